"""Warnings about hyperparameters that grow although the network does not improve.

Very large inputs make the predictions of a network overconfident. Such predictions have no
curvature, so the estimated log evidence is high even if the network has learned nothing.
"""

import math
import warnings
from collections.abc import Sequence
from statistics import mean

from torch import Tensor

from evigrad.errors import EvigradWarning
from evigrad.evidence import Evidence
from evigrad.invariances.affine import LIMITS, AffineInvariance
from evigrad.invariances.transform import bounded_values, ranged_modules
from evigrad.passes.evaluation import Estimate

# A hyperparameter of the model has run away if it grows by this factor. A start nearer to zero
# than the least start counts as the least start.
RUNAWAY_FACTOR, LEAST_START = 30.0, 0.1
# A hyperparameter has also run away if rounds lose this many nats of log likelihood per example.
LOST_NATS = 0.5
# A range is near its limit from this share of the limit on.
NEAR_LIMIT = 0.95


class Runaways:
    """Watch a model's learned hyperparameters over the rounds, and warn once about each runaway.

    ``starts`` maps names to initial values. ``best`` is the highest mean log likelihood per example
    in any round so far. A checkpoint stores both.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.starts = {n: p.detach().clone() for n, p in free_hyperparameters(evidence).items()}
        self.best = -math.inf
        self._has_fallen = False  # far below the best, in the last round
        # Hyperparameters, and the log likelihood. A range may start near its limit.
        self._warned_of = set(ranges_near_limits(evidence))

    def check(self, epoch: int, names: Sequence[str], estimates: Sequence[Estimate]) -> None:
        """Warn about values that have grown too much, and about a log likelihood that stays low.

        A range has grown too much when it comes near its limit.

        Args:
            epoch: Number of the epoch before the round.
            names: Names of the model's learned hyperparameters.
            estimates: Estimates of the round.
        """
        for name, value in free_hyperparameters(self._evidence).items():
            if name not in self._warned_of and (words := _growth(name, self.starts[name], value)):
                self._warned_of.add(name)
                _warn(f"After epoch {epoch}, {name} is {words}.")
        for name, (value, limit) in ranges_near_limits(self._evidence).items():
            if name not in self._warned_of:
                self._warned_of.add(name)
                warnings.warn(
                    f"After epoch {epoch}, {name} is {value:.3g}, near its limit {limit:.3g}."
                    " Loose estimators can reward transforms that make images unrecognizable. Learn"
                    " fewer ranges (AffineInvariance(learn=...)), or fix the weight decay"
                    " (GaussianPrior(learnable=False)). Compare the metrics on held-out data with"
                    " and without the transform.",
                    EvigradWarning,
                    stacklevel=4,
                )
        if not estimates:
            return
        likelihood = mean(e.log_likelihood / e.num_data for e in estimates)
        has_fallen = likelihood < self.best - LOST_NATS
        if has_fallen and self._has_fallen and "likelihood" not in self._warned_of:
            self._warned_of.add("likelihood")
            _warn(
                f"The training log likelihood fell to {likelihood:.3g} nats per example in the"
                f" round after epoch {epoch}, from {self.best:.3g} in an earlier round, while"
                f" {', '.join(names)} changed."
            )
        self._has_fallen = has_fallen  # one round may be a bad draw
        self.best = max(self.best, likelihood)


def free_hyperparameters(evidence: Evidence) -> dict[str, Tensor]:
    """Return the model's learned hyperparameters by name, without ranges and bounded values."""
    held = set(bounded_values(evidence.model))
    for module in ranged_modules(evidence.model).values():
        held |= {id(parameter) for parameter in module.parameters()}
    return {
        name: parameter
        for name, parameter in evidence.hyperparameters().items()
        if name.startswith("model.") and id(parameter) not in held
    }


def ranges_near_limits(evidence: Evidence) -> dict[str, tuple[float, float]]:
    """Return the learned ranges that are near their limits, and the limits, by name.

    The limit of rotations is the full circle, which data may need, so rotations do not count.
    """
    names = {id(parameter): name for name, parameter in evidence.hyperparameters().items()}
    return {
        names[id(parameter)]: (value, LIMITS[name])
        for module in evidence.model.modules()
        if isinstance(module, AffineInvariance)
        for name, value in module.named_ranges().items()
        if id(parameter := getattr(module, name)) in names
        and name != "rotation"
        and value >= NEAR_LIMIT * LIMITS[name]
    }


def _growth(name: str, start: Tensor, value: Tensor) -> str:
    """Return in words how much an entry has grown, or an empty string if none has run away."""
    # Shrinking is fine: the range of a useless transform goes to zero, and so does the scale of a
    # useless feature.
    start, value = start.double().flatten(), value.detach().double().flatten()
    if name.rpartition(".")[2].startswith("log_"):  # a factor is a difference of logarithms
        growth = (value - start).exp()
    else:
        growth = value.abs() / start.abs().clamp(min=LEAST_START)
    entry = int(growth.argmax())
    if not float(growth[entry]) > RUNAWAY_FACTOR:
        return ""
    where = "" if len(value) == 1 else f" in entry {entry}"
    return (
        f"{float(value[entry]):.3g}{where} and started at {float(start[entry]):.3g}: it grew by a"
        f" factor of more than {RUNAWAY_FACTOR:.0f}"
    )


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} Estimates can reward a transform that grows without limit, because huge inputs"
        " make the outputs certain, and certain outputs have no curvature. Give the transform"
        " bounds (Transform.bounds), lower hyper_lr, or use a kfac estimator such as kfac-100-1."
        " Compare the metrics on test data.",
        EvigradWarning,
        stacklevel=5,
    )
