"""The endless stream of anchored blocks, whose parts are drawn by their predicted entropy.

For rows r with scores λ_r, the predicted entropy is Σ_r log(1 + λ_r/λ_Z), where λ_Z is a typical
score of an anchor. After the first evaluations, the prediction is multiplied by the observed ratio
of true to predicted entropy. Each column of the root has one ratio, and all groups share one ratio.
Predictions only determine how often each part is drawn. They do not change the expectation of the
estimate.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.blocks.anchors.partition import AnchoredPartition
from evigrad.blocks.sources import Source
from evigrad.blocks.streams import Stream, fetched
from evigrad.core.block import Block, Draw
from evigrad.core.partition import choose_distinct
from evigrad.distributed import Ranks

# Share of uniform draws, so that no weight exceeds M / FLOOR.
FLOOR = 0.03
# Step size of the logarithm of a ratio toward the last observation.
RATE = 0.5
# An observation changes a ratio by at most this factor.
LOG_LIMIT = math.log(1e3)
# Examples per row for the log likelihood. An example costs one forward pass, and a row three.
LIKELIHOOD_DATA = 0.25


class EntropyPredictor:
    """Learns the ratio of observed to predicted entropy for each key, such as a column."""

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}  # logarithms

    def _ratio(self, key: int) -> float:
        """Return the log ratio of a key, or the mean of the observed ones for a new key."""
        ratios = self._ratios
        return ratios[key] if key in ratios else sum(ratios.values()) / max(1, len(ratios))

    def expected(self, keys: Sequence[int], guesses: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
        """Return the predicted entropies ``guesses`` times the learned ratios, in float64."""
        logs = {key: self._ratio(key) for key in set(keys)}
        return (
            guesses
            * torch.tensor([logs[key] for key in keys], dtype=torch.float64, device="cpu").exp()
        )

    def observe(self, key: int, guess: float, seen: float) -> None:
        """Learn from the predicted and the observed entropy of one part."""
        if not (guess > 0 and seen > 0 and math.isfinite(seen / guess)):
            return
        rate = RATE if key in self._ratios else 1.0
        before = self._ratio(key)
        step = math.log(seen / guess) - before
        self._ratios[key] = before + rate * min(max(step, -LOG_LIMIT), LOG_LIMIT)

    def state_dict(self) -> dict[str, Any]:
        """Return the ratios for a checkpoint."""
        return {"ratios": dict(self._ratios)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``."""
        self._ratios = dict(state["ratios"])


def probabilities(
    expected: Float[Tensor, " M"], counts: Float[Tensor, " M"] | None = None, floor: float = FLOOR
) -> Float[Tensor, " M"]:
    """Return the probability of drawing each part or tail, in float64.

    The predicted entropies ``expected`` are mixed with a uniform distribution of weight ``floor``.
    ``counts`` contains the number of parts of each entry. None means one part each.
    """
    uniform = torch.ones_like(expected) if counts is None else counts
    uniform = uniform / uniform.sum()
    total = float(expected.sum())
    if not 0 < total < float("inf"):
        return uniform
    return (1 - floor) * expected / total + floor * uniform


@dataclass(frozen=True, eq=False)
class DrawnParts:
    """Fixed draws of parts from one partition, from which blocks can be made repeatedly.

    Attributes:
        source: Source of the examples.
        partition: Partition from which the parts were drawn.
        draws: Drawn parts and their weights.
        likelihood_data: Examples on which the log likelihood is evaluated, with one row for each
            draw. Without draws, there is a single row.
    """

    source: Source
    partition: AnchoredPartition
    draws: list[Draw]
    likelihood_data: Int[Tensor, "d u"]

    def blocks(self, at_once: int) -> Iterator[Block]:
        """Yield blocks of ``at_once`` draws, or one block if all rows are anchors."""
        count = len(self.draws) if self.partition.num_parts else 1
        for start in range(0, count, at_once):
            yield self.block(start, at_once)

    def block(self, start: int, count: int) -> Block:
        """Return a block of at most ``count`` draws from ``start`` on, with inputs and targets."""
        span = slice(start, start + count)
        block = self.partition.block(self.draws[span], self.likelihood_data[span])
        return fetched(block, self.source)


