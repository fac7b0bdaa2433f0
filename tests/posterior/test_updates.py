"""Updates by new observations against dense float64 matrices."""

from itertools import product

import pytest
import torch
from posterior.cases import OUTPUTS, case
from posterior.test_joint import Words, assert_close, dense, flat, identity
from posterior.test_query import check
from torch import Tensor, nn

from evigrad import Evidence, Memory, Posterior
from evigrad.errors import ConfigurationError, InputError, NotPositiveDefiniteError
from evigrad.likelihoods import Gaussian, Joint, KnownNoise, Likelihood, Weighted
from evigrad.posterior import STRUCTURES
from evigrad.priors import GaussianPrior

NOISE = [0.5, 1.0, 2.0]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_observations_one_after_another_are_those_of_dense_matrices(structure, monkeypatch):
    temperature = 1.0 if structure == "kfac" else 0.7
    small_case = case("gaussian", memory=Memory(micro_batch=2), temperature=temperature)
    test, x, y = small_case.test, torch.randn(5, 1, 4).double(), torch.randn(5, OUTPUTS).double()
    first = small_case.evidence.posterior(small_case.train, structure=structure)
    before = first(test).covariance
    posterior = first.update(x[:2], y[:2]).update(x[2:4], y[2:4]).update(x[4:], y[4:])
    assert torch.equal(first(test).covariance, before)  # the old one

    names = posterior.parameters
    span = small_case.span(names)
    start = flat({name: small_case.weights[name].detach()[None] for name in names})
    rows, rows_of_test = (small_case.rows(part)[:, :, span].flatten(0, 1) for part in (x, test))
    noise = (temperature * torch.tensor(NOISE).double().square()).repeat(5)
    inverse = torch.linalg.inv(dense(small_case, structure, names))
    of_weights = torch.linalg.inv(inverse + rows.mT @ (rows / noise[:, None]))
    model = small_case.evidence.model
    shift = of_weights @ rows.mT @ ((y - model(x)).flatten() / noise).detach()
    mean = (model(test).flatten() + rows_of_test @ shift).view(5, OUTPUTS).detach()

    joint, prediction = posterior.joint(test), posterior(test)
    assert_close(
        joint.covariance.flatten(0, 1).flatten(1), rows_of_test @ of_weights @ rows_of_test.mT
    )
    assert_close(joint.mean, mean)
    assert_close(prediction.mean, mean)
    for i in range(5):
        assert_close(prediction.covariance[i], joint.covariance[i, :, i])
    assert_close(posterior(test, correlated=False).std, prediction.std)
    assert_close(prediction.quantile(0.5), mean)
    shapes = [small_case.weights[name].shape for name in names]
    parts = rows_of_test[0].split([shape.numel() for shape in shapes])
    vector = {n: part.view(s) for n, part, s in zip(names, parts, shapes, strict=True)}
    assert posterior.variance_of(vector) == pytest.approx(float(joint.covariance[0, 0, 0, 0]))

    # Draws have this mean and covariance, and are the same functions everywhere.
    with monkeypatch.context() as patch:
        identity(patch)
        size = posterior._covariance.width + 5 * OUTPUTS
        root = flat(posterior.sample_weights(size)) - start - shift
    assert_close(root.mT @ root, of_weights)
    samples, weights = joint.sample(3, 1), flat(posterior.sample_weights(3, 1)) - start
    assert_close(samples.flatten(1), model(test).flatten().detach() + weights @ rows_of_test.mT)
    assert_close(posterior.draw(1)(test), joint.sample(1, 1)[0])

    saved = small_case.evidence.posterior(state=posterior.state_dict())
    assert torch.equal(saved(test).covariance, prediction.covariance)
    assert torch.equal(saved(test).mean, prediction.mean)


@pytest.mark.parametrize("structure", ("full", "ntk", "last-layer"))
def test_an_update_is_the_posterior_of_all_data(structure):
    whole = case("gaussian")
    x, y = whole.train
    part = Evidence(
        whole.evidence.model, Gaussian(NOISE), whole.evidence.prior, estimator="diag-N-C",
        num_data=5,
    )  # fmt: skip
    posterior = part.posterior((x[:5], y[:5]), structure=structure).update(x[5:], y[5:])
    expected = whole.evidence.posterior((x, y), structure=structure)
    assert_close(posterior(whole.test).covariance, expected(whole.test).covariance, 1e-10)


