"""A block, the examples and outputs that one stochastic estimate uses, and its micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Largest mean number of rows, over examples with rows, for which ``expanded`` repeats examples.
# Another forward pass takes half the time of a row.
MOST_EXPANDED = 1.5


@dataclass(frozen=True)
class Draw:
    """A random part B of the rows that are not anchors.

    Given the anchors Z, a draw estimates the log-determinant ℓ of all rows as ℓ(Z) + w ℓ(B|Z).

    Attributes:
        part: Index of the part in its partition, starting at 0.
        weight: w, the inverse probability of the draw.
        guess: Prediction of ℓ(B|Z), before calibration by observed values.
        key: Calibration key, shared by parts whose predictions have similar errors.
    """

    part: int
    weight: float = 1.0
    guess: float = 0.0
    key: int = 0


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Which rows of a block are anchors, and which are in the drawn parts.

    Attributes:
        parts: For each row of the statistic: 0 for an anchor, b for a row of part B_b, and -1 for
            any other row.
        weights: The weights w_1, w_2, … of the parts in ℓ(Z) + Σ_b w_b ℓ(B_b|Z).
    """

    parts: Int[Tensor, " R"]
    weights: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Anchored:
    """Which columns of a block are anchors, and which parts of the other rows were drawn.

    Attributes:
        labels: For each column: 0 for an anchor, b = 1, 2, … for a row of the b-th entry of
            ``parts``, and -1 for padding and for rows that do not count.
        draws: The draws, or () if all rows are anchors. The mean of their estimates is the estimate
            for all rows. A part may be drawn several times.
        likelihood_weights: Likelihood weights of the m examples for each of d draws, (d, m). Their
            mean over the draws is the block's ``likelihood_weights``.
    """

    labels: Int[Tensor, "m k"]
    draws: tuple[Draw, ...]
    likelihood_weights: Float[Tensor, "d m"]

    @property
    def parts(self) -> tuple[int, ...]:
        """Indices of the drawn parts in their partition, without repetitions."""
        return tuple(dict.fromkeys(draw.part for draw in self.draws))

    def label(self, draw: Draw) -> int:
        """Return the label that marks the rows of this draw in ``labels``."""
        return 1 + self.parts.index(draw.part)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight w_b of each of ``parts`` in ℓ(Z) + Σ_b w_b ℓ(B_b|Z)."""
        weights = dict.fromkeys(self.parts, 0.0)
        for draw in self.draws:
            weights[draw.part] += draw.weight / len(self.draws)
        return tuple(weights.values())


@dataclass(frozen=True, eq=False)
class Block:
    """A subset of the examples and rows, with factors that scale it up to the whole data set.

    All tensors except `inputs` and `targets` are on the CPU.

    Attributes:
        indices: Positions of the m examples in the data set, (m,). They are distinct, except in a
            block from ``expanded``.
        columns: Distinct columns of the likelihood's root for each example, (m, k), with -1 for
            padding. ``None`` for all columns. With the default root ``subblock``, columns are
            outputs, and the root belongs to their sub-block of the Hessian.
        scale: Factor that turns the block's log-determinant into an estimate for all rows.
        likelihood_weights: Weights w_n (m,) in float64, such that sum_n w_n log p(y_n) is an
            unbiased estimate of the log likelihood of all examples.
        inputs: Inputs (m, ...), once fetched.
        targets: Targets (m, ...), once fetched.
        anchored: The anchors and drawn parts of an anchored block, whose ``scale`` is 1.
        origin: In a block from ``expanded`` or ``share``, the position of each example in the
            original block.
        seed: Seed for random draws in passes over the block, if ranks have different blocks.
        shares: Number of ranks that share the original block (see ``share``).

    See also: docs/trainers.md.
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
        """Return a block without examples, for a rank that gets no other block."""
        return cls(
            torch.zeros(0, dtype=torch.int64, device="cpu"),
            None,
            0.0,
            torch.zeros(0, device="cpu").double(),
        )

    def share(self, data: slice, shares: int) -> "Block":
        """Return one rank's part of this block, with only the examples in ``data``.

        Likelihood weights are multiplied by ``shares``, the number of ranks. The log likelihood of
        this block is then the mean over the parts. Its statistic is the sum over the parts.
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
        """Return a block that repeats each example with k rows k times, each time with one row.

        Examples with the same number of rows go through the network together, and a few repetitions
        cost less than another pass. Call this method only if the rows of an example do not depend
        on the block's other rows and the curvature does not count examples. The result has an
        ``origin``. This block is returned unchanged if it has no padding, or if too many examples
        have several rows.
        """
        if self.columns is None or self.origin is not None or self._counts is None:
            return self
        present = self.columns >= 0
        counts = present.sum(1)
        with_rows = int((counts > 0).sum())
        if not 0 < int(counts.sum()) <= MOST_EXPANDED * with_rows:
            return self
        # Examples without rows occur once.
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

    @cached_property
    def num_rows(self) -> int | None:
        """Number of rows of the block, or None if ``columns`` is None."""
        return None if self.columns is None else int((self.columns >= 0).sum())

    @property
    def num_draws(self) -> int:
        """Number of draws for the same anchors, or 1 without anchors."""
        return 1 if self.anchored is None else len(self.anchored.draws)

    def of_draw(self, number: int) -> "Block":
        """Return this block with all anchors but only the draw at this position in ``draws``.

        Rows of other parts and likelihood weights of other draws do not count.
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
        """Return the largest number of rows of any example at or after this position.

        The result is 0 if ``columns`` is None.
        """
        if self.columns is None:
            return 0
        return self.columns.shape[1] if self._counts is None else self._counts[position]

    @cached_property
    def _counts(self) -> list[int] | None:
        """The number of columns of each example if it never rises, or None."""
        if self.columns is None or not bool((self.columns < 0).any()):
            return None
        present = self.columns >= 0
        counts = present.sum(1)
        # Padding comes last in the columns of an example.
        ordered = bool((counts.diff() <= 0).all()) and bool((present.long().diff(dim=1) <= 0).all())
        return counts.tolist() if ordered else None

    def num_collected(self, padded: bool = False) -> int:
        """Return the number of examples for which ``columns_of`` has columns, which come first.

        Examples on other ranks count too, as if all ranks had equally many.
        """
        if self._counts is None or padded:
            return len(self.indices) * self.shares
        return sum(count > 0 for count in self._counts) * self.shares

    def cuts(self) -> list[int]:
        """Return the positions, in ascending order, at which examples begin to have fewer columns.

        Examples between two consecutive positions go through the network together, without padding.
        """
        counts = self._counts or []
        return [i for i in range(1, len(counts)) if counts[i] != counts[i - 1]]

    def columns_of(self, data: slice, padded: bool = False) -> Int[Tensor, "m k"] | None:
        """Return the columns of the examples between two ``cuts``, or None for all C columns.

        Unless ``padded`` is True, padding is removed, so the result may have no columns.
        """
        if self.columns is None or self._counts is None or padded:
            return None if self.columns is None else self.columns[data]
        return self.columns[data, : self._counts[data.start]]


