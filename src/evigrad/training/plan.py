"""The plan of a run: default settings that depend on the data."""

from dataclasses import replace
from typing import TypeVar

from evigrad.core.names import AUTO, DEFAULT_ESTIMATOR
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Likelihood, Ordinal, make_likelihood
from evigrad.likelihoods.noisy import noisy_parts
from evigrad.likelihoods.weighted import unweighted
from evigrad.priors import GaussianPrior
from evigrad.training.settings import Optimization, Schedule, Settings

T = TypeVar("T")

# Default of a learned prior precision at the start, for steps of Adam.
LEARNED_PRECISION = 1.0
# From this number of examples on, defaults differ for the start and the estimator.
MANY_DATA = 15_000
# Weight decay of the burn-in, from which the fixed point starts: 20 times 5e-4. With a weaker one,
# the network fits noisy labels and targets before their noise is learned, and precisions recover
# slowly. With a much stronger one, networks on few data end at zero (benchmarks/README.md).
BURN_IN_DECAY = 1e-2
# The burn-in's precision does not grow further with N, so that the decay for few data does not
# restrain many.
BURN_IN_DATA = 1500
# A second start if noise is learned. The first one can end far below the evidence of a network
# that fits the data, because large noise keeps weights small and small weights keep the noise
# large. Where targets are noise, this one overfits, so the evidence decides (benchmarks/README.md).
# Many data prevent that, and then it is the only start.
WEAK_DECAY = 1e-3
# Weight decay of the burn-in for weights with a nonzero prior mean, such as pretrained ones. With a
# weak one, few data are fitted before it is learned how close the weights should stay.
PRETRAINED_DECAY = 1.0
# Default of a fixed precision divided by N.
WEIGHT_DECAY = 5e-4

# Default schedules. Training takes a number of steps, and few data make few steps per epoch. Many
# data need more than a few epochs. On tabular regression a third of the learning rate leads to
# networks that fit the noise.
CLASSIFICATION_LR, REGRESSION_LR = 3e-3, 1e-2
STEPS = 2000
FEWEST_EPOCHS = 100
# Many data need fewer epochs: from 2,000,000 to 4,000,000 examples, the test log likelihood changes
# by less than 0.005 nats (benchmarks/large_data.py). Rounds follow epochs, so there are a few.
MOST_STEPS, USUAL_BATCH = 20_000, 100
FEWEST_EPOCHS_OF_MANY = 10
# With few data, training goes on until it has settled. The first cycle may end far from that
# (benchmarks/README.md).
FEW_DATA, MORE = 2000, 4
# If there are more examples than weights, anchored rows overestimate the effective parameters, and
# the decay is too strong. The curvature of some examples, scaled to all data, predicts better. If
# there are fewer, networks can memorize their data, and it is much too weak. Of many data, anchored
# rows are a small share, so that half as many examples as weights suffice (benchmarks/README.md).
# With as few rows or weights as these, anchored rows are nearly exact.
FEW_ROWS, FEW_WEIGHTS = 4000, 400
# Examples in a block of scaled curvature, and rows, unless the examples are too few for factors.
MOST_EXAMPLES, MOST_BLOCK_ROWS, FEWEST_EXAMPLES = 400, 2000, 100
# Share of the epochs before the first round.
BURN_IN = 0.1
ROUNDS = 20


def plan(settings: Settings, num_data: int, num_items: int | None = None) -> Settings:
    """Return the settings for N examples, with values for all defaults that depend on the data.

    ``num_items`` is the number of items of the data set. Default: N, as without positions.
    """
    precision = settings.precision
    if precision is None and not isinstance(settings.prior, GaussianPrior):
        is_kept = settings.estimator is None
        precision = WEIGHT_DECAY * num_data if is_kept else LEARNED_PRECISION
    likelihood = make_likelihood(settings.likelihood)
    schedule = plan_schedule(settings.schedule, num_data, num_items)
    has_length = (settings.schedule.epochs or settings.schedule.max_epochs) is not None
    is_short = settings.estimator is not None and not has_length and num_data <= FEW_DATA
    if is_short and _learns_noise(likelihood):
        schedule = replace(schedule, max_epochs=MORE * planned(schedule.epochs))
    return replace(
        settings,
        precision=precision,
        schedule=schedule,
        optimization=plan_optimization(settings.optimization, likelihood, settings.prior, num_data),
    )