def test_heads_with_gaussian_noise_can_be_updated():
    heads = Joint({"one": (1, Gaussian(0.5)), "two": (2, Gaussian([1.0, 2.0]))})
    posteriors = [
        case(likelihood).evidence.posterior(case("gaussian").train, structure="full")
        for likelihood in (heads, Gaussian(NOISE))
    ]
    x, y = torch.randn(3, 1, 4).double(), torch.randn(3, OUTPUTS).double()
    test = case("gaussian").test
    mean, covariance = (
        [getattr(p.update(x, y)(test), name) for p in posteriors]
        for name in ("outputs", "covariance")
    )
    assert_close(*mean)
    assert_close(*covariance)


@pytest.fixture(scope="module")
def fantasies() -> tuple[Posterior, Posterior, Tensor, Tensor]:
    """A posterior after one update, and after 2 sets of targets for 3 batches of 2 inputs."""
    small_case = case("gaussian", memory=Memory(micro_batch=4))
    x, y = small_case.train
    first = small_case.evidence.posterior((x, y), structure="ntk").update(x[:1], y[:1] + 1)
    x, y = torch.randn(3, 2, 1, 4).double(), torch.randn(2, 3, 2, OUTPUTS).double()
    return first, first.update(x, y, batch_dims=1), x, y


