"""Conversion of a table of numbers and categories to the inputs of a network."""

import sys
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from evigrad.data.columns import (
    DATES,
    DECLARED,
    NUMERIC,
    TEXT,
    Column,
    is_missing,
    kinds_of_cells,
    problem_of,
    problem_of_mixture,
    refuse,
    words_of_constants,
)
from evigrad.errors import ConfigurationError, EvigradWarning, InputError, listed
from evigrad.network.modes import evaluation_mode, model_run
from evigrad.passes.parameters import select, trainable

# Number of rows that the network processes at once, outside of training.
AT_ONCE = 8192
_LEAVE_OUT = "remove the column"


def is_frame(X: Any) -> bool:
    """Return whether a table is a ``pandas.DataFrame``, without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(X, pandas.DataFrame)


class Columns:
    """The columns of a training table as numbers, with categories replaced by integers.

    A column of a ``pandas.DataFrame`` holds categories if its dtype is ``category``, ``string`` or
    ``object`` (unless an ``object`` column holds only numbers). A column of dtype ``category`` has
    all of its declared categories. The categories of other columns are the sorted training values.
    A missing value is a category if the column has missing values in the training table.

    ``categories`` maps the position of each such column to its list of categories. If
    ``ignore_unknown`` is True, values that are in no category are accepted. ``ignored`` marks
    columns whose values are not read, once training has found them to be constant.
    """

    def __init__(self, X: Any, ignore_unknown: bool) -> None:
        self._ignore_unknown = ignore_unknown
        self.categories: dict[int, list[Hashable]] = {}
        self.ignored: np.ndarray | None = None
        if not is_frame(X):
            _refuse_texts(X)
            return
        columns, problems = [], []
        for name, series in X.infer_objects().items():
            column, problem = _read(name, series)
            columns.append(column)
            problems.append(problem or problem_of(column, _LEAVE_OUT))
        refuse("", problems)
        for position, column in enumerate(columns):
            if column.kind not in NUMERIC:
                self.categories[position] = column.categories

    def numbers(self, X: Any) -> Any:
        """Return a DataFrame as numbers (−1 for no category), and any other table unchanged."""
        if not is_frame(X):
            if self.categories:
                raise InputError(
                    "X must be a DataFrame, because the training table was a DataFrame with"
                    " categories. Convert X to a DataFrame with the same columns."
                )
            _refuse_texts(X)
            return X
        numbers, problems = np.zeros(X.shape), []
        for position, (name, series) in enumerate(X.infer_objects().items()):
            if self.ignored is not None and self.ignored[position]:
                continue
            if position in self.categories:
                codes, problem = self._positions(name, series, self.categories[position])
            else:
                column, problem = _read(name, series)
                if problem is None and column.kind not in NUMERIC:
                    problem = (
                        f"{column.label} held numbers in the training table, but now has dtype"
                        f" {series.dtype}: convert it to numbers"
                    )
                codes, problem = column.values, problem or problem_of(column, _LEAVE_OUT)
            problems.append(problem)
            if problem is None:
                numbers[:, position] = codes
        refuse("", problems)
        return numbers

    def _positions(
        self, name: Hashable, series: Any, categories: Sequence[Hashable]
    ) -> tuple[Any, str | None]:
        """Return the position of each value among the categories, or a problem in words."""
        position_of = {value: index for index, value in enumerate(categories)}
        values = _present(series)
        label = f"column '{name}'"
        for value in values:
            if not isinstance(value, Hashable) or isinstance(value, tuple):
                kind = type(value).__name__
                return None, f"{label} holds values of type {kind}, which cannot be categories"
        unknown = sorted({v for v in values if v not in position_of}, key=repr)
        if unknown and not self._ignore_unknown:
            others = listed([str(value) for value in unknown if value is not None])
            seen = listed([str(value) for value in categories if value is not None])
            what = f"holds {others}" if others else "lacks values"
            return None, (
                f"{label} {what}, unlike the training table, whose categories were {seen}."
                " With handle_unknown='ignore', such values count as no category"
            )
        return [position_of.get(value, -1) for value in values], None


def _present(series: Any) -> list[Any]:
    """Return the values of a column, with None for all kinds of missing values."""
    missing = series.isna()
    return [None if m else value for value, m in zip(series, missing, strict=True)]


def _read(name: Hashable, series: Any) -> tuple[Column, str | None]:
    """Return a column of a frame for the rules, and a problem of its cells in words."""
    pandas = sys.modules["pandas"]
    types, dtype, kind = pandas.api.types, series.dtype, str(series.dtype)
    problem, declared = None, None
    if types.is_numeric_dtype(dtype) and not types.is_complex_dtype(dtype):
        kind = "yes/no" if types.is_bool_dtype(dtype) else "numbers"
    elif isinstance(dtype, pandas.CategoricalDtype):
        kind, declared = DECLARED, list(dtype.categories)
    elif types.is_datetime64_any_dtype(dtype):
        kind = DATES
    elif types.is_object_dtype(dtype) or types.is_string_dtype(dtype):
        kinds = kinds_of_cells(series)
        kind = next(iter(kinds), TEXT)
        problem = problem_of_mixture(f"column '{name}'", kinds)
    if problem is None and kind in NUMERIC:
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        values = np.array([*_present(series), None], dtype=object)[:-1]
    return Column(str(name), kind, values, declared), problem


def _refuse_texts(X: Any) -> None:
    """Raise InputError for strings in an array, in which no column is declared as categories."""
    cells = np.array(X, dtype=object) if isinstance(X, list) else X
    if not isinstance(cells, np.ndarray) or cells.ndim != 2 or cells.dtype.kind not in "OUS":
        return
    texts = [n for n, column in enumerate(cells.T) if TEXT in kinds_of_cells(column.tolist())]
    if texts:
        first = next(cell for cell in cells.T[texts[0]] if isinstance(cell, str))
        raise InputError(
            f"X must be numbers or a DataFrame, got an array with strings, such as {first!r} in"
            f" column {texts[0]} (could not convert string to float). For categories, use a"
            " DataFrame. If X comes from a ColumnTransformer or pipeline, call its"
            " set_output(transform='pandas')."
        )


def refuse_numbers(numbers: np.ndarray) -> None:
    """Raise InputError if an array (n, d) has missing or infinite numbers, and name the columns."""
    if np.isfinite(numbers).all():
        return
    columns = (Column(index, "numbers", values) for index, values in enumerate(numbers.T))
    refuse("", [problem_of(column, _LEAVE_OUT) for column in columns])


def refuse_targets(y: Any, is_classes: bool) -> None:
    """Raise InputError for invalid targets whose problem scikit-learn would not explain."""
    if y is None:  # scikit-learn raises an error
        return
    array = y.to_numpy() if hasattr(y, "to_numpy") else np.asarray(y)
    cells = array.ravel().tolist()
    if missing := sum(map(is_missing, cells)):
        raise InputError(
            f"y lacks {missing:,} of {len(cells):,} targets (None or NaN). Remove the rows without"
            " a target."
        )
    if array.dtype.kind in "OUS":
        kinds = kinds_of_cells(cells)
        if problem := problem_of_mixture("y", kinds):
            raise InputError(f"{problem}.")
        expected = (TEXT, *NUMERIC) if is_classes else NUMERIC
        if strange := [kind for kind in kinds if kind not in expected]:
            what = "Labels must be strings or numbers" if is_classes else "Targets must be numbers"
            raise InputError(
                f"Unknown label type: {what}, got {strange[0]} in y, such as {kinds[strange[0]]!r}."
            )
    if not is_classes or not {float} >= {type(cell) for cell in cells}:
        return
    if fractions := [cell for cell in cells if np.isfinite(cell) and cell % 1 != 0]:
        raise InputError(
            f"Unknown label type: continuous. Classes must be whole numbers or strings, got"
            f" other numbers in y, such as {fractions[0]:.4g}. Use EvidenceRegressor for real"
            " targets, or convert them to classes, for example with numpy.digitize."
        )


def weights_of_classes(
    class_weight: object, classes: np.ndarray, labels: np.ndarray, row_weights: np.ndarray
) -> np.ndarray:
    """Return a positive weight for each class (K,), as in scikit-learn.

    ``labels`` (n,) are positions in ``classes``. ``"balanced"`` divides the total weight of the
    rows by K times the weight of the class. Classes without weighted rows do not count in K.

    Raises:
        InputError: If a weight is not positive, or the type is wrong.
    """
    if isinstance(class_weight, str) and class_weight == "balanced":
        totals = np.bincount(labels, row_weights, minlength=len(classes))
        present = totals > 0
        return totals.sum() / (present.sum() * np.where(present, totals, 1.0))
    if not isinstance(class_weight, Mapping):
        raise InputError(
            "class_weight must be None, 'balanced', or a mapping from labels to weights, got"
            f" {class_weight!r}."
        )
    index_of = dict(zip(classes.tolist(), range(len(classes)), strict=True))
    weights = np.ones(len(classes))
    for label, weight in class_weight.items():
        if label not in index_of:  # a part of the table may lack a class
            warnings.warn(
                f"class_weight has a weight for {label!r}, which is not a label of y. The labels"
                f" are {listed([str(name) for name in index_of])}.",
                EvigradWarning,
                stacklevel=5,  # the caller of fit
            )
            continue
        is_number = isinstance(weight, int | float | np.number) and not isinstance(weight, bool)
        if not (is_number and 0 < weight < np.inf):
            raise InputError(
                f"The weight of class {label!r} must be positive and finite, got {weight!r}. To"
                " leave out a class, remove its rows."
            )
        weights[index_of[label]] = weight
    return weights


def in_order(
    numbers: np.ndarray, targets: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the three arrays with rows sorted, so that the row order does not affect training.

    Rounding errors depend on the row order, and training amplifies them.
    """
    columns = [*numbers.T, *np.atleast_2d(targets.T)]
    order = np.lexsort(columns if weights is None else [weights, *columns])
    return numbers[order], targets[order], None if weights is None else weights[order]


