"""``check_likelihood``: every likelihood passes, and planted errors are reported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from likelihood_zoo import LIKELIHOODS, RelativeNoise, targets
from likelihoods import test_conditions
from torch import Tensor, nn

from evigrad.errors import ConformanceError, InputError
from evigrad.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NaturalGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    RootRows,
    Weighted,
    base,
)
from evigrad.testing import check_likelihood
from evigrad.testing.comparison import random


class PlainCategorical(Likelihood):
    """The categorical from its log probability alone."""

    name, is_classification = "plain", True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return f.log_softmax(dim=1).gather(1, y[:, None]).squeeze(1)


class PlainPoisson(Likelihood):
    """A diagonal Λ from the log probability alone, with a parameter."""

    name, couples_outputs = "plain poisson", False

    def __init__(self) -> None:
        super().__init__()
        self.log_exposure = nn.Parameter(torch.tensor(0.3))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        rate = f + self.log_exposure
        return (y * rate - rate.exp() - torch.lgamma(y + 1)).sum(dim=1)


# A likelihood of C outputs, targets for M examples, and C.
M = 4
Case = tuple[Likelihood, Tensor, int]
CASES: dict[str, Callable[[], Case]] = {
    f"{name}, {c}": lambda make=make, c=c: (make(c), targets(make(c), M, c), c)
    for name, make in LIKELIHOODS.items()
    for c in (1, 2, 5)
    if not (name == "categorical" and c == 1)
}
CASES |= {name: lambda name=name: test_conditions.cases()[name] for name in test_conditions.cases()}
CASES |= {
    "plain categorical": lambda: (PlainCategorical(), torch.tensor([0, 1, 3, 0]), 4),
    "plain poisson": lambda: (PlainPoisson(), torch.arange(12.0).view(4, 3) % 5, 3),
    "heteroscedastic": lambda: (HeteroscedasticGaussian(), random(4, 2), 4),
    "natural": lambda: (NaturalGaussian(), random(4, 2), 4),
    "single ordinal": lambda: (Ordinal(4, thresholds=[-1.2, 0.1, 0.7]), torch.arange(4), 1),
    "weighted labels": lambda: (
        Weighted(Categorical()),
        Weighted(Categorical()).targets(torch.arange(4) % 3, torch.rand(4)),
        3,
    ),
}


# Every second number of outputs is long.
LONG = [name for name in list(CASES)[1::2] if name[-1].isdigit()]


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in CASES]
)
def test_every_likelihood(case: str) -> None:
    likelihood, y, num_outputs = CASES[case]()
    check_likelihood(likelihood, random(len(y), num_outputs, seed=len(case)), y)


@pytest.mark.parametrize("make", [Bernoulli, NegativeBinomial])
def test_unit_vectors_with_a_scale(
    make: Callable[[], Likelihood], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root of many outputs."""
    monkeypatch.setattr(base, "_MANY_OUTPUTS", 4)
    root = make().root(torch.zeros(2, 5), None)
    assert root.scale is not None and root.vectors.stride(0) == 0
    check_likelihood(make(), random(4, 5), (random(4, 5) > 0).double())


class Scores(RelativeNoise):
    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return 1.01 * super().score(f, y)


class DetachedScores(RelativeNoise):
    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return super().score(f, y).detach()


class DetachedDensity(RelativeNoise):
    def _std(self, f: Tensor) -> Tensor:
        return super()._std(f.detach())


class DetachedNoise(Gaussian):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        noise = self.log_noise.detach().exp()
        return torch.distributions.Normal(f, noise).log_prob(y).sum(1)


class Mixing(RelativeNoise):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f + 1e-5 * f.mean(0), y)


class Asymmetric(Categorical):
    def hessian(self, f: Tensor) -> Tensor:
        return super().hessian(f).triu()


class Indefinite(Categorical):
    def hessian(self, f: Tensor) -> Tensor:
        return super().hessian(f) - 0.1 * torch.eye(f.shape[1]).to(f)


class Uncoupled(Categorical):
    couples_outputs = False
    is_classification = False


class Steeper(Categorical):
    def hessian(self, f: Tensor) -> Tensor:
        return 1.001 * super().hessian(f)


