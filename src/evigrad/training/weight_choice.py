"""Choose the weight of the log-determinant by predictions of held-out data.

The log evidence sets the ratios of precisions well, but not always their level (docs/theory.md).
The weight c moves the level of all precisions, so one number remains to choose. A trial trains the
network with one weight, and predicts held-out data. The log likelihood of these predictions has a
single maximum in log c. The search starts at c = 1 and goes uphill in growing steps. It ends at the
vertex of a parabola through the best trial and its neighbors.

The search first compares trials halfway. Then it trains the best trial and its neighbors to the
end, and moves on if a neighbor turns out to be better. All trials predict the same examples, so
their differences have small standard errors. If the predicted gain over c = 1 is smaller than its
standard error, and the vertex is uncertain by more than a factor of two, the weight stays 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

# The trials of the search in each direction, as powers of two.
FACTOR, STEPS = 2.0, (1, 3, 6)


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

    def minus(self, other: "Predictions") -> "Predictions":
        """Return the differences to other predictions of the same examples."""
        return Predictions(self.sums - other.sums, self.counts)


class Trials(Protocol):
    """Trials by their weights. ``halfway`` may be None if it is not known."""

    def halfway(self, weight: float) -> Predictions | None:
        """Return the predictions after half of a trial."""
        ...

    def end(self, weight: float) -> Predictions | None:
        """Return the predictions after the whole trial, or None if training diverged."""
        ...


@dataclass(frozen=True)
class WeightChoice:
    """The weight of the log-determinant that held-out data chose.

    Attributes:
        weight: The chosen weight. It is 1 if the data could not decide.
        gain: Predicted gain in held-out log likelihood over the weight 1, in nats per example, of
            the best weight.
        error: Standard error of ``gain``.
        trials: Held-out log likelihood by weight, in nats per example. For a trial that stopped
            halfway, it is the value of the best trial plus the difference halfway. It is −inf if
            training diverged.
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


def search(trials: Trials) -> WeightChoice:
    """Return the weight with the best predictions, from a few trials, without the time.

    The trial with weight 1 must raise an error if training diverges.
    """
    run, best, tried = _Memo(trials), 0, [0]
    for sign in (1, -1):
        for size in STEPS:
            tried.append(sign * size)
            if not run.is_ahead(tried[-1], best):
                break
            best = tried[-1]
            if len(tried) > 2 and (vertex := run.vertex(tried[-3:], best)) and vertex.is_inside:
                break  # no farther trial is better
        if best:
            break

    while True:
        steps = sorted(tried)
        index = steps.index(best)
        better = max(steps[max(index - 1, 0) : index + 2], key=run.score)
        if run.score(better) > run.score(best):
            best = better
            continue
        start = min(max(index - 1, 0), len(steps) - 3)
        vertex = run.vertex(steps[start : start + 3], best)
        untried = [step for step in _neighbors(best) if step not in tried]
        if not untried or (vertex is not None and vertex.is_inside):
            break
        tried.append(untried[0])

    top, differences = run.end(best), {step: run.difference(step, best) for step in steps}
    reference = differences[0]
    assert top is not None and reference is not None
    vertex = vertex or _Vertex(float(best), 0.0, top.minus(top), False)
    gained = vertex.difference.minus(reference)
    gain, error = gained.mean, gained.standard_error()
    return WeightChoice(
        weight=FACTOR**vertex.place if gain > error or vertex.error <= 1 else 1.0,
        gain=gain,
        error=error,
        trials={
            FACTOR**step: top.mean + (-math.inf if difference is None else difference.mean)
            for step, difference in differences.items()
        },
        num_held_out=len(top.sums),
        seconds=0.0,
    )


def _neighbors(step: int) -> list[int]:
    """Return the next smaller and the next larger step that the search can try."""
    grid = sorted({sign * size for sign in (1, -1) for size in (0, *STEPS)})
    index = grid.index(step)
    return [*grid[max(index - 1, 0) : index], *grid[index + 1 : index + 2]]


@dataclass(frozen=True)
class _Vertex:
    """Step of a parabola's maximum, its standard error, and the difference to the best trial.

    ``is_inside`` tells whether the maximum lies between the three trials.
    """

    place: float
    error: float
    difference: Predictions
    is_inside: bool


class _Memo:
    """Trials by their steps, each of which runs once."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._halves: dict[int, Predictions | None] = {}
        self._ends: dict[int, Predictions | None] = {}

    def halfway(self, step: int) -> Predictions | None:
        if step not in self._halves:
            self._halves[step] = self._trials.halfway(FACTOR**step)
        return self._halves[step]

    def end(self, step: int) -> Predictions | None:
        if step not in self._ends:
            self._ends[step] = self._trials.end(FACTOR**step)
        return self._ends[step]

    def score(self, step: int) -> float:
        end = self.end(step)
        return -math.inf if end is None else end.mean

    def difference(self, step: int, best: int) -> Predictions | None:
        """Return how a trial differs from the best one: at the end, or halfway if one stopped."""
        have_ended = step in self._ends and best in self._ends
        predict = self.end if have_ended else self.halfway
        trial, top = predict(step), predict(best)
        return None if trial is None or top is None else trial.minus(top)

    def is_ahead(self, step: int, best: int) -> bool:
        """Return whether a trial is better than the best one, halfway if this is known."""
        new, old = self.halfway(step), self.halfway(best)
        if new is None or old is None:
            return self.score(step) > self.score(best)
        return new.mean > old.mean

    def vertex(self, steps: Sequence[int], best: int) -> _Vertex | None:
        """Return the vertex of the parabola through three steps, if it is a maximum."""
        left, center, right = sorted(steps)
        low, middle, high = (self.difference(step, best) for step in (left, center, right))
        if low is None or middle is None or high is None:
            return None
        # Divided differences: the parabola is middle + x (slope + x bend), x from the center.
        a, b, counts = center - left, right - center, middle.counts
        falls, rises = (middle.sums - low.sums) / a, (high.sums - middle.sums) / b
        bend, slope = (rises - falls) / (a + b), (b * falls + a * rises) / (a + b)
        mean_bend = Predictions(bend, counts).mean
        if mean_bend >= 0:  # all three are equal, or the maximum is on one side
            return None
        x = -0.5 * Predictions(slope, counts).mean / mean_bend
        is_inside = -a < x < b
        x = min(max(x, -float(a)), float(b))
        # The mean derivative at x is zero. Its error, divided by its change with x, is that of x.
        error = Predictions(slope + 2 * x * bend, counts).standard_error()
        difference = Predictions(middle.sums + x * (slope + x * bend), counts)
        return _Vertex(center + x, 0.5 * error / abs(mean_bend), difference, is_inside)
