"""The evidence's gradient in what a transform learns, by finite differences with fixed noise."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.invariances import AdditiveNoise, AffineInvariance, Averaged, InputScale, Transform
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.priors import GaussianPrior

NUM_DATA = 5


class Network(nn.Module):
    """Smooth, so that a finite difference never steps over a kink of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.output = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.softplus(self.conv(x)).square().mean((2, 3)))


def affine() -> tuple[nn.Module, Transform, Likelihood, Tensor, Tensor]:
    x = torch.randn(NUM_DATA, 2, 5, 6, dtype=torch.float64)
    return Network(), AffineInvariance(0.3, flip=True), Categorical(), x, torch.arange(5) % 3


def scale() -> tuple[nn.Module, Transform, Likelihood, Tensor, Tensor]:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(NUM_DATA, 3, dtype=torch.float64)
    return net, InputScale(3, 0.8), Gaussian(), x, x[:, :1] ** 2


def noise() -> tuple[nn.Module, Transform, Likelihood, Tensor, Tensor]:
    net, _, likelihood, x, y = scale()
    return net, AdditiveNoise(3, 0.4, per_feature=True), likelihood, x, y


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", ["ntk-4-1", "kfac-4-1", "kfac-N-C"])
@pytest.mark.parametrize("case", [affine, scale, noise])
def test_gradient_by_finite_differences(
    case: Callable[[], tuple[nn.Module, Transform, Likelihood, Tensor, Tensor]], estimator: str
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network, transform, likelihood, x, y = case()
    model = Averaged(network, transform, 3).double()
    subset = slice(None) if "N" in estimator else slice(4)

    evidence = Evidence(
        model,
        likelihood.double(),
        GaussianPrior(precision=2.0).double(),
        estimator=estimator,
        num_data=NUM_DATA,
        hyperparameters=["invariance"],
        generator=3,
    )
    drawn = evidence.generator.get_state()
    state = torch.get_rng_state()
    model.zero_grad()
    evidence.backward(x[subset], y[subset])
    assert all(weight.grad is None for weight in network.parameters())
    for name, parameter in transform.named_parameters():
        assert parameter.grad is not None
        for index in range(parameter.numel()):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter.view(-1)[index] += step
                evidence.generator.set_state(drawn)  # the same noise and outputs
                values.append(evidence.estimate(x[subset], y[subset]).log_evidence)
                with torch.no_grad():
                    parameter.view(-1)[index] -= step
            numeric = -(values[0] - values[1]) / 2e-5 / NUM_DATA
            analytic = parameter.grad.view(-1)[index].item()
            assert abs(numeric) > 1e-5
            assert analytic == pytest.approx(numeric, rel=2e-5, abs=1e-8), name
    assert torch.equal(state, torch.get_rng_state())
