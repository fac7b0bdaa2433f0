"""One way to read data by position, however the user stores them."""

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
from evigrad.inputs import Inputs, Tree, as_inputs, mapped, stacked, tensors_of

_ACCEPTED = (
    "a pair (x, y) of tensors, a TensorDataset of two tensors, a map-style dataset of (x, y), or a"
    " DataLoader of one; x may also be a dictionary or a tuple of tensors"
)
_STREAM = (
    "An IterableDataset cannot be read by position, as blocks and metrics need. Use a map-style"
    " data set with a length, or call evidence.backward(x, y) on its batches in your own loop."
)


# Data that are read at once where only their targets are kept.
AT_ONCE = 1000
# Fewer items for each worker of a DataLoader are read sooner without starting the workers.
_FOR_EACH_WORKER = 16


class Source(ABC):
    """A finite set of data (x_n, y_n) that can be read at any positions.

    Attributes:
        is_held: Whether the data are tensors in memory, the same at every reading.
        by_target: Their positions with targets as data, once these were looked for.
    """

    is_held = False
    by_target: "Source | None" = None

    @abstractmethod
    def __len__(self) -> int:
        """The number of data, N."""

    @abstractmethod
    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        """Inputs (m, ...) and targets (m, ...) at positions in 0..N-1, in their order."""

    def first(self, count: int) -> tuple[Any, Tensor]:
        """The first data, ``count`` at most; see ``fetch``."""
        return self.fetch(torch.arange(min(count, len(self)), device="cpu"))

    def targets(self) -> Tensor:
        """All targets (N, ...)."""
        return torch.cat(
            [self.fetch(n)[1] for n in torch.arange(len(self), device="cpu").split(AT_ONCE)]
        )

    def labels(self) -> Int[Tensor, " N"]:
        """Labels (N,) as of ``class_labels``, for classification; may read all the data."""
        return class_labels(self.targets(), len(self))


class _TensorSource(Source):
    is_held = True

    def __init__(self, inputs: Inputs, targets: Tensor) -> None:
        if targets.layout != torch.strided:
            raise InputError("The targets are a sparse tensor: give y.to_dense().")
        self._inputs, self._all_targets = inputs, targets

    def __len__(self) -> int:
        return len(self._inputs)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        return self._inputs[indices], self._all_targets[indices]

    def targets(self) -> Tensor:
        return self._all_targets


class _DatasetSource(Source):
    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length
        self._labels: Tensor | None = None
        self.fetch(
            torch.zeros(1, dtype=torch.int64, device="cpu")
        )  # raises early if items are no pairs

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        positions = indices.tolist()
        return put_together(self._items(positions), positions)

    def _items(self, positions: list[int]) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)  # as DataLoader asks for a batch
        return together(positions) if together else [self._dataset[n] for n in positions]

    def labels(self) -> Int[Tensor, " N"]:
        if self._labels is None:  # a whole pass over the data set: once is enough
            self._labels = super().labels()
        return self._labels


class _LoaderSource(_DatasetSource):
    """The data set of a DataLoader, in batches as its ``collate_fn`` makes them."""

    def __init__(self, loader: DataLoader[Any], length: int) -> None:
        self._loader = loader
        # Seeds of the workers, which would otherwise be drawn from the global generator.
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
        with torch.device("cpu"):  # where the generator is, of which the reader draws a seed
            return [item for part in reader for item in part]


def put_together(items: list[Any], positions: Sequence[int]) -> tuple[Any, Tensor]:
    """Inputs and targets of items (x, y); ``positions`` are for errors."""
    pairs = [_pair(item, n) for item, n in zip(items, positions, strict=True)]
    inputs, targets = zip(*pairs, strict=True)
    return as_inputs(stacked(list(inputs), "x")), stacked(list(targets), "y")


def collated(loader: DataLoader[Any], items: list[Any]) -> tuple[Any, Tensor]:
    """Inputs and targets as the ``collate_fn`` of a loader makes them of items."""
    batch = loader.collate_fn(items)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InputError(
            f"The collate_fn of the DataLoader makes a {type(batch).__name__}, not a pair"
            " (x, y); let it return the inputs and the targets."
        )
    x, y = as_inputs(batch[0]), batch[1]
    if not isinstance(y, Tensor) or y.dim() == 0 or not len(x) == len(y) == len(items):
        raise InputError(
            f"For {len(items)} items the collate_fn of the DataLoader must make as many"
            " inputs, and a tensor of as many targets."
        )
    return x, y


