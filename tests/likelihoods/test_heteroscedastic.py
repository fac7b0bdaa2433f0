"""Mean and log variance as outputs: the Fisher information, and an evidence of dense matrices."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import softplus

from evigrad import Evidence, reference
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Gaussian, HeteroscedasticGaussian, NaturalGaussian
from evigrad.posterior import Predictive
from evigrad.priors import GaussianPrior

LIKELIHOOD = HeteroscedasticGaussian()
BOTH = pytest.mark.parametrize("likelihood", (LIKELIHOOD, NaturalGaussian()))
M, D = 5, 2


def outputs(m: int = M, d: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(m, 2 * d, generator=generator, dtype=torch.float64)


def normal(likelihood: HeteroscedasticGaussian, f: Tensor) -> Normal:
    """The density of targets, by PyTorch's own."""
    first, second = f[:, :D], f[:, D:]
    if isinstance(likelihood, NaturalGaussian):
        return Normal(first / softplus(second), softplus(second).rsqrt())
    return Normal(first, (0.5 * second).exp())


@BOTH
def test_log_prob_and_metrics(likelihood: HeteroscedasticGaussian) -> None:
    f = outputs()
    y = normal(likelihood, f).mean + 0.3
    expected = normal(likelihood, f).log_prob(y).sum(1)
    torch.testing.assert_close(likelihood.log_prob(f, y), expected)
    metrics = likelihood.metrics(f, y)
    assert metrics["log_likelihood"] == pytest.approx(expected.sum().item())
    assert metrics["squared_error"] == pytest.approx(M * D * 0.09)


def test_a_constant_log_variance_is_a_gaussian() -> None:
    f, y = outputs(), outputs()[:, :D].sin()
    f[:, D:] = 2 * math.log(0.7)
    torch.testing.assert_close(LIKELIHOOD.log_prob(f, y), Gaussian(0.7).log_prob(f[:, :D], y))
    torch.testing.assert_close(
        LIKELIHOOD.hessian(f)[:, :D, :D], Gaussian(0.7).double().hessian(f[:, :D])
    )


@BOTH
def test_rows_are_those_of_the_mean_hessian(likelihood: HeteroscedasticGaussian) -> None:
    """By quadrature over targets, exact for polynomials; single Hessians are others."""

    def loss(row: Tensor, y: Tensor) -> Tensor:
        return -likelihood.log_prob(row[None], y[None]).sum()

    # Not torch.func.hessian, whose forward mode warns of PyTorch's own code.
    second = torch.func.jacrev(torch.func.jacrev(loss))
    f = outputs()
    density = normal(likelihood, f)
    points, masses = (torch.from_numpy(array) for array in np.polynomial.hermite_e.hermegauss(8))
    total, singles = torch.zeros(M, 2 * D, 2 * D).double(), []
    for point, mass in zip(points, masses / masses.sum(), strict=True):
        y = density.mean + density.stddev * point  # the same for all D, of which none couples two
        singles.append(torch.func.vmap(second)(f, y))
        total += mass * singles[-1]
    torch.testing.assert_close(likelihood.hessian(f), total, rtol=1e-10, atol=1e-12)
    assert float((singles[0] - total).abs().max()) > 0.5


