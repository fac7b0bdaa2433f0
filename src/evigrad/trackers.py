"""Trackers: what training records, shown by other tools while it runs.

A tracker is a function of a row, a dictionary of numbers that has the epoch or the step, as the
rows of ``fit``'s history. So ``fit(..., callbacks=[tracker])`` is all that there is to add, a run
folder has the same rows as ``metrics.csv`` in any case, and any function will do: that of another
tool is ``lambda row: run.log(numbers(row), step=row["epoch"])``.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from evigrad.errors import require

__all__ = ["TensorBoard", "numbers"]

# What counts the rows.
COUNTERS = ("epoch", "round", "step")


def numbers(row: Mapping[str, int | float | None]) -> dict[str, float]:
    """The numbers of a row that were computed in it, without what counts the rows.

    Args:
        row: A row of a history.

    Returns:
        Its values by name.
    """
    return {n: float(v) for n, v in row.items() if v is not None and n not in COUNTERS}


class TensorBoard:
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

    def __call__(self, row: Mapping[str, int | float | None]) -> None:
        """Write a row, at the number that counts it."""
        count = next((int(row[name] or 0) for name in COUNTERS if name in row), None)
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, count)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