def _refuse_several_targets(y: Any) -> None:
    """Refuse targets in several tensors."""
    if isinstance(y, tuple | list | Mapping) and len(y) > 1:
        values = list(y.values() if isinstance(y, Mapping) else y)
        if all(isinstance(value, Tensor | np.ndarray) for value in values):
            raise InputError(
                f"The targets are a {type(y).__name__} of {len(y)} tensors, and a likelihood takes"
                " one. Join them with torch.cat([y1, y2], dim=1). The model then needs as many"
                " outputs. If they are of different kinds, such as a number and a class, write a"
                " likelihood whose log_prob splits the columns of outputs and targets."
            )


def _pair(item: Any, index: int) -> tuple[Any, Tensor]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(
            f"Item {index} of the data set is not a pair (x, y) but a {type(item).__name__}; "
            f"the data must be {_ACCEPTED}."
        )
    _refuse_several_targets(item[1])
    x = mapped(lambda part: _as_tensor(part, "x", index), item[0])
    return x, _as_tensor(item[1], "y", index)


def _as_tensor(value: Any, name: str, index: int) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return torch.as_tensor(value, device="cpu")
    raise InputError(
        f"The {name} of item {index} is a {type(value).__name__}, not a tensor or a number; "
        "give the data set a transform that makes tensors."
    )


def as_source(data: Any, dtype: torch.dtype | None = None) -> Source:
    """Return data that can be read by position.

    Args:
        data: A tuple or list (x, y) of two tensors or NumPy arrays whose first dimension counts the
            data, a `TensorDataset` of two tensors, a map-style data set (anything with a length and
            positions) of pairs (x, y), a `DataLoader` of one, or a `Source`,
            which is returned as it is. In the place of one tensor x may be dictionaries, tuples or
            lists of tensors, of any dtype (token ids too); the items' y may be numbers. Items are
            read each time that they are needed, so that random transforms draw anew; a data set
            with ``__getitems__`` is asked for a batch at once. Of a loader the data set, its
            ``collate_fn`` and its workers are used, and not what it says of order and batches; a
            sampler that omits examples, or draws some more often, is refused.
        dtype: Type of the tensors that are made of an array's real numbers. Default: PyTorch's.

    Raises:
        InputError: If the data is something else, empty, or the lengths differ.
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
        return _tensor_source(_without_arrays(data, dtype))
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
        raise InputError("The data set is empty.")
    return _DatasetSource(data, length)


def _loader_source(loader: DataLoader[Any]) -> Source:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise InputError(_STREAM)
    if not hasattr(dataset, "__len__"):
        raise InputError(
            "The blocks of an estimator need the data by position: give a DataLoader of a map-style"
            " data set, with a length."
        )
    if len(dataset) == 0:
        raise InputError("The data set is empty.")
    check_sampler(loader)
    warn_of_ignored_sampler(loader)
    return _LoaderSource(loader, len(dataset))


def _without_arrays(pair: Any, dtype: torch.dtype | None) -> list[Any]:
    """Return a pair with tensors instead of NumPy's arrays of numbers."""

    def as_tensor(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
            return value
        real = value.dtype.kind == "f"
        # Copies, as arrays may be read-only or change later.
        kind = (dtype or torch.get_default_dtype()) if real else None
        return torch.tensor(value, dtype=kind, device="cpu")

    return [as_tensor(value) for value in pair]


def _tensor_source(pair: Any) -> Source:
    if len(pair) == 2:
        _refuse_several_targets(pair[1])
    accepted = len(pair) == 2 and isinstance(pair[1], Tensor)
    if not accepted or not isinstance(pair[0], Tensor | Tree | Mapping | tuple | list):
        kinds = ", ".join(type(entry).__name__ for entry in pair)
        raise InputError(
            f"Data must be {_ACCEPTED}, not ({kinds}); torch.as_tensor makes a tensor of an array."
        )
    inputs, targets = as_inputs(pair[0]), pair[1]
    if any(part.dim() == 0 for part in (*tensors_of(inputs), targets)):
        raise InputError("The first dimension of x and of y counts the data; a scalar has none.")
    if len(inputs) != len(targets):
        raise InputError(f"x holds {len(inputs)} data and y {len(targets)}: they must be as many.")
    if len(inputs) == 0:
        raise InputError("The data set is empty.")
    return _TensorSource(inputs, targets)
