"""The settings of a training run, checked before anything is computed or written."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypeVar

from torch import nn
from torch.optim import Optimizer

from evigrad.blocks.anchors import Anchoring
from evigrad.core.names import DEFAULT_ESTIMATOR
from evigrad.errors import ConfigurationError, nearest
from evigrad.likelihoods import Likelihood
from evigrad.passes.settings import Memory
from evigrad.priors import GaussianPrior

P = ParamSpec("P")
T = TypeVar("T")

OPTIMIZERS = ("adam", "sgd")
# Names that earlier versions took for an estimator, and what to do instead.
_FORMER_NAMES = {
    "map": "plain MAP training is estimator=None, on the command line --estimator none.",
    "map-noise": "MAP training that learns the noise of a Gaussian is estimator=None with"
    " Optimization(noise_on_loss=True), on the command line --estimator none --noise-on-loss.",
    "augerino": "this baseline of another paper is experiments.augerino in evigrad's source.",
}
PRIOR_UPDATES = ("adam", "fixed_point")
# More epochs or steps than any run has; loops over 10^22 do not even begin.
_MOST = 10**9

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Laplace:
    """How the Laplace approximation is made, as the keywords of ``Evidence`` of the same names.

    Attributes:
        temperature: T of the likelihood p^(1/T).
        root: How the curvature of a datum is split over outputs: subblock, fisher or eigen.
            Default: the estimator's own.
        sharing: Weight sharing in KFAC: expand or reduce.
        parameter_partition: Blocks of blockdiag: tensor or module (in Python also groups of name
            prefixes).
    """

    temperature: float = 1.0
    root: Literal["subblock", "fisher", "eigen"] | None = None
    sharing: Literal["expand", "reduce"] = "expand"
    parameter_partition: Literal["tensor", "module"] | Mapping[str, Sequence[str]] = "tensor"


@dataclass(frozen=True)
class Schedule:
    """How long a run trains, in which batches, and when it learns, evaluates and saves.

    Attributes:
        epochs: Passes over the training data. Default: as many as are 2000 steps of the weights,
            but 100 at least.
        epoch_size: Data in an epoch, where these are so many that hyperparameters are to be learned
            and checkpoints written within a pass; the next epoch goes on with others. Default: all.
        batch_size: Data in a step of the weights, at most; all batches are about as large.
        burn_in: Epochs before the first steps on the hyperparameters. Default: a tenth of all.
        every: Epochs from one round of hyperparameter steps to the next. Default: as many as make
            20 rounds.
        steps: Hyperparameter steps in a round, each on a block of its own.
        hyper_every: Epochs from one round of steps on the model's own hyperparameters, as the
            ranges of an invariance, to the next. Default: as every.
        hyper_steps: Steps in such a round, after those on prior and noise. Default: as steps. With
            neither hyper_every nor hyper_steps a step is one on all hyperparameters together.
        prior_blocks: Blocks that a round passes over once, all its steps being on their mean: as
            many steps as you like for the price of these passes. Only for rounds of prior and
            noise alone (see hyper_steps). Default: a block for each step, or one for all of them
            where every block is the same.
        eval_every: Epochs between evaluations on training and test data; 0 is only at the end.
            Default: a tenth of all epochs.
        bracket_every: Epochs between bounds, lower and upper, on the exact log evidence; 0 is none.
        checkpoint_every: Epochs between checkpoints; the last epoch has one in any case. Default:
            as few as cost a twentieth of the time, which is one for most networks.

    Raises:
        ConfigurationError: If a number is out of its range.
    """

    epochs: int | None = None
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
        """How many of all data are in an epoch."""
        return min(self.epoch_size or num_data, num_data)


@dataclass(frozen=True)
class Optimization:
    """The optimisers of the weights and of the hyperparameters, and their learning rates.

    Attributes:
        optimizer: Optimiser of the weights: adam or sgd, with a momentum of 0.9. (In Python also a
            function that makes one from the named weights.)
        lr: Learning rate of the weights at the start. Default: 0.003, of regression 0.01.
        lr_min: Learning rate of the weights at the end; a cosine leads there, epoch by epoch.
        prior_update: How precisions are learned: fixed_point, MacKay's update from the effective
            number of parameters, which starts from a weight decay of 0.01 whatever the precision
            given; or adam, as in the paper, from that precision. Noise and the model's own
            hyperparameters have Adam. Default: fixed_point, but adam beside a hyperprior.
        prior_lr: Learning rate of log precisions and log noise (Adam) at the start.
        prior_lr_min: The same at the last step; a cosine leads there, step by step.
        hyper_lr: Learning rate of the model's own hyperparameters (Adam) at the start.
        hyper_lr_min: The same at the last step.
        noise_on_loss: Whether training without an estimator learns the noise of a Gaussian too, on
            the training loss and at the weights' rate.

    Raises:
        ConfigurationError: If there is no such optimiser or update, or a rate is out of its range.
    """

    optimizer: Literal["adam", "sgd"] | OptimizerFactory = "adam"
    lr: float | None = None
    lr_min: float = 1e-6
    prior_update: Literal["adam", "fixed_point"] | None = None
    prior_lr: float = 0.1
    prior_lr_min: float = 0.01
    hyper_lr: float = 0.2
    hyper_lr_min: float = 0.02
    noise_on_loss: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, type) and issubclass(self.optimizer, Optimizer):
            name = self.optimizer.__name__
            raise ConfigurationError(
                f"optimizer={name} is a class: give a function from named weights to an optimiser,"
                f" as lambda weights: torch.optim.{name}(weights.values(), lr=0.003)."
            )
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(
                f"optimizer is one of {', '.join(OPTIMIZERS)}, or a function from named weights"
                f" to an optimiser, not '{self.optimizer}'."
                f"{nearest(self.optimizer, OPTIMIZERS)}"
            )
        if self.prior_update not in (None, *PRIOR_UPDATES):
            raise ConfigurationError(
                f"prior_update is one of {', '.join(PRIOR_UPDATES)}, not '{self.prior_update}'."
                f"{nearest(str(self.prior_update), PRIOR_UPDATES)}"
            )
        for first in ("lr", "prior_lr", "hyper_lr"):
            last = f"{first}_min"
            start, end = getattr(self, first), getattr(self, last)
            if start is None:
                continue
            if not (math.isfinite(start) and start > 0):
                kept = " (To learn hyperparameters with the weights as they are: evigrad.tune.)"
                kept = kept if first == "lr" else ""
                raise ConfigurationError(f"{first} must be a positive number, not {start}.{kept}")
            if not 0 <= end <= start:
                raise ConfigurationError(
                    f"{last} must lie between 0 and {first} = {start}, not {end}: the learning rate"
                    f" falls from {first} to {last}."
                )


# The parts of ``Settings`` whose fields are options of the command line, by their own names.
GROUPS: dict[str, type] = {
    "laplace": Laplace,
    "schedule": Schedule,
    "optimization": Optimization,
    "memory": Memory,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training run, as the keywords of ``evigrad.fit`` of the same names.

    Attributes:
        prior_mean: What the prior draws the weights to: zero, or initial, the weights that training
            begins with. (In Python a ``GaussianPrior`` says so, for some of the weights too.)
    """

    likelihood: str | Likelihood = "categorical"
    estimator: str | None = DEFAULT_ESTIMATOR
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
        """Refuse what does not fit; ``Evidence`` checks what concerns the evidence alone."""
        refuse_former_name(self.estimator)
        check_integer("seed", self.seed, 0, most=None)
        if self.estimator is None:
            return
        check_burn_in(self.schedule.burn_in, self.schedule.epochs)
        if self.optimization.noise_on_loss:
            raise ConfigurationError(
                f"noise_on_loss is for training without an estimator, and {self.estimator} learns"
                " the noise by the evidence. Remove it, or set estimator=None."
            )

    def as_record(self) -> dict[str, Any]:
        """The settings as plain numbers and strings, for a configuration file."""
        record = dict(vars(self))
        for name in GROUPS:
            record |= vars(record.pop(name))
        if self.anchoring is not None:
            record["anchoring"] = asdict(self.anchoring)
        return plain(record)


