"""Partition the rows that are not anchors.

The log-determinant ℓ(B) of some rows B is here called their entropy. Given the anchors Z, the rows
B add ℓ(B|Z). The rows that are not anchors are partitioned into M parts B_m. If part m is drawn
with probability π_m, the expectation of ℓ(Z) + ℓ(B_m|Z)/π_m is ℓ(Z) + Σ_m ℓ(B_m|Z). This is at
least the entropy of all rows. There are three kinds of parts:

- *Groups* contain similar rows, because separate parts would count the entropy of these rows
  repeatedly. The last layer's kernel finds similar rows among the rows with the largest scores, and
  predicts the entropy of each group.
- *Columns* contain rows of one column of the root, or of adjacent columns. For k parts, the rows
  are ranked by score, and each part gets one random row from every k consecutive rows. The parts
  of a column are therefore similar, and the entropy of one predicts the entropy of the others.
- *Tails* contain the rows of unlikely columns, which may be millions, and the rows of examples
  outside the `Pool`. These rows are not ranked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.blocks.anchors.choice import Kernel
from evigrad.blocks.pool import Pool
from evigrad.core.block import Anchored, Block, Draw, padded_columns

# Number of rows with the largest scores that grouping considers, per row of a block, up to
# MOST_ROWS. Their kernel takes the square of it.
ROWS_PER_ROW = 16
MOST_ROWS = 2048
# If these rows hold less than this share of all curvature, they are not grouped.
LEAST_SHARE = 0.1
# Calibration keys of groups and of examples outside the pool. The key of other parts is a column.
GROUPED, OUTSIDE = -1, -2


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores |R_n[:, d]|² of all rows, where R_n is a root of the likelihood's Hessian.

    Attributes:
        head: Scores of the rows in the first K columns of the roots.
        tail: Sum of the scores of each example in the later columns.
        behind: Number of later columns, or 0 if these columns are known to be zero.
    """

    head: Float[Tensor, "N K"]
    tail: Float[Tensor, " N"]
    behind: int

    @property
    def num_rows(self) -> int:
        """Return the total number of rows."""
        return self.head.numel() + len(self.tail) * self.behind


def ranked(
    rows: Int[Tensor, " r"], flat: Float[Tensor, " R"], generator: torch.Generator
) -> Int[Tensor, " r"]:
    """Return rows in order of decreasing score. Rows with equal scores are in random order."""
    rows = rows[torch.randperm(len(rows), generator=generator, device="cpu")]
    return rows[flat[rows].argsort(descending=True, stable=True)]


def guessed(flat: Float[Tensor, " R"], unit: float) -> Float[Tensor, " R"]:
    """Return the predicted entropies log(1 + λ/λ_Z) in float64, for scores λ and a unit λ_Z."""
    return (flat.double() / unit).log1p()