def padded_columns(
    data: Int[Tensor, " r"], outputs: Int[Tensor, " r"], m: int
) -> Int[Tensor, "m k"]:
    """Return a matrix with the output indices of each example, padded with -1.

    ``data`` and ``outputs`` contain the example and the output of each row, for m examples.
    """
    by_datum = data.argsort(stable=True)
    data, outputs = data[by_datum], outputs[by_datum]
    counts = data.bincount(minlength=m)
    slots = torch.arange(len(data), device="cpu") - (counts.cumsum(0) - counts)[data]
    columns = torch.full((m, int(counts.max())), -1, device="cpu")
    columns[data, slots] = outputs
    return columns


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some examples of a block.

    Attributes:
        x: Inputs, as passed to the network.
        y: Targets.
        data: Positions of the examples in the block.
        columns: Columns of the root, or None for all.
        likelihood_weights: Weights of the log likelihoods of the examples.
        labels: Sampled labels, for the curvature ``mc``.
    """

    x: Tensor
    y: Tensor
    data: slice
    columns: Int[Tensor, "m k"] | None
    likelihood_weights: Tensor
    labels: Sequence[Tensor] = ()

    @property
    def has_rows(self) -> bool:
        """Whether the examples have rows, instead of only a log likelihood."""
        return self.columns is None or self.columns.shape[1] > 0
