"""Joint predictions, weights and functions against dense float64 matrices."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_bytes import PeakBytes
from posterior.cases import OUTPUTS, Case, case
from posterior.test_covariances import kronecker
from posterior.test_query import Cubic
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.func import functional_call, vmap

from evigrad import Memory, Posterior, reference
from evigrad.errors import ConfigurationError, InputError, MemoryBudgetError
from evigrad.likelihoods import Categorical, Gaussian, Poisson
from evigrad.passes import memory
from evigrad.posterior import STRUCTURES


def dense(small_case: Case, structure: str, names: list[str]) -> Tensor:
    """Σ of the named weights."""
    hessian = small_case.hessian()
    if structure == "diag":
        hessian = hessian.diagonal().diag()
    if structure == "kfac":
        hessian = kronecker(small_case)
    span = small_case.span(names)
    return torch.linalg.inv((hessian + small_case.precision().diag())[span][:, span])


def assert_close(one: Tensor, other: Tensor, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in weights.values()], 1)


def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the random vectors of the next draws be the unit vectors."""
    monkeypatch.setattr(torch, "randn", lambda shape, **_: torch.eye(*shape).double())


@pytest.mark.each(1)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "likelihood", ("gaussian", "categorical", "bernoulli", "poisson", "custom")
)
def test_moments_and_draws_are_those_of_dense_matrices(likelihood, structure, monkeypatch):
    chosen = Cubic() if likelihood == "custom" else likelihood
    small_case = case(chosen, memory=Memory(micro_batch=2))
    x = small_case.test
    posterior = small_case.evidence.posterior(small_case.train, structure=structure)
    names, joint = posterior.parameters, posterior.joint(x)
    rows = small_case.rows(x)[:, :, small_case.span(names)].flatten(0, 1)
    covariance = joint.covariance.flatten(0, 1).flatten(1)
    weights = posterior.sample_weights(100, 1)
    if likelihood == "gaussian" or structure != "kfac":
        of_weights = dense(small_case, structure, names)
        assert_close(covariance, rows @ of_weights @ rows.mT)
        many = torch.cov(flat(posterior.sample_weights(40_000, 1)).mT)
        assert_close(many, of_weights, 0.05 * float(of_weights.max()))
        with monkeypatch.context() as patch:
            identity(patch)
            size = posterior._covariance.width
            root = flat(posterior.sample_weights(size)) - flat({n: w[None] for n, w in (
                (name, small_case.weights[name].detach()) for name in names)})  # fmt: skip
        assert_close(root.mT @ root, of_weights)
    prediction = posterior(x)
    blocks = torch.stack([joint.covariance[i, :, i] for i in range(len(x))])
    torch.testing.assert_close(blocks, prediction.covariance, rtol=1e-12, atol=1e-12)
    assert torch.equal(joint.mean, prediction.outputs)
    if likelihood == "gaussian":
        torch.testing.assert_close(joint.noise, prediction.noise_variance)
    else:
        assert joint.noise is None

    # A draw is one function, at any inputs and in any batches.
    outputs = joint.sample(100, 1)
    start = flat({name: small_case.weights[name].detach()[None] for name in names})
    expected = joint.mean.flatten() + (flat(weights) - start) @ rows.mT
    assert_close(outputs.flatten(1), expected)
    other = posterior.joint(torch.stack([x.flip(0), x]), batch_dims=1).sample(100, 1)
    assert_close(other, torch.stack([outputs.flip(1), outputs], 1))
    function = posterior.draw(1)
    assert_close(function(x[2:]), posterior.joint(x).sample(1, 1)[0, 2:])
    assert_close(function(x[:4].unflatten(0, (2, 2)), batch_dims=1).flatten(0, 1), function(x[:4]))


