"""A likelihood of every kind, by name, for tests that go over all of them, and targets for each."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from evigrad.core.roots import check_root
from evigrad.likelihoods import (
    Bernoulli,
    Categorical,
    Conditional,
    Gaussian,
    Joint,
    KnownNoise,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    RootRows,
    StudentT,
)


class RelativeNoise(Likelihood):
    """Normal noise of variance v = σ²(1 + f²), a user's own with a learned σ.

    The scale of its rows depends on the outputs and on σ, and is no product of the two.
    """

    name = "relative noise"
    couples_outputs = False

    def __init__(self) -> None:
        super().__init__()
        self.log_ratio = nn.Parameter(torch.tensor(-0.4))

    def _std(self, f: Tensor) -> Tensor:
        return self.log_ratio.to(f).exp() * (1 + f.square()).sqrt()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return Normal(f, self._std(f)).log_prob(y.to(f)).sum(1)

    def hessian(self, f: Tensor) -> Tensor:
        """The Fisher information 1/v + ½(v'/v)²."""
        return (self._std(f) ** -2 + 2 * (f / (1 + f.square())).square()).diag_embed()

    def root(self, f: Tensor, columns: Tensor | None = None, kind: str = "subblock") -> RootRows:
        check_root(kind)
        scale, unit = self.hessian(f).diagonal(dim1=1, dim2=2).sqrt(), torch.eye(f.shape[1]).to(f)
        if columns is None:
            return RootRows(unit.expand(len(f), -1, -1), scale)
        listed = columns.clamp(min=0)
        return RootRows(unit[listed] * (columns >= 0)[..., None], scale.gather(1, listed))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(f.shape, generator=generator, dtype=f.dtype)
        return (f + self._std(f) * noise).detach()


def joint(num_outputs: int) -> Likelihood:
    """A head with noise, and one with classes or labels."""
    if num_outputs == 1:
        return Joint({"a": (1, Gaussian(0.6))})
    other = Categorical() if num_outputs > 2 else Bernoulli()
    return Joint({"a": (1, Gaussian(0.6)), "b": (num_outputs - 1, other)})


def ratings(num_outputs: int) -> Likelihood:
    """Ordered classes take one output, so there is a head for each."""
    heads = {f"item{i}": (1, Ordinal(3 + i % 2)) for i in range(num_outputs)}
    return Joint(heads)


# Each takes the number of outputs, any. (A heteroscedastic Gaussian takes even ones alone.)
LIKELIHOODS: dict[str, Callable[[int], Likelihood]] = {
    "categorical": lambda _: Categorical(),
    "gaussian": lambda _: Gaussian(0.6),
    "gaussian of each output": lambda c: Gaussian(torch.linspace(0.5, 2.0, c)),
    "bernoulli": lambda _: Bernoulli(),
    "poisson": lambda _: Poisson(),
    "negative binomial": lambda _: NegativeBinomial(0.7),
    "known noise": lambda _: KnownNoise(0.6),
    "student-t": lambda _: StudentT(0.6),
    "joint": lambda c: joint(c),
    "ordinal": lambda c: ratings(c),
    "own": lambda _: RelativeNoise(),
}


def targets(likelihood: Likelihood, num_data: int, num_outputs: int = 3, seed: int = 1) -> Tensor:
    """Targets drawn for outputs of zero, under conditions that differ."""
    f = torch.zeros(num_data, num_outputs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    if isinstance(likelihood, Conditional) and likelihood.conditions:
        values = torch.rand(f.shape, generator=generator, dtype=torch.float64) + 0.1
        likelihood = likelihood.with_conditions(**dict.fromkeys(likelihood.conditions, values))
    return likelihood.sample(f, generator)
