"""The endless stream of anchored blocks: which one is drawn, and what is expected of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from jaxtyping import Int
from torch import Tensor

from evigrad.anchors.blocks import AnchoredBlocks
from evigrad.anchors.choice import Anchoring
from evigrad.anchors.groups import Groups
from evigrad.anchors.masses import Masses, control_variate, probabilities
from evigrad.anchors.scores import Scores
from evigrad.blocks import Block, Draw
from evigrad.partitions import choose_distinct
from evigrad.sources import Source
from evigrad.streams import Stream


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
        anchoring: How many data the likelihood takes.
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
                yield self._block(made, [self._draw(made)] if made.num_blocks else [])

    def round(self, n: int, at_once: int = 1) -> Iterator[Block]:
        """Blocks whose mean several steps share.

        Args:
            n: How many draws, at most.
            at_once: How many of them a block holds, with the anchors that they share.

        Yields:
            As ``take`` draws them, or all of a partition that has no more.
        """
        made = self._partition(self._prepare())
        yield from self._with_data(made, self._draws(made, n), at_once)

    def epoch(self) -> Iterator[Block]:
        """The blocks of exactly one partition, whose mean is ℓ(Z) + Σ_m ℓ(B_m|Z).

        Yields:
            Blocks with their inputs and targets.
        """
        made = self._partition(self._prepare())
        yield from self._with_data(made, self._draws(made, made.num_blocks), 1)

    def _partition(self, prepared: Prepared) -> AnchoredBlocks:
        return AnchoredBlocks.draw(
            prepared.anchors, prepared.scores, self._num_rows, self._generator, prepared.groups
        )

    def _draws(self, made: AnchoredBlocks, n: int) -> Iterator[Draw]:
        """So many draws, or each part once."""
        count = made.num_blocks
        if count > n:
            yield from (self._draw(made) for _ in range(n))
        for number in (
            torch.randperm(count, generator=self._generator).tolist() if count <= n else ()
        ):
            yield Draw(number, float(count), expected=self._expected(made, number))

    def _draw(self, made: AnchoredBlocks) -> Draw:
        expected = self._masses.expected(made.keys, made.guesses)
        chances = probabilities(expected, made.counts)
        number = int(torch.multinomial(chances, 1, generator=self._generator))
        chance = float(chances[number])
        if made.tail is not None and number == len(made.parts):
            # Of the tail any of its blocks.
            chance /= made.tail.count
            number += int(torch.randint(made.tail.count, (), generator=self._generator))
        own = self._expected(made, number)
        return Draw(number, 1.0 / chance, control_variate(expected, own, chance), own)

    def _expected(self, made: AnchoredBlocks, number: int) -> float:
        group = made.group(number)
        one = slice(group, group + 1)
        expected = float(self._masses.expected(made.keys[one], made.guesses[one]))
        if made.tail is not None and group == len(made.parts):
            return expected / made.tail.count
        return expected

    def _with_data(
        self, made: AnchoredBlocks, draws: Iterable[Draw], at_once: int
    ) -> Iterator[Block]:
        """Draws in blocks of some of them, the anchors alone where there are none."""
        rest, found = iter(draws), False
        # Taken late, as what was seen of a block tells what to expect of the next ones.
        while (some := list(islice(rest, at_once))) or not found:
            found = True
            yield self._block(made, some)

    def _block(self, made: AnchoredBlocks, draws: Sequence[Draw]) -> Block:
        num_data = len(self._source)
        each = self._anchoring.num_likelihood(self._num_rows, num_data)
        count = min(max(1, len(draws)) * each, num_data)
        block = made.block(draws, choose_distinct(num_data, count, self._generator))
        inputs, targets = self._source.fetch(block.indices)
        return replace(block, inputs=inputs, targets=targets)
