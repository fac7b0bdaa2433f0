"""Trackers, which send the rows of a training run to other tools during training.

A tracker is a function that is called with each row. A row is a dictionary of numbers with the
epoch or the step, like the rows of ``fit``'s history. Pass the tracker as ``fit(...,
callbacks=[tracker])``. To write a tracker for another tool, derive a class from ``Tracker`` and
define ``write`` and ``close``.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from evigrad.errors import require
from evigrad.training.history import known

__all__ = ["MLflow", "TensorBoard", "Tracker", "WandB", "numbers"]

# Names of the columns that count the rows.
COUNTERS = ("epoch", "round", "step")
# MLflow accepts at most this many metrics in one request.
_AT_ONCE = 1000


def numbers(row: Mapping[str, int | float | None]) -> dict[str, float]:
    """Return the numbers of a row without missing values and without the epoch, round or step."""
    return {name: value for name, value in known(row).items() if name not in COUNTERS}


class Tracker(ABC):
    """A callback for ``fit`` that writes the numbers of each row. Use it in a ``with`` statement.

    Examples:
        >>> from evigrad.trackers import Tracker
        >>> class Print(Tracker):
        ...     def write(self, values, count):
        ...         print(count, values)
        ...     def close(self, *, failed=False):
        ...         pass
        >>> with Print() as tracker:
        ...     tracker({"epoch": 3, "loss": 0.5, "log_evidence": None})
        3 {'loss': 0.5}

    See also: docs/trainers.md.
    """

    def __call__(self, row: Mapping[str, int | float | None]) -> None:
        """Write a row under its epoch, round or step."""
        count = next((int(row[name] or 0) for name in COUNTERS if name in row), 0)
        self.write(numbers(row), count)

    @abstractmethod
    def write(self, values: dict[str, float], count: int) -> None:
        """Write the numbers of one row.

        Args:
            values: Numbers by name.
            count: Epoch, round or step of the row.
        """

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Close the tracker after training.

        Args:
            failed: Whether training ended with an error.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(failed=error is not None)


class TensorBoard(Tracker):
    """Write each row for TensorBoard. ``tensorboard --logdir FOLDER`` shows the rows.

    The tracker needs ``pip install 'evigrad[tensorboard]'``. Each row is written to the file at
    once, and a ``with`` statement closes the file. A resumed run continues in the same folder. If
    the run repeats epochs, TensorBoard shows the later values.

    Args:
        folder: Folder to write to.

    Raises:
        EvigradError: If TensorBoard is not installed.

    See also: docs/trainers.md.
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
    """Write each row to a run of Weights & Biases, which is offline by default.

    The tracker needs ``pip install 'evigrad[wandb]'``. To upload an offline run, use ``wandb sync
    FOLDER/wandb/offline-run-...``. A ``with`` statement finishes the run and marks the run as
    failed after an error.

    Args:
        folder: Folder to write to.
        mode: ``"offline"`` (default), or ``"online"`` to upload during training.
        **settings: Other arguments of ``wandb.init``, such as ``project``, ``name`` and ``config``.

    Raises:
        EvigradError: If Weights & Biases is not installed.

    See also: docs/trainers.md.
    """

    def __init__(self, folder: str | Path = ".", mode: str = "offline", **settings: Any) -> None:
        wandb: Any = require("wandb", "The tracker for Weights & Biases", extra="wandb")
        self._run = wandb.init(dir=str(folder), mode=mode, **settings)

    def write(self, values: dict[str, float], count: int) -> None:
        self._run.log(values, step=count)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(Tracker):
    """Write each row as metrics of an MLflow run, separate from the script's active run.

    The tracker needs ``pip install 'evigrad[mlflow]'``. A ``with`` statement ends the run and marks
    the run as failed after an error.

    Args:
        store: Tracking URI: a server, ``"sqlite:///mlflow.db"``, or a folder. For a folder, MLflow
            3.13 or newer needs ``MLFLOW_ALLOW_FILE_STORE=true`` in the environment. Default: None,
            which uses MLflow's default.
        experiment: Name of the experiment, which is created if it does not exist.
        name: Name of the run. Default: None, which lets MLflow choose a name.

    Raises:
        EvigradError: If MLflow is not installed.

    See also: docs/trainers.md.
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
