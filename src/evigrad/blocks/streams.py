"""Endless streams of blocks, with the inputs and targets of each block."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, repeat

import torch

from evigrad.blocks.sources import Source
from evigrad.core.block import Block
from evigrad.core.partition import Partition
from evigrad.distributed import Ranks
from evigrad.errors import ConfigurationError, InputError

# Upper limit of the seeds for the random draws of a rank.
_SEEDS = 2**62


def fetched(block: Block, source: Source) -> Block:
    """Return the block with its inputs and targets."""
    inputs, targets = source.fetch(block.indices)
    return replace(block, inputs=inputs, targets=targets)


class Stream(Iterable[Block]):
    """An endless stream of an estimator's blocks, with the inputs and targets of each block.

    Each iteration (``for``, ``take``, ``round`` or ``epoch``) starts from the beginning. With R
    ranks, each rank takes every R-th block of the same stream. All ranks must iterate in the same
    way, with generators in the same state.

    Args:
        generator: CPU generator for all draws.
        ranks: Processes that share the blocks. Default: one process.

    Attributes:
        is_constant: Whether all blocks are identical. Such blocks contain all examples and outputs,
            and nothing is drawn at random.
        period: Number of consecutive iterations that use the same anchors. It is 1 without anchors.
    """

    is_constant: bool = False
    period: int = 1

    def __init__(self, generator: torch.Generator, ranks: Ranks | None = None) -> None:
        self._generator, self._ranks = generator, ranks or Ranks()

    def take(self, n: int) -> Iterator[Block]:
        """Return the first n blocks of a new iteration, from several partitions if necessary.

        Raises:
            ConfigurationError: If n is negative.
        """
        if n < 0:
            raise ConfigurationError(f"The number of blocks must not be negative, got {n}.")
        return islice(iter(self), n)

    def round(self, n: int) -> Iterator[Block]:
        """Return at most n blocks per rank, all from one partition."""
        return (block for block in islice(self.epoch(), n) if len(block.indices))

    @abstractmethod
    def epoch(self) -> Iterator[Block]:
        """Return the blocks of exactly one partition, with inputs and targets.

        All ranks get the same number of blocks. To make the numbers equal, the last block of a rank
        may be empty.
        """

    def _local(self, builders: Iterable[Callable[[], Block]]) -> Iterator[Block]:
        """Build and return only this rank's blocks: all of them, or one of R with its own seed."""
        rank, count, remaining_builders = self._ranks.rank, self._ranks.count, iter(builders)
        if count == 1:
            yield from (build() for build in remaining_builders)
            return
        while rank_builders := list(islice(remaining_builders, count)):
            seeds = [
                int(torch.randint(_SEEDS, (), generator=self._generator, device="cpu"))
                for _ in rank_builders
            ]
            yield (
                replace(rank_builders[rank](), seed=seeds[rank])
                if rank < len(rank_builders)
                else Block.empty()
            )


class BlockStream(Stream):
    """An endless stream of blocks from random partitions of the examples and outputs.

    It yields the blocks of one partition in random order, then the blocks of the next partition.
    Each iteration (``for``, ``take``, ``round`` or ``epoch``) draws a new partition. To resume
    between iterations, the state of the generator is enough.

    Args:
        partition: Rules by which the estimator's partitions are drawn.
        source: Source of the examples.
        generator: CPU generator for all draws.
        ranks: Processes that share the blocks. Default: one process.
        splits: Whether each rank gets a part of every block. Otherwise, each rank gets whole
            blocks.

    Raises:
        InputError: If the number of examples is not the partition's N, or the estimator is
            ``grouped`` and the targets are not class labels.
    """

    def __init__(
        self,
        partition: Partition,
        source: Source,
        generator: torch.Generator,
        ranks: Ranks | None = None,
        splits: bool = False,
    ) -> None:
        super().__init__(generator, ranks)
        self._splits = splits
        if len(source) != partition.num_data:
            raise InputError(
                f"The estimator was created for {partition.num_data} examples, but the data have "
                f"{len(source)}. Pass all examples, or create a new Evidence with "
                f"num_data={len(source)}."
            )
        self._partition, self._source = partition, source
        self._labels = source.labels() if partition.spec.grouped else None
        self.is_constant = partition.num_blocks == 1 and partition.spec.curvature != "mc"

    def __iter__(self) -> Iterator[Block]:
        return self._local(builder for _ in repeat(None) for builder in self._builders())

    def epoch(self) -> Iterator[Block]:
        """See ``Stream.epoch``."""
        return self._local(self._builders())

    def _local(self, builders: Iterable[Callable[[], Block]]) -> Iterator[Block]:
        """See ``Stream``. Parts of one block share a seed."""
        return (build() for build in builders) if self._splits else super()._local(builders)

    def _builders(self) -> Iterator[Callable[[], Block]]:
        """Yield a function that builds and reads each block of a new partition."""
        blocks = self._partition.blocks(self._generator, self._labels)
        yield from (partial(self._read, blocks, number) for number in range(len(blocks)))

    def _read(self, blocks: Sequence[Block], number: int) -> Block:
        block, ranks = blocks[number], self._ranks
        if self._splits and ranks.count > 1:
            block = block.share(slice(ranks.rank, None, ranks.count), ranks.count)
        return fetched(block, self._source)
