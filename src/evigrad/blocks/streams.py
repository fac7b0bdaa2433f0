"""An estimator's blocks together with their data."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch

from evigrad.blocks.block import Block
from evigrad.blocks.partitions import Partition
from evigrad.blocks.sources import Source
from evigrad.errors import ConfigurationError, InputError


class Stream(Iterable[Block]):
    """Blocks of an estimator with their data, without end.

    It holds no position: each iteration (``for``, ``take``, ``round``, ``epoch``) starts anew.

    Attributes:
        is_constant: Whether every block is the same: all data and outputs, with nothing drawn.
        period: How many consecutive iterations share a choice of anchors; 1 without anchors.
    """

    is_constant: bool = False
    period: int = 1

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

    def round(self, n: int) -> Iterator[Block]:
        """At most n blocks of one partition, whose mean several steps share.

        Args:
            n: How many, at most.

        Returns:
            Blocks with their inputs and targets.
        """
        return islice(self.epoch(), n)

    @abstractmethod
    def epoch(self) -> Iterator[Block]:
        """The blocks of exactly one partition.

        Returns:
            Blocks with their inputs and targets.

        Raises:
            InputError: If items of the data set cannot be stacked.
        """


class BlockStream(Stream):
    """An endless stream of an estimator's blocks, with their data.

    It goes through the blocks of one random partition in random order, then through those of the
    next. Each iteration (`for`, `take`, `epoch`) starts a new partition: only the generator has to
    be stored to resume.

    Args:
        partition: Which blocks to draw.
        source: The data, as many as the partition's N.
        generator: A CPU generator, which advances with every partition.

    Raises:
        InputError: If the number of data is another, or the estimator is ``grouped`` and the
            targets are no class labels.
    """

    def __init__(self, partition: Partition, source: Source, generator: torch.Generator) -> None:
        if len(source) != partition.num_data:
            raise InputError(
                f"The estimator was made for {partition.num_data} data, but these are "
                f"{len(source)}."
            )
        self._partition, self._source, self._generator = partition, source, generator
        self._labels = source.labels() if partition.spec.grouped else None
        self.is_constant = partition.num_blocks == 1 and partition.spec.curvature != "mc"

    def __iter__(self) -> Iterator[Block]:
        while True:
            yield from self.epoch()

    def epoch(self) -> Iterator[Block]:
        """See ``Stream.epoch``."""
        for block in self._partition.blocks(self._generator, self._labels):
            inputs, targets = self._source.fetch(block.indices)
            yield replace(block, inputs=inputs, targets=targets)
