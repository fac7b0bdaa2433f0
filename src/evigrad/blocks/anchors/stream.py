"""The endless stream of anchored blocks: which one is drawn, and what is expected of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.blocks.anchors.blocks import AnchoredBlocks
from evigrad.blocks.anchors.choice import Anchoring
from evigrad.blocks.anchors.groups import Groups
from evigrad.blocks.anchors.masses import Masses, control_variate, probabilities
from evigrad.blocks.anchors.scores import Scores
from evigrad.blocks.block import Block, Draw
from evigrad.blocks.partitions import choose_distinct
from evigrad.blocks.sources import Source
from evigrad.blocks.streams import Stream

# Data of a block's log likelihood, for each of its rows: a forward pass each, where a row takes
# three.
LIKELIHOOD_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class Prepared:
    """What partitions are drawn from.

    Attributes:
        anchors: Rows as n K + d.
        groups: Blocks that all partitions have.
        scores: Of every row.
    """

    anchors: Int[Tensor, " Z"]
    groups: Groups
    scores: Scores


class AnchoredStream(Stream):
    """An endless stream of anchored blocks with their data.

    Each iteration (``for``, ``take``, ``epoch``) takes anchors and a partition of the rest anew.
    ``take`` draws blocks of it, each as likely as it is expected to matter, and a new partition
    after as many draws as it has blocks; ``epoch`` goes through all of them once.

    Args:
        source: The data.
        anchoring: How often anchors are chosen anew.
        num_rows: Of a block.
        prepare: Returns anchors, groups and scores, at the beginning of an iteration.
        masses: What to expect of blocks.
        generator: A CPU generator.
    """

    def __init__(
        self,
        source: Source,
        anchoring: Anchoring,
        num_rows: int,
        prepare: Callable[[], "Prepared"],
        masses: Masses,
        generator: torch.Generator,
    ) -> None:
        self._source, self._anchoring, self._num_rows = source, anchoring, num_rows
        self._prepare, self._masses, self._generator = prepare, masses, generator

    @property
    def is_constant(self) -> bool:
        """Never: blocks are drawn, and the data of their log likelihood too."""
        return False

    @property
    def period(self) -> int:
        """Iterations from one choice of anchors to the next."""
        return self._anchoring.refresh

    def __iter__(self) -> Iterator[Block]:
        """Blocks drawn from partition after partition, without end."""
        prepared = self._prepare()
        while True:
            made = self._partition(prepared)
            for _ in range(max(1, made.num_blocks)):
                # Drawn late, as what was seen of the last block tells what to expect of this one.
                yield self._alone(made, [self._draw(made)] if made.num_blocks else [])

    def round(self, n: int, at_once: int = 1) -> Iterator[Block]:
        """Blocks whose mean several steps share.

        Args:
            n: How many draws, at most.
            at_once: How many of them a block holds, with the anchors that they share.

        Returns:
            As ``take`` draws them, or all of a partition that has no more.
        """
        return self.drawn(n, whole=True).blocks(at_once)

    def epoch(self) -> Iterator[Block]:
        """The blocks of exactly one partition, whose mean is ℓ(Z) + Σ_m ℓ(B_m|Z).

        Yields:
            Blocks with their inputs and targets.
        """
        made = self._partition(self._prepare())
        for draw in self._each(made):
            yield self._alone(made, [draw])
        if not made.num_blocks:
            yield self._alone(made, [])

    def drawn(self, n: int, whole: bool = False) -> "Drawn":
        """Draws of one partition, of which nothing is random any more.

        Args:
            n: How many.
            whole: Whether to take each part once instead, where the partition has no more than n.

        Returns:
            The draws; none where all rows are anchors.
        """
        made = self._partition(self._prepare())
        if whole and made.num_blocks <= n:
            draws = list(self._each(made))
        else:
            draws = [self._draw(made) for _ in range(n if made.num_blocks else 0)]
        return Drawn(self._source, made, draws, self._likelihood_data(made, max(1, len(draws))))

    def _partition(self, prepared: Prepared) -> AnchoredBlocks:
        return AnchoredBlocks.draw(
            prepared.anchors, prepared.scores, self._num_rows, self._generator, prepared.groups
        )

    def _each(self, made: AnchoredBlocks) -> Iterator[Draw]:
        """Each part once, in random order."""
        count = made.num_blocks
        expected = self._masses.expected(made.keys, made.guesses)
        for number in torch.randperm(count, generator=self._generator).tolist():
            # Offsets that have no part in the mean of all; of each they take what it is off by.
            offset = control_variate(expected, self._of_one(made, number, expected), 1.0 / count)
            yield Draw(number, float(count), offset, self._of_one(made, number, made.guesses))

    def _draw(self, made: AnchoredBlocks) -> Draw:
        expected = self._masses.expected(made.keys, made.guesses)
        chances = probabilities(expected, made.counts)
        number = int(torch.multinomial(chances, 1, generator=self._generator))
        chance = float(chances[number])
        if made.tail is not None and number == len(made.parts):
            # Of the tail any of its blocks.
            chance /= made.tail.count
            number += int(torch.randint(made.tail.count, (), generator=self._generator))
        offset = control_variate(expected, self._of_one(made, number, expected), chance)
        return Draw(number, 1.0 / chance, offset, self._of_one(made, number, made.guesses))

    @staticmethod
    def _of_one(made: AnchoredBlocks, number: int, values: Float[Tensor, " _"]) -> float:
        """What is said of a part, where all of the tail has one number."""
        group = made.group(number)
        return float(values[group]) / float(made.counts[group])

    def _alone(self, made: AnchoredBlocks, draws: list[Draw]) -> Block:
        return Drawn(self._source, made, draws, self._likelihood_data(made, 1)).block(0, 1)

    def _likelihood_data(self, made: AnchoredBlocks, count: int) -> Int[Tensor, "d u"]:
        """The data of the log likelihood of so many draws; together they are spread over all."""
        num_data = len(self._source)
        each = min(max(1, int(LIKELIHOOD_SHARE * self._num_rows)), num_data)
        if made.num_blocks <= 1:
            each = num_data  # a block that holds every row passes over all the data in any case
        total = min(count * each, num_data)
        chosen = choose_distinct(num_data, total, self._generator)
        if count > 1:
            chosen = chosen[torch.randperm(total, generator=self._generator)]
        return chosen[torch.arange(count * each) % total].reshape(count, each)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Draws of one partition, which can be laid out in blocks again and again.

    Attributes:
        source: The data.
        partition: What is drawn from.
        draws: Of its parts, by their numbers.
        of_likelihood: The data of each draw's log likelihood; of the anchors alone without any.
    """

    source: Source
    partition: AnchoredBlocks
    draws: list[Draw]
    of_likelihood: Int[Tensor, "d u"]

    def blocks(self, at_once: int) -> Iterator[Block]:
        """The draws in blocks, or one of the anchors alone where these are all rows.

        Args:
            at_once: How many of them a block holds, with the anchors that they share.

        Yields:
            Blocks with their inputs and targets.
        """
        count = len(self.draws) if self.partition.num_blocks else 1
        for start in range(0, count, at_once):
            yield self.block(start, at_once)

    def block(self, start: int, count: int) -> Block:
        """Some of the draws in a block, or the anchors alone where these are all rows.

        Args:
            start: The position of the first one.
            count: How many, at most.

        Returns:
            A block with its inputs and targets.
        """
        some = slice(start, start + count)
        block = self.partition.block(self.draws[some], self.of_likelihood[some])
        inputs, targets = self.source.fetch(block.indices)
        return replace(block, inputs=inputs, targets=targets)
