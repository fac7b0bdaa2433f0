"""The history of a training run: a table with a row for each epoch, in memory and in a file."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from evigrad.core.model import standard_error
from evigrad.errors import ConfigurationError, InputError, listed
from evigrad.evidence import Evidence
from evigrad.files import replacing, writing
from evigrad.measure.bracket import bracket
from evigrad.measure.metrics import hyperparameter_values
from evigrad.training.data import RunData
from evigrad.training.rounds import Round

# A value that was not computed in an epoch is None, and an empty cell in the file.
Row = dict[str, int | float | None]
# If there are more precisions than this, logs of rounds summarize them; they omit the details.
_FEW_PRECISIONS = 3
_DETAILS = ("step", "log_det_term", "hyper_steps")
# Number of rows in a block of the bounds on the exact log evidence, and the names of their columns.
BRACKET_ROWS = 400
BRACKET_COLUMNS = ("bracket_lower", "bracket_lower_sem", "bracket_upper")


def known(row: Mapping[str, int | float | None]) -> dict[str, float]:
    """Return the values of a row that are not None."""
    return {name: float(value) for name, value in row.items() if value is not None}


def headlines(row: Mapping[str, int | float | None]) -> dict[str, float]:
    """Return the values of a round for a log. If there are many precisions, summarize them."""
    values = known(row)
    precisions = sorted(v for name, v in values.items() if name.startswith("precision/"))
    if len(precisions) > _FEW_PRECISIONS:
        values = {n: v for n, v in values.items() if not n.startswith("precision/")}
        values["precision/lowest"], values["precision/highest"] = precisions[0], precisions[-1]
        values["precision/median"] = median(precisions)
    if not values.get("skipped_steps"):
        values.pop("skipped_steps", None)
    return {name: v for name, v in values.items() if name not in _DETAILS}


def evidence_columns(learned: Round | None) -> Row:
    """Return the history columns of a round's log evidence and skipped steps."""
    skipped: Row = {"skipped_steps": 0 if learned is None else learned.skipped}
    if learned is None or not learned.estimates:
        return dict.fromkeys(("log_evidence", "log_det_term", "log_evidence_sem")) | skipped
    estimates = learned.estimates
    values = [e.per_datum for e in estimates]
    many = len(values) > 1 and not learned.is_shared
    return {
        "log_evidence": mean(values),
        "log_det_term": mean(-0.5 * e.log_det_weight * e.log_det / e.num_data for e in estimates),
        "log_evidence_sem": standard_error(values) if many else None,
        **skipped,
    }


def round_columns(evidence: Evidence, hyper_round: Round | None, hyper_steps: int) -> Row:
    """Return the history columns after a round: log evidence, step counts and hyperparameters."""
    return {
        **evidence_columns(hyper_round),
        "hyper_steps": hyper_steps,
        **hyperparameter_values(evidence),
    }


def metric_columns(evidence: Evidence, metrics: Mapping[str, Mapping[str, float]]) -> Row:
    """Return the history columns of training and test ``metrics``. Missing values are None."""
    error = "accuracy" if evidence.likelihood.is_classification else "squared_error"
    return {
        f"{part}_{name}": metrics.get(part, {}).get(name)
        for part in ("train", "test")
        for name in ("log_likelihood", error)
    }


def bracket_columns(evidence: Evidence, data: RunData, seed: int) -> Row:
    """Return the history columns of bounds on the exact log evidence, in nats per example."""
    bounds = bracket(evidence, data, rows=BRACKET_ROWS, seed=seed)
    lower_error = bounds.lower_error / bounds.num_data
    values = (bounds.lower_per_datum, lower_error, bounds.upper_per_datum)
    return dict(zip(BRACKET_COLUMNS, values, strict=True))


def append_row(history: list[Row], row: Row) -> None:
    """Append an epoch's row. Raise ConfigurationError if a checkpoint's rows have other columns."""
    if history and row.keys() != history[0].keys():
        raise ConfigurationError(
            "The checkpoint's history and this run have different columns"
            f" ({listed(sorted(row.keys() ^ history[0].keys()))}). Another version of evigrad wrote"
            " the checkpoint, or the checkpoint was changed. Start a new run in another folder."
        )
    history.append(row)


class MetricsFile:
    """A CSV file with one row per epoch. Each row is flushed to the file immediately.

    An existing file is replaced unless it holds exactly the column names and the ``rows`` of
    earlier epochs.
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
        """Append a row, which has a value or None for every column."""
        with writing(self._path):
            self._file.write(self._lines([_cells(row)]))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):  # retries what a full disk did not accept before
            self._file.close()

    def _lines(self, rows: Sequence[Mapping[str, str]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns).writerows(rows)
        return text.getvalue().encode("utf-8")


def read_metrics(path: str | Path) -> list[Row]:
    """Read the ``metrics.csv`` of a run.

    Returns:
        One row per epoch.

    Raises:
        InputError: If the file does not exist, or is not a table of metrics.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            return [
                {name: float(cell) if cell else None for name, cell in row.items()}
                for row in csv.DictReader(file)
            ]
    except FileNotFoundError:
        raise InputError(
            f"path must be the metrics.csv of a run, got {path}, which does not exist."
        ) from None
    except (TypeError, ValueError) as error:
        raise InputError(f"path must be the metrics.csv of a run, got {path}: {error}.") from error


def _cells(row: Mapping[str, int | float | None]) -> dict[str, str]:
    # Six digits exceed the accuracy of these numbers, and keep the file readable.
    return {
        name: f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
        for name, value in row.items()
    }


def packed_history(history: Sequence[Row]) -> dict[str, list[Any]]:
    """Return a history as column names, and rows of values in the order of the names."""
    columns = list(history[0]) if history else []
    return {"columns": columns, "rows": [[row[name] for name in columns] for row in history]}


def unpacked_history(packed: Mapping[str, list[Any]]) -> list[Row]:
    """Return the rows of a history that ``packed_history`` packed."""
    rows = [dict(zip(packed["columns"], row, strict=True)) for row in packed["rows"]]
    for name, value in (cell for row in rows for cell in row.items()):
        is_name = isinstance(name, str) and name.isprintable()
        if not is_name or not isinstance(value, int | float | None):
            raise ConfigurationError(
                f"The saved history must contain numbers, got the value {value!r} for {name!r}."
                " Start a new run in another folder."
            )
    return rows
