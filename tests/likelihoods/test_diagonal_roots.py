"""Roots of likelihoods whose outputs are independent."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.core.block import Block
from evigrad.core.names import STRUCTURES
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Bernoulli, Likelihood, NegativeBinomial, base
from evigrad.priors import GaussianPrior

LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "bernoulli": Bernoulli,
    "negative binomial, learned": NegativeBinomial,
}
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


def measured(likelihood: Likelihood, estimator: str) -> tuple[float, dict[str, Tensor | None]]:
    evidence, block = problem(likelihood, estimator, ["factor"])
    value = evidence.backward(block).log_evidence
    return value, {name: p.grad for name, p in evidence.hyperparameters().items()}


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["N-C", "4-2"])
def test_unit_vectors_with_a_scale_give_the_same_evidence(
    name: str, structure: str, subset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator = f"{structure}-{subset}"
    value, gradients = measured(LIKELIHOODS[name](), estimator)
    monkeypatch.setattr(base, "_MANY_OUTPUTS", 4)
    likelihood = LIKELIHOODS[name]()
    root = likelihood.root(torch.zeros(2, 5), None)
    assert root.scale is not None and root.vectors.stride(0) == 0
    scaled_value, scaled_gradients = measured(likelihood, estimator)
    assert scaled_value == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(scaled_gradients, gradients, rtol=1e-9, atol=1e-12)


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
    for backward, data in ((evidence.backward_kept, kept), (evidence.backward, block)):
        parameter.grad = None
        gradients.append((backward(data).log_evidence, parameter.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
