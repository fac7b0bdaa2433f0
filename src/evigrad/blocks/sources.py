"""Read examples by position from tensors, data sets and loaders."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from evigrad.blocks.samplers import check_sampler, warn_of_ignored_sampler
from evigrad.core.partition import class_labels
from evigrad.errors import InputError
from evigrad.inputs import (
    MISSING_TARGETS,
    Inputs,
    Tree,
    as_inputs,
    check_dense,
    mapped,
    refuse_cells,
    stacked,
    tensors_of,
)

_ACCEPTED = (
    "a pair (x, y) of tensors, a TensorDataset, a map-style data set of pairs, or a DataLoader for"
    " such pairs (x may also be a dictionary or tuple of tensors)"
)
_STREAM = (
    "Blocks and metrics read examples by position, which an IterableDataset does not support. Use"
    " a map-style data set with a length, or call evidence.backward(x, y) on its batches in your"
    " own loop."
)


# Number of examples that are read at once if only their targets are stored.
AT_ONCE = 1000
# With fewer items per worker, reading without starting the workers is faster.
_FOR_EACH_WORKER = 16


class Source(ABC):
    """N examples (x_n, y_n) that can be read by position.

    Attributes:
        is_held: Whether the examples are tensors in memory, identical each time they are read.
        is_compared: Whether items have been read twice, to see whether they change.
        by_target: Source of the positions that have a target. None until it is needed.
    """

    is_held = False
    is_compared = False
    by_target: "Source | None" = None

    @property
    def unseeded(self) -> "Source":
        """The source that reads the user's items without seeding random generators."""
        return self

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of examples, N."""

    @abstractmethod
    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        """Return the inputs (m, ...) and targets (m, ...) at these positions, in this order."""

    def first(self, count: int) -> tuple[Any, Tensor]:
        """Return inputs and targets of the first ``count`` examples, or of all if N is smaller."""
        return self.fetch(torch.arange(min(count, len(self)), device="cpu"))

    def targets(self) -> Tensor:
        """Return all targets (N, ...)."""
        return torch.cat(
            [self.fetch(n)[1] for n in torch.arange(len(self), device="cpu").split(AT_ONCE)]
        )

    def labels(self) -> Int[Tensor, " N"]:
        """Return the class labels (N,). This may read all examples."""
        return class_labels(self.targets(), len(self))


class _TensorSource(Source):
    is_held = True

    def __init__(self, inputs: Inputs, targets: Tensor) -> None:
        self._inputs, self._all_targets = inputs, targets

    def __len__(self) -> int:
        return len(self._inputs)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        return self._inputs[indices], self._all_targets[indices]

    def targets(self) -> Tensor:
        return self._all_targets


class Subset(Source):
    """The examples of another source at some positions."""

    def __init__(self, source: Source, indices: Int[Tensor, " n"]) -> None:
        self._source, self._indices, self.is_held = source, indices, source.is_held

    def __len__(self) -> int:
        return len(self._indices)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        return self._source.fetch(self._indices[indices])


class InColumns(Source):
    """A source that reshapes the targets (N,) of another source to (N, 1)."""

    def __init__(self, source: Source) -> None:
        self._source, self.is_held = source, source.is_held

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        x, y = self._source.fetch(indices)
        return x, y.unsqueeze(1)

    def targets(self) -> Tensor:
        return self._source.targets().unsqueeze(1)


class _DatasetSource(Source):
    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length
        self._labels: Tensor | None = None
        # Raises early if the items are not pairs.
        self.fetch(torch.zeros(1, dtype=torch.int64, device="cpu"))

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        positions = indices.tolist()
        return put_together(self._items(positions), positions)

    def _items(self, positions: list[int]) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)  # DataLoader uses it too
        return together(positions) if together else [self._dataset[n] for n in positions]

    def labels(self) -> Int[Tensor, " N"]:
        if self._labels is None:
            self._labels = super().labels()
        return self._labels


class LoaderSource(_DatasetSource):
    """The data set of a DataLoader, collated by its ``collate_fn``."""

    def __init__(self, loader: DataLoader[Any], length: int) -> None:
        self._loader = loader
        # For the workers' seeds, which would otherwise come from the global generator.
        self._generator = torch.Generator().manual_seed(0)
        super().__init__(loader.dataset, length)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        return collated(self._loader, self._items(indices.tolist()))

    def _items(self, positions: list[int]) -> list[Any]:
        loader, workers = self._loader, self._loader.num_workers
        if len(positions) < _FOR_EACH_WORKER * workers or not workers:
            return super()._items(positions)
        reader = DataLoader(
            self._dataset,
            batch_size=-(-len(positions) // workers),
            sampler=positions,
            num_workers=workers,
            collate_fn=list,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
        )
        with torch.device("cpu"):  # the reader draws a seed from the generator, which is on the CPU
            return [item for part in reader for item in part]


def put_together(items: list[Any], positions: Sequence[int]) -> tuple[Any, Tensor]:
    """Return the stacked inputs and targets of items (x, y). Errors name an item's position."""
    pairs = [_pair(item, n) for item, n in zip(items, positions, strict=True)]
    inputs, targets = zip(*pairs, strict=True)
    return as_inputs(stacked(list(inputs), "x")), stacked(list(targets), "y")


