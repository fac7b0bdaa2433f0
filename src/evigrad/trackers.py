"""Trackers: what training records, shown by other tools while it runs.

A tracker is a function of a row, a dictionary of numbers that has the epoch or the step, as the
rows of ``fit``'s history. So ``fit(..., callbacks=[tracker])`` is all that there is to add, a run
folder has the same rows as ``metrics.csv`` in any case, and any function will do. `Tracker` is
what those of this module share; that of another tool has a ``write`` and a ``close`` of its own.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from evigrad.errors import require
from evigrad.training.history import known

__all__ = ["MLflow", "TensorBoard", "Tracker", "WandB", "numbers"]

# What counts the rows.
COUNTERS = ("epoch", "round", "step")
# MLflow takes no more metrics than these in one request.
_AT_ONCE = 1000


def numbers(row: Mapping[str, int | float | None]) -> dict[str, float]:
    """The numbers of a row of a history that were computed in it, without what counts the rows."""
    return {name: value for name, value in known(row).items() if name not in COUNTERS}


class Tracker(ABC):
    """A callback of ``fit`` that writes the numbers of each row, and closes in a ``with``."""

    def __call__(self, row: Mapping[str, int | float | None]) -> None:
        """Write a row, at the number that counts it."""
        count = next((int(row[name] or 0) for name in COUNTERS if name in row), 0)
        self.write(numbers(row), count)

    @abstractmethod
    def write(self, values: dict[str, float], count: int) -> None:
        """Write the numbers of one row.

        Args:
            values: The numbers by name.
            count: The epoch, round or step that they are from.
        """

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """End what is written.

        Args:
            failed: Whether training ended by an error.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(failed=error is not None)


class TensorBoard(Tracker):
    """Writes each row for TensorBoard: ``tensorboard --logdir FOLDER`` shows them.

    It needs ``pip install 'evigrad[tensorboard]'``. Used in a ``with`` statement it closes its file
    in the end; rows are on the disk after each call. A run that is resumed writes on in the folder,
    and of epochs that it repeats the later values count.

    Args:
        folder: Where it writes.

    Raises:
        EvigradError: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        require("tensorboard", "TensorBoard's tracker", extra="tensorboard")
        writer: Any = require("torch.utils.tensorboard", "TensorBoard's tracker", "tensorboard")
        self._writer = writer.SummaryWriter(str(folder))

    def write(self, values: dict[str, float], count: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, count)
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class WandB(Tracker):
    """Writes each row as a run of Weights & Biases, on this machine alone by default.

    It needs ``pip install 'evigrad[wandb]'``. ``wandb sync FOLDER/wandb/offline-run-...`` uploads
    what was written offline. Used in a ``with`` statement it finishes the run in the end, as failed
    after an error.

    Args:
        folder: Where it writes.
        mode: ``"offline"``, or ``"online"`` to upload while training runs.
        **settings: More for ``wandb.init``, such as ``project``, ``name`` and ``config``.

    Raises:
        EvigradError: If Weights & Biases is not installed.
    """

    def __init__(self, folder: str | Path = ".", mode: str = "offline", **settings: Any) -> None:
        wandb: Any = require("wandb", "the tracker for Weights & Biases", extra="wandb")
        self._run = wandb.init(dir=str(folder), mode=mode, **settings)

    def write(self, values: dict[str, float], count: int) -> None:
        self._run.log(values, step=count)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(Tracker):
    """Writes each row as metrics of a run of MLflow, apart from the script's active run.

    It needs ``pip install 'evigrad[mlflow]'``. Used in a ``with`` statement it ends the run, as
    failed after an error.

    Args:
        store: A tracking URI: a server, ``"sqlite:///mlflow.db"``, or a folder, for which MLflow
            3.13 and newer ask for ``MLFLOW_ALLOW_FILE_STORE=true`` in the environment. None
            is MLflow's own choice, from the environment too.
        experiment: The experiment's name; it is made where there is none of that name.
        name: The run's name. None lets MLflow choose.

    Raises:
        EvigradError: If MLflow is not installed.
    """

    def __init__(
        self,
        store: str | Path | None = None,
        *,
        experiment: str = "Default",
        name: str | None = None,
    ) -> None:
        mlflow: Any = require("mlflow", "MLflow's tracker", extra="mlflow")
        self._metric = mlflow.entities.Metric
        uri = store.absolute().as_uri() if isinstance(store, Path) else store
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name(experiment)
        number = existing.experiment_id if existing else self._client.create_experiment(experiment)
        self._run = self._client.create_run(number, run_name=name).info.run_id

    def write(self, values: dict[str, float], count: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, count) for name, value in values.items()]
        for start in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._run, metrics[start : start + _AT_ONCE])

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
