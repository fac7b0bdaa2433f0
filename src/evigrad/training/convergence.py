"""Whether a training run has converged: the log evidence assumes weights at a mode."""

import warnings
from typing import TYPE_CHECKING

from evigrad.errors import EvigradError, EvigradWarning
from evigrad.training.history import Row

if TYPE_CHECKING:
    from evigrad.training.trainer import Trainer

# A larger distance from the mode than this causes a warning, in nats per example.
TOLERANCE = 0.1
# Rows of the data that determine the mode. On networks of docs/start.md, 400 rows give 1.0 to 1.3
# times the exact gap, and take a hundredth of the time of training.
_ROWS = 400
# Beyond this many numbers in the rows, Kronecker factors take less memory.
_MOST_NUMBERS = 2**27


def mode_columns(trainer: "Trainer", epoch: int) -> Row:
    """Return the distance from the mode in nats per example, after the last epoch.

    It is None in other epochs, and if it cannot be computed, for instance for lack of memory.
    """
    if trainer.learner is None:
        return {}
    if epoch < trainer.epochs:
        return {"mode_gap": None}
    evidence = trainer.evidence
    num_weights = sum(weight.numel() for weight in evidence.weights().values())
    try:
        if _ROWS * num_weights <= _MOST_NUMBERS:
            return {"mode_gap": evidence.mode_gap(trainer.data, structure="ntk", rows=_ROWS)}
        return {"mode_gap": evidence.mode_gap(trainer.data, structure="kfac")}
    except EvigradError:
        return {"mode_gap": None}


def warn_of_distance(gap: float | None) -> None:
    """Warn if the weights are so far from the mode that the log evidence is too low."""
    if gap is not None and gap > TOLERANCE:
        warnings.warn(
            f"The weights are not at the mode: a Newton step of the linearized model would gain"
            f" {gap:.2g} nats per example, and the log evidence is too low by as much. Train"
            " longer, with more epochs in Schedule. A network with kinks, such as ReLU, may never"
            " reach a mode. SiLU and tanh have no kinks.",
            EvigradWarning,
            stacklevel=3,
        )
