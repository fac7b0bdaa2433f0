"""Estimators of scikit-learn: its contract, and what they learn from tables."""

import copy
import pickle
import re
import warnings
from collections.abc import Iterator
from inspect import getdoc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import evigrad
from evigrad.data import Scaling
from evigrad.invariances import InputScale
from evigrad.likelihoods import Gaussian
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

pytest.importorskip("sklearn")
pandas = pytest.importorskip("pandas")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_iris, make_classification, make_friedman1  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.impute import SimpleImputer  # noqa: E402
from sklearn.metrics import log_loss  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.utils.estimator_checks import estimator_checks_generator  # noqa: E402

from evigrad.errors import ConfigurationError, EvigradWarning, InputError  # noqa: E402
from evigrad.sklearn import EvidenceClassifier, EvidenceRegressor  # noqa: E402
from evigrad.training.weight_choice import Predictions  # noqa: E402

# As short as it can be: what is learned is not the point.
SHORT: dict[str, Any] = {
    "hidden_layer_sizes": (8,),
    "epochs": 6,
    "learning_rate": 0.05,
    "settings": {"burn_in": 1, "every": 3, "steps": 1},
    "random_state": 0,
}
OWN = {name: value for name, value in SHORT.items() if name != "hidden_layer_sizes"}
NOISE = 100.0


# Checks of forms of a table, of weights and of attributes that a further check has in another form.
SIMILAR = """
    array_api_input dict_unchanged estimators_fit_returns_self estimators_overwrite_params
    f_contiguous_array_estimator fit_check_is_fitted n_features_in_after_fitting
    non_transformer_estimators_n_iter pipeline_consistency positive_only_tag_during_fit
    readonly_memmap_input regressor_data_not_an_array regressors_no_decision_function
    sample_weights_list sample_weights_not_an_array methods_sample_order_invariance
    classifier_data_not_an_array classifiers_one_label_sample_weights class_weight_classifiers
""".split()


def checks() -> Iterator[Any]:
    """The checks of both estimators; those that repeat one, or are similar to one, are long."""
    seen = {f"check_{name}" for name in SIMILAR}
    for estimator in (EvidenceRegressor(**SHORT), EvidenceClassifier(**SHORT)):
        names = set()
        pairs: Any = estimator_checks_generator(estimator)
        for _, check in pairs:
            function = check.func.__name__
            name = "-".join([function, *map(str, check.keywords.values())])
            marks = [pytest.mark.long] if function in seen | names else []
            names.add(function)
            yield pytest.param(
                estimator, check, marks=marks, id=f"{type(estimator).__name__}-{name}"
            )
        seen |= names


@pytest.mark.filterwarnings("ignore:Column 0 of the targets has")
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_the_contract_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


def table(n: int = 60, seed: int = 0) -> tuple[Any, np.ndarray]:
    """A frame of two columns of numbers, one of words, which matters most, and a category."""
    draw = np.random.RandomState(seed)
    words = draw.choice(["low", "middle", "high"], n)
    frame = pandas.DataFrame(
        {
            "length": draw.randn(n),
            "count": draw.randint(0, 9, n),
            "word": words,
            "kind": pandas.Categorical(draw.choice(["a", "b"], n), categories=["a", "b", "c"]),
        }
    )
    level = frame["word"].map({"low": 0.0, "middle": 10.0, "high": 50.0}).to_numpy()
    return frame, level + 5.0 * frame["length"].to_numpy() + 0.5 * draw.randn(n)


# ---------------------------------------------------------------- what is learned


def made(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Friedman's table: five of ten columns matter; the targets are hundreds."""
    X, y = make_friedman1(rows, 10, noise=1.0, random_state=seed)
    return X, NOISE * y


@pytest.fixture(scope="module")
def trained() -> EvidenceRegressor:
    settings = {"burn_in": 100}
    estimator = EvidenceRegressor((32, 32), epochs=300, settings=settings, random_state=0)
    return estimator.fit(*made(250, 0))


def test_importances_find_the_columns_that_matter(trained: EvidenceRegressor) -> None:
    importances = trained.feature_importances_
    assert importances.shape == (10,) and importances.sum() == pytest.approx(1.0)
    assert importances[:5].min() > 3.0 * importances[5:].max()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(5))
