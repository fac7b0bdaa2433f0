"""Blocks of the rows of unlikely columns, of which there may be millions."""

from dataclasses import dataclass
from math import gcd

import torch
from jaxtyping import Int
from torch import Tensor

from evigrad.blocks.anchors.scores import Scores


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
        # In Python's numbers: a t may be beyond 64 bits.
        places = range(number * self.size, stop)
        chosen = torch.tensor([(self.factor * t + self.shift) % self.num_rows for t in places])
        return chosen // self.behind, self.first + chosen % self.behind