def test_each_fantasy_is_an_update_by_itself(fantasies):
    first, posterior, x, y = fantasies
    more, y_more = torch.randn(3, 1, 1, 4).double(), torch.randn(3, 1, OUTPUTS).double()
    chained = posterior.update(more, y_more, batch_dims=1)
    test = torch.randn(2, 3, 4, 1, 4).double()  # other inputs for each fantasy
    joint, later, few = posterior.joint(test, batch_dims=2), chained.joint(test, batch_dims=2), None
    few = posterior.joint(test[0, 0])  # the same for all
    by_batch = posterior.joint(test[0], batch_dims=1)
    assert few.mean.shape == (2, 3, 4, OUTPUTS) and few.covariance.shape[:3] == (3, 4, OUTPUTS)
    assert by_batch.mean.shape == (2, 3, 4, OUTPUTS)
    samples = joint.sample(3, 1)
    for s, b in product(range(2), range(3)):
        alone = first.update(x[b], y[s, b])
        both = alone.update(more[b], y_more[b])
        for ours, expected, where in (
            (joint, alone.joint(test[s, b]), (s, b)),
            (later, both.joint(test[s, b]), (s, b)),
        ):
            assert_close(ours.mean[where], expected.mean)
            assert_close(ours.covariance[where], expected.covariance)
        assert_close(samples[:, s, b], alone.joint(test[s, b]).sample(3, 1))
        assert_close(few.mean[s, b], alone.joint(test[0, 0]).mean)
        assert_close(few.covariance[b], alone.joint(test[0, 0]).covariance)
        assert_close(by_batch.covariance[b], alone.joint(test[0, b]).covariance)
        assert_close(posterior.draw(1)(test[s, b])[s, b], alone.draw(1)(test[s, b]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_through_updates_are_those_of_differences(structure):
    """The quantities of a knowledge gradient."""
    torch.manual_seed(0)
    small_case = case("gaussian")
    x, y = small_case.train
    first = small_case.evidence.posterior((x, y), structure=structure).update(x[:2], y[:2] + 1)
    new, test = torch.randn(2, 2, 1, 4).double(), torch.randn(2, 3, 1, 4).double()

    def value(both: Tensor) -> Tensor:
        new, test = both[:, :2], both[:, 2:]
        fantasies = first.joint(new, batch_dims=1).sample(3, 1)
        posterior = first.update(new, fantasies, batch_dims=1)
        joint = posterior.update(
            test[:, :1], torch.ones(2, 1, OUTPUTS).double(), batch_dims=1
        ).joint(test, batch_dims=1)
        alone = first.update(new[0], fantasies[0, 0]).joint(test[0])
        parts = (joint.mean, joint.covariance, joint.sample(2), alone.mean, alone.sample(2))
        return torch.cat([part.flatten() for part in parts])

    check(value, torch.cat([new, test], 1))
    posterior = first.update(new[0].requires_grad_(), y[:2])
    posterior.joint(test[0]).covariance.sum().backward()  # with a graph to the new inputs only
    assert new.grad is None or new.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in small_case.weights.values())


def gaussian(likelihood: Likelihood, y: Tensor, x: Tensor, evidence: Evidence) -> Posterior:
    other = Evidence(
        evidence.model, likelihood, GaussianPrior(), estimator="diag-N-C", num_data=len(x)
    )
    return other.posterior((x, y), structure="ntk")


@pytest.mark.parametrize("kind", ("known noise", "weights", "missing"))
def test_targets_have_their_own_noise(kind):
    small_case = case("gaussian")
    x, y = small_case.train
    test, s = small_case.test, torch.rand(9, OUTPUTS).double()
    if kind == "known noise":
        likelihood = KnownNoise(0.4)
        y = likelihood.targets(y, noise=s)
    elif kind == "weights":
        likelihood = Weighted(Gaussian(0.4))
        y = likelihood.targets(y, s[:, 0].where(torch.arange(9) % 3 > 0, 0.0))
    else:
        likelihood = Gaussian(0.4, missing="nan")
        y = y.where(s > 0.4, torch.nan)
    few = gaussian(likelihood, y[:5], x[:5], small_case.evidence)
    whole = gaussian(likelihood, y, x, small_case.evidence)
    posterior = few.update(x[5:], y[5:])
    assert_close(posterior(test).covariance, whole(test).covariance)
    twice = few.update(x[5:7], y[5:7]).update(x[7:], y[7:])
    assert_close(twice(test).mean, posterior(test).mean)
    fantasies = few.update(x[5:], torch.stack([y[5:], y[5:].flip(0)]))  # the noise differs
    assert_close(fantasies.joint(test).mean[0], posterior(test).mean)
    expected = few.update(x[5:], y[5:].flip(0)).joint(test)
    assert_close(fantasies.joint(test).mean[1], expected.mean)
    assert_close(fantasies.joint(test).covariance[-1], expected.covariance)


def test_positions_of_trees_are_observed():
    model = Words().double()
    evidence = Evidence(model, Gaussian(0.5), GaussianPrior(), estimator="full-N-C", num_data=36)
    x = {"values": torch.randn(9, 4).double(), "shift": torch.randn(9).double()}
    y = torch.randn(9, 4, 2).double()
    first = evidence.posterior((x, y), structure="full")
    joint = first.joint({name: part[:5] for name, part in x.items()})
    covariance, mean = joint.covariance.reshape(40, 40), joint.mean.flatten()
    observed = torch.arange(24, 40)
    gain = covariance[:, observed] @ torch.linalg.inv(
        covariance[observed][:, observed] + 0.25 * torch.eye(16).double()
    )
    expected = mean + gain @ (y[:2].flatten() - mean[observed])
    ours = first.update({name: part[3:5] for name, part in x.items()}, y[:2])
    few = ours.joint({name: part[:3] for name, part in x.items()})
    assert_close(few.mean.flatten(), expected[:24])
    expected = (covariance - gain @ covariance[observed])[:24, :24]
    assert_close(few.covariance.reshape(24, 24), expected)


def test_targets_of_one_output_need_no_column():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    small_case = case(Gaussian(), model=model)
    x, y = small_case.train[0], small_case.train[1][:, :1]
    posterior = small_case.evidence.posterior((x, y), structure="full")
    one, other = posterior.update(x, y[:, 0]), posterior.update(x.numpy(), y.numpy())
    assert torch.equal(one(x).mean, other(x).mean)


def test_mistakes_in_updates_are_explained(fantasies):
    first, posterior, x, y = fantasies
    with pytest.raises(InputError, match=r"y must have the shape \(\.\.\., 3, 2, D\)"):
        first.update(x, y[:, :, :1], batch_dims=1)
    with pytest.raises(InputError, match="Targets must have"):
        first.update(x, y[..., :2], batch_dims=1)
    with pytest.raises(InputError, match="must have the batches"):
        posterior.joint(torch.randn(2, 4, 1, 4).double(), batch_dims=1).mean  # noqa: B018
    vector = dict(first._problem.model.weights)
    for refused in (
        lambda: posterior(x[0]),
        lambda: posterior.sample_weights(1),
        lambda: posterior.variance_of(vector),
        lambda: first.update(x[0].requires_grad_(), y[0, 0])(x[0]),
    ):
        with pytest.raises(ConfigurationError, match="needs a single set of observations without"):
            refused()
    small_case = case("categorical")
    classes = small_case.evidence.posterior(small_case.train, structure="diag")
    with pytest.raises(ConfigurationError, match="plus Gaussian noise, got Categorical"):
        classes.update(*small_case.train)
    exact = case(Gaussian(1e-10), num_data=1)
    certain = exact.evidence.posterior(exact.train, structure="ntk")
    with pytest.raises(NotPositiveDefiniteError, match="noisier than rounding errors"):
        certain.update(exact.test[:1].repeat(9, 1, 1), exact.train[1].repeat(9, 1))
