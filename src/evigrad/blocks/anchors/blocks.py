"""Partitions of the rows that are no anchors, for draws of the anchored estimate.

The rows that are no anchors are partitioned into M blocks, of which m is drawn with probability
π_m: the estimate is ℓ(Z) + ℓ(B_m|Z)/π_m, and its expectation ℓ(Z) + Σ_m ℓ(B_m|Z) ≥ ℓ(I).

Rows that have much in common belong in one block: their joint entropy is less than the sum. Among
the rows with the largest scores, the last layer's kernel tells which those are (``groups``). Of the
others, a block has rows of one column of the root: data that the network is unsure of in the same
way. Within a column the partition is stratified: rows are ranked by their scores, and of every M
consecutive rows each block gets one, at random. The blocks of a column are then much alike, and the
entropy of one predicts that of the others, hence π (``masses``): the estimate depends little on
which block was drawn. Where there are many columns, the unlikely ones are partitioned without any
ranks (``tail``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.blocks.anchors.groups import Groups
from evigrad.blocks.anchors.scores import Scores, guessed, ranked, unit_score
from evigrad.blocks.anchors.tail import Tail
from evigrad.blocks.block import Block, Draw, padded_columns

# The calibration group of blocks from ``groups``; others have a column.
GROUPED = -1


@dataclass(frozen=True, eq=False)
class AnchoredBlocks:
    """A partition of all rows but the anchors.

    Attributes:
        anchors: Rows as n K + d.
        parts: The blocks of the first K columns.
        num_data: N.
        num_columns: K.
        tail: The blocks of all other columns, or None where there are none.
        keys: The calibration group of each part, its first column or GROUPED, and of the tail.
        guesses: The predicted entropy of each part, and of all of the tail; see ``masses``.
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
        groups: Groups | None = None,
    ) -> "AnchoredBlocks":
        """Draw a partition: the groups, and other rows by columns, stratified by scores."""
        num_data, num_columns = scores.head.shape
        flat = scores.head.flatten()
        free = torch.ones(num_data * num_columns, dtype=torch.bool)
        free[anchors] = False
        size = max(1, num_rows - len(anchors))
        groups = groups or Groups()
        if groups.parts:
            free[torch.cat(groups.parts)] = False
        parts: list[Tensor] = []
        keys: list[int] = []
        for columns in _together(free.reshape(num_data, num_columns).sum(0).tolist(), size):
            rest = (torch.arange(num_data)[:, None] * num_columns + columns).flatten()
            dealt = _dealt(ranked(rest[free[rest]], flat, generator), size, generator)
            parts += dealt
            keys += [int(columns[0])] * len(dealt)
        unit = unit_score(flat, anchors)
        held = guessed(flat, unit)
        # Groups are predicted in the unit of the others: blocks that seem negligible would hardly
        # ever be drawn, and then with a huge weight.
        of_groups = groups.shares * _sums(held, groups.parts).sum()
        guesses = torch.cat([of_groups, _sums(held, parts)])
        parts, keys = groups.parts + parts, [GROUPED] * len(groups.parts) + keys
        tail = None
        if scores.behind:
            tail = Tail.draw(scores, size, generator)
            keys.append(tail.first)
            each = guessed(scores.tail.double() / scores.behind, unit)
            guesses = torch.cat([guesses, scores.behind * each.sum().reshape(1)])
        return cls(anchors, parts, num_data, num_columns, tail, keys, guesses)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the partition, M."""
        return len(self.parts) + (0 if self.tail is None else self.tail.count)

    def block(self, draws: Sequence[Draw], of_likelihood: Int[Tensor, "d u"]) -> Block:
        """A block of the anchors and some parts, without inputs, by falling number of rows.

        Args:
            draws: ``part`` is the number in the partition, the tail's last; none for anchors alone.
            of_likelihood: Uniformly drawn data for each draw's log likelihood, or for the anchors'.

        Returns:
            The block.
        """
        numbers = list(dict.fromkeys(draw.part for draw in draws))
        rows = [(self.anchors // self.num_columns, self.anchors % self.num_columns)]
        rows += [self._rows(number) for number in numbers]
        of_rows, columns = (torch.cat(each) for each in zip(*rows, strict=True))
        sizes = torch.tensor([len(data) for data, _ in rows])
        labels = torch.arange(len(rows)).repeat_interleave(sizes)
        indices = torch.cat([of_rows, of_likelihood.flatten()]).unique()
        position = torch.searchsorted(indices, of_rows)
        # By falling number of rows, those without any last.
        counts = position.bincount(minlength=len(indices))
        order = counts.argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        position, indices = rank[position], indices[order]
        each = self.num_data / of_likelihood.shape[1]
        shares = torch.stack([each * torch.isin(indices, own).double() for own in of_likelihood])
        return Block(
            indices,
            # Rows and their labels are laid out in the same way.
            columns=padded_columns(position, columns, len(indices)),
            scale=1.0,
            likelihood_weights=shares.mean(0),
            likelihood_shares=shares,
            parts=padded_columns(position, labels, len(indices)),
            draws=tuple(
                replace(draw, part=1 + numbers.index(draw.part), key=self._key(draw.part))
                for draw in draws
            ),
        )

    @property
    def counts(self) -> Float[Tensor, " _"]:
        """How many blocks each of ``keys`` and ``guesses`` stands for."""
        counts = torch.ones(len(self.keys), dtype=torch.float64)
        if self.tail is not None:
            counts[-1] = self.tail.count
        return counts

    def group(self, number: int) -> int:
        """The position of a block in ``keys`` and ``guesses``; the tail has one in all."""
        return min(number, len(self.parts))

    def _key(self, number: int) -> int:
        return self.keys[self.group(number)] if self.keys else 0

    def _rows(self, number: int) -> tuple[Tensor, Tensor]:
        """Data and columns of a part."""
        if number >= len(self.parts):
            assert self.tail is not None
            return self.tail.rows(number - len(self.parts))
        part = self.parts[number]
        return part // self.num_columns, part % self.num_columns


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
    rows: Int[Tensor, " R"], size: int, generator: torch.Generator
) -> list[Int[Tensor, " _"]]:
    """Parts of at most ``size`` rows with one row of each stratum, from rows in order of rank."""
    if not len(rows):
        return []
    count = -(-len(rows) // size)
    strata = -(-len(rows) // count)
    missing = count * strata - len(rows)
    table = torch.cat([rows, rows.new_full((missing,), -1)]).reshape(strata, count)
    keys = torch.rand(strata, count, dtype=torch.float64, generator=generator)
    table = table.gather(1, keys.argsort(dim=1)).mT
    present = table >= 0
    return list(table[present].split(present.sum(1).tolist()))


def _sums(values: Float[Tensor, " R"], parts: list[Int[Tensor, " _"]]) -> Float[Tensor, " M"]:
    if not parts:
        return values[:0]
    lengths = torch.tensor([len(part) for part in parts])
    sums = values.new_zeros(len(parts))
    return sums.index_add(
        0, torch.arange(len(parts)).repeat_interleave(lengths), values[torch.cat(parts)]
    )
