"""Posteriors of many outputs: rows and predictions in parts."""

import math
from itertools import cycle

import pytest
import torch
from peak_bytes import PeakBytes
from posterior.cases import Case, case
from torch import Tensor, nn

from evigrad import Evidence, Memory, Predictive
from evigrad.core.curvature import BlockDiagonal, Diagonal
from evigrad.core.curvature.kfac import Kfac
from evigrad.errors import MemoryBudgetError
from evigrad.likelihoods import Bernoulli, Categorical, Gaussian, Joint, Likelihood, Poisson
from evigrad.posterior import STRUCTURES, covariances, predictive, query
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


@pytest.mark.each(1)
@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Bernoulli(), Poisson()])
def test_parts_of_the_rows_give_the_kfac_of_every_output(likelihood, parts):
    small_case = local_case(likelihood)
    posterior = small_case.evidence.posterior(small_case.train)
    assert_close(
        posterior(small_case.test).covariance, small_case.covariance(kronecker(small_case))
    )


# ------------------------------------------------------------------ predictions in parts


@pytest.mark.parametrize(
    ("structure", "likelihood"),
    list(zip(STRUCTURES, cycle(["gaussian", "categorical", "poisson"]), strict=False)),
)
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


@pytest.mark.filterwarnings("ignore:The mean or the noise")  # of Poisson, whose logs vary widely
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


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("structure", "correlated"),
    [
        *[(name, False) for name in ("kfac", "diag", "last-layer", "full")],
        *[(name, True) for name in ("last-layer", "kfac")],
    ],
)
def test_a_prediction_takes_at_most_the_memory_budget(structure, correlated):
    memory = Memory(micro_batch="auto", memory_budget="8MiB")
    evidence, x = denoiser(8, 8, structure, memory)
    posterior = evidence.posterior((x, x.flatten(1)), structure=structure)
    posterior(x, correlated=correlated)
    with PeakBytes() as held:
        result = posterior(x, correlated=correlated)
    assert held.most < 2**23 + 2 * result.covariance.nbytes  # and the parts that are joined


def test_covariances_that_do_not_fit_name_the_variances(monkeypatch):
    evidence, x = denoiser(8, 4, "diag")
    posterior = evidence.posterior((x, x.flatten(1)), structure="diag")
    monkeypatch.setattr(query, "available_bytes", lambda device: 2**20)
    with pytest.raises(MemoryBudgetError, match="correlated=False"):
        posterior(x)
    assert posterior(x, correlated=False).std.shape == (24, 192)