def test_ten_irrelevant_columns_are_switched_off(seed: int) -> None:
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(200, 20))
    y = np.tanh(X[:, :5]).sum(1) + X[:, 5:10].sum(1) + 0.5 * draw.normal(size=200)
    settings = {"burn_in": 8, "every": 4, "steps": 2}
    fitted = EvidenceRegressor(
        (16,), epochs=50, learning_rate=0.02, settings=settings, random_state=seed
    ).fit(X, y)
    importances = fitted.feature_importances_
    assert importances[:10].min() > 3 * importances[10:].max()
    precisions = fitted.result_.evidence.prior.precisions()["linear1.weight"][0].detach()
    assert precisions[10:].min() > 3 * precisions[:10].max()


def test_the_importance_of_a_linear_model_is_what_a_column_adds() -> None:
    """The share of the standard deviations, also of a category and of weighted rows."""
    X, y = table(60)
    weights = np.tile([0.5, 1.5], 30)
    linear = EvidenceRegressor((), epochs=20, settings=SHORT["settings"], random_state=0)
    fitted = linear.fit(X, y, sample_weight=weights)
    slopes = fitted.result_.model.state_dict()["output.weight"].numpy()[0]
    parts = fitted.inputs(X).numpy() * slopes
    added = [parts[:, place].sum(1) for place in ([0], [1], [2, 3, 4], [5, 6, 7])]
    deviations = np.sqrt(np.cov(added, aweights=weights, ddof=0).diagonal())
    np.testing.assert_allclose(fitted.feature_importances_, deviations / deviations.sum())


def test_importances_of_a_network_are_of_its_derivatives() -> None:
    X, y = made(30, 7)
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        fitted = EvidenceRegressor(**OWN, module=module).fit(X, np.stack([y, y**2], 1))
    model = fitted.result_.model.eval()
    x = fitted.inputs(X)
    jacobians = torch.func.vmap(torch.func.jacrev(model))(x).detach()
    norms = (jacobians.square().sum((0, 1)).sqrt() * x.std(0, correction=0)).numpy()
    np.testing.assert_allclose(fitted.feature_importances_, norms / norms.sum(), rtol=1e-4)


def test_the_noise_is_that_of_the_targets(trained: EvidenceRegressor) -> None:
    assert trained.noise_ == pytest.approx(NOISE, rel=0.2)


def test_intervals_hold_what_they_say_or_somewhat_more(trained: EvidenceRegressor) -> None:
    X, y = made(1000, 1)
    mean, std = trained.predict(X, return_std=True)
    np.testing.assert_allclose(mean, trained.predict(X))
    assert (std > trained.noise_).all()
    assert 0.63 < np.mean(abs(y - mean) < std) < 0.83
    assert 0.93 < np.mean(abs(y - mean) < 1.96 * std) < 0.995


@pytest.mark.long
def test_a_classifier_is_not_made_sure_by_relevances() -> None:
    """Scales of columns without a limit take a tenth of wrong labels for right ones, at −3 nats."""
    X, y = make_classification(
        1150, 10, n_informative=4, n_redundant=0, flip_y=0.1, class_sep=1.0, random_state=3
    )
    settings = {"burn_in": 10, "every": 10}
    classifier = EvidenceClassifier(epochs=60, settings=settings, random_state=0)
    fitted = classifier.fit(X[:150], y[:150])
    assert log_loss(y[150:], fitted.predict_proba(X[150:])) < 0.6


# ---------------------------------------------------------------- what it computes


def test_a_regressor_is_a_fit_of_the_standardised_table() -> None:
    X, y = made(50, 2)
    regressor = EvidenceRegressor(**SHORT).fit(X, y)

    order = np.lexsort([*X.T, y])
    x, targets = torch.tensor(X[order]), torch.tensor(y[order])[:, None]
    inputs, outputs = Scaling.of(x), Scaling.of(targets)
    model = make_model("mlp", (10,), 1, seed=0, hidden=[8]).double()
    others = ("linear1.bias", "output.weight", "output.bias")
    result = evigrad.fit(
        model,
        (inputs(x), outputs(targets)),
        likelihood=Gaussian(),
        prior=GaussianPrior({"columns": {"linear1.weight": 1}, **{name: name for name in others}}),
        schedule=evigrad.Schedule(epochs=6, burn_in=1, every=3, steps=1),
        optimization=evigrad.Optimization(lr=0.05),
        progress=False,
    )
    evidence, pair = result.evidence, (inputs(x), outputs(targets))
    unit = float(outputs.std)
    np.testing.assert_allclose(
        regressor.predict(X[order]), outputs.undo(model(pair[0]))[:, 0].detach()
    )
    predictive = evidence.posterior(pair)(pair[0])
    _, std = regressor.predict(X[order], return_std=True)
    np.testing.assert_allclose(std, unit * predictive.std[:, 0], rtol=1e-6)
    block = next(iter(evidence.blocks(pair)))  # of all rows
    exact = evidence.estimate(block).log_evidence - 50 * np.log(unit)
    assert regressor.log_evidence_ == pytest.approx(exact)
    learned = {name: value.detach() for name, value in evidence.hyperparameters().items()}
    assert regressor.noise_ == pytest.approx(unit * float(learned["likelihood.log_noise"].exp()))


