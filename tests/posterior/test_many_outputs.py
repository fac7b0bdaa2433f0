"""Posteriors of many outputs: passes that outputs share, and predictions in parts."""

import math

import pytest
import torch
from posterior.cases import Case, case
from torch import Tensor, nn

from evigrad import Evidence, Memory, Predictive
from evigrad.core.curvature import BlockDiagonal, Diagonal
from evigrad.core.curvature.kfac import Kfac
from evigrad.errors import MemoryBudgetError
from evigrad.likelihoods import Bernoulli, Categorical, Gaussian, Joint, Likelihood, Poisson
from evigrad.passes.memory import PeakBytes
from evigrad.posterior import STRUCTURES, covariances, predictive
from evigrad.posterior import posterior as of_posterior
from evigrad.priors import GaussianPrior

LENGTH = 12


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.fixture(params=[1, 2, 3])
def parts(request, monkeypatch) -> int:
    """At most this many outputs are in memory together."""
    for owner in (Kfac, Diagonal, BlockDiagonal):
        monkeypatch.setattr(owner, "rows_at_once", request.param)
    for module in (covariances, of_posterior):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", request.param)
    return request.param


def local_case(likelihood: Likelihood, num_data: int = 9, **options) -> Case:
    """A convolutional network with an output for each number of a sequence."""
    torch.manual_seed(0)
    layers = (nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv1d(2, 1, 3, padding=1))
    model = nn.Sequential(*layers, nn.Flatten()).double()
    x, test = torch.randn(num_data, 1, LENGTH).double(), torch.randn(4, 1, LENGTH).double()
    evidence = Evidence(
        model, likelihood, GaussianPrior("layerwise"), num_data=num_data, generator=0, **options
    )
    return Case(evidence, (x, (x.flatten(1) > 0).double()), test)


def curvature(small_case: Case, posterior) -> Kfac:
    """The curvature that collected the posterior's statistic."""
    problem = posterior._problem
    kfac = problem.curvature(problem.network.plan(small_case.train[0]))
    assert isinstance(kfac, Kfac)
    return kfac


def kronecker(small_case: Case) -> Tensor:
    """H of kfac: B ⊗ A / count of each convolution, and exact blocks of the biases."""
    exact, (x, y) = small_case.hessian(), small_case.train
    model = small_case.evidence.model
    assert isinstance(model, nn.Sequential)
    hessian = torch.zeros_like(exact)
    for name in small_case.weights:
        span = small_case.span([name])
        hessian[span[:, None], span] = exact[span[:, None], span]
    root = small_case.evidence.likelihood.hessian(model(x)).detach().diagonal(dim1=1, dim2=2).sqrt()
    weights = small_case.evidence.likelihood.weights(y)
    root = root if weights is None else root * weights.sqrt()
    for number in (0, 2):
        layers = list(model)
        a = nn.Sequential(*layers[:number])(x).detach()
        z = layers[number](a).detach().requires_grad_()
        f = nn.Sequential(*layers[number + 1 :])(z)
        g = torch.stack(
            [
                torch.autograd.grad((root * f)[:, d].sum(), z, retain_graph=True)[0]
                for d in range(LENGTH)
            ]
        )
        patches = nn.functional.pad(a, (1, 1)).unfold(2, 3, 1)
        of_inputs = torch.einsum("nitk,njtl->ikjl", patches, patches)
        of_inputs = of_inputs.reshape(2 * [a.shape[1] * 3])
        of_outputs = torch.einsum("dnot,dnpt->op", g, g)
        span = small_case.span([f"{number}.weight"])
        block = torch.kron(of_outputs, of_inputs) / (len(x) * LENGTH)
        hessian[span[:, None], span] = block
    return hessian


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Bernoulli(), Poisson()])
def test_shared_passes_give_the_kfac_of_every_output(likelihood, parts):
    small_case = local_case(likelihood)
    posterior = small_case.evidence.posterior(small_case.train)
    reach = curvature(small_case, posterior)._reach
    assert reach.num_records == 1
    assert_close(
        posterior(small_case.test).covariance, small_case.covariance(kronecker(small_case))
    )