def collated(loader: DataLoader[Any], items: list[Any]) -> tuple[Any, Tensor]:
    """Return the inputs and targets that a loader's ``collate_fn`` returns for the items."""
    batch = loader.collate_fn(items)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InputError(
            f"The collate_fn of the DataLoader returned a {type(batch).__name__}, not a pair"
            " (x, y). Return a tuple of the inputs and the targets. If the items are mappings,"
            " create the DataLoader from evigrad.data.Pairs(dataset, x=..., y=...)."
        )
    x, y = as_inputs(batch[0]), batch[1]
    if isinstance(y, Tensor):
        check_dense("Targets", y)
    if not isinstance(y, Tensor) or y.dim() == 0 or not len(x) == len(y) == len(items):
        raise InputError(
            f"For {len(items)} items, the collate_fn of the DataLoader must return {len(items)}"
            f" inputs and one tensor of {len(items)} targets, got a different number or type."
            " Return one input and one target per item."
        )
    return x, y


def _refuse_several_targets(y: Any) -> None:
    if isinstance(y, tuple | list | Mapping) and len(y) > 1:
        values = list(y.values() if isinstance(y, Mapping) else y)
        if all(isinstance(value, Tensor | np.ndarray) for value in values):
            raise InputError(
                f"The targets are a {type(y).__name__} of {len(y)} tensors, but a likelihood takes"
                " a single tensor. Join them with torch.cat([y1, y2], dim=1). The model then needs"
                " one output per column. If the targets are of different kinds, such as a number"
                " and a class, use evigrad.likelihoods.Joint and its method targets."
            )


def _pair(item: Any, index: int) -> tuple[Any, Tensor]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        hint = ""
        if isinstance(item, Mapping | tuple | list):
            fields = item if isinstance(item, Mapping) else range(len(item))
            hint = (
                f" with the fields {', '.join(map(repr, fields))}. To choose the fields of the"
                " inputs and of the target, use evigrad.data.Pairs(dataset, x=..., y=...)"
            )
        raise InputError(
            f"Item {index} of the data set must be a pair (x, y), got a"
            f" {type(item).__name__}{hint}. Data can be {_ACCEPTED}."
        )
    _refuse_several_targets(item[1])
    x = mapped(lambda part: _as_tensor(part, "x", index), item[0])
    return x, _as_tensor(item[1], "y", index)


def _as_tensor(value: Any, name: str, index: int) -> Tensor:
    if isinstance(value, Tensor):
        check_dense(f"The {name} of item {index}", value)
        return value
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return torch.as_tensor(value, device="cpu")
    advice = "Convert it to a tensor, for example with a transform of the data set"
    if value is None and name == "y":
        advice = MISSING_TARGETS
    raise InputError(
        f"The {name} of item {index} is a {type(value).__name__}, not a tensor or a number."
        f" {advice}."
    )