def test_units_change_units_alone() -> None:
    X, y = made(40, 3)
    one, other = (EvidenceRegressor(**SHORT).fit(X, target) for target in (y, 8.0 * y + 5.0))
    mean, std = one.predict(X, return_std=True)
    other_mean, other_std = other.predict(X, return_std=True)
    np.testing.assert_allclose(other_mean, 8.0 * mean + 5.0, rtol=1e-6)
    np.testing.assert_allclose(other_std, 8.0 * std, rtol=1e-6)
    assert other.noise_ == pytest.approx(8.0 * one.noise_)
    assert other.log_evidence_ == pytest.approx(one.log_evidence_ - 40 * np.log(8.0))


def test_the_order_of_the_rows_does_not_matter() -> None:
    X, y = table()
    order = np.random.RandomState(1).permutation(len(X))
    one = EvidenceRegressor(**SHORT).fit(X, y)
    other = EvidenceRegressor(**SHORT).fit(X.iloc[order], y[order])
    np.testing.assert_array_equal(one.predict(X), other.predict(X))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Column 0 of the targets has")
def test_weights_that_are_no_whole_numbers() -> None:
    """Of two values at each place the weighted mean is fitted, and the noise is that about it."""
    X = np.repeat(np.linspace(-1, 1, 40), 2)[:, None]
    y = np.tile([0.0, 4.0], 40)
    weights = np.tile([1.5, 0.5], 40)
    settings = {"every": 20, "steps": 5}
    linear = EvidenceRegressor(
        (), epochs=200, learning_rate=0.05, settings=settings, random_state=0
    )
    fitted = linear.fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(fitted.predict(X), 1.0, atol=0.1)
    assert fitted.noise_ == pytest.approx(np.sqrt(3.0), rel=0.1)


def test_two_values_are_warned_of_without_standardized_numbers() -> None:
    X = np.linspace(-1, 1, 40)[:, None]
    with pytest.warns(EvigradWarning, match="has only two values. A Gaussian") as caught:
        EvidenceRegressor(**SHORT).fit(X, np.tile([0.0, 1.0], 20))
    assert not [warning for warning in caught if "0.9" in str(warning.message)]


def test_a_frequent_value_is_shown_in_the_units_of_the_target() -> None:
    X, y = table(60)
    y = np.where(y < 11, 2.5, y)
    with pytest.warns(EvigradWarning, match="Column 0 of the targets has the value") as caught:
        EvidenceRegressor(**SHORT).fit(X, y)
    (warning,) = (w for w in caught if "has the value" in str(w.message))
    share = 100 * np.mean(y == 2.5)
    assert f"has the value 2.5 in {share:.0f} % of the rows" in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Training has not converged")
        EvidenceRegressor(likelihood="heteroscedastic", **SHORT).fit(X, y)


def test_several_targets() -> None:
    X, y = made(40, 4)
    both = np.stack([y, 1e-3 * X[:, 0]], axis=1)
    fitted = EvidenceRegressor(**SHORT).fit(X, both)
    mean, std = fitted.predict(X, return_std=True)
    first, second = np.asarray(fitted.noise_)
    assert mean.shape == std.shape == (40, 2) and first > 1e4 * second
    assert EvidenceRegressor(**SHORT).fit(X, both[:, :1]).predict(X).shape == (40, 1)


# ---------------------------------------------------------------- tables


@pytest.mark.filterwarnings("ignore:The residuals")  # of the values that were missing
def test_frames_with_categories_in_a_pipeline() -> None:
    X, y = table(150)
    X.loc[::10, "length"] = np.nan
    numbers = ["length", "count"]
    from sklearn.compose import make_column_transformer

    filled = make_column_transformer(
        (SimpleImputer(), numbers), remainder="passthrough", verbose_feature_names_out=False
    ).set_output(transform="pandas")
    few = {"burn_in": 20, "every": 10, "steps": 3}
    regressor = EvidenceRegressor(
        (16,), epochs=60, learning_rate=0.03, settings=few, random_state=0
    )
    pipeline = make_pipeline(filled, regressor)
    fitted: Any = pipeline.fit(X[:100], y[:100])[-1]
    assert pipeline.score(X[100:], y[100:]) > 0.95
    assert list(fitted.feature_names_in_) == ["length", "count", "word", "kind"]
    assert fitted.inputs(filled.fit_transform(X)).shape == (150, 2 + 3 + 3)
    assert fitted.feature_importances_.argmax() == 2