def passes_of(monkeypatch) -> list[int]:
    """The number of columns of each pass that collects a statistic."""
    counts: list[int] = []
    plain = Kfac._examples

    def examples(self, linearization, root):
        counts.append(root.vectors.shape[1])
        return plain(self, linearization, root)

    monkeypatch.setattr(Kfac, "_examples", examples)
    return counts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_an_image_for_each_image_takes_few_passes(dtype, bias, monkeypatch):
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3, padding=1, bias=bias), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    model = nn.Sequential(*layers, nn.Flatten()).to(dtype)
    x = torch.rand(10, 1, 12, 12).to(dtype)
    covariances_of = {}
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(Kfac, "_may_share", lambda *_: False)
        evidence = Evidence(
            model, Gaussian(0.5), GaussianPrior("layerwise"), num_data=10,
            memory=Memory(micro_batch=5),
        )  # fmt: skip
        counts = passes_of(monkeypatch)
        posterior = evidence.posterior((x, x.flatten(1)))
        # 144 outputs of four examples, then 9 colors of the other six.
        per_batch = [9, 9] if shares else [64, 64, 16, 64, 64, 16]
        assert counts[-len(per_batch) :] == per_batch
        assert sum(counts) == (144 + 18 if shares else 3 * 144)
        covariances_of[shares] = posterior(x[:3]).covariance
        monkeypatch.undo()
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(
        covariances_of[True], covariances_of[False], rtol=tolerance, atol=tolerance
    )


