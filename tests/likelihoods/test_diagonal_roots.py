"""Roots of likelihoods whose outputs are independent."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.core.block import Block
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Likelihood, NegativeBinomial, base
from evigrad.priors import GaussianPrior

ROWS = ("ntk-9-rows", "ntk-9-rows-anchored")


class Scaled(nn.Module):
    """A network with a hyperparameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.8))
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.factor * x)


class Flat(Likelihood):
    """A density whose Hessian is a learned multiple of the identity, but not by a scale."""

    couples_outputs = False

    def __init__(self) -> None:
        super().__init__()
        self.log_size = nn.Parameter(torch.zeros(()))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -0.5 * self.log_size.exp() * (f - y).square().sum(1) + 2.5 * self.log_size


def problem(likelihood: Likelihood, estimator: str, names: list[str]) -> tuple[Evidence, Block]:
    torch.manual_seed(0)
    model, x = Scaled().double(), torch.randn(9, 3, dtype=torch.float64)
    evidence = Evidence(
        model,
        likelihood.double(),
        GaussianPrior("layerwise", precision=0.7),
        estimator=estimator,
        num_data=9,
        hyperparameters=names,
        generator=0,
    )
    (block,) = evidence.blocks((x, (model(x) > 0).double())).take(1)
    return evidence, block


@pytest.mark.each(1)
@pytest.mark.parametrize("make", [NegativeBinomial, Flat])
@pytest.mark.parametrize("estimator", ["ntk-4-C", "ntk-4-2", "full-4-1", *ROWS])
def test_kept_rows_follow_the_parameters(
    estimator: str, make: Callable[[], Likelihood], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_MANY_OUTPUTS", 4)
    evidence, block = problem(make(), estimator, [])
    (parameter,) = evidence.problem.model.likelihood.parameters()
    try:
        kept = evidence.collect(block)
    except ConfigurationError:  # the parameter changes a sum
        assert not estimator.startswith("ntk")
        return
    with torch.no_grad():
        parameter += 1.0
    gradients = []
    for backward in (lambda: evidence.backward_kept(kept), lambda: evidence.backward(block)):
        parameter.grad = None
        gradients.append((backward().log_evidence, parameter.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