def test_drawn_weights_are_those_of_the_model():
    small_case = case("gaussian", model=nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    posterior = small_case.evidence.posterior(small_case.train, structure="kfac")
    weights = posterior.sample_weights(6, 2)
    for name, weight in posterior.sample_weights(2, 2).items():
        assert torch.equal(weight, weights[name][:2])
    model, x = small_case.evidence.model, small_case.test
    outputs = vmap(lambda w: functional_call(model, w, (x,)))(weights)
    assert_close(outputs, posterior.joint(x).sample(6, 2))  # the model is linear
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(posterior.draw(generator)(x), posterior.draw(generator)(x))
    assert torch.equal(posterior.draw()(x), posterior.draw()(x))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_equal_inputs_and_more_inputs_than_the_rank_have_samples(structure):
    small_case = case("gaussian", model=nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    posterior = small_case.evidence.posterior(small_case.train, structure=structure)
    x = small_case.test.repeat(5, 1, 1)  # 75 outputs of 15 weights
    joint = posterior.joint(x)
    values = torch.linalg.eigvalsh(joint.covariance.flatten(0, 1).flatten(1))
    assert values.min() > -1e-12 * values.max() and (values > 1e-9 * values.max()).sum() <= 15
    samples = joint.sample(7).unflatten(1, (5, 5))
    assert_close(samples, samples[:, :1].expand_as(samples), 1e-12)


@pytest.fixture(scope="module")
def posterior() -> Posterior:
    small_case = case("poisson", memory=Memory(micro_batch=4))
    return small_case.evidence.posterior(small_case.train, structure="ntk")


@settings(max_examples=10)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_each_batch_is_predicted_as_if_alone(posterior, sizes):
    x = torch.randn(*sizes, 1, 4).double()
    joint = posterior.joint(x, batch_dims=len(sizes) - 1)
    assert joint.mean.shape == (*sizes, OUTPUTS) and joint.noise is None
    shape = (*sizes, OUTPUTS, *sizes[-1:], OUTPUTS)
    assert joint.covariance.shape == shape and joint.sample(2).shape == (2, *sizes, OUTPUTS)
    alone = [posterior.joint(part) for part in x.reshape(-1, *sizes[-1:], 1, 4)]
    assert_close(joint.mean.reshape(-1, *sizes[-1:], OUTPUTS), torch.stack([a.mean for a in alone]))
    covariances = torch.stack([a.covariance for a in alone])
    assert_close(joint.covariance.reshape(covariances.shape), covariances, 1e-12)


class Words(nn.Module):
    """Outputs (m, T, C) of words, whose last layer is not linear alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(1, 2), nn.Linear(2, 2)

    def forward(self, values: Tensor, shift: Tensor) -> Tensor:
        h = self.inner(values.unsqueeze(2)).cumsum(1) + shift[:, None, None]
        return self.out(h.tanh())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_positions_of_trees_count_as_inputs(structure, monkeypatch):
    model = Words().double()
    small_case = case("gaussian", model=model)
    values, shift = torch.randn(9, 4).double(), torch.randn(9).double()
    likelihood = Gaussian(0.5)
    evidence = type(small_case.evidence)(
        model, likelihood, small_case.evidence.prior, estimator="full-N-C", num_data=36
    )
    x, y = {"values": values, "shift": shift}, torch.randn(9, 4, 2).double()
    posterior = evidence.posterior((x, y), structure=structure)
    few = {"values": values[:4].view(2, 2, 4), "shift": shift[:4].view(2, 2)}
    joint = posterior.joint(few, batch_dims=1)
    assert joint.mean.shape == (2, 2, 4, 2) and joint.covariance.shape == (2, *(2, 4, 2) * 2)

    weights = evidence.weights()
    outputs = model(values, shift).flatten()
    rows = torch.stack([
        reference.vector(dict(zip(weights, gradients, strict=True)), weights)
        for f in outputs
        for gradients in [torch.autograd.grad(f, list(weights.values()), retain_graph=True)]
    ])  # fmt: skip
    if structure in ("full", "ntk"):
        precision = reference.vector(evidence.prior.precisions(), weights).detach()
        of_weights = torch.linalg.inv(rows.mT @ rows / 0.25 + precision.diag())
    else:  # of the weights that are drawn
        with monkeypatch.context() as patch:
            identity(patch)
            drawn = posterior.sample_weights(posterior._covariance.width)
        last = posterior.parameters[-1]
        parts = [
            (drawn[name] - w).flatten(1)
            if name in drawn
            else w.new_zeros(len(drawn[last]), w.numel())
            for name, w in weights.items()
        ]
        root = torch.cat(parts, 1).detach()
        of_weights = root.mT @ root
    covariance = rows @ of_weights @ rows.mT
    for batch in range(2):
        span = slice(16 * batch, 16 * (batch + 1))
        ours = joint.covariance[batch].flatten(0, 2).flatten(1)
        assert_close(ours, covariance[span, span])
    samples = joint.sample(3, 1)
    assert samples.shape == (3, 2, 2, 4, 2)
    assert_close(samples[0].flatten(0, 1), posterior.draw(1)({n: v[:4] for n, v in x.items()}))


def test_the_density_of_all_targets_is_that_of_a_dense_normal_distribution():
    small_case = case("gaussian")
    posterior = small_case.evidence.posterior(small_case.train, structure="full")
    x, y = torch.randn(2, 3, 1, 4).double(), torch.randn(2, 3, 3).double()
    joint = posterior.joint(x, batch_dims=1)
    assert joint.noise is not None
    covariance = joint.covariance.reshape(2, 9, 9) + joint.noise.reshape(2, 9).diag_embed()
    normal = MultivariateNormal(joint.mean.reshape(2, 9), covariance)
    assert_close(joint.log_prob(y), normal.log_prob(y.reshape(2, 9)))
    draws = joint.sample_targets(40_000, 0).reshape(-1, 2, 9)
    torch.testing.assert_close(draws.mean(0), joint.mean.reshape(2, 9), atol=0.06, rtol=0)
    for batch in range(2):
        torch.testing.assert_close(draws[:, batch].T.cov(), covariance[batch], atol=0.15, rtol=0.02)
    # The chain rule of probabilities.
    first, second = posterior.joint(x[0, :1]), posterior.update(x[0, :1], y[0, :1]).joint(x[0, 1:])
    assert_close(joint.log_prob(y)[0], first.log_prob(y[0, :1]) + second.log_prob(y[0, 1:]))


@pytest.mark.parametrize("likelihood", (Categorical(), Poisson(exposure=True)))
def test_densities_and_targets_of_functions(likelihood):
    """Averages of products over functions, whose sums over all labels are 1."""
    small_case = case("categorical" if isinstance(likelihood, Categorical) else "poisson")
    evidence = small_case.evidence
    posterior = evidence.posterior(small_case.train, structure="full")
    joint = posterior.joint(torch.randn(4, 2, 1, 4).double(), batch_dims=1)
    joint = replace(joint, _likelihood=likelihood)
    f, exposure = joint.sample(200, 3), torch.tensor([[1.0, 2.0]]).double().expand(4, 2)
    if isinstance(likelihood, Categorical):
        labels = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        logs = [joint.log_prob(pair.expand(4, 2), generator=3) for pair in labels]
        assert_close(torch.stack(logs).exp().sum(0), torch.ones(4).double())
        y, expected = labels[5].expand(4, 2), f.log_softmax(-1)[..., [0, 1], labels[5]].sum(-1)
        drawn = joint.sample_targets(40_000, 3)
        counts = (drawn == y).all(-1).double().mean(0)
        exact = joint.sample(40_000, 3).softmax(-1)[..., [0, 1], labels[5]].prod(-1).mean(0)
        torch.testing.assert_close(counts, exact, atol=0.01, rtol=0)
        with pytest.raises(InputError, match="must have the first dimensions"):
            joint.log_prob(labels[5])
    else:
        counts = torch.poisson(torch.ones(4, 2, 3).double())
        y = likelihood.targets(counts.view(8, 3), exposure=exposure.reshape(8))
        y, rates = y.view(4, 2, -1), f.exp() * exposure[..., None]
        expected = torch.distributions.Poisson(rates).log_prob(counts).sum((-1, -2))
        drawn = joint.with_conditions(exposure=exposure).sample_targets(20_000, 3)
        exact = joint.sample(20_000, 3).exp().mean(0) * exposure[..., None]
        torch.testing.assert_close(drawn.mean(0), exact, atol=0.05, rtol=0.05)
    assert_close(joint.log_prob(y, generator=3), expected.logsumexp(0) - math.log(200))


def test_many_outputs_take_several_backward_passes():
    many = nn.Sequential(nn.Flatten(), nn.Linear(4, 70))
    small_case = case(Categorical(), model=many)
    small_case.train = small_case.train[0], torch.arange(9)
    posterior = small_case.evidence.posterior(small_case.train, structure="diag")
    joint, prediction = posterior.joint(small_case.test), posterior(small_case.test)
    for i in range(len(small_case.test)):
        assert_close(joint.covariance[i, :, i], prediction.covariance[i], 1e-12)
    weights = posterior.sample_weights(2, 1)
    outputs = vmap(lambda w: functional_call(many, w, (small_case.test,)))(weights)
    assert_close(joint.sample(2, 1), outputs)


def test_a_weight_may_be_a_single_number():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.flatten(1)) * self.scale

    small_case = case("gaussian", model=Scaled())
    expected = small_case.covariance(small_case.hessian())
    for structure in ("full", "ntk"):
        posterior = small_case.evidence.posterior(small_case.train, structure=structure)
        assert_close(posterior(small_case.test).covariance, expected)
        assert posterior.sample_weights(3)["scale"].shape == (3,)
        assert posterior.draw()(small_case.test).shape == (5, 3)


def test_memory_grows_with_the_number_of_batches_only():
    small_case = case("gaussian", memory=Memory(micro_batch=50))
    posterior = small_case.evidence.posterior(small_case.train, structure="full")
    posterior.joint(small_case.test).covariance  # noqa: B018
    peaks = []
    for count in (50, 200):
        x = torch.randn(count, 3, 1, 4).double()
        with PeakBytes() as peak:
            joint = posterior.joint(x, batch_dims=1)
            assert joint.covariance.shape == (count, 3, 3, 3, 3)
        peaks.append(peak.most)
    assert peaks[1] <= 4 * peaks[0] and peaks[1] < 8 * (200 * 9) ** 2 / 10


def test_mistakes_are_explained(posterior, monkeypatch):
    x = torch.randn(2, 3, 1, 4).double()
    for batch_dims in (-1, 1.0):
        with pytest.raises(ConfigurationError, match="batch_dims must be a positive integer"):
            posterior.joint(x, batch_dims=batch_dims)
    with pytest.raises(InputError, match="With batch_dims=4, all inputs must have equal"):
        posterior.joint(x, batch_dims=4)
    with pytest.raises(ConfigurationError, match="n must be a positive integer"):
        posterior.sample_weights(0)
    joint, function = posterior.joint(x, batch_dims=1), posterior.draw()
    with pytest.raises(ConfigurationError, match="n must be a positive integer"):
        joint.sample(0)
    changed = x.clone()
    other, expected = posterior.joint(changed, batch_dims=1), joint.covariance
    changed.zero_()  # after the call
    assert torch.equal(other.covariance, expected)
    with monkeypatch.context() as patch, pytest.raises(MemoryBudgetError, match="Use batch_dims"):
        patch.setattr(memory, "_free_bytes", lambda device: 1000)
        posterior.joint(x, batch_dims=1).covariance  # noqa: B018
    weight = next(iter(posterior._problem.model.weights.values()))
    saved = weight.detach().clone()
    weight.data += 0.1
    unread = posterior.joint
    for refused in (
        lambda: joint.sample(1),
        lambda: unread(x, batch_dims=1),
        lambda: posterior.sample_weights(1),
        lambda: function(x[0]),
    ):
        with pytest.raises(ConfigurationError, match="weights have changed"):
            refused()
    assert torch.equal(joint.covariance, expected)  # read before
    weight.data = saved
