"""The settings of a training run, checked before anything is computed or written."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, Self, TypeVar

from torch import nn
from torch.optim import Optimizer

from evigrad.blocks.anchors import Anchoring
from evigrad.core.names import AUTO
from evigrad.errors import ConfigurationError, nearest
from evigrad.likelihoods import Likelihood
from evigrad.passes.settings import Memory
from evigrad.priors import GaussianPrior

P = ParamSpec("P")
T = TypeVar("T")

OPTIMIZERS = ("adam", "sgd")
# Names that earlier versions accepted as an estimator, and what to use instead.
_FORMER_NAMES = {
    "map": "For plain MAP training, use estimator=None, or --estimator none on the command line.",
    "map-noise": "For MAP training that learns the noise of a Gaussian, use estimator=None with"
    " Optimization(noise_on_loss=True), or --estimator none --noise-on-loss on the command line.",
    "augerino": "This baseline from another paper is in experiments/augerino.py in the source.",
}
PRIOR_UPDATES = ("adam", "fixed_point")
# More epochs or steps than any run has: loops over 10^22 do not even start.
_MOST = 10**9

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Laplace:
    """Set how the Laplace approximation is computed.

    Attributes:
        temperature: Temperature T of the likelihood p^(1/T).
        root: How the curvature of an example is divided among outputs: subblock, fisher or eigen.
            Default: the estimator's own choice.
        sharing: Treatment of shared weights in KFAC: expand or reduce.
        parameter_partition: How blockdiag divides the parameters into blocks: tensor or module. (In
            Python, groups of name prefixes are also possible.)
        log_det_weight: Weight c of the log-determinant. Larger weights lead to larger learned
            precisions, smaller weights to smaller ones. Default: 1, the log evidence.

    Examples:
        >>> from evigrad import Laplace
        >>> Laplace(temperature=0.5).sharing
        'expand'

    See also: docs/theory.md.
    """

    temperature: float = 1.0
    root: Literal["subblock", "fisher", "eigen"] | None = None
    sharing: Literal["expand", "reduce"] = "expand"
    parameter_partition: Literal["tensor", "module"] | Mapping[str, Sequence[str]] = "tensor"
    log_det_weight: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """Set the length of a run, its batches, and when rounds, evaluations and checkpoints happen.

    Attributes:
        epochs: Number of passes over the training data. Default: enough for 2,000 optimizer steps,
            and at least 100. With more than 20,000 examples, enough for 2,000,000 examples and
            20,000 steps, and at least 10.
        max_epochs: Number of epochs up to which training may continue. After ``epochs``, cycles of
            half that number of epochs follow. Their learning rates fall from 0.3 lr. Training
            ends after a cycle that changes log evidence, noise and mode gap only a little. Default:
            four times epochs if a noise is learned from at most 2,000 examples and epochs is not
            set. Otherwise epochs.
        epoch_size: Number of examples per epoch. Set it for very large data sets, so that rounds
            and checkpoints also happen during a pass over the data. Each epoch continues where the
            previous one stopped. Default: all examples.
        batch_size: Maximum number of examples per optimizer step. All batches have about the same
            size.
        burn_in: Number of epochs before the first round of hyperparameter steps. Default: a tenth
            of all epochs.
        every: Number of epochs between rounds. Default: enough for 20 to 40 rounds.
        steps: Number of hyperparameter steps per round. Each step uses a new block.
        hyper_every: Number of epochs between rounds for the model's own hyperparameters, such as
            the ranges of an invariance. Default: every.
        hyper_steps: Number of steps on the model's own hyperparameters per round, after the steps
            on prior and noise. Default: steps. If neither hyper_every nor hyper_steps is set, each
            step updates all hyperparameters jointly.
        prior_blocks: Number of blocks per round over which all steps average the log evidence. The
            network runs once per block, and further steps are cheap. This is only for rounds that
            learn nothing but prior and noise (see hyper_steps). Default: a block for each step, or
            one block for all steps if the blocks do not change.
        eval_every: Number of epochs between evaluations on training and test data, or 0 for one
            evaluation at the end. Default: a tenth of all epochs.
        bracket_every: Number of epochs between lower and upper bounds on the exact log evidence.
            With 0, no bounds are computed.
        checkpoint_every: Number of epochs between checkpoints. The last epoch always has one.
            Default: chosen so that checkpoints take at most a twentieth of the training time, which
            is every epoch for most networks.

    Raises:
        ConfigurationError: If a number is out of range.

    Examples:
        >>> from evigrad import Schedule
        >>> Schedule(epochs=40, burn_in=5, steps=4).batch_size
        100

    See also: docs/fit.md.
    """

    epochs: int | None = None
    max_epochs: int | None = None
    epoch_size: int | None = None
    batch_size: int = 100
    burn_in: int | None = None
    every: int | None = None
    steps: int = 10
    hyper_every: int | None = None
    hyper_steps: int | None = None
    prior_blocks: int | None = None
    eval_every: int | None = None
    bracket_every: int = 0
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        from_zero = ("burn_in", "eval_every", "bracket_every")
        for setting in fields(Schedule):
            value = getattr(self, setting.name)
            if value is not None or setting.default is not None:
                check_integer(setting.name, value, 0 if setting.name in from_zero else 1)

    def data_in_epoch(self, num_data: int) -> int:
        """Return the number of examples per epoch, out of ``num_data`` examples."""
        return min(self.epoch_size or num_data, num_data)


@dataclass(frozen=True)
class Optimization:
    """Set the optimizers of the weights and of the hyperparameters, and their learning rates.

    Attributes:
        optimizer: Optimizer of the weights: adam, or sgd with a momentum of 0.9. (In Python, you
            can also pass a function that makes an optimizer from the named weights. The function
            sets the learning rates at the start.)
        lr: Learning rate of the weights at the start. Default: 0.003, or 0.01 for regression.
        lr_min: Learning rate of the weights at the end. The rate follows a cosine, epoch by epoch.
        prior_update: Update of the precisions: fixed_point or adam. fixed_point is MacKay's update
            by the effective number of parameters. It starts from start_decay, regardless of
            precision. adam starts from precision, as in Immer et al. (2023). Noise and the model's
            own hyperparameters always use Adam. Default: fixed_point, or adam if the prior has a
            hyperprior.
        start_decay: Weight decay of the burn-in, from which fixed_point starts. With several
            values, the network trains with each value for a third of the epochs. Training continues
            from the value with the highest log evidence. Default: 0.01. If the likelihood learns
            its noise, 0.01 and 0.001, or only 0.001 from 15,000 examples on.
        prior_lr: Learning rate of log precisions and log noise (Adam) at the start.
        prior_lr_min: Learning rate of log precisions and log noise at the end. The rate follows a
            cosine, step by step.
        hyper_lr: Learning rate of the model's own hyperparameters (Adam) at the start.
        hyper_lr_min: Learning rate of the model's own hyperparameters at the end.
        noise_on_loss: Whether training without an estimator also learns the noise of a Gaussian,
            from the training loss and with the learning rate of the weights.

    Raises:
        ConfigurationError: If the optimizer or update does not exist, or a rate is out of range.

    Examples:
        >>> from evigrad import Optimization
        >>> Optimization(optimizer="sgd", lr=0.1).hyper_lr
        0.2

    See also: docs/fit.md.
    """

    optimizer: Literal["adam", "sgd"] | OptimizerFactory = "adam"
    lr: float | None = None
    lr_min: float = 1e-6
    prior_update: Literal["adam", "fixed_point"] | None = None
    start_decay: float | Sequence[float] | None = None
    prior_lr: float = 0.1
    prior_lr_min: float = 0.01
    hyper_lr: float = 0.2
    hyper_lr_min: float = 0.02
    noise_on_loss: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, type) and issubclass(self.optimizer, Optimizer):
            name = self.optimizer.__name__
            raise ConfigurationError(
                f"optimizer must be a function that maps named weights to an optimizer, got the"
                f" class {name}. Use lambda weights: torch.optim.{name}(weights.values(),"
                " lr=0.003)."
            )
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, or a function that maps"
                f" named weights to an optimizer, got '{self.optimizer}'."
                f"{nearest(self.optimizer, OPTIMIZERS)}"
            )
        if self.prior_update not in (None, *PRIOR_UPDATES):
            raise ConfigurationError(
                f"prior_update must be one of {', '.join(PRIOR_UPDATES)}, got"
                f" '{self.prior_update}'.{nearest(str(self.prior_update), PRIOR_UPDATES)}"
            )
        decays = self.start_decays
        if self.start_decay is not None and not (decays and all(map(_is_positive, decays))):
            raise ConfigurationError(
                f"start_decay must be one or more positive numbers, got {self.start_decay!r}."
            )
        if len(set(decays)) < len(decays):
            raise ConfigurationError(
                f"start_decay must not contain a value twice, got {self.start_decay!r}. Remove"
                " repeated values."
            )
        for first in ("lr", "prior_lr", "hyper_lr"):
            last = f"{first}_min"
            start, end = getattr(self, first), getattr(self, last)
            if start is None:
                continue
            if not (math.isfinite(start) and start > 0):
                kept = " (To learn hyperparameters with fixed weights, use evigrad.tune.)"
                kept = kept if first == "lr" else ""
                raise ConfigurationError(f"{first} must be a positive number, got {start}.{kept}")
            if not 0 <= end <= start:
                raise ConfigurationError(
                    f"{last} must be between 0 and {first} = {start}, got {end}. The learning rate"
                    f" falls from {first} to {last}."
                )

    @property
    def start_decays(self) -> tuple[float, ...]:
        """Return ``start_decay`` as a tuple, or an empty tuple if it is not set."""
        decays = self.start_decay
        if decays is None:
            return ()
        return tuple(decays) if isinstance(decays, Sequence) else (decays,)


# The parts of ``Settings`` whose fields are options of the command line under the same names.
GROUPS: dict[str, type] = {
    "laplace": Laplace,
    "schedule": Schedule,
    "optimization": Optimization,
    "memory": Memory,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training run, named like the keyword arguments of ``evigrad.fit``.

    Attributes:
        prior_mean: Mean of the prior: zero, or initial for the weights at the start of training.
            (In Python, a ``GaussianPrior`` can set other means, or means for some weights only.)
    """

    likelihood: str | Likelihood = "categorical"
    estimator: str | None = AUTO
    prior: str | GaussianPrior = "layerwise"
    precision: float | None = None
    prior_mean: Literal["zero", "initial"] = "zero"
    hyperparameters: Sequence[str] = ()
    laplace: Laplace = field(default_factory=Laplace)
    schedule: Schedule = field(default_factory=Schedule)
    optimization: Optimization = field(default_factory=Optimization)
    memory: Memory = field(default_factory=Memory)
    anchoring: Anchoring | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings. ``Evidence`` checks those that concern only the evidence."""
        refuse_former_name(self.estimator)
        check_integer("seed", self.seed, 0, most=None)
        if self.estimator is None:
            if self.schedule.max_epochs is not None:
                raise ConfigurationError(
                    f"max_epochs requires an estimator, but max_epochs is"
                    f" {self.schedule.max_epochs} and estimator is None. Set an estimator, or"
                    " remove max_epochs."
                )
            return
        check_burn_in(self.schedule.burn_in, self.schedule.epochs)
        if self.optimization.noise_on_loss:
            raise ConfigurationError(
                "noise_on_loss is only for training without an estimator. With the estimator"
                f" '{self.estimator}', the evidence determines the noise. Remove noise_on_loss, or"
                " set estimator=None."
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the settings among a function's arguments. Groups that are None have defaults."""
        keywords = {setting.name for setting in fields(cls)} & arguments.keys()
        defaults = {name for name in GROUPS if arguments.get(name) is None}
        return cls(**{name: arguments[name] for name in keywords - defaults})

    def as_record(self) -> dict[str, Any]:
        """Return the settings as plain values for a configuration file."""
        record = dict(vars(self))
        for name in GROUPS:
            record |= vars(record.pop(name))
        if self.anchoring is not None:
            record["anchoring"] = asdict(self.anchoring)
        return plain(record)


