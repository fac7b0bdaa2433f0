"""Likelihoods of the scikit-learn estimators, compared with the plain fit."""

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import evigrad
from evigrad.errors import ConfigurationError, EvigradWarning, InputError
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
from evigrad.models import make_model

pytest.importorskip("sklearn")

from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.metrics import d2_tweedie_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.preprocessing import FunctionTransformer, PowerTransformer

from evigrad.sklearn import EvidenceClassifier, EvidenceRegressor

SHORT: dict[str, Any] = {
    "hidden_layer_sizes": (4,),
    "relevance": False,
    "epochs": 6,
    "learning_rate": 0.05,
    "settings": {"burn_in": 1, "every": 3, "steps": 1},
    "random_state": 0,
}
N = 30
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(N, 2))
HOURS = DRAW.uniform(0.2, 20.0, N)
COUNTS = DRAW.poisson(3 * HOURS * np.exp(0.5 * X[:, 0])).astype(float)
PRICES = 300 + 50 * X[:, 0] + np.exp(X[:, 1]) * DRAW.normal(size=N)
STARS = np.clip(np.round(5 + X[:, 0] + 0.3 * DRAW.normal(size=N)), 4, 6)


def plain(likelihood: Likelihood, y: Any, x: np.ndarray, num_outputs: int) -> evigrad.FitResult:
    """Fit the estimator's network to the same sorted table."""
    model = make_model("mlp", (2,), num_outputs, seed=0, hidden=[4]).double()
    inputs = (torch.tensor(x) - torch.tensor(X.mean(0))) / torch.tensor(X.std(0))
    return evigrad.fit(
        model,
        (inputs, torch.as_tensor(y)),
        likelihood=likelihood,
        schedule=evigrad.Schedule(epochs=6, burn_in=1, every=3, steps=1),
        optimization=evigrad.Optimization(lr=0.05),
        progress=False,
    )


def inputs_of(x: np.ndarray) -> torch.Tensor:
    return torch.tensor((x - X.mean(0)) / X.std(0))


def exact_evidence(result: evigrad.FitResult, y: Any, x: np.ndarray) -> float:
    evidence = result.evidence
    return evidence.estimate(next(iter(evidence.blocks((inputs_of(x), y))))).log_evidence