class AnchoredStream(Stream):
    """An endless stream of anchored blocks, with the inputs and targets of each block.

    Each iteration (``for``, ``take``, ``round`` or ``epoch``) starts with a new partition of the
    rows that are not anchors. ``take`` draws parts in proportion to their predicted entropies. If
    the partition has M parts, ``take`` draws a new partition after M draws. ``epoch`` yields each
    part once.

    Args:
        source: Source of the examples.
        period: Number of iterations that use the same anchors.
        num_rows: Number of rows in a block.
        prepare: Function that is called at the start of each iteration. It chooses anchors if
            necessary, and returns a function that draws partitions.
        predictor: Predictor of the entropies of parts.
        generator: CPU generator for all draws.
        ranks: Processes that share the blocks. They all draw from the same partition.
    """

    is_constant = False

    def __init__(
        self,
        source: Source,
        period: int,
        num_rows: int,
        prepare: Callable[[], Callable[[], AnchoredPartition]],
        predictor: EntropyPredictor,
        generator: torch.Generator,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(generator, ranks)
        self.period = period
        self._source, self._num_rows, self._prepare = source, num_rows, prepare
        self._predictor = predictor

    def __iter__(self) -> Iterator[Block]:
        return self._local(self._endless())

    def _endless(self) -> Iterator[Callable[[], Block]]:
        draw_partition = self._prepare()
        while True:
            partition = draw_partition()
            for _ in range(max(1, partition.num_parts)):
                # Drawn late, because the value of the last block calibrates the predictions.
                yield self._builder(
                    partition, [self._draw(partition)] if partition.num_parts else []
                )

    def round(self, n: int) -> Iterator[Block]:
        """See ``Stream.round``. If there are at most n parts per rank, each part is drawn once."""
        return self.drawn(n, whole=True).blocks(1)

    def epoch(self) -> Iterator[Block]:
        """See ``Stream.epoch``. The mean estimated log-determinant is ℓ(Z) + Σ_m ℓ(B_m|Z)."""
        return self._local(self._all())

    def _all(self) -> Iterator[Callable[[], Block]]:
        partition = self._prepare()()
        for draw in self._each(partition):
            yield self._builder(partition, [draw])
        if not partition.num_parts:
            yield self._builder(partition, [])

    def drawn(self, n: int, whole: bool = False) -> DrawnParts:
        """Return n draws per rank from one partition, or none if all rows are anchors.

        If ``whole`` is true and there are at most n parts per rank, each part is drawn once
        instead.
        """
        partition, total = self._prepare()(), n * self._ranks.count
        if whole and partition.num_parts <= total:
            draws = list(self._each(partition))
        else:
            draws = [self._draw(partition) for _ in range(total if partition.num_parts else 0)]
        likelihood_data = self._likelihood_data(partition, max(1, len(draws)))
        if draws:
            local_slice = slice(self._ranks.rank, None, self._ranks.count)
            draws, likelihood_data = draws[local_slice], likelihood_data[local_slice]
        return DrawnParts(self._source, partition, draws, likelihood_data)

    def _each(self, partition: AnchoredPartition) -> Iterator[Draw]:
        count = partition.num_parts
        for number in torch.randperm(count, generator=self._generator, device="cpu").tolist():
            yield self._of_part(partition, number, float(count))

    def _draw(self, partition: AnchoredPartition) -> Draw:
        expected = self._predictor.expected(partition.keys, partition.guesses)
        chances = probabilities(expected, partition.counts)
        entry = int(torch.multinomial(chances, 1, generator=self._generator))
        number, count = partition.pick(entry, self._generator)
        return self._of_part(partition, number, 1.0 / (float(chances[entry]) / count))

    @staticmethod
    def _of_part(partition: AnchoredPartition, number: int, weight: float) -> Draw:
        entry = partition.entry(number)
        # A tail has one prediction, which its parts share.
        guess = float(partition.guesses[entry]) / float(partition.counts[entry])
        return Draw(number, weight, guess, partition.keys[entry])

    def _builder(self, partition: AnchoredPartition, draws: list[Draw]) -> Callable[[], Block]:
        likelihood_data = self._likelihood_data(partition, 1)
        parts = DrawnParts(self._source, partition, draws, likelihood_data)
        return partial(parts.block, 0, 1)

    def _likelihood_data(self, partition: AnchoredPartition, count: int) -> Int[Tensor, "d u"]:
        """Return the examples for each draw's log likelihood, which cover the data evenly."""
        num_data = len(self._source)
        data_per_draw = min(max(1, int(LIKELIHOOD_DATA * self._num_rows)), num_data)
        if partition.num_parts <= 1:
            # A block that contains every row evaluates all examples in any case.
            data_per_draw = num_data
        total = min(count * data_per_draw, num_data)
        chosen = choose_distinct(num_data, total, self._generator)
        if count > 1:
            chosen = chosen[torch.randperm(total, generator=self._generator, device="cpu")]
        return chosen[torch.arange(count * data_per_draw, device="cpu") % total].reshape(
            count, data_per_draw
        )
