"""Mean and log variance as outputs: the Fisher information, and an evidence of dense matrices."""

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from evigrad import Evidence
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Gaussian, HeteroscedasticGaussian
from evigrad.priors import GaussianPrior

LIKELIHOOD = HeteroscedasticGaussian()
M, D = 5, 2


def outputs(m: int = M, d: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(m, 2 * d, generator=generator, dtype=torch.float64)


def test_log_prob_and_score() -> None:
    f, y = outputs().requires_grad_(), outputs()[:, :D] + 0.3
    expected = Normal(f[:, :D], (0.5 * f[:, D:]).exp()).log_prob(y).sum(1)
    torch.testing.assert_close(LIKELIHOOD.log_prob(f, y), expected)
    (score,) = torch.autograd.grad(expected.sum(), f)
    torch.testing.assert_close(LIKELIHOOD.score(f, y), score)
    metrics = LIKELIHOOD.metrics(f, y)
    assert metrics["log_likelihood"] == pytest.approx(expected.sum().item())
    assert metrics["squared_error"] == pytest.approx(M * D * 0.09)
    LIKELIHOOD.validate(f.shape, LIKELIHOOD.sample(f, torch.Generator()))


def test_a_constant_log_variance_is_a_gaussian() -> None:
    f, y = outputs(), outputs()[:, :D].sin()
    f[:, D:] = 2 * math.log(0.7)
    torch.testing.assert_close(LIKELIHOOD.log_prob(f, y), Gaussian(0.7).log_prob(f[:, :D], y))
    torch.testing.assert_close(
        LIKELIHOOD.hessian(f)[:, :D, :D], Gaussian(0.7).double().hessian(f[:, :D])
    )


def test_rows_are_those_of_the_mean_hessian() -> None:
    """By quadrature over targets, exact for polynomials; single Hessians are others."""

    def loss(row: Tensor, y: Tensor) -> Tensor:
        return -LIKELIHOOD.log_prob(row[None], y[None]).sum()

    # Not torch.func.hessian, whose forward mode warns of PyTorch's own code.
    second = torch.func.jacrev(torch.func.jacrev(loss))
    f = outputs(d=1)
    points, masses = (torch.from_numpy(each) for each in np.polynomial.hermite_e.hermegauss(8))
    total, singles = torch.zeros(M, 2, 2).double(), []
    for point, mass in zip(points, masses / masses.sum(), strict=True):
        y = f[:, :1] + (0.5 * f[:, 1:]).exp() * point
        singles.append(torch.func.vmap(second)(f, y))
        total += mass * singles[-1]
    torch.testing.assert_close(LIKELIHOOD.hessian(f), total, rtol=1e-10, atol=1e-12)
    assert float((singles[0] - total).abs().max()) > 1


class Gated(nn.Module):
    """Outputs of a small network with a hyperparameter, the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.3))
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2 * D))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.gate.exp())


def evidence_of(estimator: str, num_data: int, **options: Any) -> tuple[Evidence, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Gated().double(), torch.randn(num_data, 2).double()
    prior = GaussianPrior("layerwise", precision=0.7)
    evidence = Evidence(
        model, HeteroscedasticGaussian(), prior, estimator=estimator, num_data=num_data,
        hyperparameters=["gate"], generator=0, **options,
    )  # fmt: skip
    return evidence, x, x.sin() + 0.1


@pytest.mark.parametrize("structure", ["ntk", "full", "blockdiag", "diag", "kfac"])
def test_value_and_gradient_are_those_of_dense_matrices(structure: str) -> None:
    """Kronecker factors are exact for one datum."""
    num_data = 1 if structure == "kfac" else M
    evidence, x, y = evidence_of(f"{structure}-N-C", num_data, temperature=0.8)
    weights, f = evidence.weights(), evidence.model(x)
    jacobian = torch.cat(list(oracle.jacobian(evidence.model, weights, x).values()), dim=-1)
    fisher = torch.cat([(-f[:, D:]).exp(), torch.full_like(f[:, D:], 0.5)], dim=1).diag_embed()
    h = oracle.block_matrix(jacobian, fisher / 0.8, None, "subblock", f)
    precision = oracle.flat(evidence.prior.precisions(), weights)
    sizes = {name: w.numel() for name, w in weights.items()}
    expected = Normal(f[:, :D], (0.5 * f[:, D:]).exp()).log_prob(y).sum() / 0.8
    expected = expected - 0.5 * (precision * oracle.flat(weights, weights) ** 2).sum()
    parts = oracle.parts_of("blockdiag" if structure == "kfac" else structure, sizes)
    expected = expected - 0.5 * oracle.log_det(h, precision, parts)
    assert evidence.backward(x, y).log_evidence == pytest.approx(expected.item(), rel=1e-10)
    named = evidence.hyperparameters()
    gradients = torch.autograd.grad(-expected / num_data, list(named.values()))
    for parameter, gradient in zip(named.values(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("estimator", ["ntk-2-1", "kfac-2-1", "ntk-4-rows-anchored", "diag-5-1-mc"])
def test_blocks_of_outputs_are_learned_from(estimator: str) -> None:
    evidence, x, y = evidence_of(estimator, 20)
    evidence.backward(next(iter(evidence.blocks((x, y)))))
    assert all(p.grad is not None for p in evidence.hyperparameters().values())


def test_an_output_less_is_refused_beforehand() -> None:
    evidence, x, y = evidence_of("ntk-2-1", M)
    with pytest.raises(Exception, match="two for each target, the means"):
        evidence.estimate(x, torch.cat([y, y], dim=1))


def test_outputs_at_positions() -> None:
    """Each position of a sequence has a mean and a log variance."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2).double(), torch.randn(4, 5, 3).double()
    y = x[..., :1].sin()
    found = []
    for inputs, y_of in ((x, y), (x.flatten(0, 1), y.flatten(0, 1))):
        evidence = Evidence(
            model, HeteroscedasticGaussian(), GaussianPrior(), estimator="ntk-N-C", num_data=20
        )
        predictive = evidence.posterior((inputs, y_of), structure="full")(inputs)
        moments = (predictive.mean, predictive.std, predictive.noise_variance)
        found.append([evidence.estimate(inputs, y_of).log_evidence, *moments])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-10)
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other.view(4, 5, 1))


class LogLaplace(HeteroscedasticGaussian):
    """Another density, with the rows of this one."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_scale = f.chunk(2, dim=1)
        return -((y - mean).abs() / log_scale.exp() + log_scale).sum(1)


def test_a_subclass_with_another_density_is_refused() -> None:
    f = outputs()
    with pytest.raises(ConfigurationError, match="LogLaplace"):
        LogLaplace().check_derivatives(f, f[:, :D] + 0.3)
