"""Sums over the rows of one block that several ranks share, each with those of its own data.

The inner products of rows are sums over weights. So ranks exchange some columns of the rows at a
time (``Split``), for the rows of all data over a part of these columns each, add the products of
these up, and drop them: no rank ever holds more than its own rows and one slab.

Sums of outer products fall into parts, one for each weight, that one rank each has, its owner
(``Owners``). The terms of a sum go to its owner alone. The derivatives in the sums go back to all
ranks, since each pulls them back through data of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from evigrad.curvature.base import StatisticT
from evigrad.curvature.linalg import RoundingError, rounding_is_refused
from evigrad.distributed import Ranks

# Bytes that a rank receives at a time, and keeps three or four times for a moment.
EXCHANGED_BYTES = 2**22

T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """How the data of a block are split over ranks; whatever is of all data is in their order.

    Attributes:
        ranks: The ranks.
        rows: How many rows each has.
        data: How many data each has.
        chunks: How many data each of this rank's micro-batches has.
    """

    ranks: Ranks
    rows: tuple[int, ...]
    data: tuple[int, ...]
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Ranks, present: Sequence[Tensor]) -> "Split":
        """The split whose micro-batches here have these rows (m_i, k_i) that are no padding."""
        chunks = tuple(len(part) for part in present)
        own = torch.tensor([[sum(int(part.sum()) for part in present), sum(chunks)]], device="cpu")
        ranks.agree()
        rows, data = torch.cat(ranks.gather(own)).T.tolist()
        return cls(ranks, tuple(rows), tuple(data), chunks)

    def slabs(
        self, chunks: Sequence[Float[Tensor, "_ n"]], like: Tensor
    ) -> Iterator[tuple[slice, slice, Float[Tensor, "R _"]]]:
        """Yield columns that are exchanged, this rank's part of them, and all rows over it.

        ``chunks`` are this rank's rows. A part may have no columns.
        """
        width, num_rows, count = chunks[0].shape[1], sum(self.rows), self.ranks.count
        step = count * max(1, EXCHANGED_BYTES // max(1, num_rows * like.element_size()))
        for start in range(0, width, step):
            exchanged = slice(start, min(start + step, width))
            widths = self._widths(exchanged)
            own = torch.cat([chunk[:, exchanged] for chunk in chunks])
            mine = widths[self.ranks.rank]
            parts = self.ranks.exchange(own.split(widths, 1), [(n, mine) for n in self.rows])
            first = start + sum(widths[: self.ranks.rank])
            yield exchanged, slice(first, first + mine), torch.cat(parts).to(like)

    def own_rows(self, slab: Float[Tensor, "R _"], exchanged: slice) -> Float[Tensor, "r c"]:
        """This rank's rows of what is like a slab, over all columns that were exchanged."""
        count = self.rows[self.ranks.rank]
        shapes = [(count, width) for width in self._widths(exchanged)]
        return torch.cat(self.ranks.exchange(slab.split(list(self.rows)), shapes), 1)

    def _widths(self, columns: slice) -> list[int]:
        width = columns.stop - columns.start
        parts = [self.ranks.part(width, rank) for rank in range(self.ranks.count)]
        return [part.stop - part.start for part in parts]

    def is_owner(self, number: int) -> bool:
        """Whether what is the same on all ranks is computed by this one."""
        return number % self.ranks.count == self.ranks.rank

    def sum(self, matrix: Tensor) -> Tensor:
        """The sum over the ranks, with R times its gradient: see ``Statistic.over``."""
        self.ranks.agree()
        (total,) = self.ranks.sum([matrix])
        if not matrix.requires_grad:
            return total
        return total + self.ranks.count * (matrix - matrix.detach())

    def of_rows(self, values: Shaped[Tensor, " _"]) -> Shaped[Tensor, " R"]:
        """A number for each row of all ranks, from this rank's, with R times its gradient."""
        self.ranks.agree()
        parts = self.ranks.gather(values)
        if values.requires_grad:
            own = parts[self.ranks.rank]
            parts[self.ranks.rank] = own + self.ranks.count * (values - values.detach())
        return torch.cat(parts)

    def own(self, values: Float[Tensor, " R"]) -> Float[Tensor, " r"]:
        """This rank's part of a number for each row."""
        return values.split(list(self.rows))[self.ranks.rank]

    def of_data(self, chunks: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
        """Return a tensor of all data from those of the micro-batches here.

        Where their lengths in ``dims`` differ, the others end in zeros.
        """
        self.ranks.agree()
        sizes = torch.tensor(
            [[max(chunk.shape[dim] for chunk in chunks) for dim in dims]], device="cpu"
        )
        most = torch.cat(self.ranks.gather(sizes)).amax(0).tolist()
        padded = list(chunks)
        for dim, size in zip(dims, most, strict=True):
            padded = [
                F.pad(part, (*[0, 0] * (part.dim() - 1 - dim), 0, size - part.shape[dim]))
                for part in padded
            ]
        return torch.cat(self.ranks.gather(torch.cat(padded)))

    def own_data(self, whole: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What ``of_data`` was made of: the micro-batches here, of the shapes of ``like``."""
        own = whole.split(list(self.data))[self.ranks.rank].split(list(self.chunks))
        return tuple(
            part[tuple(slice(size) for size in shape.shape)]
            for part, shape in zip(own, like, strict=True)
        )


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
