"""How much curvature rows can hold, by the likelihood's root alone."""

from dataclasses import dataclass

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


def guessed(flat: Float[Tensor, " R"], anchors: Int[Tensor, " Z"]) -> Float[Tensor, " R"]:
    """What rows are guessed to hold given the anchors: log(1 + λ/λ_Z), with a typical anchor's λ_Z.

    Args:
        flat: λ, the scores of all rows.
        anchors: Their numbers.

    Returns:
        One number for each row, float64.
    """
    return (flat.double() / unit_score(flat, anchors)).log1p()


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
