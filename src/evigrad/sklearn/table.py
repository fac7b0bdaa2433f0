"""From a table of numbers and categories to the inputs of a network."""

import sys
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from evigrad.data.tables import MOST_CATEGORIES
from evigrad.errors import InputError, listed

# Where relevances start, before the sigmoid: at 0.88.
_START = 2.0


def is_frame(X: Any) -> bool:
    """Whether a table is a ``pandas.DataFrame``; without pandas loaded nothing is."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(X, pandas.DataFrame)


class Columns:
    """The columns of a training table as numbers: categories become their positions.

    Columns of a frame are categories where their dtype is ``category``, ``string`` or ``object``
    (unless an ``object`` column holds nothing but numbers). A declared ``category`` has all of its
    categories, another column those of the training data, sorted; a missing value is a category
    of its own where the training data have one.

    Args:
        X: The training table.
        ignore_unknown: Whether values that are no category count as none of them.

    Attributes:
        categories: The categories by the column's position.

    Raises:
        InputError: If a column is neither numbers nor categories, or of too many of these.
    """

    def __init__(self, X: Any, ignore_unknown: bool) -> None:
        self._ignore_unknown = ignore_unknown
        self.categories: dict[int, list[Hashable]] = {}
        if not is_frame(X):
            return
        for position, (name, column) in enumerate(X.infer_objects().items()):
            if not _is_numeric(column.dtype):
                self.categories[position] = _categories(name, column)

    def numbers(self, X: Any) -> Any:
        """A frame as numbers, and other tables as they are.

        Args:
            X: A table with the columns of the training table.

        Returns:
            (n, d) float64, categories as their positions and −1 for none of them.

        Raises:
            InputError: If it is no frame where the training table had categories, or a column of
                numbers holds others.
        """
        if not is_frame(X):
            if self.categories:
                raise InputError(
                    "The training table was a DataFrame with columns of categories: give a"
                    " DataFrame with the same columns."
                )
            return X
        found = np.empty(X.shape)
        for position, (name, column) in enumerate(X.items()):
            if position in self.categories:
                found[:, position] = self._positions(name, column, self.categories[position])
            else:
                found[:, position] = _numbers(name, column)
        return found

    def _positions(self, name: Hashable, column: Any, known: Sequence[Hashable]) -> list[int]:
        position_of = {value: index for index, value in enumerate(known)}
        values = _present(column)
        strange = sorted({v for v in values if v not in position_of}, key=repr)
        if strange and not self._ignore_unknown:
            others = listed([str(value) for value in strange if value is not None])
            seen = listed([str(value) for value in known if value is not None])
            what = f"holds {others}" if others else "lacks values"
            raise InputError(
                f"Column '{name}' {what}, which the training table did not: its categories were"
                f" {seen}. With handle_unknown='ignore' such values count as no category."
            )
        return [position_of.get(value, -1) for value in values]


def _is_numeric(dtype: Any) -> bool:
    return sys.modules["pandas"].api.types.is_numeric_dtype(dtype)


def _present(column: Any) -> list[Hashable]:
    """The values of a column; None for all kinds of missing ones."""
    missing = column.isna()
    return [None if m else value for value, m in zip(column, missing, strict=True)]


def _categories(name: Hashable, column: Any) -> list[Hashable]:
    types = sys.modules["pandas"].api.types
    declared = getattr(column.dtype, "categories", None)
    is_text = types.is_object_dtype(column.dtype) or types.is_string_dtype(column.dtype)
    if not is_text and not isinstance(column.dtype, sys.modules["pandas"].CategoricalDtype):
        raise InputError(
            f"Column '{name}' is of dtype {column.dtype}, neither numbers nor categories: make"
            " numbers of it, or leave it out."
        )
    values = set(_present(column))
    known = sorted(values - {None}, key=str) if declared is None else list(declared)
    if len(known) > MOST_CATEGORIES:
        raise InputError(
            f"Column '{name}' holds {len(known):,} different values, which are no categories (at"
            f" most {MOST_CATEGORIES}): make numbers of them, or leave the column out."
        )
    return [*known, None] if None in values else known


def _numbers(name: Hashable, column: Any) -> np.ndarray:
    try:
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"Column '{name}' held numbers in the training table, and now dtype {column.dtype}:"
            f" {error}"
        ) from error


def in_order(
    numbers: np.ndarray, targets: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The rows sorted, so that training is the same whatever order they come in.

    Training amplifies rounding, and even a sum depends on the order of its terms.

    Args:
        numbers: The table (n, d).
        targets: Labels (n,) or numbers (n, D).
        weights: How often each row counts, (n,), or None.

    Returns:
        The three in the new order.
    """
    columns = [*numbers.T, *np.atleast_2d(targets.T)]
    order = np.lexsort(columns if weights is None else [weights, *columns])
    return numbers[order], targets[order], None if weights is None else weights[order]


class Encoding:
    """Numbers standardised by the training table, and categories as zeros and ones.

    Args:
        numbers: The training table, of ``Columns.numbers``, (n, d).
        categories: Those of its columns.
        weights: How often each row counts, (n,), or None for once each.

    Attributes:
        feature_of: The column of the table that each input of the network stands for.
    """

    def __init__(
        self,
        numbers: np.ndarray,
        categories: dict[int, list[Hashable]],
        weights: np.ndarray | None = None,
    ) -> None:
        self._sizes = {position: len(known) for position, known in categories.items()}
        self._numeric = [p for p in range(numbers.shape[1]) if p not in self._sizes]
        if self._numeric:
            self._scaler = StandardScaler().fit(numbers[:, self._numeric], sample_weight=weights)
        repeats = [[position] * size for position, size in self._sizes.items()]
        self.feature_of = np.array(sum(repeats, self._numeric), dtype=np.int64)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """The inputs of the network, (n, inputs), numeric columns first."""
        parts = [self._scaler.transform(numbers[:, self._numeric])] if self._numeric else []
        for position, size in self._sizes.items():
            parts.append((numbers[:, position, None] == np.arange(size)).astype(np.float64))
        return np.concatenate(parts, axis=1)


class Relevance(nn.Module):
    """A learnable scale between 0 and 1 for each feature, shared by the inputs that stand for it.

    It switches features off, and leaves how large the outputs are to the weights. A scale above 1
    would not: it saturates the softmax of a classifier whatever the weights' prior says, and where
    the softmax has no curvature the linearised evidence rewards that.

    Args:
        feature_of: The feature of each input, 0 … d − 1.
        num_features: d.
    """

    feature_of: Tensor

    def __init__(self, feature_of: np.ndarray, num_features: int) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full((num_features,), _START, device="cpu"))
        self.register_buffer("feature_of", torch.as_tensor(feature_of, device="cpu"))

    @property
    def values(self) -> Float[Tensor, " d"]:
        """The scale of each feature, with a graph."""
        return self.raw.sigmoid()

    def forward(self, x: Float[Tensor, "m inputs"]) -> Float[Tensor, "m inputs"]:
        """The inputs times their scales."""
        return x * self.values[self.feature_of]