def test_positions_that_the_first_examples_do_not_show(monkeypatch):
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3, padding=1)
    layers = (first, nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    model = nn.Sequential(*layers, nn.Flatten()).double()
    assert first.bias is not None
    with torch.no_grad():  # zeros in the input, and only these, are zeros after the ReLU
        first.weight.copy_(first.weight.abs())
        first.bias.fill_(-1e-6)
    x = torch.rand(12, 1, 12, 12).double()
    x[:4, :, :6] = 0.0
    evidence = Evidence(
        model, Gaussian(), GaussianPrior(), num_data=12, memory=Memory(micro_batch=4)
    )
    counts = passes_of(monkeypatch)
    posterior = evidence.posterior((x, x.flatten(1)))
    # The second micro-batch does not fit and takes all outputs. The third shares passes again.
    assert counts == [64, 64, 16, 64, 64, 16, 9]
    shared = posterior(x[:3]).covariance
    monkeypatch.setattr(Kfac, "_may_share", lambda *_: False)
    assert_close(shared, evidence.posterior((x, x.flatten(1)))(x[:3]).covariance)


def test_inputs_of_other_lengths_share_passes_too(monkeypatch):
    torch.manual_seed(0)
    layers = (nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool1d(100))
    model = nn.Sequential(*layers, nn.Conv1d(2, 1, 3, padding=1), nn.Flatten()).double()
    batches = [
        (torch.randn(3, 1, length).double(), torch.randn(3, 100).double())
        for length in (100, 200, 200)
    ]

    def estimate() -> float:
        evidence = Evidence(
            model, Gaussian(0.5), GaussianPrior(), estimator="kfac-N-C", num_data=9,
            memory=Memory(micro_batch=3),
        )  # fmt: skip
        return evidence.estimate(batches).log_evidence

    counts = passes_of(monkeypatch)
    shared = estimate()
    # The second length takes all 100 outputs, and then shares passes again.
    assert counts == [64, 36, 64, 36, 3]
    monkeypatch.setattr(Kfac, "_may_share", lambda *_: False)
    assert shared == pytest.approx(estimate(), rel=1e-10)


def test_outputs_of_a_dense_layer_share_nothing(monkeypatch):
    torch.manual_seed(0)
    model = nn.Linear(3, 100).double()
    x, y = torch.randn(8, 3).double(), torch.randn(8, 100).double()
    evidence = Evidence(model, Gaussian(), GaussianPrior(), num_data=8)
    posterior = evidence.posterior((x, y))
    dense_case = Case(evidence, (x, y), x[:2])
    reach = curvature(dense_case, posterior)._reach
    assert not reach.is_local and reach.coloring is None and reach.num_records == 0
    monkeypatch.setattr(Kfac, "_may_share", lambda *_: False)
    assert_close(posterior(x[:2]).covariance, evidence.posterior((x, y))(x[:2]).covariance)


# ------------------------------------------------------------------ predictions in parts


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical", "poisson"])
def test_parts_of_the_outputs_change_nothing(structure, likelihood, monkeypatch):
    small_case = case(likelihood)
    expected = small_case.evidence.posterior(small_case.train, structure=structure)(small_case.test)
    for at_once in (1, 2):
        with monkeypatch.context() as patched:
            for owner in (Kfac, Diagonal, BlockDiagonal):
                patched.setattr(owner, "rows_at_once", at_once)
            for module in (covariances, of_posterior):
                patched.setattr(module, "ROWS_AT_ONCE", at_once)
            posterior = small_case.evidence.posterior(small_case.train, structure=structure)
            for budget in (1, 2**20):  # one group for each block, and one for all
                patched.setattr(covariances, "ROOT_BYTES", budget)
                result = posterior(small_case.test)
                assert_close(result.covariance, expected.covariance)
                assert torch.equal(result.outputs, expected.outputs)
            variances = posterior(small_case.test, correlated=False)
            assert variances.covariance.shape == (5, 3)
            assert_close(variances.covariance, expected.covariance.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("likelihood", ["gaussian", "poisson", "bernoulli", "categorical"])
def test_outputs_without_correlations(likelihood):
    small_case = case(likelihood)
    posterior, y = (
        small_case.evidence.posterior(small_case.train, structure="full"),
        small_case.train[1][:5],
    )
    result, whole = posterior(small_case.test, correlated=False), posterior(small_case.test)
    assert not result.correlated and whole.correlated
    assert_close(result.mean, whole.mean)
    assert_close(result.std, whole.std)
    samples, size = result.sample(20_000, 1), 20_000**-0.5
    variance = result.covariance
    assert ((samples.mean(0) - result.outputs).abs() < 5 * size * variance.sqrt()).all()
    covariance = torch.einsum("nmc,nmd->mcd", *2 * [samples - result.outputs]) / 20_000
    allowed = 8 * size * (variance[:, :, None] * variance[:, None]).sqrt()
    assert ((covariance - variance.diag_embed()).abs() < allowed).all()
    samples = result.sample(result.num_samples)
    if likelihood == "gaussian":
        independent = Predictive(result.outputs, variance.diag_embed(), result.likelihood)
        assert_close(result.log_prob(y), independent.log_prob(y))
    else:
        densities = torch.stack([result.likelihood.log_prob(f, y) for f in samples])
        assert_close(result.log_prob(y), densities.logsumexp(0) - math.log(len(samples)))
    if likelihood in ("bernoulli", "categorical"):
        of_samples = [result.likelihood.probabilities(f) for f in samples]
        drawn = torch.stack([p for p in of_samples if p is not None])
        assert_close(result.probabilities, drawn.mean(0))
    else:
        assert result.noise_variance is not None
    probit = posterior(small_case.test, correlated=False, link="plug-in")
    assert_close(probit.log_prob(y), posterior(small_case.test, link="plug-in").log_prob(y))


def test_missing_targets_without_correlations():
    outputs, variance = torch.zeros(2, 2).double(), torch.full((2, 2), 3.0).double()
    prediction = Predictive(outputs, variance, Gaussian(1.0, missing="nan").double())
    y = torch.tensor([[2.0, math.nan], [0.0, 0.0]]).double()
    expected = -0.5 * (y / 2.0).square() - 0.5 * math.log(2.0 * math.pi * 4.0)
    assert_close(prediction.log_prob(y), expected.nansum(1))


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()])
def test_moments_without_correlations_take_no_matrices_of_all_examples(likelihood, monkeypatch):
    outputs, variance = torch.randn(10, 20, 50), torch.rand(10, 20, 50)
    prediction = Predictive(outputs, variance, likelihood)
    expected = Predictive(outputs, variance.diag_embed(), likelihood)
    monkeypatch.setattr(predictive, "_NUMBERS_AT_ONCE", 3 * 50**2)
    with PeakBytes() as held:
        mean, std = prediction.mean, prediction.std
    assert held.most < 10 * variance.nbytes
    torch.testing.assert_close(mean, expected.mean)
    torch.testing.assert_close(std, expected.std)


def test_moments_without_correlations_under_conditions(monkeypatch):
    outputs, variance, exposure = torch.randn(10, 4), torch.rand(10, 4), torch.rand(10)
    monkeypatch.setattr(predictive, "_NUMBERS_AT_ONCE", 3 * 4**2)
    means = [
        Predictive(outputs, covariance, Poisson(exposure=True))
        .with_conditions(exposure=exposure)
        .mean
        for covariance in (variance, variance.diag_embed())
    ]
    torch.testing.assert_close(*means)


