"""Training that continues until it has settled: the number of epochs, and the learning rates.

A run has ``Schedule.epochs`` epochs, in which the learning rate falls along a cosine. If
``Schedule.max_epochs`` is larger, shorter cycles follow, in which the learning rate falls from a
third of its first value. Training ends after a cycle that changes log evidence, noise and mode gap
only a little.
"""

import math
from collections.abc import Sequence
from itertools import islice
from statistics import fmean

from evigrad.training.history import Row
from evigrad.training.plan import planned
from evigrad.training.settings import Schedule

# A cycle changed little if log evidence and mode gap changed by at most this many nats per example,
# and the log of the noise by at most NOISE. Precisions count as far as the log evidence depends on
# them: those of weights that the data do not determine grow without limit.
NATS, NOISE = 0.01, 0.03
# Learning rate at the start of later cycles, relative to the first. At the full rate, a network
# with a small noise loses part of what it has learned, and at a tenth, it learns little more
# (benchmarks/README.md).
LATER_RATE = 0.3
# Number of rounds whose log evidence is averaged.
_ROUNDS = 3


class Cycles:
    """The cycles of a run, in each of which the learning rate falls.

    Attributes:
        most: Largest possible number of epochs.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.first = planned(schedule.epochs)
        self.most = max(self.first, schedule.max_epochs or 0)
        self.length = max(1, self.first // 2)

    def end(self, history: Sequence[Row]) -> int:
        """Return the last epoch of the cycle to which the epoch after ``history`` belongs.

        If training has ended, return the number of epochs in ``history``.
        """
        before, end = 0, self.first
        while len(history) >= end and end < self.most:
            if before and has_settled(history[:before], history[:end]):
                break
            before, end = end, min(end + self.length, self.most)
        return end

    def first_rate(self, epoch: int) -> float:
        """Return the learning rate at the start of an epoch's cycle, relative to the first one."""
        return 1.0 if epoch <= self.first or self.most == self.first else LATER_RATE

    def progress(self, epoch: int) -> float:
        """Return the share of an epoch's cycle that is over when the epoch begins."""
        done = epoch - 1
        if done < self.first or self.most == self.first:
            return done / self.first
        begin = done - (done - self.first) % self.length
        return (done - begin) / min(self.length, self.most - begin)


def has_settled(before: Sequence[Row], after: Sequence[Row]) -> bool:
    """Return whether evidence, noise and mode gap differ little at the ends of two histories."""
    one, other = _state(before), _state(after)
    return one.keys() == other.keys() and all(
        abs(one[name] - other[name]) <= (NOISE if "noise" in name.split("/") else NATS)
        for name in one
    )


def _state(history: Sequence[Row]) -> dict[str, float]:
    """Return log evidence, mode gap and log noise at the end of a history."""
    latest = (e for row in reversed(history) if (e := row["log_evidence"]) is not None)
    values = list(islice(latest, _ROUNDS))
    state = {"log_evidence": fmean(values)} if values else {}
    for name, value in history[-1].items():
        if value is not None and name == "mode_gap":
            state[name] = value
        elif value is not None and "noise" in name.split("/"):
            state[name] = math.log(value)
    return state
