"""Choose the weight of the log-determinant by predictions of held-out data.

The log evidence sets the ratios of precisions well, but not always their level (docs/theory.md).
The weight c moves the level of all precisions, so one number remains to choose. A trial trains the
network with one weight, and predicts held-out data. The log likelihood of these predictions has a
single maximum in log c. The search starts at c = 1 and goes uphill in steps of a factor of four.
Around the best weight, it continues in steps of a factor of two. It ends at the vertex of the
parabola through the best trial and its two neighbors.

All trials predict the same examples, so their differences have small standard errors. If the
predicted gain over c = 1 is smaller than its standard error, the weight stays 1.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

# Ratio of neighboring weights, and the number of steps from 1 to the smallest and largest weight.
# Over a factor of four, the log likelihood can differ much from a parabola (benchmarks/README.md).
FACTOR, FARTHEST = 2.0, 6
# Number of standard errors by which the predicted gain must exceed zero.
_DECISIVE = 1.0


@dataclass(frozen=True)
class Predictions:
    """Log likelihoods of held-out examples under one trial.

    Attributes:
        sums: Log likelihood of each example, summed over its targets, (n,), in nats.
        counts: Number of targets of each example, (n,).
    """

    sums: Float[Tensor, " n"]
    counts: Float[Tensor, " n"]

    @property
    def mean(self) -> float:
        """Return the mean log likelihood of a target, in nats."""
        return float(self.sums.sum() / self.counts.sum())

    def standard_error(self) -> float:
        """Return the standard error of the mean. Targets of one example may be correlated."""
        count = len(self.sums)
        if count < 2:
            return math.inf
        residuals = self.sums - self.mean * self.counts
        return float((residuals.square().sum() * count / (count - 1)).sqrt() / self.counts.sum())


@dataclass(frozen=True)
class WeightChoice:
    """The weight of the log-determinant that held-out data chose.

    Attributes:
        weight: The chosen weight. It is 1 if the data could not decide.
        gain: Predicted gain in held-out log likelihood over the weight 1, in nats per example, of
            the best weight.
        error: Standard error of ``gain``.
        trials: Held-out log likelihood by weight, in nats per example. It is −inf if training
            diverged.
        num_held_out: Number of held-out examples.
        seconds: Time of all trials in seconds.

    See also: docs/choosing.md.
    """

    weight: float
    gain: float
    error: float
    trials: Mapping[float, float]
    num_held_out: int
    seconds: float

    def __str__(self) -> str:
        """Return the result in one sentence."""
        gain = f"{self.gain:.2g} ± {self.error:.2g} nats per example on {self.num_held_out}"
        if self.weight == 1:
            return (
                "The held-out data do not call for another weight of the log-determinant than 1"
                f" (predicted gain of the best weight: {gain} examples)."
            )
        return (
            f"The held-out data chose the weight {self.weight:.2g} of the log-determinant"
            f" (predicted gain over 1: {gain} examples)."
        )


def search(predict: Callable[[float], Predictions | None]) -> WeightChoice:
    """Return the weight with the best predictions, from a few trials.

    Args:
        predict: Returns the predictions of a trial with a weight, or None if training diverged. For
            weight 1, it must raise an error instead.

    Returns:
        The choice, without its time.
    """
    trials: dict[int, Predictions | None] = {}

    def score(step: int) -> float:
        if step not in trials:
            trials[step] = predict(FACTOR**step)
        trial = trials[step]
        return -math.inf if trial is None else trial.mean

    reference = trials[0] = predict(1.0)
    assert reference is not None
    direction = 2 if score(2) > score(0) else -2
    best = 0
    while abs(best) < FARTHEST and score(best + direction) > score(best):
        best += direction
    # The side of the better neighbor comes first, because the maximum is probably there.
    sides = [side for side in (1, -1) if abs(best + side) <= FARTHEST]
    for side in sorted(sides, key=lambda side: -score(best + 2 * side)):
        if score(best + side) > score(best):
            best += side
            break
    place, sums = _vertex(best, trials)
    difference = Predictions(sums - reference.sums, reference.counts)
    gain, error = difference.mean, difference.standard_error()
    return WeightChoice(
        weight=FACTOR**place if gain > _DECISIVE * error else 1.0,
        gain=gain,
        error=error,
        trials={FACTOR**step: score(step) for step in sorted(trials)},
        num_held_out=len(reference.sums),
        seconds=0.0,
    )


def _vertex(best: int, trials: Mapping[int, Predictions | None]) -> tuple[float, Tensor]:
    """Return the vertex of the parabola around the best step, and each example's value there.

    If the best step has no neighbor on one side, return the best step.
    """
    low, middle, high = (trials.get(best + offset) for offset in (-1, 0, 1))
    assert middle is not None
    if low is None or high is None:
        return best, middle.sums
    curvature = low.mean - 2 * middle.mean + high.mean
    if curvature >= 0:  # all three are equal
        return best, middle.sums
    x = 0.5 * (low.mean - high.mean) / curvature
    sums = 0.5 * x * (x - 1) * low.sums + (1 - x * x) * middle.sums + 0.5 * x * (x + 1) * high.sums
    return best + x, sums