def current_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of settings, of this version or an earlier one, in the words of this one."""
    if record.get("estimator") == "map-noise":
        return {**record, "estimator": None, "noise_on_loss": True}
    return dict(record)


def method_of(record: Mapping[str, Any]) -> str:
    """Return how a run of these settings learns: the name of its estimator, or MAP without one."""
    record = current_record(record)
    without = "MAP, learned noise" if record.get("noise_on_loss") else "MAP"
    name = str(record.get("estimator") or without)
    return {"augerino": "Augerino"}.get(name, name)


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of ``fit`` from options among which are fields of ``GROUPS``."""
    keywords = dict(options)
    for name, kind in GROUPS.items():
        names = [setting.name for setting in fields(kind) if setting.name in keywords]
        if names:
            keywords[name] = kind(**{key: keywords.pop(key) for key in names})
    return keywords


def explains_groups(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function with the keywords of ``GROUPS`` name the group of a field given alone."""

    @wraps(function)
    def wrapped(*arguments: P.args, **keywords: P.kwargs) -> T:
        accepted = signature(function).parameters
        for name, value in keywords.items():
            for group, kind in GROUPS.items():
                if name not in accepted and name in {setting.name for setting in fields(kind)}:
                    raise ConfigurationError(
                        f"{function.__name__} has no keyword {name}: it is a field of"
                        f" {kind.__name__}. Use {group}={kind.__name__}({name}={value!r})."
                    )
        return function(*arguments, **keywords)

    return wrapped


def refuse_former_name(estimator: str | None) -> None:
    """Raise ConfigurationError for what was an estimator's name in an earlier version."""
    if estimator in _FORMER_NAMES:
        raise ConfigurationError(f"'{estimator}' is no estimator: {_FORMER_NAMES[estimator]}")


def check_integer(name: str, value: object, least: int, most: int | None = _MOST) -> None:
    """Raise ConfigurationError unless a setting is an integer between ``least`` and ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be an integer of at least {least}, not {value}.")
    if most is not None and value > most:
        raise ConfigurationError(f"{name} must be at most {most}, not {value}.")


def check_burn_in(burn_in: int | None, epochs: int | None) -> None:
    """Raise ConfigurationError for a burn-in that training ends before."""
    if (burn_in or 0) > (epochs or math.inf):
        raise ConfigurationError(
            f"burn_in is {burn_in}, but training ends after {epochs} epochs: no"
            " hyperparameter would ever be learned. Lower burn_in or raise epochs."
            " (Plain MAP training is estimator=None, on the command line --estimator none.)"
        )


def plain(value: Any) -> Any:
    """Return dictionaries and lists of numbers and texts; other objects become their ``str``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else str(value)
