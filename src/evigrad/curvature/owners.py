"""Sums over ranks that one rank each has, its owner, where the work on them falls into parts.

The terms of a sum go to its owner alone. The derivatives in the sums go back to all ranks, since
each pulls them back through data of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from evigrad.curvature.base import StatisticT
from evigrad.curvature.linalg import RoundingError, rounding_is_refused
from evigrad.distributed import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Owners(Generic[StatisticT]):
    """Which rank owns each tensor of a statistic.

    Attributes:
        ranks: The ranks.
        places: The rank that owns each of the statistic's ``tensors()``.
        form: The statistic of all owners, of tensors without memory.
        empty: No numbers, of the type and on the device of those that are sent.
    """

    ranks: Ranks
    places: tuple[int, ...]
    form: StatisticT
    empty: Tensor

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums that are this rank's, from its terms of all sums."""
        own = self._by_rank(self.form.tensors())[self.ranks.rank]
        found = self._exchanged(self._by_rank(tensors), [own] * self.ranks.count)
        return [torch.stack(terms).sum(0) for terms in zip(*found, strict=True)]

    def of_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of all owners, from this rank's own."""
        like = self._by_rank(self.form.tensors())
        found = list(map(iter, self._exchanged([tensors] * self.ranks.count, like)))
        return [next(found[place]) for place in self.places]

    def agreed(self, compute: Callable[[], T]) -> T:
        """Return what ``compute`` does; a ``RoundingError`` of one rank is raised on all.

        So all repeat in float64 what one of them has to.
        """
        if not rounding_is_refused():
            return compute()
        found, error = list[T](), None
        with self.ranks.together():
            try:
                found.append(compute())
            except RoundingError as caught:
                error = caught
        if self.ranks.any(error is not None):
            raise error or RoundingError("Rounding loses too much of a sum of another rank.")
        return found[0]

    def _by_rank(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        ranks, pairs = range(self.ranks.count), list(zip(tensors, self.places, strict=True))
        return [[tensor for tensor, place in pairs if place == rank] for rank in ranks]

    def _exchanged(
        self, parts: Sequence[Sequence[Tensor]], like: Sequence[Sequence[Tensor]]
    ) -> list[list[Tensor]]:
        """What each rank sent here, ``like`` these, for what is sent to each."""
        sent = [torch.cat([self.empty, *(t.reshape(-1) for t in part)]) for part in parts]
        sizes = [[tensor.numel() for tensor in own] for own in like]
        flat = self.ranks.exchange(sent, [(sum(own),) for own in sizes])
        found = [part.split(own) for part, own in zip(flat, sizes, strict=True)]
        return [
            [tensor.reshape(each.shape).to(each.dtype) for tensor, each in zip(*pair, strict=True)]
            for pair in zip(found, like, strict=True)
        ]


def balanced(costs: Sequence[int], count: int) -> list[int]:
    """One of ``count`` places for each cost; the largest first, each to the least sum so far."""
    sums, places = [0] * count, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        place = sums.index(min(sums))
        places[number] = place
        sums[place] += costs[number]
    return places
