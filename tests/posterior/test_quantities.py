"""Quantiles, intervals, cumulative probabilities and sampled targets of every likelihood."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import expit, ndtri
from torch import Tensor

from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import (
    Bernoulli,
    Categorical,
    Conditional,
    Gaussian,
    HeteroscedasticGaussian,
    Joint,
    KnownNoise,
    Likelihood,
    NaturalGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    Weighted,
)
from evigrad.posterior import Predictive

LEVELS = (0.001, 0.05, 0.5, 0.8, 0.975)
CONDITION = 2.5
CUTS = [-1.0, 0.3, 2.0]


class Waiting(Likelihood):
    """Exponential times, whose log rates are the outputs."""

    name, couples_outputs = "waiting", False

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y * f.exp()).sum(1)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return -(-y.clamp(min=0).to(f) * f.exp()).expm1()

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(f.shape, generator=generator, dtype=f.dtype)
        return -(-uniform).log1p() / f.exp()


class Stars:
    """The ordinal distribution, by its definition."""

    def __init__(self, f: float) -> None:
        self.ends = np.concatenate([expit(np.array(CUTS) - f), [1.0]])

    def cdf(self, y: np.ndarray) -> np.ndarray:
        last = np.clip(np.floor(y), -1, 3).astype(int)
        return np.concatenate([[0.0], self.ends])[last + 1]

    def ppf(self, q: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.ends, q)


class Case(NamedTuple):
    """A likelihood, the distribution of a target for outputs f, and the conditions."""

    likelihood: Likelihood
    distribution: Callable[..., Any]
    conditions: dict[str, float] = {}
    num_outputs: int = 1


def negative_binomial(f: float) -> Any:
    d = 0.7
    return stats.nbinom(1 / d, 1 / (1 + d * CONDITION * math.exp(f)))


def natural(f: float, b: float) -> Any:
    precision = math.log1p(math.exp(b))
    return stats.norm(f / precision, precision**-0.5)


CASES = {
    "gaussian": Case(Gaussian(0.6), lambda f: stats.norm(f, 0.6)),
    "known noise": Case(
        KnownNoise(0.6), lambda f: stats.norm(f, math.hypot(0.6, 2.5)), {"noise": CONDITION}
    ),
    "student-t": Case(StudentT(0.6, degrees=3.5), lambda f: stats.t(3.5, f, 0.6)),
    "heteroscedastic": Case(
        HeteroscedasticGaussian(), lambda f, s: stats.norm(f, math.exp(s / 2)), num_outputs=2
    ),
    "natural-gaussian": Case(NaturalGaussian(), natural, num_outputs=2),
    "poisson": Case(Poisson(), lambda f: stats.poisson(math.exp(f))),
    "poisson with exposure": Case(
        Poisson(exposure=True),
        lambda f: stats.poisson(CONDITION * math.exp(f)),
        {"exposure": CONDITION},
    ),
    "negative-binomial": Case(
        NegativeBinomial(0.7, exposure=True), negative_binomial, {"exposure": CONDITION}
    ),
    "ordinal": Case(Ordinal(4, CUTS), Stars),
    "custom": Case(Waiting(), lambda f: stats.expon(scale=math.exp(-f))),
}
F = torch.tensor([[-1.3, 0.2], [0.4, -0.5], [2.0, 1.0]], dtype=torch.float64)


def prediction(case: Case, size: float = 0.0, **options: Any) -> Predictive:
    root = size * torch.tensor([[1.0, 0.0], [-0.4, 0.6]], dtype=torch.float64)
    c = case.num_outputs
    covariance = (root @ root.T)[:c, :c].expand(3, c, c)
    p = Predictive(F[:, :c], covariance, case.likelihood.double(), **options)
    if not case.conditions:
        return p
    values = {name: torch.full((3,), value) for name, value in case.conditions.items()}
    return p.with_conditions(**values)


def per_target(p: Predictive, y: Any) -> Tensor:
    """Numbers of the examples in the shape of the targets."""
    y = torch.as_tensor(y, dtype=torch.float64)
    return y if isinstance(p.likelihood, Ordinal) else y[:, None]


def targets(p: Predictive, y: Tensor) -> Tensor:
    """Targets in the form of ``log_prob``."""
    if isinstance(p.likelihood, Conditional):
        return p.likelihood.combined(y, p.outputs)
    return y.long() if isinstance(p.likelihood, Ordinal) else y


@pytest.mark.parametrize("name", CASES)
def test_certain_outputs_have_the_distribution_of_scipy(name: str) -> None:
    case = CASES[name]
    certain = prediction(case, num_samples=3)
    distributions = [case.distribution(*f[: case.num_outputs].tolist()) for f in F]
    for p in (certain, replace(prediction(case, 1.0), link="plug-in")):
        for y in (-0.7, 0.0, 1.0, 2.6):
            expected = per_target(p, [d.cdf(y) for d in distributions])
            torch.testing.assert_close(p.cdf(y), expected, atol=1e-7, rtol=1e-6)
        quantiles = p.quantile(LEVELS)
        for q, values in zip(LEVELS, quantiles, strict=True):
            expected = per_target(p, [float(d.ppf(q)) for d in distributions])
            torch.testing.assert_close(values.double(), expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(p.quantile(LEVELS[1]), quantiles[1])
        levels = torch.tensor([0.05, 0.95], dtype=torch.float64)
        torch.testing.assert_close(torch.stack(p.interval(0.9)), p.quantile(levels))


@pytest.mark.parametrize("name", CASES)
def test_log_prob_is_the_derivative_or_the_difference_of_cdf(name: str) -> None:
    p = prediction(CASES[name], 0.8, num_samples=20)
    for values in ([1.0, 2.0, 3.0], [0.0, 1.0, 0.0]):
        y = per_target(p, values) + (0.0 if p.likelihood.has_whole_targets else 0.3)
        step, width = (1.0, 1.0) if p.likelihood.has_whole_targets else (1e-4, 2e-4)
        above = y if p.likelihood.has_whole_targets else y + step
        density = (p.cdf(above) - p.cdf(y - step)).flatten() / width
        torch.testing.assert_close(density, p.log_prob(targets(p, y)).exp(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_probabilities_are_integrals_over_the_outputs(name: str) -> None:
    case = CASES[name]
    p = prediction(case, 0.8, num_samples=10_000)
    nodes, weights = (torch.tensor(v) for v in np.polynomial.hermite_e.hermegauss(60))
    grid, weights = torch.cartesian_prod(nodes, nodes), torch.outer(weights, weights).flatten()
    root = torch.linalg.cholesky(p.covariance[0])
    for i, y in enumerate((0.0, 1.0, 2.0)):
        f = p.outputs[i] + grid[:, : case.num_outputs] @ root.T
        # The integrand is the public cdf of certain outputs, which another test checks.
        certain = Predictive(f, torch.zeros(*f.shape, f.shape[1]), case.likelihood, "plug-in")
        if case.conditions:
            certain = certain.with_conditions(**case.conditions)
        expected = (weights * certain.cdf(y).flatten()).sum() / weights.sum()
        assert p.cdf(y)[i].item() == pytest.approx(expected.item(), abs=0.015)
        assert prediction(case, 0.8).cdf(y)[i].item() == pytest.approx(expected.item(), abs=0.1)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None)
@given(q=st.floats(1e-5, 1 - 1e-5), size=st.floats(0.0, 2.0))
def test_quantiles_invert_probabilities(name: str, q: float, size: float) -> None:
    p = prediction(CASES[name], size, num_samples=8)
    values = p.quantile(q)
    probabilities = p.cdf(values)
    if p.likelihood.has_whole_targets:
        assert bool((values == values.round()).all())
        assert bool((probabilities >= q - 1e-12).all() and (p.cdf(values - 1) < q + 1e-12).all())
    else:
        torch.testing.assert_close(probabilities, torch.full_like(probabilities, q), rtol=1e-9,
                                   atol=1e-11)  # fmt: skip


@pytest.mark.each(1)
@pytest.mark.parametrize("link", ["monte-carlo", "plug-in"])
@pytest.mark.parametrize("name", CASES)
def test_sampled_targets_have_the_probabilities(name: str, link: str) -> None:
    n, p = 4000, replace(prediction(CASES[name], 0.8, num_samples=1500), link=link)
    y = p.sample_targets(n, 3)
    assert y.shape == (n, *p.quantile(0.5).shape) and y.dtype == p.quantile(0.5).dtype
    for q in (0.1, 0.5, 0.9):
        at = p.quantile(q)
        frequency = (y <= at).double().mean(0)
        torch.testing.assert_close(frequency, p.cdf(at), atol=0.05, rtol=0)
    assert torch.equal(p.sample_targets(3), p.sample_targets(3, p.seed))
    assert torch.equal(p.sample_targets(3, torch.Generator().manual_seed(5)),
                       p.sample_targets(3, 5))  # fmt: skip


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_classes_without_an_order_have_samples_only(likelihood: Likelihood) -> None:
    covariance = torch.eye(3).double().expand(4, 3, 3)
    f = torch.linspace(-2, 2, 12).double().view(4, 3)
    p = Predictive(f, covariance, likelihood, num_samples=4000)
    for link in ("monte-carlo", "probit", "plug-in"):
        p = replace(p, link=link)
        y = p.sample_targets(4000, 1)
        if isinstance(likelihood, Categorical):
            assert y.shape == (4000, 4)
            y = torch.nn.functional.one_hot(y, 3)
        torch.testing.assert_close(y.double().mean(0), p.probabilities, atol=0.035, rtol=0)
        for method, arguments in (("quantile", [0.5]), ("interval", []), ("cdf", [0])):
            with pytest.raises(ConfigurationError, match="Use probabilities"):
                getattr(p, method)(*arguments)


def test_heads_positions_and_weights() -> None:
    heads = Joint(
        {"depth": (2, Gaussian(0.5)), "count": (1, Poisson()), "kind": (2, Categorical())}
    )
    f = torch.linspace(-1, 1, 30).double().view(2, 3, 5)
    root = 0.3 * torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    p = Predictive(f, (root @ root.T).expand(2, 3, 5, 5), heads.double())
    for call in (lambda: p.quantile(0.5), lambda: p.cdf(0.0)):
        with pytest.raises(ConfigurationError, match=r"prediction\['depth'\]"):
            call()
    y = p.sample_targets(6000, 1)
    assert y.shape == (6000, 2, 3, 4)
    head = p["depth"]
    assert head.quantile([0.1, 0.9]).shape == (2, 2, 3, 2)
    torch.testing.assert_close(head.quantile(0.9), head.mean + ndtri(0.9) * head.std)
    # Heads are correlated through their outputs.
    products = (y[..., 0] * y[..., 1]).mean(0) - y[..., 0].mean(0) * y[..., 1].mean(0)
    torch.testing.assert_close(products, p.covariance[..., 0, 1], atol=0.03, rtol=0)
    count = p["count"]
    one = Predictive(count.outputs[1, :1], count.covariance[1, :1], Poisson(), num_samples=20_000)
    many = replace(count, num_samples=20_000)
    torch.testing.assert_close(many.cdf(1.0)[1, :1], one.cdf(1.0), atol=0.01, rtol=0)
    torch.testing.assert_close(many.cdf(many.quantile(0.5))[1, :1], one.cdf(one.quantile(0.5)),
                               atol=0.01, rtol=0)  # fmt: skip
    assert p["kind"].sample_targets(5).shape == (5, 2, 3)
    weighted = replace(head, likelihood=Weighted(head.likelihood))
    assert torch.equal(weighted.quantile(0.3), head.quantile(0.3))
    assert torch.equal(weighted.sample_targets(5), head.sample_targets(5))


def test_targets_of_float32_outputs_and_missing_targets() -> None:
    p = Predictive(F[:, :1].float(), torch.ones(3, 1, 1), StudentT(0.5, missing="nan"))
    y = p.quantile(0.9)
    assert y.dtype == p.sample_targets(2).dtype == p.cdf(y).dtype == torch.float32
    y[1] = math.nan
    values = p.cdf(y.flatten().tolist())  # targets of one output may have the shape (m,)
    assert torch.equal(values.isnan(), y.isnan())
    torch.testing.assert_close(values[0], torch.tensor([0.9]))


def test_conditions_of_each_example_scale_their_quantiles() -> None:
    p = Predictive(torch.zeros(2, 1), torch.ones(2, 1), KnownNoise(1.0))
    p = p.with_conditions(noise=torch.tensor([0.0, 2.0]))
    expected = ndtri(0.95) * torch.tensor([[2.0], [6.0]]).sqrt()
    torch.testing.assert_close(p.interval(0.9)[1], expected)
    counts = Predictive(torch.zeros(2, 1), torch.zeros(2, 1), Poisson(exposure=True))
    counts = counts.with_conditions(exposure=[1.0, 100.0])
    assert counts.quantile(0.5).flatten().tolist() == [1.0, 100.0]
    assert counts.sample_targets(2000).mean(0)[1].item() == pytest.approx(100.0, abs=1.0)


class Inherited(StudentT):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(2 * f, y)


class Summed(Waiting):
    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return super().cdf(f, y).sum(1)


class Flat(Waiting):
    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(y, 0.4)


def test_errors() -> None:
    def of(likelihood: Likelihood, **options: Any) -> Predictive:
        return Predictive(torch.zeros(2, 1), torch.ones(2, 1, 1), likelihood, **options)

    p = of(Inherited())
    with pytest.raises(
        ConfigurationError, match=r"Inherited has no quantiles.*sample_targets\(n\)"
    ):
        p.quantile(0.5)
    with pytest.raises(ConfigurationError, match="Inherited cannot draw targets"):
        p.sample_targets(3)
    with pytest.raises(
        ConfigurationError, match=r"cdf of Summed .* one number per target, \(\d+, 1\)"
    ):
        of(Summed()).cdf(1.0)
    with pytest.raises(ConfigurationError, match="do not rise from 0 to 1"):
        of(Flat()).quantile(0.5)
    with pytest.raises(ConfigurationError, match="probit"):
        of(Poisson(), link="probit").sample_targets(3)
    with pytest.raises(ConfigurationError, match="n must be a positive integer"):
        of(Poisson()).sample_targets(0)
    with pytest.raises(InputError, match=r"y must be one number, or have the shape \(2, 1\)"):
        of(Gaussian()).cdf([1.0, 2.0, 3.0])
    for q in (0.0, 1.0, [], [[0.5]], math.nan, 5):
        with pytest.raises(InputError, match="q must be a probability"):
            of(Gaussian()).quantile(q)
    with pytest.raises(InputError, match="such as 0.95, got 95"):
        of(Gaussian()).interval(95)
