"""A block: the data and outputs that one stochastic estimate uses."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Mean rows of a datum that has any, up to which ``expanded`` repeats data: another forward pass
# costs half as much as a row.
MOST_EXPANDED = 1.5


@dataclass(frozen=True)
class Draw:
    """A drawn part B of the rows that are no anchors; it estimates ℓ by ℓ(Z) + w ℓ(B|Z).

    Attributes:
        part: The number of the part in its partition, from 0.
        weight: w, one over the probability of the draw.
        guess: Predicted ℓ(B|Z), before calibration by observed values.
        key: Calibration key, the same for parts whose predictions err alike.
    """

    part: int
    weight: float = 1.0
    guess: float = 0.0
    key: int = 0


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Which rows of a block are anchors, and which belong to the parts given the anchors.

    Attributes:
        parts: For each accumulated row 0 for an anchor, b for part B_b, -1 for a row to leave out.
        weights: w_1, w_2, … of the parts: one over the probability of drawing each.
    """

    parts: Int[Tensor, " R"]
    weights: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Anchored:
    """Which rows of a block are anchors, and which parts of the others were drawn.

    Attributes:
        labels: For each of the block's columns 0 for an anchor, b = 1, 2, … for a row of the b-th
            of ``parts``, and -1 for padding and rows that do not count.
        draws: The draws whose mean estimates the log-determinant of all rows; several may be of one
            part. Empty where all rows are anchors.
        likelihood_weights: Weights (d, m) of each draw's own data, whose mean is the block's.
    """

    labels: Int[Tensor, "m k"]
    draws: tuple[Draw, ...]
    likelihood_weights: Float[Tensor, "d m"]

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of the drawn parts in their partition, each once."""
        return tuple(dict.fromkeys(draw.part for draw in self.draws))

    def label(self, draw: Draw) -> int:
        """The label of a draw's rows."""
        return 1 + self.parts.index(draw.part)

    @property
    def weights(self) -> tuple[float, ...]:
        """w_b in ℓ(Z) + Σ_b w_b ℓ(B_b|Z), for each of ``parts``."""
        weights = dict.fromkeys(self.parts, 0.0)
        for draw in self.draws:
            weights[draw.part] += draw.weight / len(self.draws)
        return tuple(weights.values())