def as_source(data: Any, dtype: torch.dtype | None = None) -> Source:
    """Return examples that can be read by position.

    Args:
        data: A pair (x, y) of tensors or NumPy arrays, a `TensorDataset`, a map-style data set of
            pairs, a `DataLoader` for such a data set, or a `Source`, which is returned unchanged.
            The first dimension of x and y counts the examples. x may also be a dictionary, tuple or
            list of tensors of any dtype. Items are read each time they are needed, so random
            transforms are drawn again. A data set with ``__getitems__`` is read one batch at a
            time. A loader's data set, ``collate_fn`` and workers are used, but its order and
            batches are ignored.
        dtype: Type of the tensors that replace floating-point arrays. Default: PyTorch's default
            type.

    Raises:
        InputError: If the data have an unsupported type or are empty, if x and y differ in length,
            or if a sampler omits or repeats examples.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, TensorDataset):
        return _tensor_source(data.tensors)
    if isinstance(data, tuple) or (
        isinstance(data, list)
        and data
        and all(isinstance(part, Tensor | np.ndarray) for part in data)
    ):
        return _tensor_source(without_arrays(data, dtype))
    if isinstance(data, DataLoader):
        return _loader_source(data)
    if isinstance(data, IterableDataset):
        raise InputError(_STREAM)
    by_position = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    no_positions = not by_position or not hasattr(data, "__len__")
    if isinstance(data, Tensor | Mapping) or no_positions:
        raise InputError(f"Data must be {_ACCEPTED}, not a {type(data).__name__}.")
    length = len(data)
    if length == 0:
        raise InputError("The data set is empty. Pass at least one example.")
    return _DatasetSource(data, length)


def _loader_source(loader: DataLoader[Any]) -> Source:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise InputError(_STREAM)
    if not hasattr(dataset, "__len__"):
        raise InputError(
            "evigrad reads examples by position, so the DataLoader needs a map-style data set with"
            " a length. Define __len__ in the data set."
        )
    if len(dataset) == 0:
        raise InputError("The data set is empty. Pass at least one example.")
    check_sampler(loader)
    warn_of_ignored_sampler(loader)
    return LoaderSource(loader, len(dataset))


def without_arrays(pair: Any, dtype: torch.dtype | None = None) -> list[Any]:
    """Return the entries of a tuple, with numeric NumPy arrays converted to tensors."""

    def as_tensor(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
            return value
        real = value.dtype.kind == "f"
        # A copy, because arrays may be read-only or change later.
        kind = (dtype or torch.get_default_dtype()) if real else None
        return torch.tensor(value, dtype=kind, device="cpu")

    return [as_tensor(value) for value in pair]


def _tensor_source(pair: Any) -> Source:
    if len(pair) == 2:
        _refuse_several_targets(pair[1])
    if len(pair) == 2 and isinstance(pair[1], list | np.ndarray):
        refuse_cells(pair[1])
    accepted = len(pair) == 2 and isinstance(pair[1], Tensor)
    if not accepted or not isinstance(pair[0], Tensor | Tree | Mapping | tuple | list):
        kinds = ", ".join(type(entry).__name__ for entry in pair)
        raise InputError(
            f"Data must be {_ACCEPTED}, not ({kinds}). Convert arrays with torch.as_tensor."
        )
    inputs, targets = as_inputs(pair[0]), pair[1]
    check_dense("Targets", targets)
    if any(part.dim() == 0 for part in (*tensors_of(inputs), targets)):
        raise InputError(
            "The first dimension of x and y must be the example (batch) dimension, got a scalar."
            " Add a dimension with unsqueeze(0)."
        )
    if len(inputs) != len(targets):
        raise InputError(
            f"x and y must have the same number of examples, got {len(inputs)} and {len(targets)}."
            " Check their first dimensions. If an example has a varying number of rows, like the"
            " nodes of a graph, pad all examples to the same number of rows."
        )
    if len(inputs) == 0:
        raise InputError("The data set is empty. Pass at least one example.")
    return _TensorSource(inputs, targets)
