"""Which rows become anchors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.blocks.anchors.greedy import pivots
from evigrad.errors import ConfigurationError, nearest

CHOICES = ("auto", "greedy", "score", "k-centre", "random")

# The greedy choice is among so many rows for each anchor, but at most MOST_CANDIDATES, or twice the
# anchors if that is more. Half of them have the largest scores, where a trained network has its
# anchors; the others are random, for a network that is not sure of anything yet.
CANDIDATES = 4
MOST_CANDIDATES = 2048

# From rows n D + d to their inner products, or to None where unknown.
Kernel = Callable[[Int[Tensor, " m"]], Float[Tensor, "m m"] | None]


@dataclass(frozen=True)
class Anchoring:
    """How an anchored estimator chooses anchors and blocks.

    Attributes:
        share: The share of a block's rows that are anchors, in [0, 1).
        choice: ``greedy`` takes one row after the other, always the one of largest conditional
            variance by the kernel of the network's last layer, if linear (else by score);
            ``score`` the rows of the largest norms |R_n[:, d]|² of the likelihood's root, the data
            that the network is unsure of; ``k-centre`` those of data spread over all inputs;
            ``random`` any; ``auto`` greedily, but k-centre where all data have the same scores, as
            in regression.
        refresh: Streams of blocks (in training, rounds) from one choice of anchors to the next.
        grouped: Whether rows that have much in common given the anchors, by the kernel of the last
            layer, lie in one block; else blocks are stratified by scores alone.

    Raises:
        ConfigurationError: If a value is out of its range.
    """

    share: float = 0.9
    choice: str = "auto"
    refresh: int = 3
    grouped: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigurationError(f"anchors: share must lie in [0, 1), not {self.share}.")
        if self.choice not in CHOICES:
            raise ConfigurationError(
                f"anchors: choice is one of {', '.join(CHOICES)}, not '{self.choice}'."
                f"{nearest(str(self.choice), CHOICES)}"
            )
        if self.refresh < 1:
            raise ConfigurationError(f"anchors: refresh must be at least 1, not {self.refresh}.")

    def num_anchors(self, num_rows: int) -> int:
        """How many of a block's rows are anchors; at least one is left for its part."""
        return min(int(self.share * num_rows), num_rows - 1)


def choose(
    anchoring: Anchoring,
    scores: Float[Tensor, "N D"],
    count: int,
    generator: torch.Generator,
    centres: Callable[[int], Int[Tensor, " k"] | None] | None = None,
    kernel: Kernel | None = None,
) -> Int[Tensor, " Z"]:
    """The anchors among all rows.

    Args:
        anchoring: How to choose.
        scores: |R_n[:, d]|² of every row (n, d).
        count: How many.
        generator: A CPU generator.
        centres: From a count to data spread over all inputs, or to None where inputs have no
            distances; rows are then random.
        kernel: From rows to their inner products, or to None where unknown; greedy is then by
            score.

    Returns:
        Rows as n D + d, in ascending order.
    """
    best = _ranked(anchoring.choice, scores, count, generator, centres, kernel)
    return best[:count].sort().values


def _ranked(
    choice: str,
    scores: Float[Tensor, "N D"],
    count: int,
    generator: torch.Generator,
    centres: Callable[[int], Int[Tensor, " k"] | None] | None,
    kernel: Kernel | None,
) -> Int[Tensor, " R"]:
    """All rows, the best ones first."""
    num_data, num_columns = scores.shape
    if choice == "auto":
        choice = "k-centre" if bool((scores == scores[:1]).all()) else "greedy"
    by_score = scores.flatten().argsort(descending=True, stable=True)
    if choice == "score":
        return by_score
    if choice == "greedy":
        if kernel is None or not 0 < count < len(by_score):
            return by_score
        half = max(count, min(CANDIDATES * count, MOST_CANDIDATES) // 2)
        others = by_score[half:]
        drawn = torch.randperm(len(others), generator=generator)[:half]
        candidates = torch.cat([by_score[:half], others[drawn]])
        known = kernel(candidates)
        if known is not None and not bool(known.diagonal().isfinite().all()):
            known = None
        return by_score if known is None else _first(candidates[pivots(known, count)], by_score)
    if choice == "k-centre" and centres is not None:
        data = centres(-(-count // num_columns))
        if data is not None:
            first = (data[:, None] * num_columns + torch.arange(num_columns)).flatten()
            return _first(first, torch.arange(num_data * num_columns))
    return torch.randperm(num_data * num_columns, generator=generator)


def _first(first: Int[Tensor, " m"], rows: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
    """All rows, starting with the given ones."""
    is_other = torch.ones(len(rows), dtype=torch.bool)
    is_other[first] = False
    return torch.cat([first, rows[is_other[rows]]])