@dataclass(frozen=True, eq=False)
class Block:
    """A subset of the index set, with the factors that scale it up to the whole.

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
        anchored: In a block with anchors, which rows these are; ``scale`` is 1 then.
        origin: In a block from ``expanded`` or ``share``, the earlier position of each datum.
        seed: Of what passes over the block draw, where several ranks have blocks of their own.
        shares: Number of ranks that pass over parts of the block; see ``share``.
    """

    indices: Int[Tensor, " m"]
    columns: Int[Tensor, "m k"] | None
    scale: float
    likelihood_weights: Float[Tensor, " m"]
    inputs: Any = None
    targets: Tensor | None = None
    anchored: Anchored | None = None
    origin: Int[Tensor, " m"] | None = None
    seed: int | None = None
    shares: int = 1

    @classmethod
    def empty(cls) -> "Block":
        """A block without data: that of a rank for which a partition has none left."""
        return cls(
            torch.zeros(0, dtype=torch.int64, device="cpu"),
            None,
            0.0,
            torch.zeros(0, device="cpu").double(),
        )

    def share(self, data: slice, shares: int) -> "Block":
        """Return some of the data, as the part that one of several ranks passes over.

        Its log likelihood is scaled up to the whole block's, its rows are not. So the mean of the
        parts' log likelihoods, and the sum of their statistics, are those of the block.
        """
        return replace(
            self,
            indices=self.indices[data],
            columns=None if self.columns is None else self.columns[data],
            likelihood_weights=shares * self.likelihood_weights[data],
            inputs=None if self.inputs is None else self.inputs[data],
            targets=None if self.targets is None else self.targets[data],
            origin=torch.arange(len(self.indices), device="cpu")[data],
            shares=shares,
        )

    def expanded(self) -> "Block":
        """Return a block that takes a datum of k rows as k data of one row each, in the same order.

        Data with equally many rows go through the network together, and seeing a few data twice
        costs less than another pass. Use it only where the rows of a datum do not depend on which
        of them a block has, and where data are not counted. The result has an ``origin``; it is
        this block where that has no padding, or where too many data have several rows for this to
        pay.
        """
        if self.columns is None or self.origin is not None or self._counts is None:
            return self
        present = self.columns >= 0
        counts = present.sum(1)
        with_rows = int((counts > 0).sum())
        if not 0 < int(counts.sum()) <= MOST_EXPANDED * with_rows:
            return self
        # Data without rows stay once.
        origin = torch.arange(len(counts), device="cpu").repeat_interleave(counts.clamp(min=1))
        first = torch.cat([torch.ones(1, dtype=torch.bool, device="cpu"), origin.diff() > 0])
        has_row = counts[origin] > 0

        def spread(table: Tensor) -> Tensor:
            column = torch.full((len(origin), 1), -1, device="cpu")
            column[has_row, 0] = table[present]
            return column

        anchored = self.anchored
        if anchored is not None:
            weights = anchored.likelihood_weights[:, origin] * first
            labels = spread(anchored.labels)
            anchored = replace(anchored, labels=labels, likelihood_weights=weights)
        return replace(
            self,
            indices=self.indices[origin],
            columns=spread(self.columns),
            likelihood_weights=self.likelihood_weights[origin] * first,
            inputs=None if self.inputs is None else self.inputs[origin.to(self.inputs.device)],
            targets=None if self.targets is None else self.targets[origin.to(self.targets.device)],
            anchored=anchored,
            origin=origin,
        )

    @property
    def num_rows(self) -> int | None:
        """Number of rows of the block; None where they are all outputs of its data."""
        return None if self.columns is None else int((self.columns >= 0).sum())

    @property
    def num_draws(self) -> int:
        """How many draws given the same anchors the block holds; 1 without anchors."""
        return 1 if self.anchored is None else len(self.anchored.draws)

    def of_draw(self, number: int) -> "Block":
        """Return the same data and anchors with a single draw, by its position among the draws.

        Rows of other parts, and likelihood data of other draws, do not count in it.
        """
        anchored = self.anchored
        if anchored is None or len(anchored.draws) < 2:
            return self
        draw, labels = anchored.draws[number], anchored.labels
        mine = torch.where(labels == anchored.label(draw), 1, -1)
        weights = anchored.likelihood_weights[number]
        one_draw = Anchored(torch.where(labels == 0, 0, mine), (draw,), weights[None])
        return replace(self, likelihood_weights=weights, anchored=one_draw)

    def rows_of(self, position: int) -> int:
        """Most rows of a datum from a position on; 0 where none follow, or data have all C."""
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
        """Whether only these data have rows, and the others count for their likelihood alone."""
        if data.start != 0:
            return False
        num_others = len(self.indices) - data.stop
        if not num_others or self.columns is None:
            return not num_others
        return not bool((self.columns[data.stop :] >= 0).any())

    def cuts(self) -> list[int]:
        """Return ascending positions where a datum's number of columns falls, if it never rises.

        Between two of them data go through the network together, without any padding.
        """
        counts = self._counts or []
        return [i for i in range(1, len(counts)) if counts[i] != counts[i - 1]]

    def columns_of(self, data: slice, padded: bool = False) -> Int[Tensor, "m k"] | None:
        """Return the columns of the data between two cuts, or None for all C.

        There is no needless padding unless ``padded``; a datum's list may be empty.
        """
        if self.columns is None or self._counts is None or padded:
            return None if self.columns is None else self.columns[data]
        return self.columns[data, : self._counts[data.start]]


def padded_columns(
    data: Int[Tensor, " r"], outputs: Int[Tensor, " r"], m: int
) -> Int[Tensor, "m k"]:
    """Arrange pairs (datum, output) as a list of outputs for each datum, padded with -1."""
    by_datum = data.argsort(stable=True)
    data, outputs = data[by_datum], outputs[by_datum]
    counts = data.bincount(minlength=m)
    slots = torch.arange(len(data), device="cpu") - (counts.cumsum(0) - counts)[data]
    columns = torch.full((m, int(counts.max())), -1, device="cpu")
    columns[data, slots] = outputs
    return columns
