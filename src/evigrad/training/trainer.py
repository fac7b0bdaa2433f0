"""A training run: epochs of weight updates, rounds of hyperparameter updates, and their history."""

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import SGD

from evigrad.blocks.pool import Pool
from evigrad.errors import (
    ConfigurationError,
    EvigradError,
    EvigradWarning,
    InputError,
    MemoryBudgetError,
    RankError,
    listed,
    memory_for,
)
from evigrad.evidence import Evidence
from evigrad.likelihoods.noisy import noisy_parts
from evigrad.measure.metrics import evaluate, hyperparameter_values
from evigrad.models import fixup_scalars
from evigrad.network.modes import seeded
from evigrad.training.checkpoint import (
    PROBED,
    check_format,
    fitting,
    machine,
    packed,
    restore,
    with_threads,
)
from evigrad.training.convergence import mode_columns, warn_of_mode, warn_of_tails
from evigrad.training.cycles import Cycles
from evigrad.training.data import RunData, batches, derived_seed, stream
from evigrad.training.history import Row, bracket_columns, evidence_columns, metric_columns
from evigrad.training.learner import Learner
from evigrad.training.offset import center_outputs
from evigrad.training.optimizers import cosine, make_hyper_optimizer, make_weight_optimizer
from evigrad.training.plan import planned
from evigrad.training.progress import Progress
from evigrad.training.rotation import RankRotation
from evigrad.training.run_directory import RunDirectory, RunRecord, naming_files
from evigrad.training.settings import Settings, label_of, method_of
from evigrad.training.starts import Starts
from evigrad.training.weight_choice import WeightChoice

Callback = Callable[[Row], None]

# Share of an epoch's batches (at least one) that may be skipped before training has diverged.
SKIPPED_SHARE = 0.1
# Enough for curves, at a small share of the time of training.
_EVALUATIONS = 10


@dataclass(frozen=True)
class FitResult:
    """The trained model, evidence, history and metrics of a training run.

    Attributes:
        model: The model that was passed to ``fit``, now trained and in evaluation mode.
        evidence: Evidence of the model. Without an estimator, it has a placeholder estimator.
        history: One row per epoch (see ``metrics.csv``). Missing values are None.
        train_metrics: Means over the training data at the end: ``log_likelihood`` in nats per
            example, and ``accuracy`` or ``squared_error``.
        test_metrics: The same metrics on the test data. Empty without test data.
        seconds: Training time in seconds, without evaluations and file writes.
        starts: Log evidence of each ``start_decay`` that was tried, in nats per example, after a
            third of the epochs. Empty if there was only one start.
        mode_gap: Log evidence that is missing because the weights are not at the mode, in nats per
            example (see ``Evidence.mode_gap``). None without an estimator, with
            ``Schedule.epoch_size``, or if it could not be computed.
        run_dir: Folder of the run on the first rank, or None if nothing was written.
        estimator: Name of the estimator, or None for training without an estimator.
        weight_choice: The weight of the log-determinant that held-out data chose, and its trials.
            None if the weight was not chosen.

    See also: docs/fit.md.
    """

    model: nn.Module
    evidence: Evidence
    history: list[Row]
    train_metrics: dict[str, float]
    test_metrics: dict[str, float]
    seconds: float
    run_dir: Path | None
    estimator: str | None
    starts: Mapping[float, float] = field(default_factory=dict)
    mode_gap: float | None = None
    weight_choice: WeightChoice | None = None

    def __repr__(self) -> str:
        """Return the final state in one line."""
        took = f"{len(self.history)} epochs in {self.seconds:.3g} s"
        parts = [self.estimator or "no estimator", took]
        for name, metrics in (("train", self.train_metrics), ("test", self.test_metrics)):
            parts += [f"{name} {key} {value:.4g}" for key, value in metrics.items()]
        parts += [] if self.run_dir is None else [f"run_dir {str(self.run_dir)!r}"]
        return f"FitResult({', '.join(parts)})"


