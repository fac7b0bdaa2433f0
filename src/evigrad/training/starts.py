"""Several starts of a training run. The start with the highest log evidence continues.

Weights and precisions depend on each other, so training can end in different optima. Large noise
and large precisions keep the weights small, and small weights keep the noise large. Starts differ
only in the weight decay of the burn-in: the initial weights, batches and blocks are the same.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from evigrad.training.checkpoint import fitting
from evigrad.training.history import Row
from evigrad.training.plan import planned
from evigrad.training.settings import Schedule

State = Mapping[str, Any]

# Share of the epochs after which starts are compared. At a fifth, weak starts still win on data
# where they end with less evidence (benchmarks/README.md).
SHARE = 1 / 3
# Number of rounds whose log evidence is averaged, because weights move at large learning rates.
ROUNDS = 3


class Starts:
    """The starts of a training run, which are tried one after another.

    Attributes:
        decays: Weight decays of the burn-in, in the order of the trials. There is only one if the
            run is too short to compare several.
        until: Last epoch of a trial.
        scores: Log evidence in nats per example by weight decay, for the starts tried so far. The
            value is −inf if training diverged.
    """

    def __init__(self, decays: Sequence[float], schedule: Schedule) -> None:
        self.until = comparison(schedule)
        self.decays = list(decays if self.until and schedule.burn_in else decays[:1])
        self.scores: dict[float, float] = {}
        self._initial: State | None = None
        self._best: State | None = None

    @property
    def are_tried(self) -> bool:
        """Return whether trials are still running. If so, the current history may be dropped."""
        return len(self.decays) > 1 and len(self.scores) < len(self.decays)

    @property
    def decay(self) -> float:
        """Return the weight decay of the current trial."""
        return self.decays[len(self.scores)]

    def begin(self, state: State) -> None:
        """Keep the state before the first epoch, if no state has been loaded."""
        if self._initial is None:
            self._initial = copy.deepcopy(state)

    def is_due(self, epoch: int) -> bool:
        """Return whether the trial of a start ends after ``epoch``. Epochs are numbered from 1."""
        return self.are_tried and epoch == self.until

    def advance(self, history: Sequence[Row], state: State | None) -> State | None:
        """End the trial of a start.

        Args:
            history: Rows of the trial.
            state: State at the end of the trial, or None if training diverged.

        Returns:
            The state from which the next trial or the best start continues, which is ``state`` if
            that start continues without a change. None if all starts diverged.
        """
        best = max(self.scores.values(), default=-math.inf)
        self.scores[self.decay] = score = -math.inf if state is None else _score(history)
        if state is not None and (score > best or self._best is None):
            self._best = copy.deepcopy(state) if self.are_tried else state
        if self.are_tried:
            return copy.deepcopy(self._initial)
        state, self._initial, self._best = self._best, None, None
        return state

    def epochs_left(self, done: int, last: int) -> list[range]:
        """Return the epochs of this trial, of later trials and of the start that continues.

        Args:
            done: Number of epochs of the current trial, or of the run after the trials.
            last: Last epoch of the run.
        """
        if not self.are_tried:
            return [range(done + 1, last + 1)]
        later = [range(1, self.until + 1)] * (len(self.decays) - len(self.scores) - 1)
        return [range(done + 1, self.until + 1), *later, range(self.until + 1, last + 1)]

    def trial(self) -> str:
        """Return an announcement of the current trial."""
        return f"Trying start decay {self.decay:g} (epochs 1 to {self.until})."

    def end_of_trial(self) -> str:
        """Return the result of the last trial."""
        decay, score = list(self.scores.items())[-1]
        if score == -math.inf:
            return f"Start decay {decay:g} diverged, or its log evidence is not finite."
        return f"Start decay {decay:g} has log evidence {score:.3f} (mean of {ROUNDS} rounds)."

    def choice(self, last: int) -> str:
        """Return which start continues until the epoch ``last``, and why."""
        best = max(self.scores, key=lambda decay: self.scores[decay])
        others = [f"{score:.3f}" for decay, score in self.scores.items() if decay != best]
        why = f"log evidence {self.scores[best]:.3f} instead of {', '.join(others)}"
        return f"Continuing from start decay {best:g} ({why}), epochs {self.until + 1} to {last}."

    def state_dict(self) -> dict[str, Any]:
        """Return the scores, and the states that the remaining trials need."""
        states = {"initial": self._initial, "best": self._best}
        return {"decays": list(self.scores), "scores": list(self.scores.values()), **states}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a ``state_dict``.

        If ``state`` is None (from a version without trials), keep only the first start.
        """
        if state is None:
            self.decays = self.decays[:1]
            return
        with fitting("The saved state"):
            self.scores = dict(zip(state["decays"], state["scores"], strict=True))
            self._initial, self._best = state["initial"], state["best"]


def comparison(schedule: Schedule) -> int:
    """Return the epoch after which starts are compared, or 0 if the run has too few rounds."""
    burn_in, every, epochs = map(planned, (schedule.burn_in, schedule.every, schedule.epochs))
    rounds = range(burn_in + (ROUNDS - 1) * every, epochs, every)
    return next((epoch for epoch in rounds if epoch >= SHARE * epochs), 0)


def _score(history: Sequence[Row]) -> float:
    """Return the mean log evidence of the last rounds, or −inf if it is not finite."""
    values = [row["log_evidence"] for row in history]
    last = [value for value in values if value is not None][-ROUNDS:]
    return fmean(last) if last and all(map(math.isfinite, last)) else -math.inf
