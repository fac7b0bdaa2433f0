"""Which rows become anchors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.errors import ConfigurationError, nearest

CHOICES = ("auto", "score", "k-centre", "random")

# One's own: from the scores |R_n[:, d]|² (N, D) and a number to so many rows n D + d.
Chooser = Callable[[Float[Tensor, "N D"], int], Int[Tensor, " Z"]]

# Data of a block's log likelihood, for each of its rows: a forward pass each, where a row takes
# three.
LIKELIHOOD_SHARE = 0.25


@dataclass(frozen=True)
class Anchoring:
    """How an anchored estimator spends its rows.

    Attributes:
        share: The part of the rows of a block that are anchors.
        choice: ``score`` takes the rows of the largest norms |R_n[:, d]|² of the likelihood's root,
            the data that the network is unsure of; ``k-centre`` those of data that lie spread over
            all inputs; ``random`` any; ``auto`` by score, but k-centre where all data have the same
            scores, as in regression. Or a function from the scores (N, D) and a number to so many
            rows, given as n D + d.
        random_share: The part of the anchors that is drawn at random in any case.
        refresh: Streams of blocks (in training, rounds) from one choice of anchors to the next.
        likelihood_data: Data of a block that its log likelihood is taken from, drawn uniformly.
            Default: a quarter as many as rows.

    Raises:
        ConfigurationError: If a value is out of its range.
    """

    share: float = 0.75
    choice: str | Chooser = "auto"
    random_share: float = 0.0
    refresh: int = 1
    likelihood_data: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not 0 <= self.share < 1:
            raise ConfigurationError(f"anchors: share must lie in [0, 1), not {self.share}.")
        if not 0 <= self.random_share <= 1:
            raise ConfigurationError(
                f"anchors: random_share must lie in [0, 1], not {self.random_share}."
            )
        if not callable(self.choice) and self.choice not in CHOICES:
            raise ConfigurationError(
                f"anchors: choice is one of {', '.join(CHOICES)}, not '{self.choice}'."
                f"{nearest(str(self.choice), CHOICES)}"
            )
        if self.refresh < 1:
            raise ConfigurationError(f"anchors: refresh must be at least 1, not {self.refresh}.")
        if self.likelihood_data is not None and self.likelihood_data < 1:
            raise ConfigurationError(
                f"anchors: likelihood_data must be at least 1, not {self.likelihood_data}."
            )

    def num_anchors(self, num_rows: int) -> int:
        """How many rows of a block are anchors; at least one is left for its part.

        Args:
            num_rows: Of the block.

        Returns:
            The number.
        """
        return min(int(self.share * num_rows), num_rows - 1)

    def num_likelihood(self, num_rows: int, num_data: int) -> int:
        """How many data the log likelihood is taken from.

        Args:
            num_rows: Of the block.
            num_data: N.

        Returns:
            The number.
        """
        asked = self.likelihood_data or max(1, int(LIKELIHOOD_SHARE * num_rows))
        return min(asked, num_data)


def choose(
    anchoring: Anchoring,
    scores: Float[Tensor, "N D"],
    count: int,
    generator: torch.Generator,
    centres: Callable[[int], Int[Tensor, " k"] | None] | None = None,
) -> Int[Tensor, " Z"]:
    """The anchors among all rows.

    Args:
        anchoring: How to choose.
        scores: |R_n[:, d]|² of every row (n, d).
        count: How many.
        generator: A CPU generator.
        centres: Gives so many data that lie spread over all inputs, or None where inputs have no
            distances; random rows then take their place.

    Returns:
        Rows as n D + d, in ascending order.
    """
    best = _ranked(anchoring.choice, scores, count, generator, centres)
    drawn = int(anchoring.random_share * count)
    chosen, others = best[: count - drawn], best[count - drawn :]
    if drawn:
        picked = torch.randperm(len(others), generator=generator)[:drawn]
        chosen = torch.cat([chosen, others[picked]])
    return chosen.sort().values


def _ranked(
    choice: str | Chooser,
    scores: Float[Tensor, "N D"],
    count: int,
    generator: torch.Generator,
    centres: Callable[[int], Int[Tensor, " k"] | None] | None,
) -> Int[Tensor, " R"]:
    """All rows, the best ones first."""
    num_data, num_columns = scores.shape
    if choice == "auto":
        choice = "k-centre" if bool((scores == scores[:1]).all()) else "score"
    if choice == "score":
        return scores.flatten().argsort(descending=True, stable=True)
    first = None
    if callable(choice):
        first = choice(scores, count)
        _check_rows(first, count, scores.numel())
    elif choice == "k-centre" and centres is not None:
        data = centres(-(-count // num_columns))
        if data is not None:
            first = (data[:, None] * num_columns + torch.arange(num_columns)).flatten()
    if first is None:
        return torch.randperm(num_data * num_columns, generator=generator)
    is_other = torch.ones(num_data * num_columns, dtype=torch.bool)
    is_other[first] = False
    return torch.cat([first, is_other.nonzero().squeeze(1)])


def _check_rows(rows: Tensor, count: int, num_rows: int) -> None:
    if (
        rows.dtype != torch.int64
        or rows.shape != (count,)
        or len(rows.unique()) < count
        or (count and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows)
    ):
        raise ConfigurationError(
            f"anchors: the choice must return {count} different rows of 0 to {num_rows - 1}, int64."
        )
