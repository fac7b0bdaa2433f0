"""The endless stream of anchored blocks: draws by predicted entropy."""

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

# Data of a block's log likelihood per row: such a datum costs one forward pass, a row three.
LIKELIHOOD_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class Prepared:
    """Anchors (rows as n K + d), groups and scores, from which partitions are drawn."""

    anchors: Int[Tensor, " Z"]
    groups: Groups
    scores: Scores


class AnchoredStream(Stream):
    """An endless stream of anchored blocks with their data.

    Each iteration (``for``, ``take``, ``epoch``) takes anchors and a partition of the rest anew.
    ``take`` draws blocks in proportion to their predicted entropies, and a new partition after as
    many draws as it has blocks; ``epoch`` goes through all of them once.

    Args:
        source: The data.
        anchoring: How often anchors are chosen anew.
        num_rows: Rows of a block.
        prepare: Returns anchors, groups and scores, at the beginning of an iteration.
        masses: Predicts the entropies of blocks.
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
        """False, as blocks and the data of their log likelihood are drawn."""
        return False

    @property
    def period(self) -> int:
        """Iterations from one choice of anchors to the next."""
        return self._anchoring.refresh

    def __iter__(self) -> Iterator[Block]:
        prepared = self._prepare()
        while True:
            made = self._partition(prepared)
            for _ in range(max(1, made.num_blocks)):
                # Drawn late, as the last block's value calibrates the predictions.
                yield self._alone(made, [self._draw(made)] if made.num_blocks else [])

    def round(self, n: int, at_once: int = 1) -> Iterator[Block]:
        """See ``Stream.round``: drawn as by ``take``, or all of a partition of at most n."""
        return self.drawn(n, whole=True).blocks(at_once)

    def epoch(self) -> Iterator[Block]:
        """See ``Stream.epoch``; the mean is ℓ(Z) + Σ_m ℓ(B_m|Z)."""
        made = self._partition(self._prepare())
        for draw in self._each(made):
            yield self._alone(made, [draw])
        if not made.num_blocks:
            yield self._alone(made, [])

    def drawn(self, n: int, whole: bool = False) -> "Drawn":
        """Fixed draws of one partition.

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
            # Offsets that cancel in the mean of all, and remove most of each draw's error.
            offset = control_variate(expected, self._of_one(made, number, expected), 1.0 / count)
            yield Draw(number, float(count), offset, self._of_one(made, number, made.guesses))

    def _draw(self, made: AnchoredBlocks) -> Draw:
        expected = self._masses.expected(made.keys, made.guesses)
        chances = probabilities(expected, made.counts)
        number = int(torch.multinomial(chances, 1, generator=self._generator))
        chance = float(chances[number])
        if made.tail is not None and number == len(made.parts):
            # The tail has one entry: any of its blocks.
            chance /= made.tail.count
            number += int(torch.randint(made.tail.count, (), generator=self._generator))
        offset = control_variate(expected, self._of_one(made, number, expected), chance)
        return Draw(number, 1.0 / chance, offset, self._of_one(made, number, made.guesses))

    @staticmethod
    def _of_one(made: AnchoredBlocks, number: int, values: Float[Tensor, " _"]) -> float:
        """The value of a part; all of the tail has one value, which its parts share."""
        group = made.group(number)
        return float(values[group]) / float(made.counts[group])

    def _alone(self, made: AnchoredBlocks, draws: list[Draw]) -> Block:
        return Drawn(self._source, made, draws, self._likelihood_data(made, 1)).block(0, 1)

    def _likelihood_data(self, made: AnchoredBlocks, count: int) -> Int[Tensor, "d u"]:
        """The data of each draw's log likelihood; together they cover the data evenly."""
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
        partition: The partition that was drawn from.
        draws: Draws of its parts, by their numbers.
        of_likelihood: The data of each draw's log likelihood; of the anchors' where none is drawn.
    """

    source: Source
    partition: AnchoredBlocks
    draws: list[Draw]
    of_likelihood: Int[Tensor, "d u"]

    def blocks(self, at_once: int) -> Iterator[Block]:
        """The draws in blocks of ``at_once``; the anchors alone where all rows are anchors."""
        count = len(self.draws) if self.partition.num_blocks else 1
        for start in range(0, count, at_once):
            yield self.block(start, at_once)

    def block(self, start: int, count: int) -> Block:
        """``count`` draws at most, from ``start`` on, in a block with its data; see ``blocks``."""
        some = slice(start, start + count)
        block = self.partition.block(self.draws[some], self.of_likelihood[some])
        inputs, targets = self.source.fetch(block.indices)
        return replace(block, inputs=inputs, targets=targets)
