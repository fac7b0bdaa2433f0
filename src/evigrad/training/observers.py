"""Observers of a training run, which are notified when something has happened."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from evigrad.evidence import Evidence
from evigrad.training.cycles import Cycles
from evigrad.training.history import Row
from evigrad.training.learner import Learner
from evigrad.training.settings import Settings
from evigrad.training.starts import Starts

Callback = Callable[[Row], None]


class Run(Protocol):
    """The state of a run that observers read. ``steps`` is the number of steps of an epoch."""

    settings: Settings
    evidence: Evidence
    learner: Learner | None
    cycles: Cycles
    starts: Starts
    history: list[Row]
    seconds: float
    steps: int

    @property
    def epochs(self) -> int:
        """Return the last epoch of the current cycle."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what is needed to continue training from here."""
        ...


class Observer:
    """An observer of a run on the first rank. By default, it does nothing."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def begin(self) -> None:
        """Take notice before the first epoch in this process."""

    def step(self, share: float) -> None:
        """Take notice that a share of the current epoch is done."""

    def epoch(self, row: Row) -> None:
        """Take notice of an epoch, with the last row of the history."""

    def restart(self, row: Row | None) -> None:
        """Take notice that the trial of a start has ended, and that the history is another one.

        ``row`` is the last row of the trial, or None if training diverged.
        """
        if row is not None:
            self.epoch(row)

    def end(self, is_complete: bool) -> None:
        """Take notice that the run is complete, or has been stopped after an epoch."""


class Callbacks(Observer):
    """Call functions with the row of each epoch of the start that continues."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        super().__init__(run)
        self._callbacks = callbacks

    def epoch(self, row: Row) -> None:
        if not self._run.starts.are_tried:
            for callback in self._callbacks:
                callback(row)

    def restart(self, row: Row | None) -> None:
        for kept in self._run.history:
            self.epoch(kept)
