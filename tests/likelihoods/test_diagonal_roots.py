"""Roots of likelihoods whose outputs are independent."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.likelihoods import Bernoulli, Likelihood, NegativeBinomial, Poisson, base
from evigrad.priors import GaussianPrior

LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "negative binomial, learned": NegativeBinomial,
}


class Scaled(nn.Module):
    """A network with a hyperparameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.8))
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.factor * x)


def measured(likelihood: Likelihood, estimator: str) -> tuple[float, dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model, x = Scaled().double(), torch.randn(9, 3, dtype=torch.float64)
    evidence = Evidence(
        model,
        likelihood.double(),
        GaussianPrior("layerwise", precision=0.7),
        estimator=estimator,
        num_data=9,
        hyperparameters=["factor"],
        generator=0,
    )
    (block,) = evidence.blocks((x, (model(x) > 0).double())).take(1)
    value = evidence.backward(block).log_evidence
    return value, {name: p.grad for name, p in evidence.hyperparameters().items()}


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["ntk", "full", "blockdiag", "kfac", "diag"])
@pytest.mark.parametrize("subset", ["N", "4"])
def test_unit_vectors_with_a_scale_give_the_same_evidence(
    name: str, structure: str, subset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator = f"{structure}-{subset}-C"
    value, gradients = measured(LIKELIHOODS[name](), estimator)
    monkeypatch.setattr(base, "_MANY_OUTPUTS", 4)
    likelihood = LIKELIHOODS[name]()
    root = likelihood.root(torch.zeros(2, 5), None)
    assert root.scale is not None and root.vectors.stride(0) == 0
    scaled_value, scaled_gradients = measured(likelihood, estimator)
    assert scaled_value == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(scaled_gradients, gradients, rtol=1e-9, atol=1e-12)