def plan_estimator(
    settings: Settings, num_data: int, num_rows: int, num_weights: int
) -> str | None:
    """Return the estimator of a run, which depends on the sizes if its name is ``AUTO``.

    Args:
        settings: Settings of the run. Kronecker factors need precisions that are constant along
            the inputs or the outputs of a tensor, and have no anchors.
        num_data: Number of items of the data set.
        num_rows: Number of Jacobian rows of an example.
        num_weights: Number of weights that training changes.
    """
    if settings.estimator != AUTO:
        return settings.estimator
    prior = settings.prior
    varies = prior.varies if isinstance(prior, GaussianPrior) else prior == "diagonal"
    is_nearly_exact = num_data * num_rows <= FEW_ROWS or num_weights <= FEW_WEIGHTS
    needs_rows = varies or settings.anchoring is not None
    share = 1.0 if num_data < MANY_DATA else 0.5
    if num_data <= share * num_weights or is_nearly_exact or needs_rows:
        return DEFAULT_ESTIMATOR
    size = max(FEWEST_EXAMPLES, min(MOST_EXAMPLES, MOST_BLOCK_ROWS // num_rows))
    return f"kfac-{size}-C-scaled" if size < num_data else "kfac-N-C"


def plan_schedule(schedule: Schedule, num_data: int, num_items: int | None = None) -> Schedule:
    """Return a schedule in which ``epochs``, ``burn_in`` and ``every`` are set."""
    epochs, burn_in, every = schedule.epochs, schedule.burn_in, schedule.every
    if epochs is None:
        steps = -(-schedule.data_in_epoch(num_data) // schedule.batch_size)
        epochs = max(FEWEST_EPOCHS, -(-STEPS // steps))
        size = schedule.data_in_epoch(num_data if num_items is None else num_items)
        # Neither small nor large batches shorten the training of few data.
        steps = min(-(-size // schedule.batch_size), -(-size // USUAL_BATCH))
        epochs = min(epochs, max(FEWEST_EPOCHS_OF_MANY, -(-MOST_STEPS // steps)))
    if schedule.max_epochs is not None and schedule.max_epochs < epochs:
        raise ConfigurationError(
            f"max_epochs must be at least epochs = {epochs}, got {schedule.max_epochs}. Raise"
            " max_epochs, or lower epochs."
        )
    if burn_in is None:
        burn_in = max(1, int(BURN_IN * epochs))
    if every is None:
        every = max(1, (epochs - burn_in) // ROUNDS)
    return replace(schedule, epochs=epochs, burn_in=burn_in, every=every)


def plan_optimization(
    optimization: Optimization, likelihood: Likelihood, prior: str | GaussianPrior, num_data: int
) -> Optimization:
    """Return an optimization in which ``lr``, ``prior_update`` and ``start_decay`` are set."""
    lr, update = optimization.lr, optimization.prior_update
    if lr is None:
        # The output of an ordinal likelihood is a real number, which may have to grow large.
        is_ordinal = isinstance(unweighted(likelihood), Ordinal)
        has_logits = likelihood.is_classification and not is_ordinal
        usual = CLASSIFICATION_LR if has_logits else REGRESSION_LR
        lr = max(usual, optimization.lr_min)
    if update is None:
        is_prior_object = isinstance(prior, GaussianPrior)
        has_fixed_point = not is_prior_object or (prior.learnable and prior.hyperprior is None)
        update = "fixed_point" if has_fixed_point else "adam"
    starts = optimization.start_decay
    if starts is None:
        starts = (BURN_IN_DECAY,)
        if _learns_noise(likelihood):
            starts = (BURN_IN_DECAY, WEAK_DECAY) if num_data < MANY_DATA else (WEAK_DECAY,)
    return replace(optimization, lr=lr, prior_update=update, start_decay=starts)


def _learns_noise(likelihood: Likelihood) -> bool:
    return any(part.log_noise.requires_grad for part in noisy_parts(likelihood))


def planned(value: T | None) -> T:
    """Return a setting that is not None, because ``plan`` has set it."""
    assert value is not None
    return value


def burn_in_precision(decay: float, num_data: int) -> float:
    """Return the prior precision for a weight decay during the burn-in."""
    return decay * min(num_data, BURN_IN_DATA)
