"""Data that can only be read one after another, and whose number is given."""

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader

from evigrad.blocks.samplers import check_sampler
from evigrad.blocks.sources import Source, collated, put_together
from evigrad.errors import ConfigurationError, InputError

# Stands for an item where a pass is over.
_OVER = object()


class Streamed(Source):
    """Data in an order alone, as of an ``IterableDataset``, with their number.

    Whoever asks for m data gets the next m: a batch of training, or a block of an estimator, which
    is right as long as any m consecutive data are a random subset of all. So the stream has to be
    shuffled, at least by a buffer; data that come class by class give wrong numbers, which nothing
    here can see. After its end it is read from the beginning.

    A run reads the stream for batches, for blocks and for metrics apart, each from its beginning,
    and a run that goes on skips what was read before it was interrupted: with the same items in
    each pass the numbers are those without interruption. What items draw from the global generators
    of PyTorch's CPU, NumPy and Python is seeded by the run and the number of the pass, and a data
    set with ``set_epoch`` is told that number before each one, from 0.

    Args:
        data: Items (x, y): an ``IterableDataset``, another iterable that can be iterated again, or
            a ``DataLoader`` of one, whose ``collate_fn`` and workers are used. Each worker must
            give a part of the data, as ``torch.utils.data.get_worker_info()`` says.
        num_data: N, how many there are. A pass that ends must have had as many; a stream that does
            not end is taken to repeat N data.

    Attributes:
        num_data: N.

    Raises:
        ConfigurationError: If ``num_data`` is no positive integer, or a loader makes no batches.
        InputError: If the data cannot be iterated again, or the sampler of a loader omits or
            repeats examples.
    """

    is_stream = True

    def __init__(self, data: Any, num_data: int) -> None:
        if not isinstance(num_data, Integral) or isinstance(num_data, bool) or num_data < 1:
            raise ConfigurationError(f"num_data must be a positive integer, not {num_data!r}.")
        self.num_data = int(num_data)
        self._loader = data if isinstance(data, DataLoader) else None
        self._dataset: Any = data if self._loader is None else self._loader.dataset
        if isinstance(self._dataset, Iterator):
            raise InputError(
                f"A {type(data).__name__} can be iterated only once: give a data set whose __iter__"
                " begins anew."
            )
        if isinstance(data, Tensor | Mapping | tuple) or not hasattr(self._dataset, "__iter__"):
            raise InputError(
                "A stream is an IterableDataset of items (x, y), or a DataLoader of one, not a"
                f" {type(data).__name__}."
            )
        if self._loader is not None and hasattr(self._dataset, "__len__"):
            check_sampler(self._loader)
        if self._loader is not None and self._loader.batch_size is None:
            raise ConfigurationError(
                "The DataLoader makes no batches (batch_size=None): give one with a batch size, of"
                " single items (x, y)."
            )
        self._head: list[Any] = []
        self._begin_at(0, 0, 0)

    def _begin_at(self, seed: int, passes: int, taken: int) -> None:
        self._seed, self._passes, self._taken = seed, passes, taken
        self._items: Iterator[Any] | None = None
        self._states: tuple[Any, ...] | None = None

    def anew(self, seed: int | None = None) -> "Streamed":
        """The same data, read from their beginning.

        Args:
            seed: Of what items draw. Default: as here.

        Returns:
            A stream that this one does not move.
        """
        found = copy.copy(self)
        found._begin_at(self._seed if seed is None else seed, 0, 0)
        if seed is not None:
            found._head = []
        return found

    @property
    def place(self) -> dict[str, int]:
        """How many passes are over, and how many data of the present one were taken."""
        return {"passes": self._passes, "taken": self._taken}

    @place.setter
    def place(self, value: Mapping[str, int]) -> None:
        passes, taken = int(value["passes"]), int(value["taken"])
        if min(passes, taken) < 0:
            raise ConfigurationError(f"No stream is at the place {dict(value)}.")
        self._begin_at(self._seed, passes, taken)

    def __len__(self) -> int:
        return self.num_data

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        """The next m data, whatever positions are asked for."""
        return self._made(self._next(len(indices)), max(0, self._taken - len(indices)))

    def first(self, count: int) -> tuple[Any, Tensor]:
        """The data at the beginning, ``count`` at most; nothing moves on."""
        count = min(count, self.num_data)
        if len(self._head) < count:
            self._head = self.anew()._next(count)
        return self._made(self._head[:count], 0)

    def _made(self, items: list[Any], first: int) -> tuple[Any, Tensor]:
        if self._loader is None:
            return put_together(items, range(first, first + len(items)))
        return collated(self._loader, items)

    def _targets(self) -> Tensor:
        raise InputError(
            "The targets of all data are not known beforehand in a stream: give data that are read"
            " by position."
        )

    def _next(self, count: int) -> list[Any]:
        found: list[Any] = []
        with self._own_draws():
            while len(found) < count:
                if self._items is None:
                    self._items = self._begin_pass()
                item = next(self._items, _OVER)
                if item is _OVER:
                    self._end_pass()
                else:
                    self._taken += 1
                    found.append(item)
        return found

    def _begin_pass(self) -> Iterator[Any]:
        """The items of the present pass that are left."""
        seed = int(np.random.SeedSequence([self._seed, self._passes]).generate_state(1)[0])
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._passes)
        items = iter(self._reader(seed))
        for number in range(self._taken):
            if next(items, _OVER) is _OVER:
                raise InputError(
                    f"The stream has ended after {number} data, and {self._taken} of this pass had"
                    " been read before: it gives other data than the first time."
                )
        return items

    def _reader(self, seed: int) -> Any:
        loader = self._loader
        if loader is None or not loader.num_workers:
            return self._dataset
        batches = DataLoader(
            self._dataset,
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            collate_fn=list,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            generator=torch.Generator().manual_seed(seed),
        )
        with torch.device("cpu"):  # where the generator is, of which the reader draws a seed now
            return (item for batch in batches for item in batch)

    def _end_pass(self) -> None:
        if self._taken != self.num_data:
            raise self._wrong_number(self._taken)
        self._begin_at(self._seed, self._passes + 1, 0)

    def _wrong_number(self, found: int) -> InputError:
        if not found:
            return InputError(f"Pass {self._passes + 1} over the stream gave no data.")
        workers = 0 if self._loader is None else self._loader.num_workers
        return InputError(
            f"num_data is {self.num_data}, but a pass over the stream gave {found} data:"
            f" say num_data={found}"
            + (", unless each of the workers gives all of the data." if workers > 1 else ".")
        )

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Put the global generators where this stream has left them, and back on the way out.

        So items draw the same, however many are read at once and whatever is drawn in between.
        """
        before = _states()
        if self._states is not None:
            _restore(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _restore(before)


def _states() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def check_single(source: Source, ranks: int) -> None:
    """Refuse a stream on several ranks, which divide data by their positions.

    Raises:
        ConfigurationError: If it is one.
    """
    if source.is_stream and ranks > 1:
        raise ConfigurationError(
            f"{ranks} ranks divide data by their positions, which a stream has none of: give a"
            " map-style data set. Or take estimate(x, y) and backward(x, y) in a loop of your own,"
            " where each rank gives a random subset from a stream of its own."
        )
