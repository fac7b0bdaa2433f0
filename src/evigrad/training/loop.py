"""The interleaved scheme: epochs of the weights, and between them steps of the hyperparameters."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from evigrad.assembly import Collected
from evigrad.draws import stochastic_modules
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.estimate import Estimate
from evigrad.evidence import Evidence
from evigrad.fixed_point import FixedPoint
from evigrad.modes import seeded
from evigrad.partitions import Block
from evigrad.preparation import PROBE_SIZE
from evigrad.training.randomness import derived_seed, stream
from evigrad.training.schedules import cosine, count_rounds, is_round
from evigrad.training.settings import Settings


@dataclass(frozen=True)
class Round:
    """A round of hyperparameter steps.

    Attributes:
        estimates: Of each step, made before it.
        is_shared: Whether the steps were on the same data, so that the spread of the estimates
            tells nothing about their error.
    """

    estimates: list[Estimate]
    is_shared: bool


class Loop:
    """What changes during training: two optimisers, and the steps that they take.

    The weights' optimiser only ever holds ``evidence.weights()``, the hyperparameters' one only
    ``evidence.hyperparameters()``. Neither has weight decay: the decay of the weights is the
    prior's, inside the loss, and a decay of hyperparameters would be a hyperprior by accident.
    """

    def __init__(self, evidence: Evidence, x: Tensor, y: Tensor, settings: Settings) -> None:
        """Make the optimisers.

        Args:
            evidence: Of the model that is trained; its hyperparameters are only touched by
                ``learn``.
            x: All training inputs (N, ...), on the model's device.
            y: All targets.
            settings: Validated settings.

        Raises:
            ConfigurationError: If an optimiser of the user's own has weight decay or does not
                hold exactly the weights; if the prior has no fixed-point update; if a round
                cannot keep its passes (``prior_blocks``).
        """
        self.evidence, self.x, self.y, self.settings = evidence, x, y, settings
        self.weight_optimizer = make_weight_optimizer(evidence.weights(), settings)
        self.hyper_optimizer = make_hyper_optimizer(evidence.hyperparameters(), settings)
        self._base_rates = [group["lr"] for group in self.weight_optimizer.param_groups]
        self.device = next(iter(evidence.weights().values())).device
        self.hyper_steps = 0
        self.fixed_point: FixedPoint | None = None
        if settings.estimator is not None:
            if settings.prior_update == "fixed_point":
                self.fixed_point = FixedPoint(evidence, settings.prior_rate)
            if settings.prior_blocks is not None:
                evidence.check_collect(x[:PROBE_SIZE])

    def train_epoch(self, epoch: int) -> float:
        """Show the weights all training data once.

        The order, the only random choice here, is drawn from (seed, epoch); what the model draws
        itself (dropout) comes from a second stream of (seed, epoch).

        Args:
            epoch: From 1; sets the learning rate.

        Returns:
            The mean of the loss over the epoch, nats per datum.

        Raises:
            EvigradError: If the loss or a weight is not finite.
        """
        self._set_weight_rates(epoch)
        seed = self.settings.seed
        order = torch.randperm(len(self.x), generator=stream(seed, "shuffle", epoch))
        # Batches of nearly one size: a last batch of one datum would break batch normalisation.
        batches = order.tensor_split(-(-len(order) // self.settings.batch_size))
        total = 0.0
        with (
            seeded(derived_seed(seed, "model", epoch), self.device),
            training_mode(self.evidence.model),
        ):
            for batch in batches:
                indices = batch.to(self.device)
                loss = self.evidence.map_loss(self.x[indices], self.y[indices])
                value = loss.item()
                if not math.isfinite(value):
                    raise self._diverged("the loss", value, epoch)
                self.weight_optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.weight_optimizer.step()
                total += value * len(batch)
        self.weight_optimizer.zero_grad(set_to_none=True)
        for name, weight in self.evidence.weights().items():
            if not torch.isfinite(weight).all():
                raise self._diverged(f"the weight {name}", float("nan"), epoch)
        return total / len(order)

    def is_round(self, epoch: int) -> bool:
        """Whether hyperparameter steps follow an epoch.

        Args:
            epoch: From 1.

        Returns:
            True where ``learn`` is due.
        """
        return is_round(epoch, self.settings.burn_in, self.settings.every)

    def learn(self, epoch: int) -> Round:
        """One round of hyperparameter steps, on the blocks of a fresh partition.

        Args:
            epoch: The epoch that the round follows; for the words of an error.

        Returns:
            The estimates.

        Raises:
            EvigradError: If an estimate fails; the text names the epoch.
        """
        estimates = []
        try:
            blocks, is_shared = self._blocks_of_a_round()
            for block in blocks:
                self._set_hyper_rates()
                self._clear_gradients()
                estimates.append(self.evidence.backward(block))
                self.hyper_optimizer.step()
                if self.fixed_point is not None:
                    self.fixed_point.step()
                self.hyper_steps += 1
        except EvigradError as error:
            raise type(error)(f"Hyperparameter step after epoch {epoch}: {error}") from error
        finally:
            self._clear_gradients()
        return Round(estimates, is_shared)

    def _blocks_of_a_round(self) -> tuple[Iterable[Block | list[Collected]], bool]:
        """What each step of a round is on, and whether that is the same for all of them.

        Where all the data are one block, and no more than prior and noise are learned, the steps
        share one pass through the network: they would repeat the same one.

        Returns:
            A block for each step, or the same kept passes again and again.
        """
        blocks, steps = self.evidence.blocks((self.x, self.y)), self.settings.steps
        count = self.settings.prior_blocks
        # A model that draws, as an average over transforms does, draws anew in each pass.
        draws = bool(stochastic_modules(self.evidence.model))
        if count is None and blocks.is_constant and not draws and self._can_keep_passes():
            count = 1
        if count is None:
            return blocks.take(steps), False
        kept = [self.evidence.collect(block) for block in islice(blocks.epoch(), count)]
        return repeat(kept, steps), True

    def _can_keep_passes(self) -> bool:
        try:
            self.evidence.check_collect(self.x[:PROBE_SIZE])
        except ConfigurationError:
            return False
        return True

    def _clear_gradients(self) -> None:
        for parameter in self.evidence.hyperparameters().values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, besides data, settings and the number of the epoch."""
        return {
            "model": self.evidence.model.state_dict(),
            "evidence": self.evidence.state_dict(),
            "weight_optimizer": self.weight_optimizer.state_dict(),
            "hyper_optimizer": self.hyper_optimizer.state_dict(),
            "hyper_steps": self.hyper_steps,
        }

    def _set_weight_rates(self, epoch: int) -> None:
        s = self.settings
        factor = cosine((epoch - 1) / s.epochs, s.lr, s.lr_min) / s.lr
        for group, base in zip(self.weight_optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def _set_hyper_rates(self) -> None:
        s = self.settings
        total = count_rounds(s.epochs, s.burn_in, s.every) * s.steps
        for group in self.hyper_optimizer.param_groups:
            group["lr"] = cosine(self.hyper_steps / total, group["lr_first"], group["lr_last"])
        if self.fixed_point is not None:
            self.fixed_point.rate = cosine(self.hyper_steps / total, s.prior_rate, s.prior_rate_min)

    def _diverged(self, what: str, value: float, epoch: int) -> EvigradError:
        rate = self.weight_optimizer.param_groups[0]["lr"]
        return EvigradError(
            f"Training diverged in epoch {epoch} of {self.settings.epochs}: {what} is {value}."
            f" Lower lr (it was {rate:.3g} in this epoch)"
            + ("" if self.hyper_steps == 0 else ", or prior_lr and hyper_lr")
            + "; check the scale of the inputs."
        )


def make_weight_optimizer(weights: dict[str, nn.Parameter], settings: Settings) -> Optimizer:
    """The optimiser of the weights.

    Args:
        weights: The named weights.
        settings: Names the optimiser, or holds a function that makes it.

    Returns:
        The optimiser, without weight decay.

    Raises:
        ConfigurationError: If one of the user's own has weight decay, or does not hold exactly
            the weights.
    """
    if settings.optimizer == "adam":
        return Adam(weights.values(), lr=settings.lr)
    if settings.optimizer == "sgd":
        return SGD(weights.values(), lr=settings.lr, momentum=settings.momentum)
    if isinstance(settings.optimizer, str):
        raise ConfigurationError(f"Unknown optimizer '{settings.optimizer}'.")
    optimizer = settings.optimizer(weights)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if sorted(held) != sorted(id(p) for p in weights.values()):
        raise ConfigurationError(
            "The optimiser must hold every weight that it is given once, and nothing else."
        )
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ConfigurationError(
            "The optimiser has weight decay. The prior in the loss is the weight decay here: set"
            " weight_decay=0 and say precision=... instead."
        )
    return optimizer


def make_hyper_optimizer(hyperparameters: dict[str, nn.Parameter], settings: Settings) -> Optimizer:
    """Adam on the hyperparameters: one rate for prior and noise, one for the model's own.

    Without the prior where that has its fixed-point update.

    Args:
        hyperparameters: ``evidence.hyperparameters()``; may be empty.
        settings: Holds the learning rates.

    Returns:
        The optimiser, without weight decay.
    """
    own = [p for name, p in hyperparameters.items() if name.startswith("model.")]
    kinds = (
        ("likelihood.",) if settings.prior_update == "fixed_point" else ("prior.", "likelihood.")
    )
    prior = [p for name, p in hyperparameters.items() if name.startswith(kinds)]
    groups: list[dict[str, Any]] = [
        {"params": prior, "lr_first": settings.prior_lr, "lr_last": settings.prior_lr_min},
        {"params": own, "lr_first": settings.hyper_lr, "lr_last": settings.hyper_lr_min},
    ]
    for group in groups:
        group["lr"] = group["lr_first"]
    return Adam(groups, lr=settings.prior_lr, weight_decay=0.0)


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode, and every module back into its own on the way out.

    In a model that is in training mode already, modules in evaluation mode were put there on
    purpose (a frozen batch normalisation), and stay.

    Args:
        model: Any module.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
