"""Rows of one block on several ranks, each of which holds those of its own data.

Their inner products are sums over weights. So ranks exchange some columns of the rows at a time,
for the rows of all data over a part of these columns each, add the products of these up, and drop
them: no rank ever holds more than its own rows and one slab.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from evigrad.distributed import Ranks

# Bytes that a rank receives at a time, and keeps three or four times for a moment.
EXCHANGED_BYTES = 2**22


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
        own = torch.tensor([[sum(int(part.sum()) for part in present), sum(chunks)]])
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
        sizes = torch.tensor([[max(chunk.shape[dim] for chunk in chunks) for dim in dims]])
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
