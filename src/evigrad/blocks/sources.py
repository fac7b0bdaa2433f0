"""One way to read data by position, however the user stores them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from evigrad.errors import InputError

_ACCEPTED = (
    "a pair (x, y) of tensors, a TensorDataset of two tensors, or a map-style dataset of (x, y)"
)


# Data that are read at once where only their targets are kept.
_AT_ONCE = 1000


class Source(ABC):
    """A finite set of data (x_n, y_n) that can be read at any positions.

    Attributes:
        is_held: Whether the data are tensors in memory, the same at every reading.
    """

    is_held = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of data, N."""

    @abstractmethod
    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Tensor, Tensor]:
        """Inputs (m, ...) and targets (m, ...) at positions in 0..N-1, in their order."""

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """The first data, ``count`` at most; see ``fetch``."""
        return self.fetch(torch.arange(min(count, len(self))))

    @abstractmethod
    def _targets(self) -> Tensor:
        """All targets (N, ...)."""

    def labels(self) -> Int[Tensor, " N"]:
        """Labels (N,) as of ``class_labels``, for classification; may read all the data."""
        return class_labels(self._targets(), len(self))


def class_labels(targets: Tensor, num_data: int) -> Int[Tensor, " N"]:
    """Targets as labels (N,), int64, on the CPU; raises unless they are N integers."""
    if targets.shape != (num_data,):
        raise InputError(
            f"Class labels need the shape ({num_data},), one for each datum, "
            f"not {tuple(targets.shape)}."
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise InputError(
            f"Class labels must be integers, not {targets.dtype}; if these numbers are classes, "
            "convert them with .long()."
        )
    return targets.detach().to("cpu", torch.int64)


class _TensorSource(Source):
    is_held = True

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._all_targets = inputs, targets

    def __len__(self) -> int:
        return len(self._inputs)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Tensor, Tensor]:
        return self._inputs[indices], self._all_targets[indices]

    def _targets(self) -> Tensor:
        return self._all_targets


class _DatasetSource(Source):
    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length
        self._labels: Tensor | None = None
        self.fetch(torch.zeros(1, dtype=torch.int64))  # raises early if items are no pairs

    def __len__(self) -> int:
        return self._length

    def _pair(self, item: Any, index: int) -> tuple[Tensor, Tensor]:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InputError(
                f"Item {index} of the data set is not a pair (x, y) but a {type(item).__name__}; "
                f"the data must be {_ACCEPTED}."
            )
        return _as_tensor(item[0], "x", index), _as_tensor(item[1], "y", index)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Tensor, Tensor]:
        positions = indices.tolist()
        together = getattr(self._dataset, "__getitems__", None)  # as DataLoader asks for a batch
        items = together(positions) if together else [self._dataset[n] for n in positions]
        pairs = [self._pair(item, n) for item, n in zip(items, positions, strict=True)]
        inputs, targets = zip(*pairs, strict=True)
        return _stack(inputs, "x"), _stack(targets, "y")

    def _targets(self) -> Tensor:
        return torch.cat([self.fetch(n)[1] for n in torch.arange(len(self)).split(_AT_ONCE)])

    def labels(self) -> Int[Tensor, " N"]:
        if self._labels is None:  # a whole pass over the data set: once is enough
            self._labels = super().labels()
        return self._labels


def _as_tensor(value: Any, name: str, index: int) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return torch.as_tensor(value)
    raise InputError(
        f"The {name} of item {index} is a {type(value).__name__}, not a tensor or a number; "
        "give the data set a transform that makes tensors."
    )


def _stack(values: Any, name: str) -> Tensor:
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise InputError(
            f"The {name} of different items have different shapes, {sorted(shapes)[:3]}: they "
            "cannot be stacked."
        )
    return torch.stack(list(values))


def as_source(data: Any) -> Source:
    """Return data that can be read by position.

    Args:
        data: A tuple or list (x, y) of two tensors whose first dimension counts the data, a
            `TensorDataset` of two tensors, a map-style data set (anything with a length and
            positions) of pairs (x, y), or a `Source`, which is returned as it is. Inputs may have
            any dtype (token ids too); the items' y may be numbers. Items are read each time that
            they are needed, so that random transforms draw anew; a data set with
            ``__getitems__`` is asked for a batch at once.

    Raises:
        InputError: If the data is something else, empty, or the lengths differ.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, TensorDataset):
        return _tensor_source(data.tensors)
    if isinstance(data, tuple) or (
        isinstance(data, list) and data and all(isinstance(each, Tensor) for each in data)
    ):
        return _tensor_source(data)
    if isinstance(data, DataLoader):
        raise InputError(
            "A DataLoader draws its own batches, but the blocks of an estimator need the data by "
            "position: pass loader.dataset."
        )
    no_positions = not hasattr(data, "__getitem__") or not hasattr(data, "__len__")
    if isinstance(data, Tensor | Mapping | IterableDataset) or no_positions:
        raise InputError(f"Data must be {_ACCEPTED}, not a {type(data).__name__}.")
    length = len(data)
    if length == 0:
        raise InputError("The data set is empty.")
    return _DatasetSource(data, length)


def _tensor_source(pair: Any) -> Source:
    if len(pair) != 2 or not all(isinstance(each, Tensor) for each in pair):
        kinds = ", ".join(type(each).__name__ for each in pair)
        raise InputError(
            f"Data must be {_ACCEPTED}, not ({kinds}); torch.as_tensor makes a tensor of an array."
        )
    inputs, targets = pair
    if inputs.dim() == 0 or targets.dim() == 0:
        raise InputError("The first dimension of x and of y counts the data; a scalar has none.")
    if len(inputs) != len(targets):
        raise InputError(f"x holds {len(inputs)} data and y {len(targets)}: they must be as many.")
    if len(inputs) == 0:
        raise InputError("The data set is empty.")
    return _TensorSource(inputs, targets)
