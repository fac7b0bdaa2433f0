"""A training run from its first epoch to its last, and what is recorded of it."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from evigrad.blocks.pool import Pool
from evigrad.engine.allocator import kept_memory
from evigrad.errors import ConfigurationError, EvigradError, listed
from evigrad.evidence import Evidence
from evigrad.inputs import tensors_of, with_tensors
from evigrad.measure.bracket import bracket
from evigrad.measure.metrics import evaluate, hyperparameter_values, probe_outputs
from evigrad.training.checkpoint import (
    CHECKPOINT_FORMAT,
    PROBED,
    check_data,
    check_format,
    check_network,
    check_outputs,
    check_settings,
    fitting,
    machine,
    packed_history,
    unpacked_history,
    with_threads,
)
from evigrad.training.data import RunData, derived_seed, stream
from evigrad.training.history import Row
from evigrad.training.learner import evidence_columns
from evigrad.training.loop import Loop
from evigrad.training.progress import make_progress
from evigrad.training.run_directory import RunDirectory, RunRecord

Callback = Callable[[Row], None]

BRACKET_ROWS = 400
BRACKET_COLUMNS = ("bracket_lower", "bracket_lower_sem", "bracket_upper")
# Enough for curves, for a small part of the time of training.
_EVALUATIONS = 10


@dataclass(frozen=True)
class FitResult:
    """The trained model, evidence, history and metrics of a training run.

    Attributes:
        model: The given model, trained, in evaluation mode.
        evidence: The model's evidence. After a baseline the estimator is a placeholder.
        history: One row for each epoch, as in ``metrics.csv``; None where nothing was computed.
        train_metrics: Means over the training data at the end: ``log_likelihood`` in nats per
            datum, ``accuracy`` or ``squared_error``.
        test_metrics: The same on the test data; empty without any.
        seconds: Time of training, without evaluation and files.
        run_dir: The folder of the run, or None; it is the first rank's.
        estimator: Name of the estimator, or None for a baseline (MAP, Augerino).
    """

    model: nn.Module
    evidence: Evidence
    history: list[Row]
    train_metrics: dict[str, float]
    test_metrics: dict[str, float]
    seconds: float
    run_dir: Path | None
    estimator: str | None

    def __repr__(self) -> str:
        """The state at the end in one line, as the history has a row for each epoch."""
        took = f"{len(self.history)} epochs in {self.seconds:.3g} s"
        parts = [self.estimator or "no estimator", took]
        for name, metrics in (("train", self.train_metrics), ("test", self.test_metrics)):
            parts += [f"{name} {key} {value:.4g}" for key, value in metrics.items()]
        parts += [] if self.run_dir is None else [f"run_dir {str(self.run_dir)!r}"]
        return f"FitResult({', '.join(parts)})"


class Run:
    """A checked run that has not started yet; ``prepare`` makes one, ``train`` runs it once.

    ``network`` records how the model was built, for ``evigrad.load``.
    """

    def __init__(
        self, loop: Loop, test: RunData | None, network: Mapping[str, Any] | None = None
    ) -> None:
        self.loop, self.test, self.network = loop, test, network
        self._probe, _ = loop.data.first(PROBED)
        self.settings, self.schedule = loop.settings, loop.settings.schedule
        self.history: list[Row] = []
        self.metrics: dict[str, dict[str, float]] = {"train": {}, "test": {}}
        self.seconds = 0.0

    @property
    def evidence(self) -> Evidence:
        """The evidence of the model that is trained."""
        return self.loop.evidence

    @property
    def name(self) -> str:
        """The estimator's name, or that of a baseline."""
        return self.settings.baseline or self.evidence.spec.name

    def train(
        self,
        run_dir: str | Path | RunDirectory | None = None,
        *,
        resume: bool = False,
        progress: bool = True,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] | None = None,
    ) -> FitResult:
        """Return the result of training for all epochs, or those that are left.

        ``run_dir``, ``resume``, ``progress`` and ``callbacks`` are those of ``fit``: they are for
        the first rank alone. ``stop`` is
        asked after every epoch: where it returns True before the last one, a checkpoint is written
        and a ``KeyboardInterrupt`` is raised.

        Raises:
            ConfigurationError: If it ran already; if the folder holds the run of other settings,
                data or another network, or another process writes into it.
            EvigradError: If training diverges; the metrics of the epochs before are kept.
        """
        if self.history:
            raise ConfigurationError("This run is over; prepare another one.")
        if resume and run_dir is None:
            raise ConfigurationError("To go on with a run name its folder: run_dir=...")
        ranks = self.evidence.ranks
        if not ranks.is_first:
            run_dir, progress, callbacks = None, False, ()
        directory, state = None, None
        with ExitStack() as stack:
            stack.enter_context(kept_memory())
            with ranks.together():
                directory = _directory(run_dir, resume, progress)
                if directory is not None:
                    stack.enter_context(directory.locked())
                    state = directory.read_checkpoint() if resume else None
                    if state is None:
                        directory.write_json("config.json", self._configuration())
            if (state := ranks.shared(state)) is not None:
                where = ranks.shared("" if directory is None else str(directory.path))
                with ranks.together(), fitting(f"The checkpoint in {where}"):
                    check_format(state, where)
                    stack.enter_context(with_threads(int(state["machine"]["threads"])))
                    self._restore(state, where)
                if progress:
                    print(self._resumed(), file=sys.stderr, flush=True)
            self._run(directory, progress, callbacks, stop)
        self.evidence.model.eval()
        return FitResult(
            model=self.evidence.model,
            evidence=self.evidence,
            history=self.history,
            train_metrics=self.metrics["train"],
            test_metrics=self.metrics["test"],
            seconds=self.seconds,
            run_dir=None if directory is None else directory.path,
            estimator=None if self.settings.baseline else self.evidence.spec.name,
        )

    def _run(
        self,
        directory: RunDirectory | None,
        progress: bool,
        callbacks: Sequence[Callback],
        stop: Callable[[], bool] | None,
    ) -> None:
        left = len(self.history) < self.schedule.epochs
        bar = make_progress(self.name, self.schedule.epochs) if progress and left else None
        seen = [*([] if bar is None else [bar.update]), *callbacks]

        try:
            if directory is None:
                self._train(None, seen, stop)
            else:
                with RunRecord(directory, self.history) as record:
                    self._train(record, seen, stop)
        except EvigradError as error:
            if directory is None or not self.history:
                raise
            kept = f"The metrics up to epoch {len(self.history)} are in {directory.metrics}."
            raise type(error)(f"{error} {kept}") from error
        except KeyboardInterrupt as error:
            if directory is not None:
                again = f"run_dir={str(directory.path)!r}, resume=True"
                error.add_note(f"The same call with {again} goes on from the last checkpoint.")
            raise
        finally:
            if bar is not None:
                bar.close()

    def _train(
        self,
        record: RunRecord | None,
        callbacks: Sequence[Callback],
        stop: Callable[[], bool] | None,
    ) -> None:
        epochs, every = self.schedule.epochs, self.schedule.checkpoint_every
        ranks = self.evidence.ranks
        with ranks.together():
            if record is not None and not self.history:
                # Before the first epoch too: the initial weights are kept nowhere else.
                record.write_checkpoint(self._state())
                record.check_readable()
        for epoch in range(len(self.history) + 1, epochs + 1):
            row = self._epoch(epoch)
            if self.history and row.keys() != self.history[0].keys():
                raise ConfigurationError(
                    "The checkpoint has a history with other columns than this run"
                    f" ({listed(sorted(row.keys() ^ self.history[0].keys()))}): it was written by"
                    " another version of evigrad, or changed. Start the run anew in another folder."
                )
            self.history.append(row)
            with ranks.together():
                if record is not None:
                    record.write_row(row)
                for callback in callbacks:
                    callback(row)
                stopped = stop is not None and epoch < epochs and stop()
            stopped = ranks.any(stopped)
            is_due = stopped or epoch == epochs
            # After the callbacks, as they may draw or change what the next epoch depends on.
            with ranks.together():
                if record is not None and (is_due or record.is_due(epoch, every)):
                    record.write_checkpoint(self._state())
            if stopped:
                raise KeyboardInterrupt(f"Stopped after epoch {epoch} of {epochs}.")
        if record is not None:
            record.finish()

    def _epoch(self, epoch: int) -> Row:
        start = time.perf_counter()
        loss, skipped = self.loop.train_epoch(epoch)
        lr = self.loop.weight_optimizer.param_groups[0]["lr"]
        learned = self.loop.learn(epoch) if self.loop.is_round(epoch) else None
        self.seconds += time.perf_counter() - start
        evaluated = is_evaluated(epoch, self.schedule.epochs, self.schedule.eval_every)
        if evaluated:
            self._evaluate(epoch)
        row: Row = {"epoch": epoch, "seconds": self.seconds, "lr": lr, "loss": loss}
        row["skipped_batches"] = skipped
        row |= evidence_columns(learned)
        row["hyper_steps"] = self.loop.hyper_steps
        classifies = self.evidence.likelihood.is_classification
        for part, metrics in self.metrics.items():
            for name in ("log_likelihood", "accuracy" if classifies else "squared_error"):
                row[f"{part}_{name}"] = metrics.get(name) if evaluated else None
        row |= self._bracket(epoch)
        return row | hyperparameter_values(self.evidence)

    def _bracket(self, epoch: int) -> Row:
        """Bounds on the exact log evidence, nats per datum, in the epochs that ask for them."""
        every = self.schedule.bracket_every
        if not every:
            return {}
        if epoch % every and epoch != self.schedule.epochs:
            return dict.fromkeys(BRACKET_COLUMNS)
        bounds = bracket(
            self.evidence,
            self.loop.data,
            rows=BRACKET_ROWS,
            seed=derived_seed(self.settings.seed, "bracket", epoch),
        )
        lower_error = bounds.lower_error / bounds.num_data
        values = (bounds.lower_per_datum, lower_error, bounds.upper_per_datum)
        return dict(zip(BRACKET_COLUMNS, values, strict=True))

    def _evaluate(self, epoch: int) -> None:
        evidence, seed = self.evidence, self.settings.seed
        train = Pool(len(self.loop.data)).of(self.loop.data)
        for part, data in {"train": train, "test": self.test}.items():
            if data is not None:
                generator = stream(seed, "evaluation", epoch)
                self.metrics[part] = evaluate(
                    evidence.model,
                    evidence.likelihood,
                    data,
                    generator=generator,
                    ranks=evidence.ranks,
                )

    def _state(self) -> dict[str, Any]:
        return {
            "format": CHECKPOINT_FORMAT,
            "epoch": len(self.history),
            "seconds": self.seconds,
            "history": packed_history(self.history),
            "metrics": self.metrics,
            **self._identity,
            "machine": machine(self.loop.device),
            # Saved with its outputs, as a data set may give other items the next time.
            "probe": [part.cpu() for part in tensors_of(self._probe)],
            "outputs": probe_outputs(self.evidence.model, self._probe).cpu(),
            **self.loop.state_dict(),
        }

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Return the records that must be the same when a run goes on."""
        evidence = self.evidence
        return {
            "settings": self.settings.as_record(),
            "data": {
                "train": self.loop.data.fingerprint(),
                "test": None if self.test is None else self.test.fingerprint(),
            },
            "learned": {
                "weights": list(evidence.weights()),
                "hyperparameters": list(evidence.hyperparameters()),
            },
        }

    def _restore(self, state: Mapping[str, Any], where: str) -> None:
        identity, here = self._identity, machine(self.loop.device)
        check_settings(state["settings"], identity["settings"], where)
        check_data(state["data"], identity["data"], where)
        check_network(state, self.evidence, where)
        self.loop.load_state_dict(state)
        self._probe = with_tensors(self._probe, state["probe"]).to(self.loop.device)
        outputs = probe_outputs(self.evidence.model, self._probe).cpu()
        check_outputs(state["outputs"], outputs, here, state["machine"], where)
        self.seconds = float(state["seconds"])
        for part in self.metrics:
            self.metrics[part] = {n: float(value) for n, value in state["metrics"][part].items()}
        self.history = unpacked_history(state["history"])
        for row in self.history:  # of a checkpoint of before these were counted
            row.setdefault("skipped_batches", 0)
            row.setdefault("skipped_steps", 0)

    def _resumed(self) -> str:
        done, epochs = len(self.history), self.schedule.epochs
        if done == epochs:
            return f"{self.name}: all {epochs} epochs are done"
        return f"{self.name}: goes on after epoch {done} of {epochs}"

    def _configuration(self) -> dict[str, Any]:
        """The settings for a file, with what is needed to understand them."""
        evidence = self.evidence
        context: dict[str, Any] = {
            "likelihood": evidence.likelihood.name,
            "num_data": evidence.num_data,
            "num_weights": sum(w.numel() for w in evidence.weights().values()),
            "learned": self.loop.learned,
            "network": self.network,
            **machine(self.loop.device),
            "device": str(self.loop.device),
        }
        return self.settings.as_record() | context


def _directory(
    run_dir: str | Path | RunDirectory | None, resume: bool, progress: bool
) -> RunDirectory | None:
    """The run's folder; with ``progress`` it is said if it has another name."""
    if not isinstance(run_dir, str | Path):
        return run_dir
    directory = RunDirectory(run_dir, resume=resume)
    if progress and directory.path != Path(run_dir):
        words = f"{run_dir} holds something already: this run goes to {directory.path}"
        print(words, file=sys.stderr, flush=True)
    return directory


def is_evaluated(epoch: int, epochs: int, every: int | None) -> bool:
    """Return whether an evaluation follows an epoch, counted from 1: always the last one.

    ``every`` is 0 for the last epoch alone, None for ten evaluations at most.
    """
    if every is None:
        every = -(-epochs // _EVALUATIONS)
    return epoch == epochs or (every > 0 and epoch % every == 0)