@pytest.mark.filterwarnings("ignore:The mean or the noise", "ignore:Counts in the targets")
@pytest.mark.parametrize("kind", [Poisson, NegativeBinomial])
def test_counts_are_a_plain_fit_with_exposures_in_units_of_the_mean_rate(kind: Any) -> None:
    regressor = EvidenceRegressor(likelihood=kind.name, **SHORT)
    regressor.fit(X, COUNTS, exposure=HOURS)
    order = np.lexsort([*X.T, COUNTS, HOURS])
    x, hours, counts = X[order], HOURS[order], COUNTS[order]
    unit = COUNTS.sum() / HOURS.sum()
    likelihood = kind(exposure=True)
    y = likelihood.targets(counts[:, None], exposure=hours * unit)
    result = plain(likelihood, y, x, 1)
    rates = unit * result.model(inputs_of(x)).exp()[:, 0].detach().numpy()
    np.testing.assert_allclose(regressor.predict(x), rates, rtol=1e-6)
    np.testing.assert_allclose(regressor.predict(x, exposure=hours), hours * rates, rtol=1e-6)
    prediction = result.evidence.posterior((inputs_of(x), y))(inputs_of(x))
    mean, std = regressor.predict(x, return_std=True, exposure=hours)
    np.testing.assert_allclose(mean, hours * rates, rtol=1e-6)
    expected = prediction.with_conditions(exposure=torch.tensor(hours * unit)).std[:, 0]
    np.testing.assert_allclose(std, expected, rtol=1e-5)
    assert regressor.log_evidence_ == pytest.approx(exact_evidence(result, y, x))
    assert not hasattr(regressor, "noise_")
    # Another unit of the exposures changes nothing.
    minutes = EvidenceRegressor(likelihood=kind(exposure=True), **SHORT)
    minutes.fit(X, COUNTS, exposure=60 * HOURS)
    np.testing.assert_allclose(minutes.predict(x, exposure=60 * hours), hours * rates, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The mean or the noise")
@pytest.mark.parametrize(
    ("likelihood", "num_outputs"),
    [(StudentT(), 1), (HeteroscedasticGaussian(), 2), (NaturalGaussian(), 2)],
)
def test_numbers_are_a_plain_fit_of_standardized_targets(
    likelihood: Likelihood, num_outputs: int
) -> None:
    regressor = EvidenceRegressor(likelihood=likelihood.name, **SHORT).fit(X, PRICES)
    order = np.lexsort([*X.T, PRICES])
    x, unit = X[order], PRICES.std()
    y = torch.tensor((PRICES[order] - PRICES.mean()) / unit)[:, None]
    result = plain(copy.deepcopy(likelihood), y, x, num_outputs)
    prediction = result.evidence.posterior((inputs_of(x), y))(inputs_of(x))
    mean, std = regressor.predict(x, return_std=True)
    expected = PRICES.mean() + unit * prediction.mean[:, 0].numpy()
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(regressor.predict(x), expected, rtol=1e-6)
    np.testing.assert_allclose(std, unit * prediction.std[:, 0], rtol=1e-5)
    evidence = exact_evidence(result, y, x) - N * np.log(unit)
    assert regressor.log_evidence_ == pytest.approx(evidence)
    assert hasattr(regressor, "noise_") == isinstance(likelihood, StudentT)


def test_ordered_classes_are_a_plain_fit_of_an_ordinal_likelihood() -> None:
    classifier = EvidenceClassifier(likelihood="ordinal", **SHORT).fit(X, STARS)
    order = np.lexsort([*X.T, STARS])
    x, y = X[order], torch.tensor(STARS[order] - 4).long()
    result = plain(Ordinal(3), y, x, 1)
    outputs = result.model(inputs_of(x)).detach()
    likelihood: Any = result.evidence.likelihood
    expected = likelihood.probabilities(outputs).detach()
    np.testing.assert_allclose(classifier.predict_proba(x), expected, rtol=1e-6)
    assert classifier.classes_.tolist() == [4, 5, 6]
    np.testing.assert_array_equal(classifier.predict(x), 4 + expected.argmax(1).numpy())
    assert classifier.score(x, STARS[order]) == np.mean(classifier.predict(x) == STARS[order])
    averaged = EvidenceClassifier(likelihood=Ordinal(3), posterior="kfac", **SHORT)
    averaged.fit(X, STARS, sample_weight=np.linspace(0.5, 1.5, N))
    np.testing.assert_allclose(averaged.predict_proba(x).sum(1), 1.0)


def test_likelihoods_are_parameters_like_any_other() -> None:
    likelihood = StudentT(degrees=3.0)
    before = copy.deepcopy(likelihood.state_dict())
    estimator = EvidenceRegressor(likelihood=likelihood, **SHORT)
    assert estimator.get_params()["likelihood"] is likelihood
    again: Any = clone(estimator)
    assert again.likelihood.degrees == 3.0 and again.likelihood is not likelihood
    np.testing.assert_array_equal(
        again.fit(X, PRICES).predict(X), estimator.fit(X, PRICES).predict(X)
    )
    assert all(torch.equal(before[k], v) for k, v in likelihood.state_dict().items())
    grid = GridSearchCV(estimator, {"likelihood": ["gaussian", likelihood]}, cv=2)
    assert grid.fit(X, PRICES).best_params_["likelihood"] in ("gaussian", likelihood)
    assert not hasattr(estimator.set_params(likelihood="heteroscedastic").fit(X, PRICES), "noise_")


def test_a_fixed_noise_is_in_units_of_the_targets() -> None:
    fixed = EvidenceRegressor(likelihood=Gaussian(3.0, learnable=False), **SHORT)
    assert fixed.fit(X, PRICES).noise_ == pytest.approx(3.0)
    both = np.stack([PRICES, 0.5 * PRICES], 1)
    np.testing.assert_allclose(fixed.fit(X, both).noise_, [3.0, 3.0], rtol=1e-5)
    beyond = EvidenceRegressor(likelihood=Gaussian(2.0, learnable=False), **SHORT)
    assert beyond.fit(X, PRICES, noise=0.5).noise_ == pytest.approx(2.0)


class Waiting(Likelihood):
    """Exponential times with log rates f."""

    name, couples_outputs = "waiting", False

    def log_prob(self, f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (f - y * f.exp()).sum(1)

    def hessian(self, f: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(f).diag_embed()


class WithMoments(Waiting):
    def moments(self, f: torch.Tensor, covariance: torch.Tensor) -> Any:
        variance = covariance.diagonal(dim1=1, dim2=2)
        mean = (0.5 * variance - f).exp()
        second = (2 * variance - 2 * f).exp()
        return mean, second - mean.square(), second


def test_a_custom_likelihood_is_not_standardized() -> None:
    times = DRAW.exponential(np.exp(-X[:, 0]))
    regressor = EvidenceRegressor(likelihood=WithMoments(), **SHORT).fit(X, times)
    result = regressor.result_
    expected = (-result.model(regressor.inputs(X))).exp()[:, 0].detach()
    np.testing.assert_allclose(regressor.predict(X), expected)


class Limited(Conditional):
    name, couples_outputs = "limited", False
    conditions = {"limit": 1.0}

    def log_prob(self, f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -(self.split(y)[0] - f).square().sum(1)


@pytest.mark.parametrize(
    ("likelihood", "conditions", "words"),
    [
        ("poison", {}, "must be one of .*poisson.*Did you mean 'poisson'"),
        ("ordinal", {}, "got 'ordinal'. Use EvidenceClassifier"),
        (Categorical(), {}, "likelihood of numbers, got Categorical. Use EvidenceClassifier"),
        (Bernoulli(), {}, "likelihood of numbers, got Bernoulli"),
        (Weighted(Gaussian()), {}, r"got Weighted. Pass the weights to fit\(X, y, sample_weight"),
        (Joint({"a": (1, Gaussian())}), {}, "got Joint. For heads, use evigrad.fit"),
        (3, {}, "must be one of .* got 3"),
        (Waiting(), {}, r"Waiting does not define moments\(f, covariance\)"),
        (Limited(), {}, "Limited needs the limit of each row, got none. Use evigrad.fit"),
        (KnownNoise(), {}, r"needs the noise of each row, got none. Use fit\(X, y, noise=...\)"),
        (Poisson(exposure=True), {}, r"needs the exposure .* Use fit\(X, y, exposure=...\)"),
        ("gaussian", {"exposure": HOURS}, "not get exposure with Gaussian.*use likelihood=.poisso"),
        ("poisson", {"noise": HOURS}, "not get noise with Poisson.*use likelihood=.gaussian"),
        ("student-t", {"noise": HOURS}, "not get noise with StudentT"),
        (StudentT([1.0, 2.0]), {}, r"one noise, or one per target \(1\), got 2"),
    ],
)
def test_likelihoods_that_do_not_fit_a_regressor(
    likelihood: Any, conditions: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        EvidenceRegressor(likelihood=likelihood, **SHORT).fit(X, COUNTS, **conditions)


@pytest.mark.parametrize(
    ("likelihood", "y", "words"),
    [
        ("gaussian", STARS, "got 'gaussian'. Use EvidenceRegressor"),
        ("ordnal", STARS, "one of categorical, ordinal.*Did you mean 'ordinal'"),
        (Gaussian(), STARS, "of single labels, got Gaussian. Use.*EvidenceRegressor for numbers"),
        (Bernoulli(), STARS, "of single labels, got Bernoulli"),
        (Ordinal(5), STARS, r"as many classes as y, 3, got Ordinal\(5\)"),
        ("ordinal", np.where(STARS > 5, "high", "low"), "must be numbers.*such as 'high'"),
        ("categorical", np.where(STARS > 5, np.nan, 1.0), "y lacks .* of 30 targets"),
    ],
)
def test_likelihoods_that_do_not_fit_a_classifier(likelihood: Any, y: Any, words: str) -> None:
    with pytest.raises((ConfigurationError, InputError), match=words):
        EvidenceClassifier(likelihood=likelihood, **SHORT).fit(X, y)


def test_bad_counts_and_exposures_name_their_row() -> None:
    estimator = EvidenceRegressor(likelihood="poisson", **SHORT)

    def with_value(values: np.ndarray, value: float) -> np.ndarray:
        return np.where(np.arange(N) == 7, value, values)

    for value, words in ((0.0, "Exposure 0.0"), (-1.0, "Exposure -1.0"), (np.nan, "Exposure nan")):
        with pytest.raises(InputError, match=rf"{words} at index \[7, 0\]"):
            estimator.fit(X, COUNTS, exposure=with_value(HOURS, value))
    with pytest.raises(InputError, match=r"0.5 at index \[7, 0\] must be a count"):
        estimator.fit(X, with_value(COUNTS, 0.5), exposure=HOURS)
    with pytest.raises(InputError, match=r"exposure must have one value per row.*\(29,\)"):
        estimator.fit(X, COUNTS, exposure=HOURS[1:])
    with pytest.raises(ConfigurationError, match="settings must not contain 'likelihood'.*likelih"):
        EvidenceRegressor(**{**SHORT, "settings": {"likelihood": "poisson"}}).fit(X, PRICES)
    with pytest.raises(ConfigurationError, match="exposure is only for counts.*is Gaussian"):
        EvidenceRegressor(**SHORT).fit(X, PRICES).predict(X, exposure=HOURS)


def test_the_score_of_counts_is_the_deviance_that_is_explained() -> None:
    estimator = EvidenceRegressor(likelihood="poisson", **SHORT).fit(X, COUNTS, exposure=HOURS)
    weights = np.linspace(0.0, 2.0, N)
    expected = d2_tweedie_score(
        COUNTS / HOURS, estimator.predict(X), sample_weight=weights * HOURS, power=1
    )
    score = estimator.score(X, COUNTS, sample_weight=weights, exposure=HOURS)
    assert score == pytest.approx(expected)
    with pytest.raises(InputError, match=r"score needs the exposures.*enable_metadata_routing"):
        estimator.score(X, COUNTS)
    assert estimator.score(X, np.zeros(N), exposure=HOURS) == 0.0
    # Several targets, weights and no exposures.
    both = np.stack([COUNTS, 10 * COUNTS], 1)
    several = EvidenceRegressor(likelihood="negative-binomial", **SHORT)
    several.fit(X, both, sample_weight=np.arange(N) % 3 / 2)
    scores = [
        d2_tweedie_score(y, mean, power=1)
        for y, mean in zip(both.T, several.predict(X).T, strict=True)
    ]
    assert several.score(X, both) == pytest.approx(np.mean(scores))


def test_exposures_are_routed_by_cross_validation() -> None:
    estimator: Any = EvidenceRegressor(likelihood="poisson", **SHORT)
    with config_context(enable_metadata_routing=True):
        routed = estimator.set_fit_request(exposure=True).set_score_request(exposure=True)
        scores = cross_val_score(routed, X, COUNTS, cv=2, params={"exposure": HOURS})
    halves = np.arange(N) < N // 2
    expected = []
    for test in (halves, ~halves):
        fitted = EvidenceRegressor(likelihood="poisson", **SHORT)
        fitted.fit(X[~test], COUNTS[~test], exposure=HOURS[~test])
        expected.append(fitted.score(X[test], COUNTS[test], exposure=HOURS[test]))
    np.testing.assert_allclose(scores, expected)


def test_predicted_counts_are_plug_in_rates_without_a_warning() -> None:
    estimator = EvidenceRegressor(likelihood="poisson", **SHORT).fit(X, COUNTS, exposure=HOURS)
    far = 100 * X
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates = estimator.predict(far)
    with pytest.warns(EvigradWarning, match="The means are not affected") as caught:
        mean, _ = estimator.predict(far, return_std=True)
    np.testing.assert_allclose(mean, rates, rtol=1e-6)
    assert "prediction.plug_in" not in str(caught[0].message) and caught[0].filename == __file__


@pytest.mark.parametrize("kind", [EvidenceClassifier, EvidenceRegressor])
def test_an_array_is_not_a_likelihood(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="likelihood must be one of"):
        kind(likelihood=np.zeros(3), **SHORT).fit(X, STARS)


def test_intervals_of_transformed_targets() -> None:
    """scikit-learn cannot transform a standard deviation, but ends of intervals it can."""
    model: Any = TransformedTargetRegressor(
        EvidenceRegressor(**SHORT), func=np.log, inverse_func=np.exp
    )
    model.fit(X, PRICES)
    with pytest.raises(AttributeError):
        model.predict(X, return_std=True)
    on_logs: Any = model.regressor_
    mean, std = on_logs.predict(X, return_std=True)
    np.testing.assert_allclose(np.exp(mean).ravel(), model.predict(X), rtol=1e-6)
    lower, upper = np.exp(mean - 1.96 * std), np.exp(mean + 1.96 * std)
    inside = (lower.ravel() < PRICES) & (PRICES < upper.ravel())
    assert inside.mean() > 0.8


def test_a_module_for_two_outputs_per_target() -> None:
    options = {n: v for n, v in SHORT.items() if n != "hidden_layer_sizes"}
    regressor = EvidenceRegressor(
        likelihood="heteroscedastic", module=lambda i, o: nn.Linear(i, o).double(), **options
    )
    assert regressor.fit(X, PRICES).result_.model.out_features == 2
    with pytest.raises(ConfigurationError, match=r"shape \(2,\) per row, got \(1,\)"):
        regressor.set_params(module=nn.Linear(2, 1).double()).fit(X, PRICES)


@pytest.mark.filterwarnings("ignore:Counts in the targets")
@pytest.mark.parametrize(
    ("likelihood", "y"),
    [("gaussian", PRICES), ("heteroscedastic", PRICES), ("negative-binomial", COUNTS)],
)
def test_quantiles_of_targets_in_their_own_units(likelihood: str, y: np.ndarray) -> None:
    exposure = HOURS if y is COUNTS else None
    regressor = EvidenceRegressor(likelihood=likelihood, **SHORT).fit(X, y, exposure=exposure)
    levels, posterior = [0.05, 0.5, 0.95], regressor.posterior_
    assert posterior is not None
    prediction, scale, shift = posterior(regressor.inputs(X)), y.std(), y.mean()
    if exposure is not None:
        unit, scale, shift = COUNTS.sum() / HOURS.sum(), 1.0, 0.0
        prediction = prediction.with_conditions(exposure=HOURS * unit)
    expected = shift + scale * prediction.quantile(levels).squeeze(2).T.numpy()
    values = regressor.predict(X, exposure=exposure, quantiles=levels)
    assert values.shape == (N, 3)
    np.testing.assert_allclose(values, expected)
    one = regressor.predict(X, exposure=exposure, quantiles=0.5)
    np.testing.assert_allclose(one, values[:, 1], rtol=1e-9)
    if likelihood == "gaussian":
        mean, std = regressor.predict(X, return_std=True)
        np.testing.assert_allclose(values[:, 2], mean + 1.6448536269514722 * std)
    with pytest.raises(ConfigurationError, match="return_std must be False with quantiles"):
        regressor.predict(X, True, quantiles=0.5)  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(InputError, match="quantiles must be a probability between 0 and 1"):
        regressor.predict(X, quantiles=[0.1, 95.0])
    with pytest.raises(InputError, match="several of them, got 5\\."):
        regressor.predict(X, quantiles=5)


def test_quantiles_of_several_targets() -> None:
    y = np.stack([PRICES, -2.0 * PRICES, PRICES**2], 1)
    regressor = EvidenceRegressor(**SHORT).fit(X, y)
    mean, std = regressor.predict(X, return_std=True)
    values = regressor.predict(X, quantiles=(0.5, 0.8413447460685429))
    assert values.shape == (N, 3, 2)
    np.testing.assert_allclose(values[..., 0], mean)
    np.testing.assert_allclose(values[..., 1], mean + std)
    np.testing.assert_allclose(regressor.predict(X, quantiles=0.5), mean)


@pytest.mark.parametrize(
    "transformer",
    [
        FunctionTransformer(np.log1p, np.expm1, check_inverse=False),
        PowerTransformer("box-cox"),
    ],  # fmt: skip
)
def test_quantiles_commute_with_a_transformed_target_regressor(transformer: Any) -> None:
    model: Any = TransformedTargetRegressor(EvidenceRegressor(**SHORT), transformer=transformer)
    inner = model.fit(X, PRICES).regressor_
    for q in (0.05, 0.5, 0.95):
        at = inner.predict(X, quantiles=q)
        expected = model.transformer_.inverse_transform(at[:, None])[:, 0]
        np.testing.assert_array_equal(model.predict(X, quantiles=q), expected)
    np.testing.assert_allclose(model.predict(X, quantiles=0.5), model.predict(X))
    if isinstance(transformer, FunctionTransformer):  # which accepts several columns
        expected = np.expm1(inner.predict(X, quantiles=[0.1, 0.9]))
        np.testing.assert_array_equal(model.predict(X, quantiles=[0.1, 0.9]), expected)
