"""A training run from its first epoch to its last, and what is recorded of it."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, EvigradError
from evigrad.evidence import Evidence
from evigrad.training.loop import Loop, Round
from evigrad.training.metrics import Row, evaluate
from evigrad.training.progress import make_progress
from evigrad.training.randomness import stream
from evigrad.training.run_directory import RunDirectory
from evigrad.training.tracking import hyperparameter_values

_CHECKPOINT_FORMAT = 1

Callback = Callable[[Row], None]


@dataclass(frozen=True)
class FitResult:
    """What a training run leaves.

    Attributes:
        model: The model that was given, trained, in evaluation mode.
        evidence: Its evidence. After MAP training the estimator is a placeholder.
        history: One row for each epoch, as in ``metrics.csv``; None where nothing was computed.
        train_metrics: Means over the training data at the end: ``log_likelihood`` in nats per
            datum, ``accuracy`` or ``squared_error``.
        test_metrics: The same on the test data; empty without any.
        seconds: Time of training, without evaluation and files.
        run_dir: The folder of the run, or None.
        estimator: Name of the estimator, or None for MAP training.
    """

    model: nn.Module
    evidence: Evidence
    history: list[Row]
    train_metrics: dict[str, float]
    test_metrics: dict[str, float]
    seconds: float
    run_dir: Path | None
    estimator: str | None


class Run:
    """A checked run that has not started yet; ``prepare`` makes one, ``train`` runs it once."""

    def __init__(self, loop: Loop, test: tuple[Tensor, Tensor] | None) -> None:
        """Take up what was prepared.

        Args:
            loop: Model, training data, settings and optimisers.
            test: Test data on the model's device.
        """
        self.loop, self.test = loop, test
        self.evidence, self.settings = loop.evidence, loop.settings
        self.history: list[Row] = []
        self.metrics: dict[str, dict[str, float]] = {"train": {}, "test": {}}
        self.seconds = 0.0

    @property
    def name(self) -> str:
        """The estimator's name, or MAP."""
        return "MAP" if self.settings.estimator is None else self.evidence.spec.name

    def train(
        self,
        run_dir: str | Path | RunDirectory | None = None,
        *,
        progress: bool = True,
        callbacks: Sequence[Callback] = (),
    ) -> FitResult:
        """Run all epochs.

        Args:
            run_dir: As for ``fit``.
            progress: As for ``fit``.
            callbacks: As for ``fit``.

        Returns:
            What the run leaves.

        Raises:
            ConfigurationError: If it ran already.
            EvigradError: If training diverges; the metrics of the epochs before are kept.
        """
        if self.history:
            raise ConfigurationError("This run is over; prepare another one.")
        is_path = isinstance(run_dir, str | Path)
        directory = RunDirectory(run_dir) if is_path else run_dir
        if directory is not None:
            directory.write_json("config.json", self._configuration())
        bar = make_progress(self.name, self.settings.epochs) if progress else None
        try:
            self._train(directory, [*([] if bar is None else [bar.update]), *callbacks])
        finally:
            if bar is not None:
                bar.close()
        self.evidence.model.eval()
        return FitResult(
            model=self.evidence.model,
            evidence=self.evidence,
            history=self.history,
            train_metrics=self.metrics["train"],
            test_metrics=self.metrics["test"],
            seconds=self.seconds,
            run_dir=None if directory is None else directory.path,
            estimator=None if self.settings.estimator is None else self.evidence.spec.name,
        )

    def _train(self, directory: RunDirectory | None, callbacks: Sequence[Callback]) -> None:
        epochs, file = self.settings.epochs, None
        try:
            for epoch in range(1, epochs + 1):
                row = self._epoch(epoch)
                self.history.append(row)
                if directory is not None:
                    file = file or directory.open_metrics(list(row))
                    file.write(row)
                    if epoch % self.settings.checkpoint_every == 0 or epoch == epochs:
                        directory.write_checkpoint(self._state(epoch))
                for callback in callbacks:
                    callback(row)
        except EvigradError as error:
            if directory is None or file is None:
                raise
            kept = f"The metrics up to epoch {len(self.history)} are in {directory.metrics}."
            raise type(error)(f"{error} {kept}") from error
        finally:
            if file is not None:
                file.close()

    def _epoch(self, epoch: int) -> Row:
        start = time.perf_counter()
        loss = self.loop.train_epoch(epoch)
        lr = self.loop.weight_optimizer.param_groups[0]["lr"]
        due = self.settings.estimator is not None and self.loop.is_round(epoch)
        learned = self.loop.learn(epoch) if due else None
        self.seconds += time.perf_counter() - start
        self._evaluate(epoch)
        row: Row = {"epoch": epoch, "seconds": self.seconds, "lr": lr, "loss": loss}
        row |= _evidence_columns(learned)
        row["hyper_steps"] = self.loop.hyper_steps
        evaluated = self._is_evaluated(epoch)
        for part, metrics in self.metrics.items():
            for name in self._metric_names:
                row[f"{part}_{name}"] = metrics.get(name) if evaluated else None
        return row | hyperparameter_values(self.evidence)

    def _is_evaluated(self, epoch: int) -> bool:
        every = self.settings.eval_every
        return epoch == self.settings.epochs or (every > 0 and epoch % every == 0)

    @property
    def _metric_names(self) -> tuple[str, str]:
        classifies = self.evidence.likelihood.is_classification
        return ("log_likelihood", "accuracy" if classifies else "squared_error")

    def _evaluate(self, epoch: int) -> None:
        if not self._is_evaluated(epoch):
            return
        evidence, seed = self.evidence, self.settings.seed
        pairs = {"train": (self.loop.x, self.loop.y), "test": self.test}
        for part, pair in pairs.items():
            if pair is not None:
                generator = stream(seed, "evaluation", epoch)
                self.metrics[part] = evaluate(
                    evidence.model, evidence.likelihood, *pair, generator=generator
                )

    def _state(self, epoch: int) -> dict[str, Any]:
        """What a checkpoint holds."""
        state = {"format": _CHECKPOINT_FORMAT, "epoch": epoch, "seconds": self.seconds}
        return state | self.loop.state_dict()

    def _configuration(self) -> dict[str, Any]:
        """The settings as a file keeps them, with what is needed to understand them."""
        evidence = self.evidence
        found: dict[str, Any] = {
            "likelihood": evidence.likelihood.name,
            "num_data": evidence.num_data,
            "num_weights": sum(w.numel() for w in evidence.weights().values()),
            "learned": [] if self.settings.estimator is None else list(evidence.hyperparameters()),
            "device": str(self.loop.device),
            "torch": torch.__version__,
        }
        return self.settings.as_record() | found


def _evidence_columns(learned: Round | None) -> Row:
    """Mean over a round's estimates, nats per datum, and the standard error of the mean."""
    if learned is None:
        return dict.fromkeys(("log_evidence", "log_det_term", "log_evidence_sem"))
    estimates = learned.estimates
    values = torch.tensor([e.per_datum for e in estimates], dtype=torch.float64)
    terms = [-0.5 * e.log_det / e.num_data for e in estimates]
    many = len(values) > 1 and not learned.is_shared
    return {
        "log_evidence": float(values.mean()),
        "log_det_term": sum(terms) / len(terms),
        "log_evidence_sem": float(values.std()) / math.sqrt(len(values)) if many else None,
    }
