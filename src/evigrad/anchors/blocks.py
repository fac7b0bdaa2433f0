"""Anchors and blocks of the rest: what one draw of the anchored estimate looks at.

The rows that are no anchors are partitioned into M blocks, of which m is drawn with probability
π_m: the estimate is ℓ(Z) + ℓ(B_m|Z)/π_m, and its expectation ℓ(Z) + Σ_m ℓ(B_m|Z) ≥ ℓ(I).

The rows of a block are of one column of the root: data that the network is unsure of in the same
way have much in common, and their joint entropy is less than the sum. Within a column the partition
is stratified: rows are ranked by their scores, and of every M consecutive ones each block gets one,
at random. The blocks of a column then are much alike, and what was seen of one tells what to expect
of the others, hence π (``masses``): the estimate depends little on which block was drawn. Where
there are many columns, those behind the first ones are partitioned without any ranks (``Tail``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.anchors.choice import Anchoring
from evigrad.anchors.masses import Masses, control_variate, probabilities
from evigrad.blocks import Block, padded_columns
from evigrad.partitions import choose_distinct
from evigrad.sources import Source
from evigrad.streams import Stream


@dataclass(frozen=True, eq=False)
class Scores:
    """How much curvature rows can hold.

    Attributes:
        head: |R_n[:, d]|² of each row of the first K columns.
        tail: The sum of those of all columns behind.
        behind: How many columns there are behind; 0 where they are none, or zero for certain.
    """

    head: Float[Tensor, "N K"]
    tail: Float[Tensor, " N"]
    behind: int

    @property
    def num_rows(self) -> int:
        """All rows."""
        return self.head.numel() + len(self.tail) * self.behind


@dataclass(frozen=True, eq=False)
class Tail:
    """The rows of unlikely columns in blocks, without a list of them: there may be millions.

    An affine map t ↦ (a t + c) mod T with a random a that has no divisor in common with T is a
    permutation; block b holds what it makes of b size, b size + 1, …

    Attributes:
        first: The first of the columns.
        behind: Their number.
        num_rows: T.
        size: Rows in a block.
        factor: a.
        shift: c.
    """

    first: int
    behind: int
    num_rows: int
    size: int
    factor: int
    shift: int

    @classmethod
    def draw(cls, scores: Scores, size: int, generator: torch.Generator) -> "Tail":
        """Draw a partition.

        Args:
            scores: Of the rows.
            size: Rows in a block.
            generator: A CPU generator.

        Returns:
            The partition.
        """
        num_rows = len(scores.tail) * scores.behind

        def number() -> int:
            return int(torch.randint(num_rows, (), generator=generator))

        factor, shift = number(), number()
        while gcd(factor, num_rows) != 1:
            factor = number()
        return cls(scores.head.shape[1], scores.behind, num_rows, size, factor, shift)

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-self.num_rows // self.size)

    def rows(self, number: int) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """A block.

        Args:
            number: Of the block.

        Returns:
            Data and columns.
        """
        stop = min((number + 1) * self.size, self.num_rows)
        places = torch.arange(number * self.size, stop)
        chosen = (self.factor * places + self.shift) % self.num_rows
        return chosen // self.behind, self.first + chosen % self.behind


@dataclass(frozen=True, eq=False)
class AnchoredBlocks:
    """A partition of all rows but the anchors.

    Attributes:
        anchors: Rows as n K + d.
        parts: The blocks of the first K columns.
        num_data: N.
        num_columns: K.
        tail: The blocks of all other columns, or None where there are none.
        keys: For each of the parts the first column in it, and that of the tail.
        guesses: What scores say of each part, and of all of the tail; see ``masses``.
    """

    anchors: Int[Tensor, " Z"]
    parts: list[Int[Tensor, " _"]]
    num_data: int
    num_columns: int
    tail: Tail | None = None
    keys: Sequence[int] = ()
    guesses: Float[Tensor, " _"] = field(default_factory=lambda: torch.zeros(0).double())

    @classmethod
    def draw(
        cls,
        anchors: Int[Tensor, " Z"],
        scores: Scores,
        num_rows: int,
        generator: torch.Generator,
    ) -> "AnchoredBlocks":
        """Draw a partition by columns, stratified by scores.

        Args:
            anchors: Rows as n K + d.
            scores: Of every row.
            num_rows: Of a block, its anchors included.
            generator: A CPU generator.

        Returns:
            The partition.
        """
        num_data, num_columns = scores.head.shape
        flat = scores.head.flatten()
        free = torch.ones(num_data * num_columns, dtype=torch.bool)
        free[anchors] = False
        size = max(1, num_rows - len(anchors))
        parts: list[Tensor] = []
        keys: list[int] = []
        for columns in _together(free.reshape(num_data, num_columns).sum(0).tolist(), size):
            rest = (torch.arange(num_data)[:, None] * num_columns + columns).flatten()
            rest = rest[free[rest]]
            # Rows of equal scores in random order: where all are equal, the partition is uniform.
            rest = rest[torch.randperm(len(rest), generator=generator)]
            ranked = rest[flat[rest].argsort(descending=True, stable=True)]
            dealt = _dealt(ranked, size, generator)
            parts += dealt
            keys += [int(columns[0])] * len(dealt)
        unit = least_score(anchors, flat)
        guesses = [float((flat[part].double() / unit).log1p().sum()) for part in parts]
        tail = None
        if scores.behind:
            tail = Tail.draw(scores, size, generator)
            keys.append(tail.first)
            each = scores.tail.double() / (scores.behind * unit)
            guesses.append(float(scores.behind * each.log1p().sum()))
        found = torch.tensor(guesses, dtype=torch.float64)
        return cls(anchors, parts, num_data, num_columns, tail, keys, found)

    @property
    def num_blocks(self) -> int:
        """M, the blocks of the partition."""
        return len(self.parts) + (0 if self.tail is None else self.tail.count)

    def block(
        self,
        number: int | None,
        of_likelihood: Int[Tensor, " u"],
        probability: float = 1.0,
        expected: float = 0.0,
        offset: float = 0.0,
    ) -> Block:
        """A block of the anchors and one part.

        Args:
            number: Of the part, those of the tail last; None for the anchors alone.
            of_likelihood: The data that the log likelihood is taken from, drawn uniformly.
            probability: With which the part was drawn.
            expected: What is expected of ℓ(B|Z), in nats.
            offset: See ``Block``.

        Returns:
            The block, without inputs; data with the same number of rows lie together.
        """
        data, columns = self._rows(number)
        labels = torch.cat([torch.zeros_like(self.anchors), torch.ones_like(data)])
        data = torch.cat([self.anchors // self.num_columns, data])
        columns = torch.cat([self.anchors % self.num_columns, columns])
        indices = torch.cat([data, of_likelihood]).unique()
        position = torch.searchsorted(indices, data)
        # Those with most rows first, and those without any last.
        counts = position.bincount(minlength=len(indices))
        order = counts.argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        position, indices = rank[position], indices[order]
        weights = torch.isin(indices, of_likelihood).double() * self.num_data / len(of_likelihood)
        return Block(
            indices,
            # Rows and their labels are laid out in the same way.
            columns=padded_columns(position, columns, len(indices)),
            scale=1.0,
            likelihood_weights=weights,
            parts=padded_columns(position, labels, len(indices)),
            part_weights=() if number is None else (1.0 / probability,),
            offset=0.0 if number is None else offset,
            expected=() if number is None else (expected,),
            part_keys=() if number is None else (self._key(number),),
        )

    def group(self, number: int) -> int:
        """The position of a block in ``keys`` and ``guesses``, where all of the tail has one."""
        return min(number, len(self.parts))

    def _key(self, number: int) -> int:
        return self.keys[self.group(number)] if self.keys else 0

    def _rows(self, number: int | None) -> tuple[Tensor, Tensor]:
        """Data and columns of a part."""
        if number is None:
            return self.anchors[:0], self.anchors[:0]
        if number >= len(self.parts):
            assert self.tail is not None
            return self.tail.rows(number - len(self.parts))
        part = self.parts[number]
        return part // self.num_columns, part % self.num_columns


def least_score(anchors: Int[Tensor, " Z"], flat: Float[Tensor, " R"]) -> float:
    """The least score of an anchor, or a typical one where there are none."""
    chosen = flat[anchors] if len(anchors) else flat
    positive = chosen[chosen > 0]
    if not len(positive):
        return 1.0
    return float(positive.min() if len(anchors) else positive.median())


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


class AnchoredStream(Stream):
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

    def __init__(
        self,
        source: Source,
        anchoring: Anchoring,
        num_rows: int,
        prepare: Callable[[], tuple[Int[Tensor, " Z"], Scores]],
        masses: Masses,
        generator: torch.Generator,
    ) -> None:
        self._source, self._anchoring, self._num_rows = source, anchoring, num_rows
        self._prepare, self._masses, self._generator = prepare, masses, generator

    @property
    def is_constant(self) -> bool:
        """Never: blocks are drawn, and the data of their log likelihood too."""
        return False

    def __iter__(self) -> Iterator[Block]:
        """Blocks drawn from partition after partition, without end."""
        anchors, scores = self._prepare()
        while True:
            made = AnchoredBlocks.draw(anchors, scores, self._num_rows, self._generator)
            for _ in range(max(1, made.num_blocks)):
                # Drawn late, as what was seen of the last block tells what to expect of this one.
                yield self._drawn(made)

    def round(self, n: int) -> Iterator[Block]:
        """Blocks whose mean several steps share.

        Args:
            n: How many, at most.

        Yields:
            As ``take`` draws them, or all of a partition that has no more.
        """
        anchors, scores = self._prepare()
        made = AnchoredBlocks.draw(anchors, scores, self._num_rows, self._generator)
        if made.num_blocks <= n:
            yield from self._all(made)
            return
        for _ in range(n):
            yield self._drawn(made)

    def epoch(self) -> Iterator[Block]:
        """The blocks of exactly one partition, whose mean is ℓ(Z) + Σ_m ℓ(B_m|Z).

        Yields:
            Blocks with their inputs and targets.
        """
        anchors, scores = self._prepare()
        made = AnchoredBlocks.draw(anchors, scores, self._num_rows, self._generator)
        yield from self._all(made)

    def _all(self, made: AnchoredBlocks) -> Iterator[Block]:
        count = made.num_blocks
        if not count:
            yield self._with_data(made, None, 1.0, 0.0)
        for number in torch.randperm(count, generator=self._generator).tolist():
            yield self._with_data(made, number, 1.0 / count, self._expected(made, number))

    def _drawn(self, made: AnchoredBlocks) -> Block:
        if not made.num_blocks:
            return self._with_data(made, None, 1.0, 0.0)
        expected = self._masses.expected(made.keys, made.guesses)
        chances = probabilities(expected)
        number = int(torch.multinomial(chances, 1, generator=self._generator))
        chance = float(chances[number])
        if made.tail is not None and number == len(made.parts):
            # Of the tail any of its blocks.
            chance /= made.tail.count
            number += int(torch.randint(made.tail.count, (), generator=self._generator))
        own = self._expected(made, number)
        offset = control_variate(expected, own, chance)
        return self._with_data(made, number, chance, own, offset)

    def _expected(self, made: AnchoredBlocks, number: int) -> float:
        group = made.group(number)
        one = slice(group, group + 1)
        expected = float(self._masses.expected(made.keys[one], made.guesses[one]))
        if made.tail is not None and group == len(made.parts):
            return expected / made.tail.count
        return expected

    def _with_data(
        self,
        made: AnchoredBlocks,
        number: int | None,
        probability: float,
        expected: float,
        offset: float = 0.0,
    ) -> Block:
        num_data = len(self._source)
        count = self._anchoring.num_likelihood(self._num_rows, num_data)
        of_likelihood = choose_distinct(num_data, count, self._generator)
        block = made.block(number, of_likelihood, probability, expected, offset)
        inputs, targets = self._source.fetch(block.indices)
        return replace(block, inputs=inputs, targets=targets)
