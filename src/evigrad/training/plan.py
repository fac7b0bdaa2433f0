"""The plan of a training: what follows from its data where the settings say nothing."""

from dataclasses import replace
from typing import TypeVar

from evigrad.likelihoods import make_likelihood
from evigrad.priors import GaussianPrior
from evigrad.training.settings import Optimization, Schedule, Settings

T = TypeVar("T")

# Default of a learned prior precision at the start, for steps of Adam.
LEARNED_PRECISION = 1.0
# Weight decay of the burn-in, from which the fixed point starts: 20 times the usual. From a weak
# one, noisy labels and targets are fitted before their noise is known, and precisions are slow to
# come back; from a much stronger one, networks on few data end at zero (benchmarks/start.py).
BURN_IN_DECAY = 1e-2
# The burn-in's precision at most: what many data say must not be held back by a decay for few.
BURN_IN_PRECISION = 15.0
# The same for weights that the prior draws to other values than zero, as pretrained ones: from a
# weak decay few data are fitted wherever that leads, before it is known how close to stay.
PRETRAINED_DECAY = 1.0
# Default of a kept precision divided by N: the usual weight decay.
WEIGHT_DECAY = 5e-4

# Default schedules (benchmarks/tables.py). Training takes a number of steps, and few data make few
# steps in an epoch; many data need more than a few epochs. On regression tables a third of the
# rate finds networks that fit the noise.
CLASSIFICATION_LR, REGRESSION_LR = 3e-3, 1e-2
STEPS = 2000
FEWEST_EPOCHS = 100
# Share of the epochs before the first round (benchmarks/start.py).
BURN_IN = 0.1
ROUNDS = 20


def plan(settings: Settings, num_data: int) -> Settings:
    """Return the settings for N data: defaults that depend on the data become numbers."""
    precision = settings.precision
    if precision is None and not isinstance(settings.prior, GaussianPrior):
        is_kept = settings.estimator is None
        precision = WEIGHT_DECAY * num_data if is_kept else LEARNED_PRECISION
    classifies = make_likelihood(settings.likelihood).is_classification
    return replace(
        settings,
        precision=precision,
        schedule=plan_schedule(settings.schedule, num_data),
        optimization=plan_optimization(settings.optimization, classifies, settings.prior),
    )


def plan_schedule(schedule: Schedule, num_data: int) -> Schedule:
    """Return a schedule with numbers for ``epochs``, ``burn_in`` and ``every``."""
    epochs, burn_in, every = schedule.epochs, schedule.burn_in, schedule.every
    if epochs is None:
        steps = -(-schedule.data_in_epoch(num_data) // schedule.batch_size)
        epochs = max(FEWEST_EPOCHS, -(-STEPS // steps))
    if burn_in is None:
        burn_in = max(1, int(BURN_IN * epochs))
    if every is None:
        every = max(1, (epochs - burn_in) // ROUNDS)
    return replace(schedule, epochs=epochs, burn_in=burn_in, every=every)


def plan_optimization(
    optimization: Optimization, classifies: bool, prior: str | GaussianPrior
) -> Optimization:
    """Return the optimisation with a rate for ``lr``, and with a ``prior_update``."""
    lr, update = optimization.lr, optimization.prior_update
    if lr is None:
        lr = max(CLASSIFICATION_LR if classifies else REGRESSION_LR, optimization.lr_min)
    if update is None:
        is_prior_object = isinstance(prior, GaussianPrior)
        has_fixed_point = not is_prior_object or (prior.learnable and prior.hyperprior is None)
        update = "fixed_point" if has_fixed_point else "adam"
    return replace(optimization, lr=lr, prior_update=update)


def planned(value: T | None) -> T:
    """Return a setting that ``plan`` has set."""
    assert value is not None
    return value


def burn_in_precision(num_data: int) -> float:
    """Return the precision of the burn-in, for weights whose prior mean is zero."""
    return min(BURN_IN_DECAY * num_data, BURN_IN_PRECISION)
