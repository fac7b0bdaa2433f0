"""The settings of a training run, checked before anything is computed or written."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evigrad.errors import ConfigurationError, nearest
from evigrad.likelihoods import Likelihood, make_likelihood
from evigrad.priors import GaussianPrior

OPTIMIZERS = ("adam", "sgd")
# Names for runs without an estimator, and what such runs are called.
BASELINES = {"map": "MAP", "map-noise": "MAP, learned noise", "augerino": "Augerino"}
PRIOR_UPDATES = ("adam", "fixed_point")
# Default of a learned prior precision. From a low one, noisy labels and targets are fitted before
# their noise is known (benchmarks/starts.py).
LEARNED_PRECISION = 1.0
# Default of a kept precision divided by N: the usual weight decay.
WEIGHT_DECAY = 5e-4

# Default schedules (benchmarks/tables.py). Training takes a number of steps, and few data make few
# steps in an epoch; many data need more than a few epochs. On regression tables a third of the
# rate finds networks that fit the noise.
CLASSIFICATION_LR, REGRESSION_LR = 3e-3, 1e-2
STEPS = 2000
FEWEST_EPOCHS = 100
# Share of the epochs before the first round. A classifier that has fitted noisy labels does not
# recover; precisions of a regression that are learned before the weights fit anything are too
# high, and recover slowly (benchmarks/starts.py and tables.py).
CLASSIFICATION_BURN_IN, REGRESSION_BURN_IN = 0.1, 0.5
ROUNDS = 20
# More epochs or steps than any run has; loops over 10^22 do not even begin.
_MOST = 10**9

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Settings:
    """What is trained and how; ``evigrad.fit`` documents each field and has the defaults."""

    likelihood: str | Likelihood
    estimator: str | None
    prior: str | GaussianPrior
    precision: float | None
    hyperparameters: Sequence[str]
    epochs: int | None
    batch_size: int
    optimizer: str | OptimizerFactory
    lr: float | None
    lr_min: float
    momentum: float
    scalar_lr_factor: float
    burn_in: int | None
    every: int | None
    steps: int
    hyper_every: int | None
    hyper_steps: int | None
    prior_blocks: int | None
    prior_update: str
    prior_lr: float
    prior_lr_min: float
    hyper_lr: float
    hyper_lr_min: float
    augerino_weight: float
    temperature: float
    root: str | None
    sharing: str
    parameter_partition: str | Mapping[str, Sequence[str]]
    micro_batch: int | str | None
    memory_budget: int | str | None
    gram_dtype: torch.dtype | str | None
    rows_dtype: torch.dtype | str | None
    rows_device: torch.device | str | None
    autocast: torch.dtype | str | None
    anchor_share: float
    anchor_choice: str
    bracket_every: int
    bracket_rows: int
    eval_every: int | None
    checkpoint_every: int | None
    seed: int
    hold_data: bool = False  # which the command line, whose data are tensors, does not have

    def __post_init__(self) -> None:
        """Refuse settings out of range.

        Without an estimator the settings of the hyperparameter steps are neither used nor checked,
        except for Augerino's. ``estimator_options`` and ``Evidence`` check what concerns the
        evidence alone.

        Raises:
            ConfigurationError: If a setting is out of its range.
        """
        if self.estimator == "map":  # one spelling from here on
            object.__setattr__(self, "estimator", None)
        self._check_integer("batch_size", 1)
        for name, least in (("epochs", 1), ("checkpoint_every", 1), ("eval_every", 0)):
            if getattr(self, name) is not None:
                self._check_integer(name, least)
        for name in ("bracket_every", "seed"):
            self._check_integer(name, 0)
        self._check_integer("bracket_rows", 1)
        self._check_rates("lr", "lr_min")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum must lie in [0, 1), not {self.momentum}.")
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
        if not 0 < self.scalar_lr_factor < math.inf:
            raise ConfigurationError(
                f"scalar_lr_factor must be a positive number, not {self.scalar_lr_factor}."
            )
        if self.estimator == "augerino":
            self._check_rates("hyper_lr", "hyper_lr_min")
            if not 0 <= self.augerino_weight < math.inf:
                raise ConfigurationError(
                    f"augerino_weight must be 0 or more, not {self.augerino_weight}."
                )
        if self.baseline is not None:
            return
        if self.burn_in is not None:
            self._check_integer("burn_in", 0)
        self._check_integer("steps", 1)
        for name in ("every", "prior_blocks", "hyper_every", "hyper_steps"):
            if getattr(self, name) is not None:
                self._check_integer(name, 1)
        if self.prior_update not in PRIOR_UPDATES:
            raise ConfigurationError(
                f"prior_update is one of {', '.join(PRIOR_UPDATES)}, not '{self.prior_update}'."
                f"{nearest(str(self.prior_update), PRIOR_UPDATES)}"
            )
        self._check_rates("prior_lr", "prior_lr_min")
        self._check_rates("hyper_lr", "hyper_lr_min")
        if self.epochs is not None and self.burn_in is not None and self.burn_in > self.epochs:
            raise ConfigurationError(
                f"burn_in is {self.burn_in}, but training ends after {self.epochs} epochs: no"
                " hyperparameter would ever be learned. Lower burn_in or raise epochs."
                " (Plain MAP training is estimator=None, on the command line --estimator map.)"
            )

    def for_data(self, num_data: int) -> "PlannedSettings":
        """The settings with numbers in place of those that follow from likelihood and data.

        Args:
            num_data: N.

        Returns:
            Settings that keep what was given.

        Raises:
            ConfigurationError: If the given burn-in is longer than the training.
        """
        classifies = make_likelihood(self.likelihood).is_classification
        share = CLASSIFICATION_BURN_IN if classifies else REGRESSION_BURN_IN
        plan = plan_epochs(num_data, self.batch_size, share, self.epochs, self.burn_in, self.every)
        given: dict[str, Any] = dict(vars(self))
        given |= zip(("epochs", "burn_in", "every"), plan, strict=True)
        if self.lr is None:
            given["lr"] = max(CLASSIFICATION_LR if classifies else REGRESSION_LR, self.lr_min)
        if self.precision is None and not isinstance(self.prior, GaussianPrior):
            kept = self.baseline is not None
            given["precision"] = WEIGHT_DECAY * num_data if kept else LEARNED_PRECISION
        return PlannedSettings(**given)

    @property
    def baseline(self) -> str | None:
        """The name of a run without an evidence estimator; None for one with it."""
        return BASELINES.get(self.estimator or "map")

    def as_record(self) -> dict[str, Any]:
        """The settings as plain numbers and strings, for a configuration file."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name} must be an integer of at least {least}, not {value}.")
        if name != "seed" and value > _MOST:
            raise ConfigurationError(f"{name} must be at most {_MOST}, not {value}.")

    def _check_rates(self, first: str, last: str) -> None:
        start, end = getattr(self, first), getattr(self, last)
        if start is None:
            return
        if not (math.isfinite(start) and start > 0):
            kept = " (To learn hyperparameters with the weights as they are: evigrad.tune.)"
            raise ConfigurationError(
                f"{first} must be a positive number, not {start}.{kept if first == 'lr' else ''}"
            )
        if not 0 <= end <= start:
            raise ConfigurationError(
                f"{last} must lie between 0 and {first} = {start}, not {end}: the learning rate"
                f" falls from {first} to {last}."
            )


@dataclass(frozen=True)
class PlannedSettings(Settings):
    """Settings for a known number of data: nothing of the schedule is None."""

    epochs: int
    lr: float
    burn_in: int
    every: int


def plan_epochs(
    num_data: int,
    batch_size: int,
    burn_in_share: float,
    epochs: int | None,
    burn_in: int | None,
    every: int | None,
) -> tuple[int, int, int]:
    """Epochs in all, before the first round, and from one round to the next.

    Args:
        num_data: N.
        batch_size: Data in a step of the weights.
        burn_in_share: Share of the epochs before the first round.
        epochs: None for as many as hold ``STEPS`` steps, but no fewer than ``FEWEST_EPOCHS``.
        burn_in: None for ``burn_in_share`` of the epochs.
        every: None for ``ROUNDS`` rounds of hyperparameter steps.

    Returns:
        The three numbers, in this order.
    """
    if epochs is None:
        epochs = max(FEWEST_EPOCHS, -(-STEPS // -(-num_data // batch_size)))
    if burn_in is None:
        burn_in = max(1, int(burn_in_share * epochs))
    if every is None:
        every = max(1, (epochs - burn_in) // ROUNDS)
    return epochs, burn_in, every


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value)