class Encoding:
    """An encoder that standardizes numbers and turns categories into zeros and ones.

    If a column is constant in the training table, its inputs are zero. ``numbers`` and
    ``categories`` come from ``Columns``. ``weights`` contains the number of times that each row
    counts. ``feature_of`` contains the index of the table's column for each input of the network.
    """

    def __init__(
        self,
        numbers: np.ndarray,
        categories: dict[int, list[Hashable]],
        weights: np.ndarray | None = None,
    ) -> None:
        self._sizes = {position: len(levels) for position, levels in categories.items()}
        self._numeric = [p for p in range(numbers.shape[1]) if p not in self._sizes]
        if self._numeric:
            self._scaler = StandardScaler().fit(numbers[:, self._numeric], sample_weight=weights)
        repeats = [[position] * size for position, size in self._sizes.items()]
        self.feature_of = np.array(sum(repeats, self._numeric), dtype=np.int64)
        self.is_constant = (numbers == numbers[0]).all(axis=0)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return the inputs of the network, (n, inputs), numeric columns first."""
        parts = [self._scaler.transform(numbers[:, self._numeric])] if self._numeric else []
        for position, size in self._sizes.items():
            parts.append((numbers[:, position, None] == np.arange(size)).astype(np.float64))
        inputs = np.concatenate(parts, axis=1)
        inputs[:, self.is_constant[self.feature_of]] = 0.0
        return inputs


def check_constants(is_constant: np.ndarray, names: Iterable[Hashable], num_rows: int) -> None:
    """Warn about constant columns, or raise InputError if all columns are constant."""
    if is_constant.all():
        rows = "one sample" if num_rows == 1 else f"{num_rows:,} rows"
        raise InputError(
            f"X must have a column that varies, got the same values in all rows ({rows}). Add rows"
            " with other values."
        )
    if is_constant.any():
        constant = [name for name, same in zip(names, is_constant, strict=True) if same]
        warnings.warn(f"Columns {words_of_constants(constant)}", EvigradWarning, stacklevel=4)


def column_groups(
    model: nn.Module, num_inputs: int, hyperparameters: Sequence[str]
) -> dict[str, str | dict[str, int]]:
    """Return prior groups: each input of the first layer, and each other parameter tensor.

    Raises:
        ConfigurationError: If the model has no linear layer of the inputs.
    """
    weights = trainable(model, select(model, hyperparameters))
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    over_inputs = {id(layer.weight) for layer in layers if layer.in_features == num_inputs}
    first = next((name for name, weight in weights.items() if id(weight) in over_inputs), None)
    if first is None:
        raise ConfigurationError(
            "relevance=True needs a module with a trainable nn.Linear of the inputs, got none with"
            f" {num_inputs} inputs. Use relevance=False."
        )
    return {name: {name: 1} if name == first else name for name in weights}


def importances(
    model: nn.Module,
    x: Float[Tensor, "n inputs"],
    feature_of: np.ndarray,
    weights: np.ndarray | None,
) -> np.ndarray:
    """Return the importance of each column (d,), normalized to the sum 1.

    The square of an importance is the mean over the rows of Σ g_kᵀ C g_k, a sum over outputs k. The
    gradient g_k is with respect to the inputs of the column, and C is their covariance. In a linear
    model, this is the variance of what the column adds to the outputs.
    """
    rows = torch.ones(len(x), device="cpu") if weights is None else torch.from_numpy(weights)
    rows, products = rows.to(x), x.new_zeros(x.shape[1], x.shape[1])
    generator = torch.Generator().manual_seed(0)
    with evaluation_mode(model, generator), model_run(model), torch.enable_grad():
        for part, row_weights in zip(x.split(AT_ONCE), rows.split(AT_ONCE), strict=True):
            leaf = part.detach().requires_grad_()
            for output in model(leaf).sum(0):
                (g,) = torch.autograd.grad(output, leaf, retain_graph=True, materialize_grads=True)
                products += g.T @ (row_weights[:, None] * g)
    squares = (torch.cov(x.detach().T, correction=0, aweights=rows) * products).double().cpu()
    columns = np.where(feature_of == feature_of[:, None], squares.numpy(), 0.0).sum(1)
    values = np.sqrt(np.bincount(feature_of, columns).clip(min=0.0))
    return values / (values.sum() or 1.0)