def test_unknown_and_missing_categories() -> None:
    X, y = table()
    strict = EvidenceRegressor(**SHORT).fit(X, y)
    strange = X.assign(word="unheard")
    with pytest.raises(InputError, match="Column 'word' holds 'unheard'.*were 'high', 'low', 'mid"):
        strict.predict(strange)
    with pytest.raises(InputError, match="Column 'word' lacks values"):
        strict.predict(X.assign(word=None))
    strict.predict(X.assign(kind="c"))  # declared, though the training table has none
    tolerant = EvidenceRegressor(**SHORT, handle_unknown="ignore").fit(X, y)
    np.testing.assert_array_equal(tolerant.inputs(strange)[:, 2:5], 0.0)
    np.testing.assert_array_equal(tolerant.predict(X), strict.predict(X))
    X.loc[:4, "word"] = None
    of_their_own = EvidenceRegressor(**SHORT).fit(X, y)
    assert of_their_own.inputs(X)[:6, 2:6].tolist()[:5] == [[0, 0, 0, 1]] * 5


def test_tables_that_do_not_fit_are_refused_in_words() -> None:
    X, y = table(30)
    fit = EvidenceRegressor(**SHORT).fit
    fitted = EvidenceRegressor(**SHORT).fit(X, y)
    dates = X.assign(day=pandas.Timestamp("2026-01-01"))
    names = X.assign(name=[f"name {n}" for n in range(30)])
    for wrong, words in (
        (lambda: fit(dates, y), "Column 'day' holds dates instead of numbers: convert them"),
        (lambda: fit(pandas.concat([names.assign(name=names.name + str(n)) for n in range(4)]),
                     np.tile(y, 4)), "Column 'name' must hold at most 100 cat.* got 120"),
        (lambda: fit(X.assign(length=np.nan), y), "'length' lacks 30 of 30 .*SimpleImputer"),
        (lambda: fit(X.to_numpy(), y), r"with strings, such as '\w+' in column 2 .*set_output"),
        (lambda: fitted.predict(X.iloc[:, :3]), "feature names should match"),
        (lambda: fitted.predict(np.zeros((2, 4))), "X must be a DataFrame"),
        (lambda: fitted.predict(X.assign(length="long")), "Column 'length' held numbers"),
        (lambda: fit(X, y, sample_weight=-np.ones(30)), "sample_weight must be non-negative"),
        (lambda: EvidenceClassifier(**SHORT).fit(X, np.zeros(30)), "y must have at least two"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            wrong()


def cells(*values: Any) -> Any:
    """A column of objects, 30 of them."""
    return pandas.Series((list(values) * 30)[:30], dtype=object)


def test_all_problems_of_a_frame_are_told_at_once() -> None:
    X, y = table(30)
    strange = X.assign(
        lists=cells([1], [2]),
        mixed=cells(True, 1),
        day=pandas.Timestamp("2026-01-01"),
        marks=cells("1", "2", "?"),
        holes=cells(1.5, None),
    )
    with pytest.raises(InputError) as error:
        EvidenceRegressor(**SHORT).fit(strange, y)
    words = str(error.value)
    assert words.startswith("The table has 5 problems.")
    for problem in (
        "Column 'lists' holds values of type list",
        "Column 'mixed' mixes yes/no (True) and numbers (1): convert all cells to one type",
        "Column 'day' holds dates",
        "Column 'marks' holds numbers, but also '?'",
        "Column 'holes' lacks 15 of 30 values (NaN): fill them in (in Python with sklearn.impute",
    ):
        assert problem in words
    fitted = EvidenceRegressor(**SHORT).fit(X, y)
    with pytest.raises(InputError, match="2 problems.*'length' lacks.*'word' holds values of type"):
        fitted.predict(X.assign(length=np.nan, word=cells([1])))
    array = np.array([[1.0, np.nan], [np.inf, 2.0]] * 15)
    with pytest.raises(InputError, match="2 problems.*Column 0 holds .*inf.*Column 1 lacks 15"):
        EvidenceRegressor(**SHORT).fit(array, y)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (cells("a", None), "y lacks 15 of 30 targets"),
        (cells(True, 1), "y mixes yes/no .True. and numbers .1."),
        (cells("1", 1), "y mixes text .'1'. and numbers .1."),
        (cells((1,), (2,)), "got tuple in y"),
        (np.linspace(0.5, 1, 30), "got other numbers in y, such as 0.5.*Use EvidenceRegressor"),
    ],
)
def test_labels_that_are_none(y: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        EvidenceClassifier(**SHORT).fit(np.arange(60.0).reshape(30, 2), y)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (cells(1.0, None), "y lacks 15 of 30 targets"),
        (cells("low", "high"), "Targets must be numbers, got text in y, such as 'low'"),
    ],
)
def test_targets_that_are_no_numbers(y: Any, words: str) -> None:
    for form in (y, y.to_numpy()):
        with pytest.raises(InputError, match=words):
            EvidenceRegressor(**SHORT).fit(np.arange(60.0).reshape(30, 2), form)


