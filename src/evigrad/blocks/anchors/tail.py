"""Blocks of the rows of unlikely columns, of which there may be millions."""

from dataclasses import dataclass
from math import gcd

import torch
from jaxtyping import Int
from torch import Tensor

from evigrad.blocks.anchors.scores import Scores


@dataclass(frozen=True, eq=False)
class Tail:
    """The rows of unlikely columns in blocks, without a list of the rows.

    An affine map t ↦ (a t + c) mod T with a random a coprime to T is a permutation; block b holds
    the images of b size, b size + 1, …

    Attributes:
        first: The first of the columns.
        behind: Number of the columns.
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
        """Draw a partition into blocks of ``size`` rows."""
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
        """Data and columns of a block."""
        stop = min((number + 1) * self.size, self.num_rows)
        # In Python's integers: a t may exceed 64 bits.
        places = range(number * self.size, stop)
        chosen = torch.tensor([(self.factor * t + self.shift) % self.num_rows for t in places])
        return chosen // self.behind, self.first + chosen % self.behind