def unit_score(flat: Float[Tensor, " R"], anchors: Int[Tensor, " Z"]) -> float:
    """Return the lower quartile of the anchors' scores, or the median score without anchors.

    Only positive scores count. If there are none, return 1.
    """
    # Not the smallest score, because some anchors may have been chosen without regard to scores.
    chosen = flat[anchors] if len(anchors) else flat
    positive = chosen[chosen > 0].sort().values
    if not len(positive):
        return 1.0
    return float(positive[len(positive) // (4 if len(anchors) else 2)])


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of similar rows, which are parts of every partition.

    Attributes:
        parts: Rows of each group, as n K + d.
        shares: Share of each group in the total entropy of all groups given the anchors, according
            to the last layer's kernel. If all scores are equal, the shares are proportional to the
            numbers of rows.
    """

    parts: list[Int[Tensor, " _"]] = field(default_factory=list)
    shares: Float[Tensor, " G"] = field(
        default_factory=lambda: torch.zeros(0, device="cpu").double()
    )


def form_groups(
    scores: Float[Tensor, "N K"],
    anchors: Int[Tensor, " Z"],
    num_rows: int,
    kernel: Kernel,
    generator: torch.Generator,
) -> Groups:
    """Return groups of similar rows among the rows with the largest scores, without the anchors.

    ``num_rows`` counts the rows of a block, including its anchors. There are no groups if the
    kernel is unknown, or if the rows with the largest scores have only a small share of the
    predicted entropy.
    """
    size = num_rows - len(anchors)
    flat = scores.flatten()
    is_free = torch.ones(len(flat), dtype=torch.bool, device="cpu")
    is_free[anchors] = False
    rows = is_free.nonzero().squeeze(1)
    if size < 2 or len(rows) < 2:
        return Groups()
    chosen = ranked(rows, flat, generator)[: min(ROWS_PER_ROW * num_rows, MOST_ROWS)]
    held = guessed(flat, unit_score(flat, anchors))
    if not float(held[chosen].sum()) > LEAST_SHARE * float(held[rows].sum()):
        return Groups()
    gram = kernel(torch.cat([anchors, chosen]))
    left = None if gram is None else conditional(gram, len(anchors))
    if left is None or not bool(left.diagonal().isfinite().all()):
        return Groups()
    parts, entropies = grouped(left, size)
    if bool((flat == flat[0]).all()):
        # As in regression: the last layer shows which rows are similar, but not their entropy.
        entropies = torch.tensor([len(part) for part in parts], dtype=torch.float64, device="cpu")
    total = float(entropies.sum())
    return Groups([chosen[part] for part in parts], entropies / total) if total > 0 else Groups()


def conditional(kernel: Float[Tensor, "m m"], num_anchors: int) -> Float[Tensor, "r r"] | None:
    """Return the kernel of the other rows given the anchors, which are the first rows.

    Return None if the matrix of the anchors has no Cholesky factor.
    """
    anchor_gram = kernel[:num_anchors, :num_anchors].double()
    factor, failed = torch.linalg.cholesky_ex(
        anchor_gram + torch.eye(num_anchors, dtype=anchor_gram.dtype, device="cpu")
    )
    if int(failed):
        return None
    cross = kernel[:num_anchors, num_anchors:].double()
    half = torch.linalg.solve_triangular(factor, cross, upper=False).to(kernel.dtype)
    return torch.addmm(kernel[num_anchors:, num_anchors:], half.mT, half, alpha=-1.0)


def grouped(
    kernel: Float[Tensor, "r r"], size: int
) -> tuple[list[Int[Tensor, " _"]], Float[Tensor, " G"]]:
    """Return groups of row numbers, and the entropy log det(I + S_gg) of each group in float64.

    A group contains the remaining row with the largest variance, and the rows with the largest
    correlation with this row, given unit noise. Each group has ``size`` rows, except for the last
    one. The kernel must be symmetric and positive semidefinite.
    """
    variance = kernel.diagonal().clamp(min=0.0)
    shrunk = (1.0 + variance).rsqrt()
    left = variance.clone()
    parts: list[Tensor] = []
    for remaining in range(len(kernel), 0, -size):
        first = int(left.argmax())
        alike = (kernel[first] * shrunk).square()
        alike[first] = torch.inf
        alike[left < 0] = -1.0
        parts.append(alike.topk(min(size, remaining)).indices)
        left[parts[-1]] = -1.0
    whole = (
        torch.stack(parts[:-1])
        if len(parts) > 1
        else torch.zeros(0, size, dtype=torch.int64, device="cpu")
    )
    return parts, torch.cat([_entropies(kernel, whole), _entropies(kernel, parts[-1][None])])


def _entropies(kernel: Float[Tensor, "r r"], parts: Int[Tensor, "G b"]) -> Float[Tensor, " G"]:
    part_grams = kernel[parts[:, :, None], parts[:, None, :]].double()
    # Rounding may have made tiny eigenvalues negative.
    return torch.linalg.eigvalsh(part_grams).clamp(min=0.0).log1p().sum(-1)


@dataclass(frozen=True, eq=False)
class Tail:
    """A random partition that does not store its rows, for unlikely columns or unscored examples.

    The rows are permuted by the map t ↦ (a t + c) mod T, where a is coprime to T. Part b contains
    the images of b · size, b · size + 1, …

    Attributes:
        first: First column.
        behind: Number of columns.
        num_rows: Number of rows T, which is the number of examples times ``behind``.
        size: Number of rows in a part.
        factor: Factor a of the map.
        shift: Shift c of the map.
    """

    first: int
    behind: int
    num_rows: int
    size: int
    factor: int
    shift: int

    @classmethod
    def draw(
        cls, num_data: int, first: int, behind: int, size: int, generator: torch.Generator
    ) -> "Tail":
        """Draw a partition of the rows of ``num_data`` examples into parts of ``size`` rows."""
        num_rows = num_data * behind

        def number() -> int:
            return int(torch.randint(num_rows, (), generator=generator, device="cpu"))

        factor, shift = number(), number()
        while gcd(factor, num_rows) != 1:
            factor = number()
        return cls(first, behind, num_rows, size, factor, shift)

    @property
    def count(self) -> int:
        """Return the number of parts."""
        return -(-self.num_rows // self.size)

    def rows(self, number: int) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """Return the examples and columns of the rows of a part."""
        stop = min((number + 1) * self.size, self.num_rows)
        # Python integers, because a t may exceed 64 bits.
        places = range(number * self.size, stop)
        chosen = torch.tensor(
            [(self.factor * t + self.shift) % self.num_rows for t in places], device="cpu"
        )
        return chosen // self.behind, self.first + chosen % self.behind


@dataclass(frozen=True, eq=False)
class AnchoredPartition:
    """A partition of all rows except the anchors.

    A row of the first K columns has the number n K + d, where n is the example's place in the pool
    and d is the column.

    Attributes:
        anchors: Numbers of the anchors.
        parts: Numbers of the rows of each part of the first K columns.
        num_data: Number of examples, N.
        num_columns: Number of columns, K.
        tails: Partitions of the later columns and of the examples outside the pool.
        keys: Calibration key of each part (``GROUPED`` or its first column) and of each tail.
        guesses: Predicted entropy of each part, and total predicted entropy of each tail.
        pool: Pool of the examples. None means that all examples are in the pool.
    """

    anchors: Int[Tensor, " Z"]
    parts: list[Int[Tensor, " _"]]
    num_data: int
    num_columns: int
    tails: Sequence[Tail] = ()
    keys: Sequence[int] = ()
    guesses: Float[Tensor, " _"] = field(
        default_factory=lambda: torch.zeros(0, device="cpu").double()
    )
    pool: Pool | None = None

    @classmethod
    def draw(
        cls,
        anchors: Int[Tensor, " Z"],
        scores: Scores,
        num_rows: int,
        generator: torch.Generator,
        groups: Groups | None = None,
        pool: Pool | None = None,
    ) -> "AnchoredPartition":
        """Draw a partition. Groups are parts, and other rows are divided by column and score."""
        num_data, num_columns = scores.head.shape
        flat = scores.head.flatten()
        free = torch.ones(num_data * num_columns, dtype=torch.bool, device="cpu")
        free[anchors] = False
        size = max(1, num_rows - len(anchors))
        groups = groups or Groups()
        if groups.parts:
            free[torch.cat(groups.parts)] = False
        parts: list[Tensor] = []
        keys: list[int] = []
        for columns in _together(free.reshape(num_data, num_columns).sum(0).tolist(), size):
            rows = (torch.arange(num_data, device="cpu")[:, None] * num_columns + columns).flatten()
            dealt = _dealt(ranked(rows[free[rows]], flat, generator), size, generator)
            parts += dealt
            keys += [int(columns[0])] * len(dealt)
        unit = unit_score(flat, anchors)
        held = guessed(flat, unit)
        # Groups share the scale of the other parts: parts that seem negligible would be drawn
        # rarely, and then with a huge weight.
        group_guesses = groups.shares * _sums(held, groups.parts).sum()
        guesses = torch.cat([group_guesses, _sums(held, parts)])
        parts, keys = groups.parts + parts, [GROUPED] * len(groups.parts) + keys
        tails, total = [], held.sum()
        if scores.behind:
            tails.append(Tail.draw(num_data, num_columns, scores.behind, size, generator))
            keys.append(num_columns)
            tail_guess = scores.behind * guessed(scores.tail.double() / scores.behind, unit).sum()
            guesses, total = torch.cat([guesses, tail_guess.reshape(1)]), total + tail_guess
        if pool is not None and not pool.is_all:
            others = pool.num_data - num_data
            tails.append(Tail.draw(others, 0, num_columns + scores.behind, size, generator))
            keys.append(OUTSIDE)
            # On average, these examples are like the examples of the pool.
            guesses = torch.cat([guesses, total.reshape(1) * others / num_data])
            num_data = pool.num_data
        return cls(anchors, parts, num_data, num_columns, tails, keys, guesses, pool)

    @property
    def num_parts(self) -> int:
        """Return the number of parts, M."""
        return len(self.parts) + sum(tail.count for tail in self.tails)

    def block(self, draws: Sequence[Draw], likelihood_data: Int[Tensor, "d u"]) -> Block:
        """Return a block of the anchors and the drawn parts, without inputs or targets.

        Examples are sorted by decreasing number of rows. Without ``draws``, the block contains only
        the anchors. For each draw, ``likelihood_data`` contains uniformly drawn examples on which
        the log likelihood is evaluated.
        """
        numbers = list(dict.fromkeys(draw.part for draw in draws))
        rows = [self._listed(self.anchors)]
        rows += [self.rows(number) for number in numbers]
        owners, columns = (torch.cat(parts) for parts in zip(*rows, strict=True))
        sizes = torch.tensor([len(data) for data, _ in rows], device="cpu")
        labels = torch.arange(len(rows), device="cpu").repeat_interleave(sizes)
        indices = torch.cat([owners, likelihood_data.flatten()]).unique()
        position = torch.searchsorted(indices, owners)
        # By falling number of rows. Examples without rows come last.
        counts = position.bincount(minlength=len(indices))
        order = counts.argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device="cpu")
        position, indices = rank[position], indices[order]
        weight = self.num_data / likelihood_data.shape[1]
        weights = torch.stack(
            [weight * torch.isin(indices, subset).double() for subset in likelihood_data]
        )
        # Columns and labels have the same layout.
        columns, labels = (padded_columns(position, t, len(indices)) for t in (columns, labels))
        anchored = Anchored(labels, tuple(draws), weights)
        return Block(indices, columns, 1.0, weights.mean(0), anchored=anchored)

    @property
    def counts(self) -> Float[Tensor, " _"]:
        """Return the number of parts of each entry of ``keys``. A tail is one entry."""
        counts = [1] * len(self.parts) + [tail.count for tail in self.tails]
        return torch.tensor(counts, dtype=torch.float64, device="cpu")

    def pick(self, entry: int, generator: torch.Generator) -> tuple[int, int]:
        """Return a random part of an entry of ``keys``, and the number of parts of this entry."""
        index = entry - len(self.parts)
        if index < 0:
            return entry, 1
        count = self.tails[index].count
        before = len(self.parts) + sum(tail.count for tail in self.tails[:index])
        return before + int(torch.randint(count, (), generator=generator, device="cpu")), count

    def entry(self, number: int) -> int:
        """Return the position of a part in ``keys``. All parts of a tail have the same position."""
        return self._place(number)[0]

    def rows(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the examples and columns of the rows of a part."""
        entry, number_in_tail = self._place(number)
        if entry < len(self.parts):
            return self._listed(self.parts[entry])
        data, columns = self.tails[entry - len(self.parts)].rows(number_in_tail)
        if self.pool is None or self.keys[entry] != OUTSIDE:
            return self._of_pool(data), columns
        return self.pool.others(data), columns

    def _place(self, number: int) -> tuple[int, int]:
        """Return the entry of a part, and the part's number within a tail."""
        entry, number_in_tail = min(number, len(self.parts)), max(0, number - len(self.parts))
        for tail in self.tails[:-1]:
            if entry < len(self.parts) or number_in_tail < tail.count:
                break
            entry, number_in_tail = entry + 1, number_in_tail - tail.count
        return entry, number_in_tail

    def _listed(self, rows: Int[Tensor, " r"]) -> tuple[Tensor, Tensor]:
        return self._of_pool(rows // self.num_columns), rows % self.num_columns

    def _of_pool(self, places: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
        return places if self.pool is None else self.pool.data(places)


def _together(counts: list[int], size: int) -> list[Int[Tensor, " _"]]:
    """Group consecutive columns until each group has at least ``size`` rows, if possible."""
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
    return [torch.tensor(group, device="cpu") for group in groups]


def _dealt(
    rows: Int[Tensor, " R"], size: int, generator: torch.Generator
) -> list[Int[Tensor, " _"]]:
    """Return parts of at most ``size`` ranked rows, each with one row of each stratum."""
    if not len(rows):
        return []
    count = -(-len(rows) // size)
    strata = -(-len(rows) // count)
    missing = count * strata - len(rows)
    table = torch.cat([rows, rows.new_full((missing,), -1)]).reshape(strata, count)
    keys = torch.rand(strata, count, dtype=torch.float64, generator=generator, device="cpu")
    table = table.gather(1, keys.argsort(dim=1)).mT
    present = table >= 0
    return list(table[present].split(present.sum(1).tolist()))


def _sums(values: Float[Tensor, " R"], parts: list[Int[Tensor, " _"]]) -> Float[Tensor, " M"]:
    if not parts:
        return values[:0]
    lengths = torch.tensor([len(part) for part in parts], device="cpu")
    sums = values.new_zeros(len(parts))
    return sums.index_add(
        0,
        torch.arange(len(parts), device="cpu").repeat_interleave(lengths),
        values[torch.cat(parts)],
    )