def test_columns_that_are_the_same_in_all_rows_are_left_out() -> None:
    X, y = table(30)
    with pytest.warns(EvigradWarning, match="omitted from the features.*: land, year"):
        fitted = EvidenceRegressor(**SHORT).fit(X.assign(land="CH", year=2026), y)
    assert fitted.feature_importances_[-2:].tolist() == [0.0, 0.0]
    expected = fitted.predict(X.assign(land="CH", year=2026))
    for strange in (
        {"land": "CH", "year": 1},
        {"land": "DE", "year": np.nan},
        {"land": None, "year": "1"},
        {"land": pandas.Timestamp(2026, 1, 1), "year": 2026},
    ):
        np.testing.assert_array_equal(fitted.predict(X.assign(**strange)), expected)
    numbers = X[["length", "count"]].to_numpy()
    with pytest.warns(EvigradWarning, match="omitted from the features.*: 2"):
        fitted = EvidenceRegressor(**SHORT).fit(np.c_[numbers, np.ones(30)], y)
    expected = fitted.predict(np.c_[numbers, np.ones(30)])
    np.testing.assert_array_equal(fitted.predict(np.c_[numbers, np.full(30, np.nan)]), expected)
    with pytest.raises(InputError, match=r"must have a column that varies.*30 rows"):
        EvidenceRegressor(**SHORT).fit(np.ones((30, 2)), y)


# ---------------------------------------------------------------- the rest of the face


def test_parameters_that_an_estimator_lacks() -> None:
    estimator = EvidenceClassifier()
    builds: list[Any] = [EvidenceRegressor, EvidenceRegressor().set_params]
    for build in builds:
        with pytest.raises(ConfigurationError, match="no class_weight.*sample_weight=") as error:
            build(class_weight="balanced")
        assert isinstance(error.value, TypeError) and isinstance(error.value, ValueError)
    builds = [EvidenceClassifier, estimator.set_params]
    for build in builds:
        with pytest.raises(ConfigurationError, match="'epoch'.*Did you mean 'epochs'"):
            build(epoch=3)
    assert estimator.get_params() == EvidenceClassifier().get_params()


