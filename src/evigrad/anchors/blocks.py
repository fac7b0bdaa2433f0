"""Anchors and blocks of the rest: what one draw of the anchored estimate looks at.

The rows that are no anchors are partitioned into M blocks, of which m is drawn with probability
π_m: the estimate is ℓ(Z) + ℓ(B_m|Z)/π_m, and its expectation ℓ(Z) + Σ_m ℓ(B_m|Z) ≥ ℓ(I).

The rows of a block are of one column of the root: data that the network is unsure of in the same
way have much in common, and their joint entropy is less than the sum. Within a column the partition
is stratified: rows are ranked by their scores, and of every M consecutive ones each block gets one,
at random. The blocks of a column then are much alike, and what was seen of one tells what to expect
of the others, hence π (``masses``): the estimate depends little on which block was drawn.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.anchors.choice import Anchoring
from evigrad.anchors.masses import Masses, probabilities
from evigrad.errors import ConfigurationError
from evigrad.partitions import Block, choose_distinct, padded_columns
from evigrad.sources import Source


@dataclass(frozen=True, eq=False)
class AnchoredBlocks:
    """A partition of all rows but the anchors.

    Attributes:
        anchors: Rows as n D + d.
        parts: The blocks, without the anchors.
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
        """Draw a partition by columns, stratified by scores.

        Args:
            anchors: Rows as n D + d.
            scores: Of every row.
            num_rows: Of a block, its anchors included.
            generator: A CPU generator.

        Returns:
            The partition.
        """
        num_data, num_columns = scores.shape
        free = torch.ones(num_data * num_columns, dtype=torch.bool)
        free[anchors] = False
        size = max(1, num_rows - len(anchors))
        parts = []
        for columns in _together(free.reshape(num_data, num_columns).sum(0).tolist(), size):
            rest = (torch.arange(num_data)[:, None] * num_columns + columns).flatten()
            rest = rest[free[rest]]
            # Rows of equal scores in random order: where all are equal, the partition is uniform.
            rest = rest[torch.randperm(len(rest), generator=generator)]
            ranked = rest[scores.flatten()[rest].argsort(descending=True, stable=True)]
            parts += _dealt(ranked, size, generator)
        return cls(anchors, parts, num_data, num_columns)

    def block(
        self,
        number: int | None,
        of_likelihood: Int[Tensor, " u"],
        probability: float = 1.0,
        expected: float = 0.0,
    ) -> Block:
        """A block of the anchors and one part.

        Args:
            number: Of the part, None for the anchors alone.
            of_likelihood: The data that the log likelihood is taken from, drawn uniformly.
            probability: With which the part was drawn.
            expected: What is expected of ℓ(B|Z), in nats.

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
            part_weights=() if number is None else (1.0 / probability,),
            expected=() if number is None else (expected,),
        )


def _together(counts: list[int], size: int) -> list[Int[Tensor, " _"]]:
    """Consecutive columns in groups of at least ``size`` rows, where there are as many."""
    groups: list[list[int]] = []
    rows = 0
    for column, count in enumerate(counts):
        if not groups or rows >= size:
            groups.append([])
            rows = 0
        groups[-1].append(column)
        rows += count
    if len(groups) > 1 and rows < size:
        last = groups.pop()
        groups[-1] += last
    return [torch.tensor(group) for group in groups]


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

    Each iteration (``for``, ``take``, ``epoch``) takes anchors and a partition of the rest anew.
    ``take`` draws blocks of it, each as likely as it is expected to matter, and a new partition
    after as many draws as it has blocks; ``epoch`` goes through all of them once.

    Args:
        source: The data.
        anchoring: How many data the likelihood takes.
        num_rows: Of a block.
        prepare: Returns anchors and scores, at the beginning of an iteration.
        masses: What to expect of blocks.
        generator: A CPU generator.
    """

    is_constant = False

    def __init__(
        self,
        source: Source,
        anchoring: Anchoring,
        num_rows: int,
        prepare: Callable[[], tuple[Int[Tensor, " Z"], Float[Tensor, "N D"]]],
        masses: Masses,
        generator: torch.Generator,
    ) -> None:
        self._source, self._anchoring, self._num_rows = source, anchoring, num_rows
        self._prepare, self._masses, self._generator = prepare, masses, generator

    def __iter__(self) -> Iterator[Block]:
        """Blocks drawn from partition after partition, without end."""
        anchors, scores = self._prepare()
        while True:
            made = AnchoredBlocks.draw(anchors, scores, self._num_rows, self._generator)
            guesses = self._masses.guesses(made.parts, anchors, scores)
            for _ in range(max(1, len(made.parts))):
                # Drawn late, as what was seen of the last block tells what to expect of this one.
                expected = self._masses.expected(made.parts, guesses, made.num_columns)
                yield self._drawn(made, expected)

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

        Yields:
            Blocks with their inputs and targets.
        """
        anchors, scores = self._prepare()
        made = AnchoredBlocks.draw(anchors, scores, self._num_rows, self._generator)
        guesses = self._masses.guesses(made.parts, anchors, scores)
        count = len(made.parts)
        for number in torch.randperm(count, generator=self._generator).tolist() or [None]:
            expected = self._masses.expected(made.parts, guesses, made.num_columns)
            own = 0.0 if number is None else float(expected[number])
            yield self._with_data(made, number, 1.0 / max(1, count), own)

    def _drawn(self, made: AnchoredBlocks, expected: Float[Tensor, " M"]) -> Block:
        if not made.parts:
            return self._with_data(made, None, 1.0, 0.0)
        chances = probabilities(expected)
        number = int(torch.multinomial(chances, 1, generator=self._generator))
        return self._with_data(made, number, float(chances[number]), float(expected[number]))

    def _with_data(
        self, made: AnchoredBlocks, number: int | None, probability: float, expected: float
    ) -> Block:
        num_data = len(self._source)
        count = self._anchoring.num_likelihood(self._num_rows, num_data)
        of_likelihood = choose_distinct(num_data, count, self._generator)
        block = made.block(number, of_likelihood, probability, expected)
        inputs, targets = self._source.fetch(block.indices)
        return replace(block, inputs=inputs, targets=targets)