def test_a_head_without_correlations():
    likelihood = Joint({"depth": (2, Gaussian()), "label": (3, Categorical())})
    prediction = Predictive(torch.zeros(4, 5), torch.rand(4, 5), likelihood)
    head = prediction["label"]
    assert torch.equal(head.covariance, prediction.covariance[:, 2:])
    assert head.probabilities.shape == (4, 3)


# ------------------------------------------------------------------ memory


def denoiser(
    side: int, channels: int, structure: str, memory: Memory | None = None
) -> tuple[Evidence, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, channels, 3, padding=1), nn.ReLU())
    model = nn.Sequential(*layers, nn.Conv2d(channels, 3, 3, padding=1), nn.Flatten())
    memory = memory or Memory(micro_batch=8, gram_dtype=torch.float64)
    x = torch.rand(24, 3, side, side)
    evidence = Evidence(
        model, Gaussian(), GaussianPrior("layerwise"), num_data=24, memory=memory,
        estimator=STRUCTURES[structure],
    )  # fmt: skip
    return evidence, x


@pytest.mark.parametrize(("structure", "side"), [("kfac", 12), ("diag", 8), ("full", 8)])
def test_a_posterior_takes_the_memory_that_its_estimator_predicts(structure, side):
    evidence, x = denoiser(side, 8, structure)
    for _ in range(2):  # after the checks of the first passes
        evidence.posterior((x, x.flatten(1)), structure=structure)
    with PeakBytes() as held:
        evidence.posterior((x, x.flatten(1)), structure=structure)
    assert held.most / 2 < evidence.predicted_bytes(x) < 2 * held.most


def test_measuring_memory_does_not_decide_which_outputs_share_passes(monkeypatch):
    torch.manual_seed(0)
    first = nn.Conv2d(1, 8, 3, padding=1)
    layers = (first, nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    model = nn.Sequential(*layers, nn.Flatten())
    assert first.bias is not None
    with torch.no_grad():  # memory is measured on two examples, whose zeros hide positions
        first.weight.copy_(first.weight.abs())
        first.bias.fill_(-1e-6)
    x = torch.rand(64, 1, 10, 10)
    x[:2, :, :6] = 0.0
    budget = 2**22
    evidence = Evidence(
        model, Gaussian(), GaussianPrior(), estimator="kfac-N-C", num_data=64,
        memory=Memory(micro_batch="auto", memory_budget=budget),
    )  # fmt: skip
    counts = passes_of(monkeypatch)
    with PeakBytes() as held:
        evidence.estimate(x, x.flatten(1))
    assert held.most < budget
    measured, recorded = 2 * [64, 36], [64, 36]
    assert counts[:7] == [*measured, *recorded, 9]


@pytest.mark.parametrize("correlated", [True, False])
@pytest.mark.parametrize("structure", ["kfac", "diag", "last-layer"])
@pytest.mark.parametrize(("side", "channels"), [(8, 16)])
def test_a_prediction_takes_the_memory_that_sets_its_size(structure, correlated, side, channels):
    evidence, x = denoiser(side, channels, "kfac")
    posterior = evidence.posterior((x, x.flatten(1)), structure=structure)
    posterior(x[:8], correlated=correlated)
    with PeakBytes() as held:
        posterior(x[:8], correlated=correlated)
    plan = posterior._problem.network.plan(x[:8])
    predicted = 8 * posterior._bytes_per_datum(plan, correlated)
    assert held.most / 2 < predicted < 2 * held.most


@pytest.mark.parametrize("structure", ["kfac", "diag", "last-layer", "full"])
def test_a_prediction_takes_at_most_the_memory_budget(structure):
    memory = Memory(micro_batch="auto", memory_budget="8MiB")
    evidence, x = denoiser(8, 8, structure, memory)
    posterior = evidence.posterior((x, x.flatten(1)), structure=structure)
    posterior(x, correlated=False)
    with PeakBytes() as held:
        posterior(x, correlated=False)
    assert held.most < 2**23


def test_covariances_that_do_not_fit_name_the_variances(monkeypatch):
    evidence, x = denoiser(8, 4, "diag")
    posterior = evidence.posterior((x, x.flatten(1)), structure="diag")
    monkeypatch.setattr(of_posterior, "available_bytes", lambda device: 2**20)
    with pytest.raises(MemoryBudgetError, match="correlated=False"):
        posterior(x)
    assert posterior(x, correlated=False).std.shape == (24, 192)
