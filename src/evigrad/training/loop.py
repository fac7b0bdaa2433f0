"""The interleaved scheme: epochs of the weights, and steps of the hyperparameters between them."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.blocks import Block
from evigrad.blocks.partitions import Stream
from evigrad.engine.evaluation import Estimate
from evigrad.engine.kept import KeptPass
from evigrad.engine.problem import PROBE_SIZE
from evigrad.errors import ConfigurationError, EvigradError, EvigradWarning, listed
from evigrad.evidence import Evidence
from evigrad.jacobians.modes import seeded
from evigrad.models import fixup_scalars
from evigrad.training.augerino import Augerino
from evigrad.training.checkpoint import load_network
from evigrad.training.data import RunData, derived_seed, stream
from evigrad.training.fixed_point import FixedPoint
from evigrad.training.optimizers import cosine, make_hyper_optimizer, make_weight_optimizer
from evigrad.training.rounds import Rounds, blocks_of_a_round, make_rounds
from evigrad.training.settings import BURN_IN_DECAY, PlannedSettings

# Damping of the first and of the last fixed-point step: a falling rate averages over blocks.
FIRST_RATE, LAST_RATE = 0.5, 0.05


@dataclass(frozen=True)
class Round:
    """The estimates of the hyperparameter steps that follow an epoch.

    Attributes:
        estimates: One for each step, made before it.
        is_shared: Whether steps used the same data, so that the spread of the estimates says
            nothing about their error.
    """

    estimates: list[Estimate]
    is_shared: bool


class Loop:
    """The state of training: two optimisers, and the steps that they take.

    One optimiser only ever holds ``evidence.weights()``, the other ``evidence.hyperparameters()``.
    Neither has weight decay: that of the weights is the prior's, inside the loss, and one of the
    hyperparameters would be a hyperprior by accident.
    """

    def __init__(self, evidence: Evidence, data: RunData, settings: PlannedSettings) -> None:
        """Make the optimisers.

        Raises:
            ConfigurationError: If a user's own optimiser has weight decay or does not hold exactly
                the weights; if the prior has no fixed-point update; if a round cannot keep its
                passes (``prior_blocks``).
        """
        self.evidence, self.data, self.settings = evidence, data, settings
        weights, hyperparameters = evidence.weights(), evidence.hyperparameters()
        held = {id(w) for w in weights.values()}
        scalars = [p for p in fixup_scalars(evidence.model).values() if id(p) in held]
        self.weight_optimizer = make_weight_optimizer(weights, settings.optimization, scalars)
        self.hyper_optimizer = make_hyper_optimizer(hyperparameters, settings)
        self._base_rates = [group["lr"] for group in self.weight_optimizer.param_groups]
        self.device = next(iter(weights.values())).device
        self.rounds = make_rounds(settings, hyperparameters)
        self._blocks: Stream | None = None  # of the data, which are checked once
        self._warned = False  # of precisions that nothing determines
        self.augerino: Augerino | None = None
        # Hyperparameters that a baseline learns on the training loss, by a step in every batch.
        self.in_loss: list[str] = []
        if settings.estimator == "augerino":
            self.augerino = Augerino(evidence, settings.optimization.augerino_weight)
            self.in_loss = self.augerino.names
        elif settings.estimator == "map-noise":
            self.in_loss = [name for name in hyperparameters if name.startswith("likelihood.")]
        self.fixed_point: FixedPoint | None = None
        if settings.baseline is None:
            if settings.optimization.prior_update == "fixed_point":
                self.fixed_point = FixedPoint(evidence, FIRST_RATE)
                if settings.schedule.burn_in:
                    self.fixed_point.start(BURN_IN_DECAY * evidence.num_data)
            if settings.schedule.prior_blocks is not None:
                x, _ = data.first(PROBE_SIZE)
                evidence.check_collect(x, wrt=self.rounds[0].names)

    @property
    def learned(self) -> list[str]:
        """Names of the hyperparameters that change during training."""
        if self.in_loss:
            return self.in_loss
        return [name for rounds in self.rounds for name in rounds.names]

    @property
    def hyper_steps(self) -> int:
        """Steps on hyperparameters so far, of all schedules together."""
        return sum(rounds.taken for rounds in self.rounds)

    def train_epoch(self, epoch: int) -> float:
        """Return the mean loss, in nats per datum, of an epoch that trains the weights on all data.

        The order is drawn from (seed, epoch), with epochs from 1. What the model draws itself
        (dropout) comes from a second stream of (seed, epoch), and what the items of a data set draw
        from others. The loss includes Augerino's regulariser.

        Raises:
            EvigradError: If the loss or a weight is not finite.
        """
        self._set_weight_rates(epoch)
        self.data.epoch = epoch
        seed = self.settings.seed
        order = torch.randperm(len(self.data), generator=stream(seed, "shuffle", epoch))
        # Batches of nearly one size: a last batch of one datum would break batch normalisation.
        batches = order.tensor_split(-(-len(order) // self.settings.schedule.batch_size))
        total = 0.0
        with (
            seeded(derived_seed(seed, "model", epoch), self.device),
            training_mode(self.evidence.model),
        ):
            for batch in batches:
                loss = self._loss(*self.data.fetch(batch), batch)
                value = loss.item()
                if not math.isfinite(value):
                    raise self._diverged("the loss", value, epoch)
                self.weight_optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.weight_optimizer.step()
                if self.in_loss:
                    self.hyper_optimizer.step()
                    self._clear_gradients()
                total += value * len(batch)
        self.weight_optimizer.zero_grad(set_to_none=True)
        for name, weight in self.evidence.weights().items():
            if not torch.isfinite(weight).all():
                raise self._diverged(f"the weight {name}", float("nan"), epoch)
        return total / len(order)

    def _loss(self, x: Tensor, y: Tensor, indices: Tensor) -> Tensor:
        loss = self.evidence.map_loss(x, y, wrt=self.in_loss, indices=indices)
        return loss if self.augerino is None else loss + self.augerino.regulariser()

    def is_round(self, epoch: int) -> bool:
        """Whether hyperparameter steps follow an epoch, counted from 1."""
        return any(rounds.is_due(epoch) for rounds in self.rounds)

    def learn(self, epoch: int) -> Round:
        """The estimates of the hyperparameter steps after an epoch, on a fresh partition."""
        estimates: list[Estimate] = []
        any_shared = False
        try:
            for rounds in self.rounds:
                if rounds.is_due(epoch):
                    if self._blocks is None:
                        self._blocks = self.evidence.blocks(self.data)
                    prior_blocks = self.settings.schedule.prior_blocks
                    blocks, is_shared = blocks_of_a_round(
                        self.evidence,
                        self._blocks,
                        self.data.first(PROBE_SIZE)[0],
                        rounds.names,
                        rounds.steps,
                        prior_blocks if rounds is self.rounds[0] else None,
                    )
                    any_shared = any_shared or is_shared
                    estimates += [self._step(rounds, block) for block in blocks]
                    if "prior.log_precision" in rounds.names and not self._warned:
                        self._warned = True
                        warn_of_unused(self.evidence)
        except EvigradError as error:
            raise type(error)(f"Hyperparameter step after epoch {epoch}: {error}") from error
        finally:
            self._clear_gradients()
        return Round(estimates, any_shared)

    def _step(self, rounds: Rounds, block: Block | list[KeptPass]) -> Estimate:
        self._set_hyper_rates(rounds.progress)
        self._clear_gradients()
        estimate = self.evidence.backward(block, wrt=rounds.names)
        self.hyper_optimizer.step()
        if self.fixed_point is not None and any(n.startswith("prior.") for n in rounds.names):
            self.fixed_point.step()
        rounds.taken += 1
        return estimate

    def _clear_gradients(self) -> None:
        for parameter in self.evidence.hyperparameters().values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on, besides data, settings and the number of the epoch.

        All else follows from these: the order of the data and what the model draws from (seed,
        epoch), learning rates from the epoch and ``hyper_steps``.
        """
        model = self.evidence.model
        state = model.state_dict()
        return {
            "model": state,
            "buffers": {n: b for n, b in model.named_buffers() if n not in state},
            "evidence": self.evidence.state_dict(),
            "weight_optimizer": self.weight_optimizer.state_dict(),
            "hyper_optimizer": self.hyper_optimizer.state_dict(),
            "hyper_steps": [rounds.taken for rounds in self.rounds],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of a loop with the same settings and data.

        Raises:
            ConfigurationError: If it does not fit the model, the evidence or an optimiser.
        """
        model = self.evidence.model
        try:
            load_network(model, state)
            self.evidence.load_state_dict(state["evidence"])
            self.weight_optimizer.load_state_dict(state["weight_optimizer"])
            self.hyper_optimizer.load_state_dict(state["hyper_optimizer"])
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise ConfigurationError(f"The saved state does not fit this run: {error}") from error
        for rounds, taken in zip(self.rounds, state["hyper_steps"], strict=True):
            rounds.taken = taken

    def _set_weight_rates(self, epoch: int) -> None:
        s, progress = self.settings.optimization, (epoch - 1) / self.settings.schedule.epochs
        factor = cosine(progress, s.lr, s.lr_min) / s.lr
        for group, base in zip(self.weight_optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor
        if self.in_loss:
            self._set_hyper_rates(progress)

    def _set_hyper_rates(self, progress: float) -> None:
        for group in self.hyper_optimizer.param_groups:
            group["lr"] = cosine(progress, group["lr_first"], group["lr_last"])
        if self.fixed_point is not None:
            self.fixed_point.rate = cosine(progress, FIRST_RATE, LAST_RATE)

    def _diverged(self, what: str, value: float, epoch: int) -> EvigradError:
        rate = self.weight_optimizer.param_groups[0]["lr"]
        return EvigradError(
            f"Training diverged in epoch {epoch} of {self.settings.schedule.epochs}: {what} is"
            f" {value}. Lower lr (it was {rate:.3g} in this epoch)"
            + ("" if self.hyper_steps == 0 else ", or prior_lr and hyper_lr")
            + "; check the scale of the inputs."
        )


def warn_of_unused(evidence: Evidence) -> None:
    """Warn of precisions that are learned although no output depends on their weights.

    The rows of P such weights with precision δ are zero. Then (P/2) log δ of the prior cancels with
    −½ log|P0 + H|, and the log evidence depends on δ by −½ δ ‖w − μ‖² alone: as long as training
    has not taken w to its mean μ, every step lowers δ, and no prediction changes with it.
    """
    prior, reports = evidence.prior, evidence.describe()
    used = {report.group for report in reports if report.rows != "unused"}
    fixed = set(prior.group_names) - {prior.group_names[i] for i in prior.learned_groups()}
    names = [report.name for report in reports if report.group not in used | fixed]
    if names:
        warnings.warn(
            f"No output depends on {listed(names)}: nothing determines their prior precisions,"
            " which will fall until training ends. Freeze these parameters (requires_grad_(False)),"
            " or take them out of the model.",
            EvigradWarning,
            stacklevel=2,
        )


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode, and restore the mode of every module on the way out.

    In a model that is in training mode already, modules in evaluation mode were put there on
    purpose (a frozen batch normalisation), and stay.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
