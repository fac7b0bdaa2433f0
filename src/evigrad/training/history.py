"""The history of a training: a table with one row for each epoch, in memory and in a file."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from evigrad.errors import InputError
from evigrad.training.files import replacing, writing

# A value that was not computed in an epoch is None, and an empty cell in the file.
Row = dict[str, int | float | None]
# Logs of rounds show each of so many precisions, and omit these columns.
_FEW_PRECISIONS = 3
_DETAILS = ("step", "log_det_term", "hyper_steps")


def known(row: Mapping[str, int | float | None]) -> dict[str, float]:
    """The values of a row that were computed in it."""
    return {name: float(value) for name, value in row.items() if value is not None}


def headlines(row: Mapping[str, int | float | None]) -> dict[str, float]:
    """The values of a round that a log shows: not one of each precision if there are many."""
    values = known(row)
    precisions = sorted(v for name, v in values.items() if name.startswith("precision/"))
    if len(precisions) > _FEW_PRECISIONS:
        values = {n: v for n, v in values.items() if not n.startswith("precision/")}
        values["precision/lowest"], values["precision/highest"] = precisions[0], precisions[-1]
        values["precision/median"] = median(precisions)
    if not values.get("skipped_steps"):
        values.pop("skipped_steps", None)
    return {name: v for name, v in values.items() if name not in _DETAILS}


class MetricsFile:
    """A CSV file with one row for each epoch, on the disk as soon as it is written.

    Args:
        path: The file; replaced if it holds anything else.
        columns: Names of the values.
        rows: The rows of the epochs before.
    """

    def __init__(self, path: Path, columns: Sequence[str], rows: Sequence[Row] = ()) -> None:
        self._path, self._columns = path, list(columns)
        content = self._lines([dict(zip(columns, columns, strict=True)), *map(_cells, rows)])
        if not path.exists() or path.read_bytes() != content:
            with replacing(path) as new:
                new.write(content)
        with writing(path):
            self._file = path.open("ab")

    def write(self, row: Mapping[str, int | float | None]) -> None:
        """Append a row: a value, or None, for every column."""
        with writing(self._path):
            self._file.write(self._lines([_cells(row)]))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):  # what a full disk did not take before is tried again
            self._file.close()

    def _lines(self, rows: Sequence[Mapping[str, str]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns).writerows(rows)
        return text.getvalue().encode("utf-8")


def read_metrics(path: str | Path) -> list[Row]:
    """Read a ``metrics.csv``.

    Returns:
        One row for each epoch.

    Raises:
        InputError: If there is no such file, or it is not one of these.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            return [
                {name: float(cell) if cell else None for name, cell in row.items()}
                for row in csv.DictReader(file)
            ]
    except FileNotFoundError:
        raise InputError(f"There is no file {path}; name the metrics.csv of a run.") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} is not a table of metrics: {error}.") from error


def _cells(row: Mapping[str, int | float | None]) -> dict[str, str]:
    # Six digits exceed the accuracy of these numbers, and keep the file readable.
    return {name: _cell(value) for name, value in row.items()}


def _cell(value: int | float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.6g}"
