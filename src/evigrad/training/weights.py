"""An epoch of steps on the weights, by the gradient of the MAP loss."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from evigrad.errors import EvigradError, EvigradWarning, memory_for
from evigrad.evidence import Evidence
from evigrad.likelihoods.noisy import noisy_parts
from evigrad.models import fixup_scalars
from evigrad.network.modes import seeded
from evigrad.training.cycles import Cycles
from evigrad.training.data import RunData, batches, derived_seed
from evigrad.training.learner import Learner
from evigrad.training.optimizers import (
    clear_negligible,
    cosine,
    make_hyper_optimizer,
    make_weight_optimizer,
)
from evigrad.training.plan import planned
from evigrad.training.settings import Settings

# Share of an epoch's batches (at least one) that may be skipped before training has diverged.
SKIPPED_SHARE = 0.1


class WeightTrainer:
    """Train the weights, and without an estimator also some hyperparameters, on the loss.

    The optimizers have no weight decay, because the prior in the loss is the weight decay.

    Args:
        evidence: Evidence of the model.
        data: Training data.
        settings: Complete settings.
        cycles: The cycles in which the learning rate falls.
        learner: Learner of the hyperparameters, or None without an estimator.
        loss: Function of inputs, targets, positions in the data set and scale, which returns the
            loss of a batch in nats per example. A step uses the scale times this loss.

    Attributes:
        optimizer: Optimizer of the weights.
        on_loss: Names of the hyperparameters that the loss learns.
        loss_optimizer: Optimizer of these hyperparameters.
        steps: Number of optimizer steps of an epoch.
    """

    def __init__(
        self,
        evidence: Evidence,
        data: RunData,
        settings: Settings,
        cycles: Cycles,
        learner: Learner | None,
        loss: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    ) -> None:
        self.evidence, self.data, self.settings = evidence, data, settings
        self._cycles, self._learner, self._loss = cycles, learner, loss
        schedule, rates = settings.schedule, settings.optimization
        self.steps = -(-schedule.data_in_epoch(len(data)) // schedule.batch_size)
        weights, hyperparameters = evidence.weights(), evidence.hyperparameters()
        held = {id(w) for w in weights.values()}
        scalars = [p for p in fixup_scalars(evidence.model).values() if id(p) in held]
        self.optimizer = make_weight_optimizer(weights, rates, scalars)
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        usual = planned(rates.lr)
        is_custom = not isinstance(rates.optimizer, str)
        self._rate = float(max(self._base_rates)) or usual if is_custom else usual
        self.on_loss: list[str] = []
        if rates.noise_on_loss:
            self.on_loss = [name for name in hyperparameters if name.startswith("likelihood.")]
            last = min(rates.lr_min, self._rate)
            rates = replace(rates, prior_lr=self._rate, prior_lr_min=last)
        self.loss_optimizer = make_hyper_optimizer(hyperparameters, rates)

    def train(self, epoch: int, last: int, notify: Callable[[float], None]) -> tuple[float, int]:
        """Take one step per batch of an epoch.

        A batch whose loss or gradient is not finite is skipped. The seed determines the order of
        the data (see ``batches``). Random draws of the model (such as dropout) and random draws in
        the items of a data set use separate streams for each epoch.

        Args:
            epoch: Number of the epoch. Epochs are numbered from 1.
            last: Last epoch of the run, for errors.
            notify: Function that is called before each step except the first one, with the share of
                the epoch that is done.

        Returns:
            The mean loss of the batches that have a target, in nats per example, and the number of
            skipped batches.

        Raises:
            EvigradError: If too many batches are skipped (see ``SKIPPED_SHARE``), or if a weight or
                buffer becomes NaN or infinite.
        """
        self.set_rates(epoch)
        self.data.epoch = epoch
        evidence, seed, schedule = self.evidence, self.settings.seed, self.settings.schedule
        num_data, steps = len(self.data), self.steps
        size, device = schedule.data_in_epoch(num_data), self._stepping()[0].device
        most = min(max(1, int(SKIPPED_SHARE * steps)), steps - 1)
        finite = self._finite_parts()
        total, count, skipped = 0.0, 0, 0
        with (
            seeded(derived_seed(seed, "model", epoch, evidence.ranks.rank), device),
            training_mode(evidence.model),
        ):
            every = batches(seed, epoch, num_data, size, schedule.batch_size)
            for number, batch in enumerate(every):
                if number:
                    notify(number / steps)
                if not self.data.num_targets(batch):
                    continue  # a step on the prior alone would count these data
                self.optimizer.zero_grad(set_to_none=True)
                value = self._differentiate(batch)
                gradients = [p.grad for p in self._stepping() if p.grad is not None]
                if math.isfinite(value) and get_total_norm(gradients, math.inf).isfinite():
                    self.optimizer.step()
                    if self.on_loss:
                        self.loss_optimizer.step()
                    total, count = total + value * len(batch), count + len(batch)
                else:
                    skipped += 1
                    if skipped > most:
                        what = f"in {skipped} of {steps} batches the loss or its gradient"
                        raise self._diverged(what, epoch, last)
                self.loss_optimizer.zero_grad()
        self.optimizer.zero_grad(set_to_none=True)
        clear_negligible(self.optimizer)
        # Statistics of normalization layers. Each rank has the statistics of its own data.
        evidence.ranks.share(list(evidence.model.buffers()))
        if spoiled := finite - self._finite_parts():
            raise self._diverged(min(spoiled), epoch, last)
        if skipped:
            warnings.warn(
                f"Epoch {epoch}: in {skipped} of {steps} batches the loss or its gradient"
                " was NaN or infinite. These batches did not change the weights.",
                EvigradWarning,
                stacklevel=2,
            )
        return total / max(count, 1), skipped

    def _differentiate(self, batch: Tensor) -> float:
        """Return the loss on a batch; if it is finite, its gradient is in ``.grad``.

        Each rank takes a part of the batch, and gradients are summed.
        """
        ranks = self.evidence.ranks
        local_batch, value, scale = batch[ranks.part(len(batch))], 0.0, self._noise_variance()
        with ranks.together():
            total = self.data.num_targets(batch)
            share = self.data.num_targets(local_batch) / total
            if share and len(local_batch):
                step = f"a training step on {len(local_batch)} examples"
                with memory_for(step, "a smaller batch_size"), torch.enable_grad():
                    loss = share * self._loss(*self.data.fetch(local_batch), local_batch, scale)
                    value = loss.item()
                    if math.isfinite(value):
                        (scale * loss).backward()
        if ranks.count == 1:
            return value
        # Each rank took a part of the batch.
        parameters = self._stepping()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total, *sums = ranks.sum([torch.tensor(value, device="cpu").to(grads[0]), *grads])
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient
        return total.item()

    def _noise_variance(self) -> float:
        """Return σ² of noise that rounds learn (geometric mean over heads and outputs), or 1.

        The gradient of the negative log likelihood grows as 1/σ², and a round can divide σ² by ten.
        Adam's running mean of squared gradients needs a thousand steps to catch up. Until then the
        steps would be several times too large, and training can diverge (benchmarks/README.md).
        With the loss times σ², a round changes nothing but the share of the prior.
        """
        # A known noise keeps the gradients small.
        noisy = noisy_parts(self.evidence.likelihood)
        noisy = [part for part in noisy if not part.has_conditions]
        if self._learner is None or not noisy:
            return 1.0
        logs = torch.stack([part.log_noise.detach().double().mean() for part in noisy])
        return logs.mul(2).mean().exp().item()

    def _stepping(self) -> list[nn.Parameter]:
        """Return the parameters that a step on the training loss changes."""
        learned = self.evidence.hyperparameters()
        return [*self.evidence.weights().values(), *(learned[name] for name in self.on_loss)]

    def _finite_parts(self) -> set[str]:
        """Return the names of weights and buffers without NaN and infinite values."""
        # A mask may be infinite on purpose; running statistics become NaN in a skipped batch.
        parts = {f"the weight {name}": w for name, w in self.evidence.weights().items()}
        parts |= {f"the buffer {name}": b for name, b in self.evidence.model.named_buffers()}
        return {words for words, part in parts.items() if bool(part.detach().isfinite().all())}

    def set_rates(self, epoch: int) -> None:
        """Set the learning rates of an epoch."""
        rate, progress = self._rate, self._cycles.progress(epoch)
        last = min(self.settings.optimization.lr_min, rate)
        start = max(rate * self._cycles.first_rate(epoch), last)
        factor = cosine(progress, start, last) / rate
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor
        for group in self.loss_optimizer.param_groups:
            group["lr"] = cosine(progress, group["lr_first"], group["lr_last"])

    def _diverged(self, what: str, epoch: int, last: int) -> EvigradError:
        rate = self.optimizer.param_groups[0]["lr"]
        has_learned = self._learner is not None and self._learner.hyper_steps > 0
        return EvigradError(
            f"Training diverged in epoch {epoch} of {last}: {what} is NaN or infinite. Lower lr (it"
            f" was {rate:.3g} in this epoch)"
            + (", or prior_lr and hyper_lr" if has_learned else "")
            + ", and check the scale of the inputs."
        )


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode, and restore the mode of every module at the end.

    If the model is already in training mode, modules in evaluation mode stay in it, because they
    were put there on purpose (such as frozen batch normalization).
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
