"""A small network with a likelihood, and the posterior of its outputs by dense matrices."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import evigrad
from evigrad import reference
from evigrad.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from evigrad.priors import GaussianPrior

N, OUTPUTS = 9, 3
LIKELIHOODS = {
    "categorical": lambda: Categorical(),
    "gaussian": lambda: Gaussian([0.5, 1.0, 2.0]),
    "bernoulli": lambda: Bernoulli(),
    "poisson": lambda: Poisson(),
}


@dataclass
class Case:
    evidence: evigrad.Evidence
    train: tuple[Tensor, Tensor]
    test: Tensor

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return self.evidence.weights()

    def rows(self, x: Tensor) -> Tensor:
        """J, (m, C, P)."""
        return reference.jacobian(self.evidence.model, self.weights, x).detach()

    def hessian(self) -> Tensor:
        """H of all data at the evidence's temperature, (P, P)."""
        x, y = self.train
        f = reference.outputs(self.evidence.model, x).detach()
        of_outputs = self.evidence.likelihood.at(y).hessian(f).detach() / self.evidence.temperature
        return torch.einsum("ncp,ncd,ndq->pq", self.rows(x), of_outputs, self.rows(x))

    def precision(self) -> Tensor:
        return reference.vector(self.evidence.prior.precisions(), self.weights).detach()

    def span(self, names: list[str]) -> Tensor:
        """Positions of some parameters among the P."""
        inside = [torch.full((w.numel(),), n in names) for n, w in self.weights.items()]
        return torch.cat(inside).nonzero().squeeze(1)

    def lower_precisions(self, by: float = 12.0) -> None:
        """Divide all precisions by e to this power."""
        self.evidence.prior.get_parameter("log_precision").data -= by

    def covariance(self, hessian: Tensor, names: list[str] | None = None) -> Tensor:
        """J (H + P0)⁻¹ Jᵀ of the test data, of some parameters, (m, C, C)."""
        chosen = self.span(list(self.weights) if names is None else names)
        matrix = (hessian + self.precision().diag())[chosen][:, chosen]
        rows = self.rows(self.test)[:, :, chosen]
        return rows @ torch.linalg.inv(matrix) @ rows.mT


def network() -> nn.Module:
    layers = (nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.PReLU(6), nn.Linear(6, OUTPUTS))
    return nn.Sequential(*layers)


def case(
    likelihood: str | Likelihood = "categorical",
    model: nn.Module | None = None,
    structure: str = "layerwise",
    num_data: int = N,
    dtype: torch.dtype = torch.float64,
    **options,
) -> Case:
    """A case from fixed seeds; ``options`` are those of ``Evidence``."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, test = torch.randn(num_data, 1, 4).to(dtype), 2 * torch.randn(5, 1, 4).to(dtype)
        y = torch.randn(num_data, OUTPUTS).to(dtype)
        model = (network() if model is None else model).to(dtype)
    if isinstance(likelihood, str):
        labels, yes, counts = y.argmax(1), (y > 0).to(dtype), y.exp().floor()
        y = {"categorical": labels, "bernoulli": yes, "poisson": counts}.get(likelihood, y)
        chosen = LIKELIHOODS[likelihood]()
    else:
        chosen = likelihood
    prior = GaussianPrior(structure)
    options = {"estimator": "diag-N-C", "generator": 0} | options
    evidence = evigrad.Evidence(model, chosen, prior, num_data=num_data, **options)
    assert prior.log_precision is not None
    prior.log_precision.data = torch.linspace(-1, 1, prior.log_precision.numel()).to(dtype)
    return Case(evidence, (x, y), test)
