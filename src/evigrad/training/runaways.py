"""Warnings of hyperparameters that run away while the network learns nothing by it.

Large inputs make a network certain of its outputs. These have no curvature then, and the evidence
of the approximation is high although the network learns nothing by it.
"""

import math
import warnings
from collections.abc import Sequence
from statistics import mean

from torch import Tensor

from evigrad.errors import EvigradWarning
from evigrad.evidence import Evidence
from evigrad.invariances.transform import bounded_values, ranged_modules
from evigrad.passes.evaluation import Estimate

# A hyperparameter of the model has run away if it grows by this factor. What starts nearer to zero
# than the least start counts as if it started there.
RUNAWAY_FACTOR, LEAST_START = 30.0, 0.1
# So has some hyperparameter if rounds lose so many nats of log likelihood per example.
LOST_NATS = 0.5


class Runaways:
    """Watches the learned hyperparameters of a model from round to round, and warns once of each.

    ``starts`` are the values at the start by name, ``best`` is the highest mean log likelihood per
    example of a round. A checkpoint has both.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.starts = {n: p.detach().clone() for n, p in free_hyperparameters(evidence).items()}
        self.best = -math.inf
        self._has_fallen = False  # far below the best, in the last round
        self._warned_of: set[str] = set()  # hyperparameters, and the log likelihood

    def check(self, epoch: int, names: Sequence[str], estimates: Sequence[Estimate]) -> None:
        """Warn of values far from their start, and of a log likelihood that fell in two rounds.

        Args:
            epoch: The epoch before the round.
            names: The hyperparameters of the model that are learned.
            estimates: Those of the round.
        """
        for name, value in free_hyperparameters(self._evidence).items():
            if name not in self._warned_of and (words := _growth(name, self.starts[name], value)):
                self._warned_of.add(name)
                _warn(f"After epoch {epoch} {name} is {words}.")
        if not estimates:
            return
        likelihood = mean(e.log_likelihood / e.num_data for e in estimates)
        has_fallen = likelihood < self.best - LOST_NATS
        if has_fallen and self._has_fallen and "likelihood" not in self._warned_of:
            self._warned_of.add("likelihood")
            _warn(
                f"The training log likelihood fell to {likelihood:.3g} nats per example in the"
                f" round after epoch {epoch}, from {self.best:.3g} in an earlier one, while"
                f" {', '.join(names)} changed."
            )
        self._has_fallen = has_fallen  # one round may be a bad draw
        self.best = max(self.best, likelihood)


def free_hyperparameters(evidence: Evidence) -> dict[str, Tensor]:
    """The learned hyperparameters of the model by name, without ranges and those with bounds."""
    held = set(bounded_values(evidence.model))
    for module in ranged_modules(evidence.model).values():
        held |= {id(parameter) for parameter in module.parameters()}
    return {
        name: parameter
        for name, parameter in evidence.hyperparameters().items()
        if name.startswith("model.") and id(parameter) not in held
    }


def _growth(name: str, start: Tensor, value: Tensor) -> str:
    """In words, by how much an entry has run away; an empty string if none has."""
    # Shrinking is no fault: a range that does not help goes to zero, as the scale of a feature.
    start, value = start.double().flatten(), value.detach().double().flatten()
    if name.rpartition(".")[2].startswith("log_"):  # where a factor is a difference
        growth = (value - start).exp()
    else:
        growth = value.abs() / start.abs().clamp(min=LEAST_START)
    entry = int(growth.argmax())
    if not float(growth[entry]) > RUNAWAY_FACTOR:
        return ""
    where = "" if len(value) == 1 else f" in entry {entry}"
    return (
        f"{float(value[entry]):.3g}{where} and began at {float(start[entry]):.3g}, which is growth"
        f" by a factor of more than {RUNAWAY_FACTOR:.0f}"
    )


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} Estimates can reward a transform that runs away: huge inputs make certain"
        " outputs, which have no curvature. Give the transform bounds (Transform.bounds), lower"
        " hyper_lr, or take a kfac estimator such as kfac-100-1. Compare test data.",
        EvigradWarning,
        stacklevel=5,
    )
