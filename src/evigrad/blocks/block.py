"""A block: the data and outputs that one stochastic estimate uses."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Mean rows of a datum that has any, up to which ``expanded`` repeats data: another forward pass
# costs half as much as a row.
MOST_EXPANDED = 1.5


@dataclass(frozen=True)
class Draw:
    """One part B of the rows that are no anchors; it estimates ℓ by ℓ(Z) + w ℓ(B|Z) + offset.

    Attributes:
        part: The label of its rows in the block, from 1; before there is a block, the number of
            the part in its partition, from 0.
        weight: w, one over the probability of the draw.
        offset: Control variate in nats: the expected sum over all parts minus w times the expected
            ℓ(B|Z). Its expectation is zero, and it cancels most of the draw's error.
        guess: Predicted ℓ(B|Z), before calibration by observed values.
        key: Calibration group: parts whose predictions err alike.
    """

    part: int
    weight: float = 1.0
    offset: float = 0.0
    guess: float = 0.0
    key: int = 0


@dataclass(frozen=True, eq=False)
class Block:
    """A part of the index set, with the factors that scale it up to the whole.

    All tensors but `inputs` and `targets` are on the CPU.

    Attributes:
        indices: Positions (m,) in the data set, distinct.
        columns: Columns of the likelihood's root for each datum (m, k), distinct for one datum,
            -1 for padding; ``None`` for all C.
        scale: The log-determinant of all rows is estimated by `scale` times the block's.
        likelihood_weights: Weights (m,), float64: sum_n w_n log p(y_n) is an unbiased estimate of
            the whole data set's log likelihood.
        inputs: The inputs (m, ...), once fetched.
        targets: The targets (m, ...), once fetched.
        parts: In an anchored block, for each of `columns` 0 for an anchor, b = 1, 2, … for a row
            of part B_b, and -1 for padding and rows that do not count; else ``None``.
        draws: In an anchored block, the draws whose mean estimates the log-determinant of all rows;
            several may share a part, and `scale` is 1. Empty where all rows are anchors.
        likelihood_shares: In an anchored block, the weights of each draw's own data, whose mean is
            `likelihood_weights`.
        origin: In a block from ``expanded``, the earlier position of each datum.
    """

    indices: Int[Tensor, " m"]
    columns: Int[Tensor, "m k"] | None
    scale: float
    likelihood_weights: Float[Tensor, " m"]
    inputs: Tensor | None = None
    targets: Tensor | None = None
    parts: Int[Tensor, "m k"] | None = None
    draws: tuple[Draw, ...] = ()
    likelihood_shares: Float[Tensor, "d m"] | None = None
    origin: Int[Tensor, " m"] | None = None

    def expanded(self) -> "Block":
        """Take a datum of k rows as k data of one row each, where most have no more than one.

        Data with equally many rows go through the network together, and seeing a few data twice
        costs less than another pass. Use it only where the rows of a datum do not depend on which
        of them a block has, and where data are not counted.

        Returns:
            A block without its data that has the same rows in the same order, and ``origin``; this
            block where it has no padding, or where too many data have several rows for this to pay.
        """
        if self.columns is None or self.origin is not None or self._counts is None:
            return self
        present = self.columns >= 0
        counts = present.sum(1)
        with_rows = int((counts > 0).sum())
        if not 0 < int(counts.sum()) <= MOST_EXPANDED * with_rows:
            return self
        # Data without rows stay once.
        origin = torch.arange(len(counts)).repeat_interleave(counts.clamp(min=1))
        first = torch.cat([torch.ones(1, dtype=torch.bool), origin.diff() > 0])
        has_row = counts[origin] > 0
        columns = torch.full((len(origin), 1), -1)
        columns[has_row, 0] = self.columns[present]
        parts = None
        if self.parts is not None:
            parts = torch.full_like(columns, -1)
            parts[has_row, 0] = self.parts[present]
        shares = self.likelihood_shares
        return replace(
            self,
            indices=self.indices[origin],
            columns=columns,
            parts=parts,
            likelihood_weights=self.likelihood_weights[origin] * first,
            likelihood_shares=None if shares is None else shares[:, origin] * first,
            inputs=None,
            targets=None,
            origin=origin,
        )

    @property
    def num_rows(self) -> int | None:
        """Number of rows of the block; None where they are all outputs of its data."""
        return None if self.columns is None else int((self.columns >= 0).sum())

    @property
    def part_weights(self) -> tuple[float, ...]:
        """In an anchored block, w_b in ℓ(Z) + Σ_b w_b ℓ(B_b|Z) + ``offset`` for each part."""
        weights = [0.0] * max((draw.part for draw in self.draws), default=0)
        for draw in self.draws:
            weights[draw.part - 1] += draw.weight / len(self.draws)
        return tuple(weights)

    @property
    def offset(self) -> float:
        """In an anchored block, the mean offset of its draws, in nats."""
        return sum(draw.offset for draw in self.draws) / max(1, len(self.draws))

    def of_draw(self, number: int) -> "Block":
        """The same data and anchors with a single draw.

        Args:
            number: Position of the draw in ``draws``.

        Returns:
            A block in which the rows of other parts, and the likelihood data of other draws, do not
            count.
        """
        if self.parts is None or self.likelihood_shares is None or len(self.draws) < 2:
            return self
        draw = self.draws[number]
        mine = torch.where(self.parts == draw.part, 1, -1)
        shares = self.likelihood_shares[number]
        return replace(
            self,
            parts=torch.where(self.parts == 0, 0, mine),
            draws=(replace(draw, part=1),),
            likelihood_weights=shares,
            likelihood_shares=shares[None],
        )

    def rows_of(self, position: int) -> int:
        """The largest number of rows of any datum from a position on.

        Args:
            position: In the block.

        Returns:
            A number of columns; 0 where no rows follow, or where a datum has all C.
        """
        if self.columns is None:
            return 0
        return self.columns.shape[1] if self._counts is None else self._counts[position]

    @cached_property
    def _counts(self) -> list[int] | None:
        """Columns of each datum, where no datum has more than the one before it; else None."""
        if self.columns is None or not bool((self.columns < 0).any()):
            return None
        present = self.columns >= 0
        counts = present.sum(1)
        # Padding is at the end of each datum's columns.
        ordered = bool((counts.diff() <= 0).all()) and bool((present.long().diff(dim=1) <= 0).all())
        return counts.tolist() if ordered else None

    def has_all_rows(self, data: slice) -> bool:
        """Whether only these data have rows, and the others count for their likelihood alone.

        Args:
            data: Positions, from the first on.

        Returns:
            Whether no other datum has a row.
        """
        if data.start != 0:
            return False
        rest = len(self.indices) - data.stop
        if not rest or self.columns is None:
            return not rest
        return not bool((self.columns[data.stop :] >= 0).any())

    def cuts(self) -> list[int]:
        """Positions at which the number of columns of a datum falls, where it never rises.

        Data with equally many columns go through the network together, without any padding.

        Returns:
            The positions, in ascending order.
        """
        counts = self._counts or []
        return [i for i in range(1, len(counts)) if counts[i] != counts[i - 1]]

    def columns_of(self, data: slice) -> Int[Tensor, "m k"] | None:
        """The columns of some consecutive data, without needless padding.

        Args:
            data: Their positions, between two cuts.

        Returns:
            One list for each datum, which may be empty; or None for all C.
        """
        if self.columns is None or self._counts is None:
            return None if self.columns is None else self.columns[data]
        return self.columns[data, : self._counts[data.start]]


def padded_columns(
    data: Int[Tensor, " r"], outputs: Int[Tensor, " r"], m: int
) -> Int[Tensor, "m k"]:
    """Arrange pairs (datum, output) as a list of outputs for each datum, padded with -1."""
    by_datum = data.argsort(stable=True)
    data, outputs = data[by_datum], outputs[by_datum]
    counts = data.bincount(minlength=m)
    slots = torch.arange(len(data)) - (counts.cumsum(0) - counts)[data]
    columns = torch.full((m, int(counts.max())), -1)
    columns[data, slots] = outputs
    return columns
