"""Anchors and blocks of the rest: what one draw of the anchored estimate looks at.

The rows that are no anchors are partitioned into M blocks, and one is drawn uniformly: the estimate
is ℓ(Z) + M ℓ(B_m|Z), and its expectation ℓ(Z) + Σ_m ℓ(B_m|Z) ≥ ℓ(I). The partition is stratified:
rows are ranked by their scores, and of every M consecutive ones each block gets one, at random. The
blocks then are much alike, so that the estimate depends little on which one was drawn.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.anchors.choice import Anchoring
from evigrad.errors import ConfigurationError
from evigrad.partitions import Block, choose_distinct, padded_columns
from evigrad.sources import Source


@dataclass(frozen=True, eq=False)
class AnchoredBlocks:
    """A partition of all rows but the anchors, stratified by their scores.

    Attributes:
        anchors: Rows as n D + d.
        parts: The blocks, as many of them as the partition has.
        num_data: N.
        num_columns: D, the columns of the root that are not zero for certain.
    """

    anchors: Int[Tensor, " Z"]
    parts: list[Int[Tensor, " _"]]
    num_data: int
    num_columns: int

    @classmethod
    def draw(
        cls,
        anchors: Int[Tensor, " Z"],
        scores: Float[Tensor, "N D"],
        num_rows: int,
        generator: torch.Generator,
    ) -> "AnchoredBlocks":
        """Draw a partition.

        Args:
            anchors: Rows as n D + d.
            scores: Of every row, by which the strata are made.
            num_rows: Of a block, its anchors included.
            generator: A CPU generator.

        Returns:
            The partition.
        """
        flat = scores.flatten()
        free = torch.ones(len(flat), dtype=torch.bool)
        free[anchors] = False
        rest = free.nonzero().squeeze(1)
        # Rows of equal scores in random order: where all are equal, the partition is uniform.
        rest = rest[torch.randperm(len(rest), generator=generator)]
        ranked = rest[flat[rest].argsort(descending=True, stable=True)]
        parts = _dealt(ranked, num_rows - len(anchors), generator)
        return cls(anchors, parts, *scores.shape)

    def block(self, number: int | None, of_likelihood: Int[Tensor, " u"]) -> Block:
        """A block of the anchors and one part.

        Args:
            number: Of the part, None for the anchors alone.
            of_likelihood: The data that the log likelihood is taken from, drawn uniformly.

        Returns:
            The block, without inputs; data with the same number of rows lie together.
        """
        part = self.anchors[:0] if number is None else self.parts[number]
        pairs = torch.cat([self.anchors, part])
        labels = torch.cat([torch.zeros_like(self.anchors), torch.ones_like(part)])
        data = pairs // self.num_columns
        indices = torch.cat([data, of_likelihood]).unique()
        position = torch.searchsorted(indices, data)
        # Those with most rows first, and those without any last.
        counts = position.bincount(minlength=len(indices))
        order = counts.argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        position, indices = rank[position], indices[order]
        # Rows and their labels are laid out in the same way.
        columns = padded_columns(position, pairs % self.num_columns, len(indices))
        parts = padded_columns(position, labels, len(indices))
        weights = torch.isin(indices, of_likelihood).double() * self.num_data / len(of_likelihood)
        return Block(
            indices,
            columns,
            scale=1.0,
            likelihood_weights=weights,
            parts=parts,
            part_weights=() if number is None else (float(len(self.parts)),),
        )


def _dealt(
    ranked: Int[Tensor, " R"], size: int, generator: torch.Generator
) -> list[Int[Tensor, " _"]]:
    """Parts of at most ``size`` rows with one of each stratum of ranked rows."""
    if not len(ranked):
        return []
    count = -(-len(ranked) // size)
    strata = -(-len(ranked) // count)
    missing = count * strata - len(ranked)
    table = torch.cat([ranked, ranked.new_full((missing,), -1)]).reshape(strata, count)
    keys = torch.rand(strata, count, dtype=torch.float64, generator=generator)
    table = table.gather(1, keys.argsort(dim=1))
    return [column[column >= 0] for column in table.mT]


class AnchoredStream:
    """An endless stream of anchored blocks with their data.

    Each iteration (``for``, ``take``, ``epoch``) takes anchors and a partition of the rest anew,
    and goes through its blocks in random order, then through those of the next partition.

    Args:
        source: The data.
        anchoring: How many data the likelihood takes.
        num_rows: Of a block.
        prepare: Returns anchors and scores, at the beginning of an iteration.
        generator: A CPU generator.
    """

    is_constant = False

    def __init__(
        self,
        source: Source,
        anchoring: Anchoring,
        num_rows: int,
        prepare: Callable[[], tuple[Int[Tensor, " Z"], Float[Tensor, "N D"]]],
        generator: torch.Generator,
    ) -> None:
        self._source, self._anchoring, self._num_rows = source, anchoring, num_rows
        self._prepare, self._generator = prepare, generator

    def __iter__(self) -> Iterator[Block]:
        """The blocks of partition after partition, without end."""
        anchors, scores = self._prepare()
        while True:
            yield from self._partition(anchors, scores)

    def take(self, n: int) -> Iterator[Block]:
        """The first n blocks of a new iteration.

        Args:
            n: How many, possibly more than a partition has.

        Returns:
            Blocks with their inputs and targets.

        Raises:
            ConfigurationError: If n is negative.
        """
        if n < 0:
            raise ConfigurationError(f"The number of blocks must not be negative, as {n} is.")
        return islice(iter(self), n)

    def epoch(self) -> Iterator[Block]:
        """The blocks of exactly one partition, whose mean is ℓ(Z) + Σ_m ℓ(B_m|Z).

        Returns:
            Blocks with their inputs and targets.
        """
        return self._partition(*self._prepare())

    def _partition(
        self, anchors: Int[Tensor, " Z"], scores: Float[Tensor, "N D"]
    ) -> Iterator[Block]:
        num_data, generator = len(self._source), self._generator
        num_likelihood = self._anchoring.num_likelihood(self._num_rows, num_data)
        made = AnchoredBlocks.draw(anchors, scores, self._num_rows, generator)
        order = torch.randperm(len(made.parts), generator=generator).tolist()
        for number in order or [None]:
            block = made.block(number, choose_distinct(num_data, num_likelihood, generator))
            inputs, targets = self._source.fetch(block.indices)
            yield replace(block, inputs=inputs, targets=targets)