class Gated(nn.Module):
    """Outputs of a small network with a hyperparameter, the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.3))
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2 * D))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.gate.exp())


def evidence_of(
    estimator: str,
    num_data: int,
    likelihood: HeteroscedasticGaussian = LIKELIHOOD,
    **options: Any,
) -> tuple[Evidence, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Gated().double(), torch.randn(num_data, 2).double()
    prior = GaussianPrior("layerwise", precision=0.7)
    evidence = Evidence(
        model, likelihood, prior, estimator=estimator, num_data=num_data,
        hyperparameters=["gate"], generator=0, **options,
    )  # fmt: skip
    return evidence, x, x.sin() + 0.1


@BOTH
@pytest.mark.each(1)
@pytest.mark.parametrize("structure", ["ntk", "full", "blockdiag", "diag", "kfac"])
def test_value_and_gradient_are_those_of_dense_matrices(
    structure: str, likelihood: HeteroscedasticGaussian
) -> None:
    """Kronecker factors are exact for one datum."""
    num_data = 1 if structure == "kfac" else M
    evidence, x, y = evidence_of(f"{structure}-N-C", num_data, likelihood, temperature=0.8)
    weights, f = evidence.weights(), evidence.model(x)
    jacobian = reference.jacobian(evidence.model, weights, x)
    if isinstance(likelihood, NaturalGaussian):
        fisher = likelihood.hessian(f)
    else:
        of_log = torch.full_like(f[:, D:], 0.5)
        fisher = torch.cat([(-f[:, D:]).exp(), of_log], dim=1).diag_embed()
    h = reference.ggn(jacobian, fisher / 0.8)
    precision = reference.vector(evidence.prior.precisions(), weights)
    expected = normal(likelihood, f).log_prob(y).sum() / 0.8
    expected = expected - 0.5 * (precision * reference.vector(weights, weights) ** 2).sum()
    parts = reference.parameter_partition(
        "blockdiag" if structure == "kfac" else structure, weights
    )
    expected = expected - 0.5 * reference.log_det(h, precision, parts)
    assert evidence.backward(x, y).log_evidence == pytest.approx(expected.item(), rel=1e-10)
    named = evidence.hyperparameters()
    gradients = torch.autograd.grad(-expected / num_data, list(named.values()))
    for parameter, gradient in zip(named.values(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-10)


@BOTH
@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", ["ntk-2-1", "kfac-2-1", "ntk-4-rows-anchored", "diag-5-1-mc"])
def test_blocks_of_outputs_are_learned_from(
    estimator: str, likelihood: HeteroscedasticGaussian
) -> None:
    evidence, x, y = evidence_of(estimator, 20, likelihood)
    evidence.backward(next(iter(evidence.blocks((x, y)))))
    assert all(p.grad is not None for p in evidence.hyperparameters().values())


def test_an_output_less_is_refused_beforehand() -> None:
    evidence, x, y = evidence_of("ntk-2-1", M)
    with pytest.raises(Exception, match=r"two outputs per target \(first the means"):
        evidence.estimate(x, torch.cat([y, y], dim=1))


def test_outputs_at_positions() -> None:
    """Each position of a sequence has a mean and a log variance."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2).double(), torch.randn(4, 5, 3).double()
    y = x[..., :1].sin()
    moments_of_form = []
    for inputs, y_of in ((x, y), (x.flatten(0, 1), y.flatten(0, 1))):
        evidence = Evidence(
            model, HeteroscedasticGaussian(), GaussianPrior(), estimator="ntk-N-C", num_data=20
        )
        predictive = evidence.posterior((inputs, y_of), structure="full")(inputs)
        moments = (predictive.mean, predictive.std, predictive.noise_variance)
        moments_of_form.append([evidence.estimate(inputs, y_of).log_evidence, *moments])
    assert moments_of_form[0][0] == pytest.approx(moments_of_form[1][0], rel=1e-10)
    for one, other in zip(moments_of_form[0][1:], moments_of_form[1][1:], strict=True):
        torch.testing.assert_close(one, other.view(4, 5, 1))


def test_a_precision_that_underflows_is_no_nan() -> None:
    f = torch.tensor([[3.0, -300.0], [-1e30, -300.0], [0.0, -300.0]])
    log_densities = NaturalGaussian().log_prob(f, torch.ones(3, 1))
    assert not log_densities.isnan().any() and bool((log_densities < -40).all())


def test_moments_of_natural_parameters_are_first_order() -> None:
    """Where outputs are nearly certain they are those of samples."""
    f, root = outputs(), 0.02 * outputs(4 * M)[:, : 2 * D].reshape(M, 4, 2 * D).mT
    likelihood = NaturalGaussian()
    prediction = Predictive(f, root @ root.mT, likelihood)
    draws = normal(likelihood, prediction.sample(100_000).flatten(0, 1)).mean.view(-1, M, D)
    torch.testing.assert_close(prediction.mean, draws.mean(0), atol=1e-2, rtol=0)
    torch.testing.assert_close(prediction.epistemic_variance, draws.var(0), atol=0, rtol=0.1)
    torch.testing.assert_close(prediction.noise_variance, normal(likelihood, f).variance)


class LogLaplace(HeteroscedasticGaussian):
    """Another density, with the rows of this one."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_scale = f.chunk(2, dim=1)
        return -((y - mean).abs() / log_scale.exp() + log_scale).sum(1)


def test_a_subclass_with_another_density_is_refused() -> None:
    f = outputs()
    with pytest.raises(ConfigurationError, match="LogLaplace"):
        LogLaplace().check_derivatives(f, f[:, :D] + 0.3)