class DetachedHessian(RelativeNoise):
    def hessian(self, f: Tensor) -> Tensor:
        return super().hessian(f.detach())


class AnotherFisher(RelativeNoise):
    def hessian(self, f: Tensor) -> Tensor:
        return self._std(f).pow(-2).diag_embed() + 0.0 * super().hessian(f)


class Unsampled(Likelihood):
    name, couples_outputs = "waiting times", False

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y * f.exp()).sum(1)

    def hessian(self, f: Tensor) -> Tensor:
        return torch.ones_like(f).diag_embed()


class Exponential(Unsampled):
    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return torch.empty_like(f.detach()).exponential_(generator=generator) / f.detach().exp()


class Roots(Categorical):
    def root(self, f: Tensor, columns: Any = None, kind: str = "subblock") -> RootRows:
        return RootRows(1.001 * super().root(f, columns, kind).vectors)


class DetachedRoots(Categorical):
    def root(self, f: Tensor, columns: Any = None, kind: str = "subblock") -> RootRows:
        return super().root(f.detach(), columns, kind)


class MisplacedColumns(Categorical):
    def root(self, f: Tensor, columns: Any = None, kind: str = "subblock") -> RootRows:
        if kind == "fisher" and columns is not None and columns.shape[1] < f.shape[1]:
            columns = columns.roll(1, 1)
        return super().root(f, columns, kind)

    def num_rows(self, num_outputs: int) -> int:
        return num_outputs - 1


class Padding(RelativeNoise):
    def root(self, f: Tensor, columns: Any = None, kind: str = "subblock") -> RootRows:
        return super().root(f, None if columns is None else columns.clamp(min=0), kind)


class Norms(Categorical):
    def row_norms(self, f: Tensor, kind: str) -> Tensor:
        return super().row_norms(f, kind).sqrt()


class Ranks(Categorical):
    def num_rows(self, num_outputs: int) -> int:
        return num_outputs