def current_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of settings from any version of evigrad, as the current one writes it."""
    record = {"log_det_weight": Laplace.log_det_weight, **record}
    if record.get("estimator") == "map-noise":
        return {**record, "estimator": None, "noise_on_loss": True}
    return record


def method_of(record: Mapping[str, Any]) -> str:
    """Return the name of a run's method: its estimator, or MAP if it has none."""
    record = current_record(record)
    without = "MAP, learned noise" if record.get("noise_on_loss") else "MAP"
    name = str(record.get("estimator") or without)
    return {"augerino": "Augerino"}.get(name, name)


def label_of(estimator: str | None) -> str:
    """Return the name of a run's method in logs and tables of results."""
    return "fixed weight decay" if estimator is None else "evigrad"


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for ``fit``, with fields of ``GROUPS`` collected in objects."""
    keywords = dict(options)
    for name, kind in GROUPS.items():
        names = [setting.name for setting in fields(kind) if setting.name in keywords]
        if names:
            keywords[name] = kind(**{key: keywords.pop(key) for key in names})
    return keywords


def explains_groups(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, with a helpful error if a field of ``GROUPS`` is passed directly."""

    @wraps(function)
    def wrapped(*arguments: P.args, **keywords: P.kwargs) -> T:
        accepted = signature(function).parameters
        if "curvature" in keywords and "curvature" not in accepted:
            raise ConfigurationError(
                f"{function.__name__} has no argument curvature. Create an Evidence(...,"
                " curvature=...) and learn with a Learner, as evigrad/network/README.md shows."
            )
        for name, value in keywords.items():
            for group, kind in GROUPS.items():
                if name not in accepted and name in {setting.name for setting in fields(kind)}:
                    raise ConfigurationError(
                        f"{function.__name__} has no argument {name}: {name} is a field of"
                        f" {kind.__name__}. Use {group}={kind.__name__}({name}={value!r})."
                    )
        return function(*arguments, **keywords)

    return wrapped


def _is_positive(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and value > 0


def refuse_former_name(estimator: str | None) -> None:
    """Raise ConfigurationError for a name that an earlier version accepted as an estimator."""
    if estimator in _FORMER_NAMES:
        raise ConfigurationError(f"'{estimator}' is not an estimator. {_FORMER_NAMES[estimator]}")


def check_integer(name: str, value: object, least: int, most: int | None = _MOST) -> None:
    """Raise ConfigurationError unless a setting is an integer between ``least`` and ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be an integer of at least {least}, got {value!r}.")
    if most is not None and value > most:
        raise ConfigurationError(f"{name} must be at most {most}, got {value}.")


def check_burn_in(burn_in: int | None, epochs: int | None) -> None:
    """Raise ConfigurationError if training would end before the burn-in ends."""
    if (burn_in or 0) > (epochs or math.inf):
        raise ConfigurationError(
            f"burn_in must be at most epochs = {epochs}, got {burn_in}: no hyperparameter would be"
            " learned. Lower burn_in or raise epochs. (For plain MAP training, use estimator=None,"
            " or --estimator none on the command line.)"
        )


def plain(value: Any) -> Any:
    """Return a value as dictionaries, lists, numbers and strings. Other objects become strings."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else str(value)