def rare(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """A class of a fifth of the rows, which overlaps with the other."""
    draw = np.random.RandomState(0)
    labels = np.where(np.arange(n) % 5 == 0, "rare", "usual")
    return draw.randn(n, 2) + 1.5 * (labels == "rare")[:, None], labels


def test_a_class_weight_of_two_repeats_the_rows_of_the_class() -> None:
    X, y = rare()
    times = np.where(y == "rare", 2, 1)
    one = EvidenceClassifier(**SHORT, class_weight={"rare": 2}).fit(X, y)
    other = EvidenceClassifier(**SHORT).fit(X.repeat(times, 0), y.repeat(times))
    np.testing.assert_array_equal(one.predict_proba(X), other.predict_proba(X))
    assert one.log_evidence_ == other.log_evidence_
    # Sample weights are multiplied with it.
    halves = EvidenceClassifier(**SHORT, class_weight={"rare": 4.0})
    halves.fit(X, y, sample_weight=np.where(y == "rare", 0.5, 1.0))
    np.testing.assert_array_equal(halves.predict_proba(X), one.predict_proba(X))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("weighted", [True, False])
def test_balanced_classes_have_the_same_total_weight(weighted: bool) -> None:
    X, y = rare()
    rows = np.random.RandomState(1).randint(0, 4, len(y)) if weighted else np.ones(len(y))
    rows = rows.astype(float)
    totals = {label: rows[y == label].sum() for label in ("rare", "usual")}
    weights = {label: rows.sum() / (2 * total) for label, total in totals.items()}
    classifier = EvidenceClassifier(**SHORT, class_weight="balanced")
    classifier.fit(X, y, sample_weight=rows if weighted else None)
    by_hand = EvidenceClassifier(**SHORT)
    by_hand.fit(X, y, sample_weight=rows * np.array([weights[label] for label in y]))
    np.testing.assert_array_equal(classifier.predict_proba(X), by_hand.predict_proba(X))
    # Rows of weight zero and their classes do not count.
    extended = EvidenceClassifier(**SHORT, class_weight="balanced")
    more = np.concatenate([rows, [0.0]])
    extended.fit(np.concatenate([X, X[:1]]), [*y, "unseen"], sample_weight=more)
    assert list(extended.classes_) == ["rare", "usual"]
    np.testing.assert_array_equal(extended.predict_proba(X), classifier.predict_proba(X))


@pytest.mark.long
def test_probabilities_refer_to_the_reweighted_classes() -> None:
    """For a linear network the odds are multiplied by the ratio of the weights, about."""
    X, y = rare(600)
    settings = {"burn_in": 10, "every": 10, "steps": 5}
    linear = EvidenceClassifier(
        (), relevance=False, epochs=60, learning_rate=0.05, settings=settings, random_state=0
    )
    plain = linear.fit(X, y).predict_proba(X)
    again: Any = clone(linear)
    balanced = again.set_params(class_weight="balanced").fit(X, y).predict_proba(X)
    # The weights are 2.5 and 0.625.
    ratio = (balanced[:, 0] / balanced[:, 1]) / (plain[:, 0] / plain[:, 1])
    assert np.median(ratio) == pytest.approx(4.0, rel=0.15)
    restored = balanced / [2.5, 0.625]
    restored /= restored.sum(1, keepdims=True)
    assert abs(restored - plain).mean() < 0.02 < abs(balanced - plain).mean()


@pytest.mark.parametrize(
    ("class_weight", "words"),
    [
        ({"rare": 0.0}, "weight of class 'rare' must be positive and finite, got 0.0"),
        ({"rare": float("nan")}, "must be positive and finite, got nan"),
        ({"rare": "2"}, "must be positive and finite, got '2'"),
        ("equal", "class_weight must be None, 'balanced', or a mapping .* got 'equal'"),
        ([1.0, 2.0], "class_weight must be None, 'balanced', or a mapping"),
    ],
)
def test_class_weights_that_are_none(class_weight: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        EvidenceClassifier(**SHORT, class_weight=class_weight).fit(*rare())


def test_class_weights_are_kept() -> None:
    X, y = rare()
    fitted = EvidenceClassifier(**SHORT, class_weight="balanced").fit(X, y)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(X), fitted.predict_proba(X))
    cloned: Any = clone(fitted)
    assert cloned.get_params()["class_weight"] == "balanced"
    assert fitted.set_params(class_weight={"rare": 3}).class_weight == {"rare": 3}
    y_numbers = (y == "rare").astype(int)
    numbered = EvidenceClassifier(**SHORT, class_weight={np.int64(1): 2, 0: 1}).fit(X, y_numbers)
    words = EvidenceClassifier(**SHORT, class_weight={"rare": 2}).fit(
        X, np.where(y_numbers, "rare", "a")
    )
    np.testing.assert_array_equal(numbered.predict_proba(X)[:, 1], words.predict_proba(X)[:, 1])


def test_a_wide_table_has_eigenvectors_of_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.RandomState(0)
    X = draw.randn(10, 200)
    y = X[:, 0] + 0.1 * draw.randn(10)
    fitted = EvidenceRegressor(**SHORT).fit(X, y)
    again, copied = pickle.loads(pickle.dumps(fitted)), copy.deepcopy(fitted)
    _, std = fitted.predict(X, return_std=True)
    kept = pickle.dumps(fitted)
    assert len(kept) < len(pickle.dumps(again)) - 8 * 200 * 150  # without the sums, 200 x 200
    for same in (again, copied, pickle.loads(kept)):
        np.testing.assert_array_equal(same.predict(X, return_std=True)[1], std)
    monkeypatch.setattr("evigrad.core.curvature.linalg.LOW_RANK_SHARE", 0.0)
    _, expected = EvidenceRegressor(**SHORT).fit(X, y).predict(X, return_std=True)
    np.testing.assert_allclose(std, expected, rtol=1e-10)


def test_a_classifier_of_words() -> None:
    X, y = load_iris(return_X_y=True, as_frame=True)
    words = np.array(["setosa", "versicolor", "virginica"])[y]
    settings: dict[str, Any] = {
        **SHORT,
        "epochs": 40,
        "settings": {"burn_in": 10, "every": 10, "steps": 3},
    }
    fitted = EvidenceClassifier(**settings).fit(X, words)
    assert fitted.score(X, words) > 0.9 and list(fitted.classes_) == sorted(set(words))
    averaged = EvidenceClassifier(**settings, posterior="last-layer").fit(X, words)
    plain, open_minded = fitted.predict_proba(X), averaged.predict_proba(X)
    np.testing.assert_allclose(open_minded.sum(axis=1), 1.0)
    assert open_minded.max(axis=1).mean() < plain.max(axis=1).mean()
    assert fitted.posterior_ is None and fitted.log_evidence_ < 0


class Squares(nn.Module):
    """A network without a linear layer of its inputs."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.ones(inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.square() @ self.slopes)[:, None]


def test_modules_of_ones_own() -> None:
    X, y = made(30, 5)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 1))
    before = copy.deepcopy(module.state_dict())
    regressor = EvidenceRegressor(**OWN, module=module).fit(X, y)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert regressor.inputs(X).dtype == torch.float32
    function = EvidenceRegressor(**OWN, module=nn.Linear, relevance=False).fit(X, y)
    assert isinstance(function.result_.model, nn.Linear)
    assert function.result_.evidence.prior.precisions()["weight"].shape == ()
    by_column = EvidenceRegressor(**OWN, module=nn.Linear).fit(X, y)
    assert by_column.result_.evidence.prior.precisions()["weight"].shape == (1, 10)
    scaled = nn.Sequential(InputScale(10), nn.Linear(10, 1))
    learning: dict[str, Any] = OWN | {"settings": {**OWN["settings"], "hyperparameters": ["0"]}}
    learned = EvidenceRegressor(**learning, module=scaled).fit(X, y).result_.evidence
    assert "model.0.log_scale" in learned.hyperparameters()
    assert learned.prior.group_names == ["1.weight", "1.bias"]
    again: Any = clone(function)
    np.testing.assert_array_equal(again.fit(X, y).predict(X), function.predict(X))
    refused: list[tuple[Any, str]] = [
        (nn.Linear(10, 2), r"outputs of shape \(1,\) per row, got \(2,\)"),
        (lambda *sizes: sizes, r"got \(10, 1\)"),
        ("mlp", "got 'mlp'"),
        (nn.Identity(), "must have parameters to train"),
        (lambda inputs, outputs: Squares(inputs), "relevance=True needs a module .* 10 inputs"),
    ]
    for wrong, words in refused:
        with pytest.raises(ConfigurationError, match=words):
            EvidenceRegressor(**OWN, module=wrong).fit(X, y)


def test_settings() -> None:
    X, y = made(30, 6)
    grid = GridSearchCV(EvidenceRegressor(**SHORT), {"hidden_layer_sizes": [4, (4, 4)]}, cv=2)
    assert grid.fit(X, y).best_estimator_.feature_importances_.shape == (10,)
    prior = GaussianPrior("scalar")
    scalar = EvidenceRegressor(**SHORT, prior=prior)
    assert scalar.fit(X, y).fit(X, y).result_.evidence.prior.group_names == ["all"]
    assert prior.log_precision is None
    short: dict[str, Any] = SHORT | {"settings": None, "estimator": None}
    fixed = EvidenceRegressor(**short).fit(X, y)
    assert np.isnan(fixed.log_evidence_) and fixed.feature_importances_.min() > 0
    with pytest.raises(NotFittedError):
        EvidenceRegressor().predict(X, return_std=True)
    for wrong, words in (
        ({"handle_unknown": "drop"}, "handle_unknown must be one of error, ignore, got 'drop'"),
        ({"activation": "rellu"}, "Did you mean 'relu'"),
        ({"activation": "tanh", "hidden_layer_sizes": ()}, "activation has no effect with"),
        ({"module": nn.Linear, "hidden_layer_sizes": (8,)}, "hidden_layer_sizes has no effect"),
        ({"settings": {"lr": 0.1}}, "Use learning_rate=0.1"),
        ({"estimator": "kfac-N"}, "STRUCTURE-SUBSET-OUTPUTS"),
        ({"posterior": "kfca"}, "Did you mean 'kfac'"),
        ({"settings": {"epoch": 3}}, "got 'epoch'. Did you mean 'epochs'"),
        (
            {"settings": {"schedule": evigrad.Schedule()}},
            "a field of Laplace, Schedule, Optimization or Memory, got 'schedule'",
        ),
        ({"prior": "diagonal"}, "posterior='kfac' needs one precision per weight matrix"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            EvidenceRegressor(**SHORT).set_params(**wrong).fit(X, y)


@pytest.mark.parametrize("kind", [EvidenceClassifier, EvidenceRegressor])
def test_help_describes_all_arguments(kind: Any) -> None:
    text = getdoc(kind) or ""
    arguments = text.partition("Args:")[2].partition("Attributes:")[0]
    described = re.findall(r"^    (\w+):", arguments, re.MULTILINE)
    assert sorted(described) == sorted(kind._get_param_names())
    attributes = text.partition("Attributes:")[2].partition("Examples:")[0]
    assert {"feature_importances_", "result_"} < set(
        re.findall(r"^    (\w+):", attributes, re.MULTILINE)
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [EvidenceClassifier, EvidenceRegressor])
def test_a_share_of_the_rows_chooses_the_weight(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictions, "standard_error", lambda _: 0.0)
    X, y = made(40, 5)
    y = np.where(y > np.median(y), "high", "low") if kind is EvidenceClassifier else y
    weights = np.tile([0.5, 1.5], 20)
    chosen: Any = kind(**SHORT, validation_fraction=0.25).fit(X, y, weights)
    choice = chosen.result_.weight_choice
    assert choice.num_held_out == 10 and choice.weight != 1
    settings = {**SHORT["settings"], "log_det_weight": choice.weight}
    fixed = kind(**{**SHORT, "settings": settings}).fit(X, y, weights)
    np.testing.assert_array_equal(chosen.feature_importances_, fixed.feature_importances_)
    # Rows are not repeated, because copies could be on both sides.
    chosen.fit(X, y, np.full(40, 2.0))
    assert chosen.result_.weight_choice.num_held_out == 10
    assert kind(**SHORT).fit(X, y).result_.weight_choice is None
    with pytest.raises(ConfigurationError, match="validation_fraction must be a number between"):
        kind(**SHORT, validation_fraction=2.0).fit(X, y)
    with pytest.raises(ConfigurationError, match="Use validation_fraction=0.1"):
        kind(**{**SHORT, "settings": {"validation_fraction": 0.1}}).fit(X, y)


def test_a_known_noise_of_each_row() -> None:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(300, 1))
    errors = np.where(generator.random(300) < 0.5, 0.5, 10.0)
    y = 20 + 10 * X[:, 0] + errors * generator.normal(size=300) + 2 * generator.normal(size=300)
    settings: Any = {"epochs": 60, "random_state": 0, "estimator": "full-N-C"}
    fits = [EvidenceRegressor((), **settings).fit(X, y, noise=errors)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvigradWarning)  # the residuals may have heavy tails
        fits.append(EvidenceRegressor((), **settings).fit(X, y))
    assert fits[0].noise_ == pytest.approx(2.0, rel=0.2)
    assert fits[1].noise_ > 5
    slopes = [fit.predict([[1.0]])[0] - fit.predict([[0.0]])[0] for fit in fits]
    assert abs(slopes[0] - 10) < 0.3
    _, std = fits[0].predict(X[:5], return_std=True)
    assert bool((std > 1.9).all() and (std < 3).all())
    # Two targets, weights, and one noise for both targets of a row.
    both = np.stack([y, -y], 1)
    weights = np.arange(300) % 3
    fit = EvidenceRegressor((), **settings | {"epochs": 5})
    fit.fit(X, both, sample_weight=weights, noise=errors)
    assert fit.predict(X[:4]).shape == (4, 2) and np.shape(fit.noise_) == (2,)
    with pytest.raises(ValueError, match=r"one value per row.*got the shape \(299,\)"):
        fit.fit(X, y, noise=errors[1:])
    with pytest.raises(ValueError, match="Noise -.* must be finite and at least 0"):
        fit.fit(X, y, noise=-errors)


def test_a_class_weight_without_a_class_is_warned_of() -> None:
    X, y = rare()
    with pytest.warns(EvigradWarning, match="'rar', .* labels are 'rare', 'usual'") as caught:
        EvidenceClassifier(**SHORT, class_weight={"rar": 2.0}).fit(X, y)
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="sample_weight must be non-negative"):
        EvidenceClassifier(**SHORT, class_weight="balanced").fit(
            X, y, sample_weight=-np.ones(len(y))
        )