class Trainer:
    """Train the weights by MAP and, between epochs, the hyperparameters by a ``Learner``.

    The optimizer of the weights changes only ``evidence.weights()``, and the learner changes only
    ``evidence.hyperparameters()``. Neither of them uses weight decay. For the weights, the prior in
    the loss is the weight decay. For the hyperparameters, weight decay would be an unintended
    hyperprior.

    Without an estimator, there is no learner. The training loss can then learn some hyperparameters
    (``on_loss``), with a separate optimizer that takes a step for every batch.

    ``prepare`` returns a checked trainer, whose ``train`` can run only once.

    Args:
        evidence: Evidence of the model, with its initial prior and noise.
        data: Training data.
        settings: Settings from ``plan`` for these data.
        test: Test data, used only for evaluation.
        network: Record of how the model was built, for ``evigrad.load``.

    Attributes:
        history: One row per epoch so far.
        metrics: Metrics of the last evaluation, on ``train`` and ``test``.
        seconds: Time of training so far, in seconds.

    Raises:
        ConfigurationError: If a custom optimizer has weight decay or does not contain exactly the
            weights, or if the prior or ``prior_blocks`` does not match the other settings.
    """

    def __init__(
        self,
        evidence: Evidence,
        data: RunData,
        settings: Settings,
        test: RunData | None = None,
        network: Mapping[str, Any] | None = None,
    ) -> None:
        self.evidence, self.data, self.settings = evidence, data, settings
        self.test, self.network = test, network
        self.schedule, rates = settings.schedule, settings.optimization
        self.cycles = Cycles(self.schedule)
        weights, hyperparameters = evidence.weights(), evidence.hyperparameters()
        self.device = next(iter(weights.values())).device
        held = {id(w) for w in weights.values()}
        scalars = [p for p in fixup_scalars(evidence.model).values() if id(p) in held]
        self.weight_optimizer = make_weight_optimizer(weights, rates, scalars)
        self._base_rates = [group["lr"] for group in self.weight_optimizer.param_groups]
        usual = planned(rates.lr)
        is_custom = not isinstance(rates.optimizer, str)
        self._rate = float(max(self._base_rates)) or usual if is_custom else usual
        self.learner: Learner | None = None
        if settings.estimator is not None:
            self.learner = Learner(evidence, data, self.schedule, rates, settings.seed)
        # Hyperparameters that the training loss learns.
        self.on_loss: list[str] = []
        if rates.noise_on_loss:
            self.on_loss = [name for name in hyperparameters if name.startswith("likelihood.")]
            last = min(rates.lr_min, self._rate)
            rates = replace(rates, prior_lr=self._rate, prior_lr_min=last)
        self.loss_optimizer = make_hyper_optimizer(hyperparameters, rates)
        self.probe, _ = data.first(PROBED)  # shows that a loaded network is the same
        self._rotation = RankRotation(evidence, self.weight_optimizer, self.probe)
        self.history: list[Row] = []  # one row for each epoch so far
        self.metrics: dict[str, dict[str, float]] = {"train": {}, "test": {}}
        self.seconds = 0.0  # time of training so far
        self.starts = Starts(self)
        self._progress: Progress | None = None

    @property
    def epochs(self) -> int:
        """Return the last epoch of the current cycle. Epochs are numbered from 1."""
        return self.cycles.end(self.history)

    @property
    def name(self) -> str:
        """Return the estimator's name, or MAP if there is no estimator."""
        return method_of(self.record)

    @property
    def label(self) -> str:
        """Return the name of the method for people: evigrad, or fixed weight decay."""
        return label_of(self.settings.estimator)

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of an epoch."""
        return -(-self.schedule.data_in_epoch(len(self.data)) // self.schedule.batch_size)

    @property
    def record(self) -> dict[str, Any]:
        """Return the settings by name, as plain values."""
        return self.settings.as_record()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return what must not change when a run is resumed: settings, data and parameter names."""
        test = None if self.test is None else self.test.fingerprint()
        weights, hyperparameters = self.evidence.weights(), self.evidence.hyperparameters()
        return {
            "settings": self.record,
            "data": {"train": self.data.fingerprint(), "test": test},
            "learned": {"weights": list(weights), "hyperparameters": list(hyperparameters)},
        }

    @property
    def learned(self) -> list[str]:
        """Return the names of the hyperparameters that change during training."""
        return self.on_loss if self.learner is None else self.learner.learned

    def weigh_log_det(self, weight: float) -> None:
        """Set the weight of the log-determinant, before training."""
        laplace = replace(self.settings.laplace, log_det_weight=weight)
        self.settings = replace(self.settings, laplace=laplace)
        problem = self.evidence.problem
        model = replace(problem.model, log_det_weight=weight)
        self.evidence.problem = replace(problem, model=model)

    def train(
        self,
        run_dir: str | Path | RunDirectory | None = None,
        *,
        resume: bool = False,
        progress: bool = True,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] | None = None,
        begin: Mapping[str, Any] | None = None,
    ) -> FitResult:
        """Return the result of training for all remaining epochs.

        ``run_dir``, ``resume``, ``progress`` and ``callbacks`` have the same meaning as in ``fit``.
        Only the first rank uses them. ``stop`` is called after every epoch except the last. If it
        returns True, a checkpoint is written and a ``KeyboardInterrupt`` is raised. ``begin`` is a
        ``state`` from which training continues if there is no checkpoint.

        Raises:
            ConfigurationError: If the trainer has already run, if the folder holds a run with
                different settings, data or network, or if another process writes into the folder.
            EvigradError: If training diverges. The metrics of earlier epochs are kept.
        """
        if self.history:
            raise ConfigurationError(
                "A trainer can run only once, and this one has already run. Prepare a new trainer."
            )
        if resume and run_dir is None:
            raise ConfigurationError(
                "resume=True requires the folder of a run, but run_dir is None. Set run_dir."
            )
        ranks = self.evidence.ranks
        if not ranks.is_first:
            run_dir, progress, callbacks = None, False, ()
        with ExitStack() as stack:
            directory = self._begin(stack, run_dir, resume, progress, begin)
            record, watchers = None, list[Callback]()
            if directory is not None:
                stack.enter_context(naming_files(directory, self.history))
                record = stack.enter_context(closing(RunRecord(directory, self.history)))
                watchers.append(record.write_row)
            if progress and len(self.history) < self.epochs:
                self._progress = stack.enter_context(closing(Progress(self)))
                watchers.append(self._progress.update)
                self._progress.begin()
            self._run(record, watchers, callbacks, stop)
            if progress and (epoch := len(self.history)) < self.cycles.most:
                words = f"settled after epoch {epoch} of at most {self.cycles.most}"
                print(f"{self.label}: {words}", file=sys.stderr, flush=True)
        self.evidence.model.eval()
        gap = self.history[-1].get("mode_gap")
        warn_of_mode(self, gap)
        warn_of_tails(self)
        return FitResult(
            model=self.evidence.model,
            evidence=self.evidence,
            history=self.history,
            train_metrics=self.metrics["train"],
            test_metrics=self.metrics["test"],
            seconds=self.seconds,
            run_dir=None if directory is None else directory.path,
            estimator=None if self.learner is None else self.evidence.spec.name,
            starts=self.starts.scores,
            mode_gap=gap,
        )

    def _begin(
        self,
        stack: ExitStack,
        run_dir: str | Path | RunDirectory | None,
        resume: bool,
        progress: bool,
        begin: Mapping[str, Any] | None,
    ) -> RunDirectory | None:
        """Return the folder, locked in ``stack``, and restore its checkpoint or ``begin``."""
        ranks, directory, state = self.evidence.ranks, None, None
        with ranks.together():
            if isinstance(run_dir, str | Path):
                directory = RunDirectory(run_dir, resume=resume)
                if progress and directory.path != Path(run_dir):
                    words = f"{run_dir} is not empty: this run writes to {directory.path}"
                    print(words, file=sys.stderr, flush=True)
            else:
                directory = run_dir
            if directory is not None:
                stack.enter_context(directory.locked())
                state = directory.read_checkpoint() if resume else None
                if state is None:
                    directory.write_json("config.json", self._configuration())
        if (state := ranks.shared(begin if state is None else state)) is not None:
            where = ranks.shared("" if directory is None else str(directory.path))
            with ranks.together(), fitting(f"The checkpoint in {where}"):
                check_format(state, where)
                stack.enter_context(with_threads(int(state["machine"]["threads"])))
                restore(self, state, where)
                self.starts.load_state_dict(state.get("starts"))
            if progress:
                epoch, epochs = len(self.history), self.epochs
                words = f"resuming after epoch {epoch} of {epochs}"
                if epoch == epochs:
                    words = f"all {epochs} epochs are done"
                print(f"{self.label}: {words}", file=sys.stderr, flush=True)
        return directory

    def _run(
        self,
        record: RunRecord | None,
        watchers: Sequence[Callback],
        callbacks: Sequence[Callback],
        stop: Callable[[], bool] | None,
    ) -> None:
        """Train for the remaining epochs, and call ``watchers`` with the row of each epoch.

        ``callbacks`` only get the rows of the start that continues.

        Raises:
            ConfigurationError: If a checkpoint's history has other columns.
            EvigradError: If training diverges from every start.
            KeyboardInterrupt: If ``stop`` returned True.
        """
        ranks = self.evidence.ranks
        if not self.history:
            center_outputs(self.evidence, self.data)
        with ranks.together():
            if record is not None and not self.history:
                # Before the first epoch too: the initial weights are kept nowhere else.
                record.write_checkpoint(self.state())
                record.check_readable()
        self.starts.begin(self)
        while (epoch := len(self.history) + 1) <= (end := self.epochs):
            try:
                row = self.epoch(epoch)
            except EvigradError as error:
                has_diverged = not isinstance(error, InputError | MemoryBudgetError | RankError)
                if not (has_diverged and self.starts.are_tried):
                    raise
                self._next_start(record, callbacks, error)
                continue
            if self.history and row.keys() != self.history[0].keys():
                raise ConfigurationError(
                    "The checkpoint's history and this run have different columns"
                    f" ({listed(sorted(row.keys() ^ self.history[0].keys()))}). Another"
                    " version of evigrad wrote the checkpoint, or the checkpoint was changed. Start"
                    " a new run in another folder."
                )
            self.history.append(row)
            is_last = epoch == self.epochs
            with ranks.together():
                for watcher in watchers:
                    watcher(row)
                if self._progress is not None and end < self.epochs:
                    self._progress.next_cycle()
            if self.starts.is_due(epoch):
                self._next_start(record, callbacks)
            elif not self.starts.are_tried:
                with ranks.together():
                    for callback in callbacks:
                        callback(row)
            with ranks.together():
                stopped = stop is not None and not is_last and stop()
            stopped = ranks.any(stopped)
            # After the callbacks, because they may draw or change what the next epoch depends on.
            with ranks.together():
                every = self.schedule.checkpoint_every
                if record is not None and (stopped or is_last or record.is_due(epoch, every)):
                    record.write_checkpoint(self.state())
            if stopped:
                raise KeyboardInterrupt(f"Stopped after epoch {epoch} of {self.epochs}.")
        if record is not None:
            record.finish()

    def state(self) -> dict[str, Any]:
        """Return what is needed to continue training from here."""
        return packed(self) | {"starts": self.starts.state_dict()}

    def _next_start(
        self,
        record: RunRecord | None,
        callbacks: Sequence[Callback],
        error: EvigradError | None = None,
    ) -> None:
        """End the trial of a start. After the last trial, show the rows of the best start."""
        self.starts.advance(self, error)
        with self.evidence.ranks.together():
            if record is not None:
                record.rewrite(self.history)
            if self._progress is not None:
                self._progress.next_start()
            if not self.starts.are_tried:
                for row in self.history:
                    for callback in callbacks:
                        callback(row)

    def epoch(self, epoch: int) -> Row:
        """Train the weights, run a round and evaluate if due, and return the history's new row."""
        start = time.perf_counter()
        loss, skipped = self.train_weights(epoch)
        rate = self.weight_optimizer.param_groups[0]["lr"]
        learner, hyper_round = self.learner, None
        if learner is not None and learner.is_due(epoch):
            self._rotation.rotate()
            hyper_round = learner.learn(epoch)
        self.seconds += time.perf_counter() - start
        evaluated = is_evaluated(epoch, self.epochs, self.schedule.eval_every)
        if evaluated:
            self._evaluate(epoch)
        return {
            "epoch": epoch,
            "seconds": self.seconds,
            "lr": rate,
            "loss": loss,
            "skipped_batches": skipped,
            **evidence_columns(hyper_round),
            "hyper_steps": 0 if learner is None else learner.hyper_steps,
            **metric_columns(self.evidence, self.metrics if evaluated else {}),
            **bracket_columns(self, epoch),
            **mode_columns(self, epoch),
            **hyperparameter_values(self.evidence),
        }

    def train_weights(self, epoch: int) -> tuple[float, int]:
        """Take one step per batch of an epoch. Epochs are numbered from 1.

        A batch whose loss or gradient is not finite is skipped. The seed determines the order of
        the data (see ``batches``). Random draws of the model (such as dropout) and random draws in
        the items of a data set use separate streams for each epoch.

        Returns:
            The mean loss of the batches that have a target, in nats per example, and the number of
            skipped batches.

        Raises:
            EvigradError: If too many batches are skipped (see ``SKIPPED_SHARE``), or if a weight or
                buffer becomes NaN or infinite.
        """
        self._set_rates(epoch)
        self.data.epoch = epoch
        seed, schedule, num_data = self.settings.seed, self.schedule, len(self.data)
        size = schedule.data_in_epoch(num_data)
        steps = self.steps
        most = min(max(1, int(SKIPPED_SHARE * steps)), steps - 1)
        finite = self._finite_parts()
        total, count, skipped = 0.0, 0, 0
        with (
            seeded(derived_seed(seed, "model", epoch, self.evidence.ranks.rank), self.device),
            training_mode(self.evidence.model),
        ):
            every = batches(seed, epoch, num_data, size, schedule.batch_size)
            for number, batch in enumerate(every):
                if number and self._progress is not None:
                    self._progress.step(number / steps)
                if not self.data.num_targets(batch):
                    continue  # a step on the prior alone would count these data
                self.weight_optimizer.zero_grad(set_to_none=True)
                value = self._differentiate(batch)
                gradients = [p.grad for p in self._stepping() if p.grad is not None]
                if math.isfinite(value) and get_total_norm(gradients, math.inf).isfinite():
                    self.weight_optimizer.step()
                    if self.on_loss:
                        self.loss_optimizer.step()
                    total, count = total + value * len(batch), count + len(batch)
                else:
                    skipped += 1
                    if skipped > most:
                        what = f"in {skipped} of {steps} batches the loss or its gradient"
                        raise self._diverged(what, epoch)
                self.loss_optimizer.zero_grad()
        self.weight_optimizer.zero_grad(set_to_none=True)
        # Statistics of normalization layers. Each rank has the statistics of its own data.
        self.evidence.ranks.share(list(self.evidence.model.buffers()))
        if spoiled := finite - self._finite_parts():
            raise self._diverged(min(spoiled), epoch)
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
                    loss = share * self.loss(*self.data.fetch(local_batch), local_batch, scale)
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

    def loss(self, x: Tensor, y: Tensor, indices: Tensor, scale: float) -> Tensor:
        """Return the loss of a batch in nats per example. A step uses ``scale`` times this loss."""
        # Precisions of weights that the data do not determine grow without limit.
        sgd = self.weight_optimizer if isinstance(self.weight_optimizer, SGD) else None
        return self.evidence.map_loss(
            x, y, wrt=self.on_loss, indices=indices, optimizer=sgd, scale=scale
        )

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
        if self.learner is None or not noisy:
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

    def _set_rates(self, epoch: int) -> None:
        rate, progress = self._rate, self.cycles.progress(epoch)
        last = min(self.settings.optimization.lr_min, rate)
        start = max(rate * self.cycles.first_rate(epoch), last)
        factor = cosine(progress, start, last) / rate
        for group, base in zip(self.weight_optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor
        for group in self.loss_optimizer.param_groups:
            group["lr"] = cosine(progress, group["lr_first"], group["lr_last"])

    def _diverged(self, what: str, epoch: int) -> EvigradError:
        rate = self.weight_optimizer.param_groups[0]["lr"]
        has_learned = self.learner is not None and self.learner.hyper_steps > 0
        return EvigradError(
            f"Training diverged in epoch {epoch} of {self.epochs}: {what} is"
            f" NaN or infinite. Lower lr (it was {rate:.3g} in this epoch)"
            + (", or prior_lr and hyper_lr" if has_learned else "")
            + ", and check the scale of the inputs."
        )

    def _evaluate(self, epoch: int) -> None:
        evidence, seed = self.evidence, self.settings.seed
        train = Pool(len(self.data)).of(self.data)
        for part, data in {"train": train, "test": self.test}.items():
            if data is not None:
                draws = stream(seed, "evaluation", epoch)
                self.metrics[part] = evaluate(
                    evidence.model, evidence.likelihood, data, generator=draws, ranks=evidence.ranks
                )

    def _configuration(self) -> dict[str, Any]:
        """Return the settings for a file, with the facts needed to understand them."""
        evidence = self.evidence
        context: dict[str, Any] = {
            "likelihood": evidence.likelihood.name,
            # In one line, with settings that the name does not tell, such as degrees of freedom.
            "likelihood_settings": " ".join(repr(evidence.likelihood).split()),
            "num_data": evidence.num_data,
            "num_weights": sum(w.numel() for w in evidence.weights().values()),
            "learned": self.learned,
            "network": self.network,
            **machine(self.device),
            "device": str(self.device),
        }
        return self.record | context


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


def is_evaluated(epoch: int, epochs: int, every: int | None) -> bool:
    """Return whether an evaluation follows ``epoch``. Epochs are numbered from 1.

    The last epoch is always evaluated. If ``every`` is 0, no other epoch is evaluated. If ``every``
    is None, there are at most ten evaluations.
    """
    if every is None:
        every = -(-epochs // _EVALUATIONS)
    return epoch == epochs or (every > 0 and epoch % every == 0)
