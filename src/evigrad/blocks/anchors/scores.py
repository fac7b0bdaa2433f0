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
        tail: The sum of those of all later columns.
        behind: How many later columns there are; 0 also where they are certainly zero.
    """

    head: Float[Tensor, "N K"]
    tail: Float[Tensor, " N"]
    behind: int

    @property
    def num_rows(self) -> int:
        """Number of all rows."""
        return self.head.numel() + len(self.tail) * self.behind


def ranked(
    rows: Int[Tensor, " r"], flat: Float[Tensor, " R"], generator: torch.Generator
) -> Int[Tensor, " r"]:
    """Rows n K + d by falling score; rows of equal scores are in random order."""
    rows = rows[torch.randperm(len(rows), generator=generator)]
    return rows[flat[rows].argsort(descending=True, stable=True)]


def guessed(flat: Float[Tensor, " R"], unit: float) -> Float[Tensor, " R"]:
    """Predicted entropy of rows given the anchors, log(1 + λ/λ_Z), float64; see ``unit_score``."""
    return (flat.double() / unit).log1p()


def unit_score(flat: Float[Tensor, " R"], anchors: Int[Tensor, " Z"]) -> float:
    """λ_Z > 0: the lower quartile of the anchors' scores; without anchors the median of all."""
    # Not the least score: some anchors may have been chosen without regard to scores.
    chosen = flat[anchors] if len(anchors) else flat
    positive = chosen[chosen > 0].sort().values
    if not len(positive):
        return 1.0
    return float(positive[len(positive) // (4 if len(anchors) else 2)])
