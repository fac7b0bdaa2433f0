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


def least_score(anchors: Int[Tensor, " Z"], flat: Float[Tensor, " R"]) -> float:
    """The least score of an anchor, or a typical one where there are none."""
    chosen = flat[anchors] if len(anchors) else flat
    positive = chosen[chosen > 0]
    if not len(positive):
        return 1.0
    return float(positive.min() if len(anchors) else positive.median())
