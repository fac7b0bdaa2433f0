"""The interleaved scheme: epochs of the weights, and steps of the hyperparameters between them."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import SGD

from evigrad.errors import EvigradError, EvigradWarning, memory_for
from evigrad.evidence import Evidence
from evigrad.inputs import with_bare_names
from evigrad.likelihoods import Gaussian
from evigrad.models import fixup_scalars
from evigrad.network.modes import seeded
from evigrad.training.augerino import Augerino
from evigrad.training.checkpoint import fitting, load_network, load_optimizer
from evigrad.training.data import RunData, batches, derived_seed
from evigrad.training.learner import Learner, Round
from evigrad.training.optimizers import cosine, make_hyper_optimizer, make_weight_optimizer
from evigrad.training.settings import OPTIMIZERS, PlannedSettings

# Part of an epoch's batches, one at least, that may be skipped before training has diverged.
SKIPPED_SHARE = 0.1


class Loop:
    """The state of training: an optimiser of the weights, and a learner of the hyperparameters.

    One only ever changes ``evidence.weights()``, the other ``evidence.hyperparameters()``. Neither
    has weight decay: that of the weights is the prior's, inside the loss, and one of the
    hyperparameters would be a hyperprior by accident. A baseline has no learner, but may learn
    some of the hyperparameters on the training loss, by an optimiser of their own.
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
        self._base_rates = [group["lr"] for group in self.weight_optimizer.param_groups]
        self.device = next(iter(weights.values())).device
        self.augerino: Augerino | None = None
        # Hyperparameters that a baseline learns on the training loss, by a step in every batch.
        self.in_loss: list[str] = []
        self.learner: Learner | None = None
        rates = settings.optimization
        if settings.baseline is None:
            self.learner = Learner(evidence, data, settings.schedule, rates, settings.seed)
        elif settings.estimator == "augerino":
            self.augerino = Augerino(evidence, rates.augerino_weight)
            self.in_loss = self.augerino.names
        elif settings.estimator == "map-noise":
            self.in_loss = [name for name in hyperparameters if name.startswith("likelihood.")]
            # Noise that the training loss learns has the weights' rate.
            rates = replace(rates, prior_lr=rates.lr, prior_lr_min=rates.lr_min)
        self.loss_optimizer = make_hyper_optimizer(hyperparameters, rates)

    @property
    def learned(self) -> list[str]:
        """Names of the hyperparameters that change during training."""
        return self.in_loss if self.learner is None else self.learner.learned

    @property
    def hyper_steps(self) -> int:
        """Steps on hyperparameters by the evidence so far."""
        return 0 if self.learner is None else self.learner.hyper_steps

    def train_epoch(self, epoch: int) -> tuple[float, int]:
        """Train the weights, by a step for each batch.

        A batch whose loss or gradient is not finite is skipped: its step would spoil the weights.
        The order of the data is drawn from the seed, with epochs from 1 (see ``batches``). What the
        model draws itself (dropout) comes from a second stream of (seed, epoch), and what the items
        of a data set draw from others. The loss includes Augerino's regulariser.

        Returns:
            The mean loss, in nats per datum, of the batches that have a target, and the number of
            batches that were skipped for a loss that is not finite.

        Raises:
            EvigradError: If more than a tenth of the batches would be skipped (``SKIPPED_SHARE``),
                or a weight or a buffer is not finite at the end.
        """
        self._set_weight_rates(epoch)
        self.data.epoch = epoch
        seed, schedule, num_data = self.settings.seed, self.settings.schedule, len(self.data)
        size = schedule.data_in_epoch(num_data)
        steps = -(-size // schedule.batch_size)
        most = min(max(1, int(SKIPPED_SHARE * steps)), steps - 1)
        finite = self._finite_parts()
        total, count, skipped = 0.0, 0, 0
        with (
            seeded(derived_seed(seed, "model", epoch, self.evidence.ranks.rank), self.device),
            training_mode(self.evidence.model),
        ):
            for batch in batches(seed, epoch, num_data, size, schedule.batch_size):
                if not self.data.num_targets(batch):
                    continue  # a step on the prior alone would count these data
                self.weight_optimizer.zero_grad(set_to_none=True)
                value = self._differentiate(batch)
                if math.isfinite(value) and self._has_finite_gradients():
                    self.weight_optimizer.step()
                    if self.in_loss:
                        self.loss_optimizer.step()
                    total, count = total + value * len(batch), count + len(batch)
                else:
                    skipped += 1
                    if skipped > most:
                        what = f"in {skipped} of {steps} batches the loss or its gradient"
                        raise self._diverged(what, epoch)
                self.loss_optimizer.zero_grad()
        self.weight_optimizer.zero_grad(set_to_none=True)
        # Statistics of normalisation layers, of which each rank has those of its own data.
        self.evidence.ranks.share(list(self.evidence.model.buffers()))
        if spoiled := finite - self._finite_parts():
            raise self._diverged(min(spoiled), epoch)
        if skipped:
            warnings.warn(
                f"Epoch {epoch}: in {skipped} of {steps} batches the loss or its gradient"
                " was NaN or infinite. The weights took no step there.",
                EvigradWarning,
                stacklevel=2,
            )
        return total / max(count, 1), skipped

    def _has_finite_gradients(self) -> bool:
        """Whether no gradient that the next step uses is NaN or infinite."""
        learned = self.evidence.hyperparameters()
        parameters = [*self.evidence.weights().values(), *(learned[n] for n in self.in_loss)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        return bool(get_total_norm(gradients, math.inf).isfinite())

    def _finite_parts(self) -> set[str]:
        """The weights and buffers without NaN and infinite values, in words."""
        # A mask may be infinite on purpose; running statistics become NaN by a skipped batch.
        parts = {f"the weight {name}": w for name, w in self.evidence.weights().items()}
        parts |= {f"the buffer {name}": b for name, b in self.evidence.model.named_buffers()}
        return {words for words, part in parts.items() if bool(part.detach().isfinite().all())}

    def _differentiate(self, batch: Tensor) -> float:
        """Return the loss on a batch; where it is finite, its gradient is in ``.grad``.

        Of several ranks each takes a part of the batch, and gradients are summed.
        """
        ranks = self.evidence.ranks
        local_batch, value, scale = batch[ranks.part(len(batch))], 0.0, self._noise_variance()
        with ranks.together():
            total = self.data.num_targets(batch)
            share = self.data.num_targets(local_batch) / total
            if share and len(local_batch):
                step = f"a training step on {len(local_batch)} data"
                with memory_for(step, "a smaller batch_size"):
                    loss = share * self._loss(*self.data.fetch(local_batch), local_batch, scale)
                    value = loss.item()
                    if math.isfinite(value):
                        (scale * loss).backward()
        if ranks.count == 1:
            return value
        named = {**self.evidence.weights(), **self.evidence.hyperparameters()}
        learned = [*self.evidence.weights(), *self.in_loss]
        parameters = [named[name] for name in learned]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total, *sums = ranks.sum([torch.tensor(value, device="cpu").to(grads[0]), *grads])
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient
        return total.item()

    def _noise_variance(self) -> float:
        """σ² of normal noise that rounds learn, the geometric mean over outputs; 1 without.

        The gradient of the negative log likelihood grows as 1/σ², and a round can divide σ² by ten.
        The running mean of squared gradients that Adam divides by follows that within a thousand
        steps; until then its steps would be several times too long, and networks die of it
        (docs/start.md). On the loss times σ² a round changes no more than the share of the prior.

        Returns:
            A factor of the loss.
        """
        if self.learner is None:
            return 1.0
        gaussians = [m for m in self.evidence.likelihood.modules() if isinstance(m, Gaussian)]
        return (
            gaussians[0].log_noise.detach().double().mul(2).mean().exp().item()
            if gaussians
            else 1.0
        )

    def _loss(self, x: Tensor, y: Tensor, indices: Tensor, scale: float) -> Tensor:
        # Precisions of weights that the data do not determine grow without bound.
        is_sgd = isinstance(self.weight_optimizer, SGD)
        loss = self.evidence.map_loss(
            x,
            y,
            wrt=self.in_loss,
            indices=indices,
            optimizer=self.weight_optimizer if is_sgd else None,
            scale=scale,
        )
        return loss if self.augerino is None else loss + self.augerino.regulariser()

    def is_round(self, epoch: int) -> bool:
        """Whether hyperparameter steps follow an epoch, counted from 1."""
        return self.learner is not None and self.learner.is_due(epoch)

    def learn(self, epoch: int) -> Round:
        """The estimates of the hyperparameter steps after an epoch for which ``is_round``."""
        assert self.learner is not None
        return self.learner.learn(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on, besides data, settings and the number of the epoch.

        All else follows from these: the order of the data and what the model draws from (seed,
        epoch), learning rates from the epoch and ``hyper_steps``.
        """
        model = self.evidence.model
        state = model.state_dict()
        if self.learner is not None:
            learned = self.learner.state_dict()
        else:
            learned = {
                "evidence": self.evidence.state_dict(),
                "hyper_optimizer": self.loss_optimizer.state_dict(),
                "hyper_steps": [],
            }
        return {
            "model": with_bare_names(model, state),
            "buffers": with_bare_names(
                model, {n: b for n, b in model.named_buffers() if n not in state}
            ),
            "weight_optimizer": self.weight_optimizer.state_dict(),
            **learned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of a loop with the same settings and data.

        Raises:
            ConfigurationError: If it does not fit the model, the evidence or an optimiser.
        """
        model = self.evidence.model
        is_own = self.settings.optimization.optimizer not in OPTIMIZERS
        with fitting("The saved state"):
            load_network(model, state)
            load_optimizer(self.weight_optimizer, state["weight_optimizer"], groups=is_own)
            if self.learner is None:
                self.evidence.load_state_dict(state["evidence"])
                load_optimizer(self.loss_optimizer, state["hyper_optimizer"])
        if self.learner is not None:
            # A run counts epochs by its history, and not by calls of ``Learner.step``.
            self.learner.load_state_dict({"count": 0, **state})

    def _set_weight_rates(self, epoch: int) -> None:
        s, progress = self.settings.optimization, (epoch - 1) / self.settings.schedule.epochs
        factor = cosine(progress, s.lr, s.lr_min) / s.lr
        for group, base in zip(self.weight_optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor
        for group in self.loss_optimizer.param_groups:
            group["lr"] = cosine(progress, group["lr_first"], group["lr_last"])

    def _diverged(self, what: str, epoch: int) -> EvigradError:
        rate = self.weight_optimizer.param_groups[0]["lr"]
        return EvigradError(
            f"Training diverged in epoch {epoch} of {self.settings.schedule.epochs}: {what} is"
            f" NaN or infinite. Lower lr (it was {rate:.3g} in this epoch)"
            + ("" if self.hyper_steps == 0 else ", or prior_lr and hyper_lr")
            + "; check the scale of the inputs."
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
