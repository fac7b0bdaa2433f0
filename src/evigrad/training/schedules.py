"""When the hyperparameters are learned, and how rates fall over a run."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from evigrad.training.settings import PlannedSettings

# Enough for curves, for a small part of the time of training.
_EVALUATIONS = 10


def cosine(progress: float, start: float, end: float) -> float:
    """A cosine from ``start`` at ``progress`` 0 to ``end`` at 1."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * progress))


def is_round(epoch: int, burn_in: int, every: int) -> bool:
    """Whether hyperparameter steps follow an epoch, counted from 1.

    They follow the last epoch of the burn-in and every ``every``-th epoch from there, as in the
    paper's schedule: with a burn-in of 10 and every 5 epochs, epochs 10, 15, 20, ...

    Returns:
        True where steps follow.
    """
    return epoch >= burn_in and (epoch - burn_in) % every == 0


def count_rounds(epochs: int, burn_in: int, every: int) -> int:
    """The number of epochs for which ``is_round`` is true."""
    return sum(is_round(epoch, burn_in, every) for epoch in range(1, epochs + 1))


def is_evaluated(epoch: int, epochs: int, every: int | None) -> bool:
    """Whether an evaluation follows an epoch, from 1: always the last one.

    ``every`` is 0 for the last epoch alone, None for ten evaluations at most.

    Returns:
        True where one follows.
    """
    if every is None:
        every = -(-epochs // _EVALUATIONS)
    return epoch == epochs or (every > 0 and epoch % every == 0)


@dataclass
class Rounds:
    """The rounds of some hyperparameters, which take their steps together.

    Attributes:
        names: Names of the hyperparameters.
        every: Epochs from one round to the next.
        steps: Steps of a round.
        burn_in: Epochs before the first round.
        epochs: Epochs in all.
        taken: Steps so far.
    """

    names: list[str]
    every: int
    steps: int
    burn_in: int
    epochs: int
    taken: int = 0

    def is_due(self, epoch: int) -> bool:
        """Whether a round follows an epoch."""
        return is_round(epoch, self.burn_in, self.every)

    @property
    def progress(self) -> float:
        """The share of all steps that are taken, from 0 to 1."""
        return self.taken / (count_rounds(self.epochs, self.burn_in, self.every) * self.steps)


def make_rounds(settings: PlannedSettings, names: Iterable[str]) -> list[Rounds]:
    """The rounds: prior and noise, then the model's own, or one for all; [] for baselines."""
    if settings.baseline is not None:
        return []
    s, known = settings.schedule, list(names)
    own = [name for name in known if name.startswith("model.")]
    rest = [name for name in known if name not in own]
    parts = [(known, s.every, s.steps)]
    if s.hyper_every is not None or s.hyper_steps is not None:
        parts = [
            (rest, s.every, s.steps),
            (own, s.hyper_every or s.every, s.hyper_steps or s.steps),
        ]
    return [Rounds(part, every, steps, s.burn_in, s.epochs) for part, every, steps in parts if part]
