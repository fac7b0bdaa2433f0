"""How much curvature rows can hold, by the likelihood's root alone."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


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


def ranked(
    rows: Int[Tensor, " r"], flat: Float[Tensor, " R"], generator: torch.Generator
) -> Int[Tensor, " r"]:
    """Rows by falling score, and those of equal scores in random order.

    Args:
        rows: Their numbers, n K + d.
        flat: The scores of all rows.
        generator: A CPU generator.

    Returns:
        The same numbers in another order; uniformly at random where all scores are equal.
    """
    rows = rows[torch.randperm(len(rows), generator=generator)]
    return rows[flat[rows].argsort(descending=True, stable=True)]


def guessed(flat: Float[Tensor, " R"], unit: float) -> Float[Tensor, " R"]:
    """What rows are guessed to hold given the anchors: log(1 + λ/λ_Z).

    Args:
        flat: λ, the scores of rows.
        unit: λ_Z, as of ``unit_score``.

    Returns:
        One number for each row, float64.
    """
    return (flat.double() / unit).log1p()


def unit_score(flat: Float[Tensor, " R"], anchors: Int[Tensor, " Z"]) -> float:
    """λ_Z: the lower quartile of the anchors' scores, or the median of all where there are none.

    Not the least one: some anchors may have been chosen without a look at their scores.

    Args:
        flat: The scores of all rows.
        anchors: Their numbers.

    Returns:
        A positive number.
    """
    chosen = flat[anchors] if len(anchors) else flat
    positive = chosen[chosen > 0].sort().values
    if not len(positive):
        return 1.0
    return float(positive[len(positive) // (4 if len(anchors) else 2)])
