"""A training run: epochs of weight updates, rounds of hyperparameter updates, and their history."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD

from evigrad.blocks.pool import Pool
from evigrad.errors import (
    ConfigurationError,
    EvigradError,
    InputError,
    MemoryBudgetError,
    RankError,
)
from evigrad.evidence import Evidence
from evigrad.inputs import with_tensors
from evigrad.measure.metrics import evaluate, hyperparameter_values, probe_outputs
from evigrad.posterior import NewtonStep
from evigrad.training import checkpoint, history
from evigrad.training.convergence import mode_gap, steps_to_mode, warn_of_mode, warn_of_tails
from evigrad.training.cycles import Cycles
from evigrad.training.data import RunData, derived_seed, stream
from evigrad.training.history import Row
from evigrad.training.learner import Learner
from evigrad.training.observers import Callback, Callbacks, Observer
from evigrad.training.offset import center_outputs
from evigrad.training.progress import Progress
from evigrad.training.rotation import RankRotation
from evigrad.training.run_directory import Checkpoints, Metrics, RunDirectory, naming_files
from evigrad.training.settings import OPTIMIZERS, Settings, method_of
from evigrad.training.starts import Starts
from evigrad.training.weight_choice import WeightChoice
from evigrad.training.weights import WeightTrainer

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
    (``weights.on_loss``), with a separate optimizer that takes a step for every batch.

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
        self.test, self.network, self.schedule = test, network, settings.schedule
        self.device = next(iter(evidence.weights().values())).device
        self.cycles, rates = Cycles(self.schedule), settings.optimization
        self.learner: Learner | None = None
        if settings.estimator is not None:
            self.learner = Learner(evidence, data, self.schedule, rates, settings.seed)
        self.weights = WeightTrainer(evidence, data, settings, self.cycles, self.learner, self.loss)
        self.steps = self.weights.steps
        self.probe, _ = data.first(checkpoint.PROBED)  # shows that a loaded network is the same
        self._rotation = RankRotation(evidence, self.weights.optimizer, self.probe)
        self.history: list[Row] = []  # one row for each epoch so far
        self.metrics: dict[str, dict[str, float]] = {"train": {}, "test": {}}
        self.seconds = 0.0  # time of training so far
        self._steps_to_mode: Sequence[NewtonStep] = []
        # Only fixed points of weights around zero start from different decays.
        starts = rates.start_decays
        is_fixed_point = self.learner is not None and self.learner.fixed_point is not None
        if not is_fixed_point or len(evidence.prior.means()) == len(evidence.weights()):
            starts = starts[:1]
        self.starts = Starts(starts, self.schedule)
        self._observers: list[Observer] = []

    @property
    def epochs(self) -> int:
        """Return the last epoch of the current cycle. Epochs are numbered from 1."""
        return self.cycles.end(self.history)

    @property
    def name(self) -> str:
        """Return the estimator's name, or MAP if there is no estimator."""
        return method_of(self.record)

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
        return self.weights.on_loss if self.learner is None else self.learner.learned

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
        if not self.evidence.ranks.is_first:
            run_dir, progress, callbacks = None, False, ()
        with ExitStack() as stack:
            directory, is_resumed = self._begin(stack, run_dir, resume, progress, begin)
            observers = self._observers = list[Observer]()
            if directory is not None:
                stack.enter_context(naming_files(directory, self.history))
                metrics = Metrics(self, directory.metrics)
                observers.append(stack.enter_context(closing(metrics)))
            if progress:
                observers.append(stack.enter_context(closing(Progress(self, is_resumed))))
            observers.append(Callbacks(self, callbacks))
            # After the callbacks, which may draw or change what the next epoch depends on.
            if directory is not None:
                observers.append(Checkpoints(self, directory))
            if not self.history:
                center_outputs(self.evidence, self.data)
            self._run(stop)
        self.evidence.model.eval()
        gap = self.history[-1].get("mode_gap")
        if self.learner is not None:
            warn_of_mode(self.evidence, self.data, gap, len(self.history), self._steps_to_mode)
            warn_of_tails(self.evidence, self.data)
        return FitResult(
            model=self.evidence.model,
            evidence=self.evidence,
            history=self.history,
            train_metrics=self.metrics["train"],
            test_metrics=self.metrics["test"],
            seconds=self.seconds,
            run_dir=None if directory is None else directory.path,
            estimator=None if self.learner is None else self.evidence.estimator.name,
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
    ) -> tuple[RunDirectory | None, bool]:
        """Lock the folder in ``stack``, and restore its checkpoint or ``begin``.

        Returns:
            The folder, and whether a state was restored.
        """
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
        if (state := ranks.shared(begin if state is None else state)) is None:
            return directory, False
        where = ranks.shared("" if directory is None else str(directory.path))
        with ranks.together(), checkpoint.fitting(f"The checkpoint in {where}"):
            checkpoint.check_format(state, where)
            stack.enter_context(checkpoint.with_threads(int(state["machine"]["threads"])))
            self._restore(state, where)
            self.starts.load_state_dict(state.get("starts"))
        return directory, True

    def _run(self, stop: Callable[[], bool] | None) -> None:
        """Train for the remaining epochs, and notify the observers.

        Raises:
            ConfigurationError: If a checkpoint's history has other columns.
            EvigradError: If training diverges from every start.
            KeyboardInterrupt: If ``stop`` returned True.
        """
        is_stopped, ranks = False, self.evidence.ranks
        self._notify(lambda observer: observer.begin())
        if self.starts.are_tried:
            self.starts.begin(self._packed())
        while not is_stopped and (epoch := len(self.history) + 1) <= self.epochs:
            try:
                row = self.epoch(epoch)
            except EvigradError as error:
                has_diverged = not isinstance(error, InputError | MemoryBudgetError | RankError)
                if not (has_diverged and self.starts.are_tried):
                    raise
                self._next_start(error)
                self._notify(lambda observer: observer.restart(None))
                continue
            history.append_row(self.history, row)
            if self.starts.is_due(epoch):
                self._next_start()
                self._notify(lambda observer, row=row: observer.restart(row))
            else:
                self._notify(lambda observer, row=row: observer.epoch(row))
            if stop is not None and len(self.history) < self.epochs:
                with ranks.together():
                    is_stopped = stop()
                is_stopped = ranks.any(is_stopped)
        self._notify(lambda observer: observer.end(is_complete=not is_stopped))
        if is_stopped:
            raise KeyboardInterrupt(f"Stopped after epoch {len(self.history)} of {self.epochs}.")

    def _notify(self, event: Callable[[Observer], None]) -> None:
        with self.evidence.ranks.together():
            for observer in self._observers:
                event(observer)

    def _next_start(self, error: EvigradError | None = None) -> None:
        """End the trial of a start, and continue from another start or from the best one.

        Raises:
            EvigradError: ``error``, by which the trial diverged, if all starts diverged.
        """
        state = self._packed() if error is None else None
        chosen = self.starts.advance(self.history, state)
        if chosen is None:
            assert error is not None
            raise error
        if chosen is not state:
            seconds = self.seconds  # the trials count
            self._restore(chosen, "this run")
            self.seconds = seconds
        if self.starts.are_tried:
            assert self.learner is not None
            self.learner.start(self.starts.decay)

    def epoch(self, epoch: int) -> Row:
        """Train the weights, run a round and evaluate if due, and return the history's new row."""
        start = time.perf_counter()
        loss, skipped = self.train_weights(epoch)
        rate = self.weights.optimizer.param_groups[0]["lr"]
        learner, hyper_round = self.learner, None
        if learner is not None and learner.is_due(epoch):
            self._rotation.rotate()
            hyper_round = learner.learn(epoch)
        self.seconds += time.perf_counter() - start
        return {
            "epoch": epoch,
            "seconds": self.seconds,
            "lr": rate,
            "loss": loss,
            "skipped_batches": skipped,
            **history.evidence_columns(hyper_round),
            "hyper_steps": 0 if learner is None else learner.hyper_steps,
            **self._measured(epoch),
            **hyperparameter_values(self.evidence),
        }

    def train_weights(self, epoch: int) -> tuple[float, int]:
        """Take one step per batch of an epoch (see ``WeightTrainer.train``)."""

        def notify(share: float) -> None:
            for observer in self._observers:
                observer.step(share)

        return self.weights.train(epoch, self.epochs, notify)

    def loss(self, x: Tensor, y: Tensor, indices: Tensor, scale: float) -> Tensor:
        """Return the loss of a batch in nats per example. A step uses ``scale`` times this loss."""
        # Precisions of weights that the data do not determine grow without limit.
        optimizer = self.weights.optimizer
        sgd = optimizer if isinstance(optimizer, SGD) else None
        return self.evidence.map_loss(
            x, y, wrt=self.weights.on_loss, indices=indices, optimizer=sgd, scale=scale
        )

    def _measured(self, epoch: int) -> Row:
        """Return the columns of metrics, bounds and mode gap. They are None if they are not due."""
        evidence, schedule, num_data = self.evidence, self.schedule, len(self.data)
        is_due = is_evaluated(epoch, self.epochs, schedule.eval_every)
        if is_due:
            self._evaluate(epoch)
        columns = history.metric_columns(evidence, self.metrics if is_due else {})
        if every := schedule.bracket_every:
            seed = derived_seed(self.settings.seed, "bracket", epoch)
            is_due = is_evaluated(epoch, self.epochs, every)
            columns |= dict.fromkeys(history.BRACKET_COLUMNS)
            columns |= history.bracket_columns(evidence, self.data, seed) if is_due else {}
        if self.learner is not None:
            # The gap needs a pass over all data, which may take longer than an epoch.
            is_due = epoch == self.epochs and schedule.data_in_epoch(num_data) == num_data
            self._steps_to_mode = steps_to_mode(evidence, self.data) if is_due else []
            columns["mode_gap"] = mode_gap(evidence, self._steps_to_mode)
        return columns

    def _evaluate(self, epoch: int) -> None:
        evidence, seed = self.evidence, self.settings.seed
        train = Pool(len(self.data)).of(self.data)
        for part, data in {"train": train, "test": self.test}.items():
            if data is not None:
                draws = stream(seed, "evaluation", epoch)
                self.metrics[part] = evaluate(
                    evidence.model, evidence.likelihood, data, generator=draws, ranks=evidence.ranks
                )

    def state(self) -> dict[str, Any]:
        """Return what is needed to continue training from here.

        The state does not include the order of the data, the model's random draws or the learning
        rate schedule. They follow from the settings and the epoch.
        """
        return self._packed() | {"starts": self.starts.state_dict()}

    def _packed(self) -> dict[str, Any]:
        """Return the state without the starts, and the records that identify the run."""
        learned = {
            "evidence": self.evidence.state_dict(),
            "hyper_optimizer": self.weights.loss_optimizer.state_dict(),
            "hyper_steps": [],
        }
        return {
            "format": checkpoint.CHECKPOINT_FORMAT,
            "epoch": len(self.history),
            "seconds": self.seconds,
            "history": history.packed_history(self.history),
            "metrics": self.metrics,
            **self.identity,
            "machine": checkpoint.machine(self.device),
            **checkpoint.network_state(self.evidence.model, self.probe),
            "weight_optimizer": self.weights.optimizer.state_dict(),
            **(learned if self.learner is None else self.learner.state_dict()),
        }

    def _restore(self, state: Mapping[str, Any], where: str) -> None:
        """Restore a state that ``_packed`` returned. Errors name the folder ``where``."""
        evidence, learner, weights = self.evidence, self.learner, self.weights
        checkpoint.check_settings(state["settings"], self.identity["settings"], where)
        checkpoint.check_data(state["data"], self.identity["data"], where)
        checkpoint.check_network(state, evidence, where)
        is_own = self.settings.optimization.optimizer not in OPTIMIZERS
        with checkpoint.fitting("The saved state"):
            checkpoint.load_network(evidence.model, state)
            checkpoint.load_optimizer(weights.optimizer, state["weight_optimizer"], groups=is_own)
            if learner is not None:
                # A run counts epochs by its history, not by calls of ``Learner.step``.
                learner.load_state_dict({"count": 0, **state})
            else:
                evidence.load_state_dict(state["evidence"])
                checkpoint.load_optimizer(weights.loss_optimizer, state["hyper_optimizer"])
        self.probe = with_tensors(self.probe, state["probe"]).to(self.device)
        outputs = probe_outputs(evidence.model, self.probe).cpu()
        checkpoint.check_outputs(
            state["outputs"], outputs, checkpoint.machine(self.device), state["machine"], where
        )
        self.seconds = float(state["seconds"])
        for part in self.metrics:
            numbers = state["metrics"][part].items()
            self.metrics[part] = {name: float(value) for name, value in numbers}
        self.history[:] = history.unpacked_history(state["history"])
        for row in self.history:  # earlier versions did not count these
            row.setdefault("skipped_batches", 0)
            row.setdefault("skipped_steps", 0)
            if learner is not None:
                row.setdefault("mode_gap", None)

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
            **checkpoint.machine(self.device),
            "device": str(self.device),
        }
        return self.record | context


def is_evaluated(epoch: int, epochs: int, every: int | None) -> bool:
    """Return whether an evaluation follows ``epoch``. Epochs are numbered from 1.

    The last epoch is always evaluated. If ``every`` is 0, no other epoch is evaluated. If ``every``
    is None, there are at most ten evaluations.
    """
    if every is None:
        every = -(-epochs // _EVALUATIONS)
    return epoch == epochs or (every > 0 and epoch % every == 0)