class Unnormalized(Gaussian):
    """It lacks the logarithm of σ."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -0.5 * ((y - f) / self.log_noise.exp()).square().sum(1)

    def hessian(self, f: Tensor) -> Tensor:
        return super().hessian(f)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return super().sample(f, generator)


class UnnormalizedLabels(PlainCategorical):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f, y) - 0.01


class WideSamples(Gaussian):
    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return f.detach() + 1.3 * (super().sample(f, generator) - f.detach())


class GlobalSamples(Gaussian):
    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return f.detach() + torch.randn_like(f)


class ConstantSamples(Gaussian):
    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return f.detach() + 1.0


class SamplesWithGraph(Gaussian):
    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return super().sample(f, generator) + 0 * f


class Probabilities(Categorical):
    def probabilities(self, f: Tensor) -> Tensor:
        return (2 * f).softmax(1)


class LargeProbabilities(Bernoulli):
    def probabilities(self, f: Tensor) -> Tensor:
        return 2 * f.sigmoid()


class AnotherNoise(Gaussian):
    def noise_variance(self, f: Tensor) -> Tensor:
        return self.log_noise.exp().expand_as(f)


LABELS, NUMBERS = torch.tensor([0, 1, 2, 1]), random(4, 3)
PLANTED: dict[type[Likelihood], str] = {
    Scores: "^score of Scores at index .* must be .*, got .*, a difference of ",
    DetachedScores: "derivative of score of DetachedScores with respect to the outputs",
    DetachedDensity: "derivative of log_prob of DetachedDensity with respect to the outputs",
    DetachedNoise: "derivative of log_prob of DetachedNoise with respect to log_noise",
    Mixing: "log_prob of Mixing for a single example",
    Asymmetric: "hessian of Asymmetric, which must be symmetric, at index",
    Indefinite: "lowest eigenvalue of the hessian of Indefinite",
    Uncoupled: "hessian of Uncoupled with couples_outputs = False",
    Steeper: "hessian of Steeper, compared with −∇² log_prob",
    DetachedHessian: "derivative of hessian of DetachedHessian with respect to the outputs",
    AnotherFisher: "hessian of AnotherFisher, the mean of −∇² log_prob over targets",
    Unsampled: "Unsampled does not define sample",
    Roots: "R Rᵀ of root of Roots with kind='subblock' and all columns at index",
    DetachedRoots: "derivative of R Rᵀ of root of DetachedRoots .* with respect to the outputs",
    MisplacedColumns: "root of MisplacedColumns with kind='fisher' and listed columns",
    Padding: "root of Padding with kind='subblock' and listed columns",
    Norms: "row_norms of Norms with kind='subblock'",
    Ranks: r"root of Ranks .* must have num_rows\(3\) = 3 columns, got 2",
    Unnormalized: "gradient of log_prob over targets from sample of Unnormalized, .* log_noise",
    UnnormalizedLabels: r"sum of exp\(log_prob\) of UnnormalizedLabels over labels",
    WideSamples: "hessian of WideSamples. The covariance of the gradient",
    GlobalSamples: "sample of GlobalSamples must draw from its generator only",
    ConstantSamples: "sample of ConstantSamples must depend on the generator",
    SamplesWithGraph: "must return targets without a graph",
    Probabilities: r"probabilities of Probabilities, compared with exp\(log_prob\)",
    LargeProbabilities: "^probabilities of LargeProbabilities at index",
    AnotherNoise: "log_prob of AnotherNoise, compared with a Gaussian of its noise_variance",
}


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_a_planted_error(kind: type[Likelihood]) -> None:
    likelihood: Any = kind(0.5) if issubclass(kind, Gaussian) else kind()
    y = LABELS if likelihood.couples_outputs or kind is Uncoupled else NUMBERS
    y = (NUMBERS > 0).double() if isinstance(likelihood, Bernoulli) else y
    y = NUMBERS.exp() if isinstance(likelihood, Unsampled) else y
    with pytest.raises(ConformanceError, match=PLANTED[kind]):
        check_likelihood(likelihood, random(4, 3, seed=1), y)


def test_the_mean_over_targets() -> None:
    """It needs samples, unless the Hessian is the same for all targets."""
    check_likelihood(Exponential(), random(4, 3, seed=1), NUMBERS.exp())


class Shifted(Exponential):
    """Its density integrates to e⁷, which no derivative shows."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f, y) + 7.0

    def hessian(self, f: Tensor) -> Tensor:
        return super().hessian(f)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return super().sample(f, generator)


class Quantiles(Exponential):
    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return 1 - (-2 * y * f.exp()).exp()


class Moments(Exponential):
    def moments(self, f: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = (-f).exp()
        return mean, 0 * mean, 2 * mean.square()


class Narrow(Exponential):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(f.float(), y.float())


@pytest.mark.parametrize(
    "kind, words",
    [
        (Shifted, "integral of exp"),
        (Quantiles, "cdf of Quantiles, compared with drawn targets"),
        (Moments, "moments of Moments without uncertainty of the outputs: the noise variance"),
        (Narrow, "log_prob of Narrow must return torch.float64"),
    ],
)
def test_a_planted_error_of_single_numbers(kind: type[Likelihood], words: str) -> None:
    with pytest.raises(ConformanceError, match=words):
        check_likelihood(kind(), random(4, 1, seed=1), NUMBERS[:, :1].exp())


def test_the_name_is_that_of_the_class() -> None:
    class Waiting(Likelihood):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return -f.sum(1)

    assert Waiting.name == "waiting"


def test_bad_arguments_and_no_side_effects() -> None:
    likelihood = Gaussian(0.5)
    f, y = random(4, 3, seed=1).float(), NUMBERS.float()
    state, before = torch.get_rng_state(), (f.clone(), likelihood.log_noise.detach().clone())
    check_likelihood(likelihood, f, y)
    assert torch.equal(torch.get_rng_state(), state) and not f.requires_grad
    assert torch.equal(f, before[0]) and torch.equal(likelihood.log_noise, before[1])
    with pytest.raises(InputError, match=r"outputs must have the shape \(m, C\).*got \(1, 3\)"):
        check_likelihood(likelihood, f[:1], y[:1])
    with pytest.raises(InputError, match="need 4 targets"):
        check_likelihood(Poisson(), f, y[:3])
