"""Functions that read the folders of runs for a report."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evigrad.configuration import check_plain
from evigrad.errors import ConfigurationError, InputError, require
from evigrad.plots.runs import History, series
from evigrad.training.history import read_metrics
from evigrad.training.settings import method_of

# Folder of the MAP run that ``evigrad train --compare-map`` makes inside a run's folder.
MAP_FOLDER = "map"
# Columns that every table of a run's metrics has.
_COLUMNS = ("epoch", "loss")


@dataclass(frozen=True)
class Run:
    """A run, or the finished epochs of an unfinished run."""

    path: Path
    label: str
    history: History  # one row per finished epoch, at least one
    settings: Mapping[str, Any]  # the content of ``config.json``
    options: Mapping[str, Any]  # of ``config.yaml``; empty for a run started from Python
    results: Mapping[str, Any]  # the run's part of ``results.json``, if there is one
    is_baseline: bool = False  # whether it is the MAP run that another one is compared with
    suffix: str = ""  # end of the names of its files, unique in a report; empty for the only run

    @property
    def method(self) -> str:
        """Return the name of the estimator or of the baseline."""
        return method_of(self.settings)

    @property
    def epochs(self) -> int:
        """Return the number of finished epochs."""
        return int(series(self.history, "epoch")[0][-1])

    @property
    def planned(self) -> int:
        """Return the number of epochs in the settings, or more if training continued."""
        return max(self.epochs, int(self.settings.get("epochs") or 0))

    def columns(self, prefix: str) -> dict[str, str]:
        """Return the columns with a prefix and at least one value, by name without the prefix."""
        return {
            column.removeprefix(prefix): column
            for column in self.history[0]
            if column.startswith(prefix) and self.values(column)
        }

    def values(self, column: str) -> list[float]:
        """Return the finite values of a column."""
        return series(self.history, column)[1]

    def titled(self, title: str) -> str:
        """Return a figure's title, with the label of this run if there are several runs."""
        return f"{title}, {self.label}" if self.suffix else title

    def last(self, column: str) -> float | None:
        """Return the last known value of a column, or None if there is none."""
        return next(reversed(self.values(column)), None)


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Return the runs in some folders. A MAP run comes directly before its main run."""
    folders = [Path(path) for path in paths]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigurationError(
            "The folders of runs must differ, but one of them was given twice. Name each run once."
        )
    names = [folder.resolve().name for folder in folders]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        label = name if names.count(name) == 1 else str(folder)
        runs += _read_with_map(folder, None if len(folders) == 1 else label)
    is_only = sum(not run.is_baseline for run in runs) == 1
    suffixed_runs: list[Run] = []
    for run in runs:
        suffix = base = "-" + re.sub(r"[^\w.]+", "-", run.label).strip("-.").lower()
        number = 1
        while suffix in [other.suffix for other in suffixed_runs]:
            number += 1
            suffix = f"{base}-{number}"
        suffixed_runs.append(replace(run, suffix="" if is_only and not run.is_baseline else suffix))
    return suffixed_runs


def _read_with_map(folder: Path, label: str | None) -> list[Run]:
    """Return a run and its MAP run, named by their methods if there is no label."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"A report needs the folder of a run, got {folder}, which does not exist. Check the"
            " path."
        )
    options, results = _read(folder / "config.yaml"), _read(folder / "results.json")
    runs = []
    for path in (folder / MAP_FOLDER, folder):
        if not (path / "metrics.csv").is_file():
            continue
        if not (path / "config.json").is_file():
            raise ConfigurationError(
                f"There is no file {path / 'config.json'}, so {path} is not the folder of a run."
                " Use the folder of a run."
            )
        settings = _read(path / "config.json")
        if not isinstance(epochs := settings.get("epochs"), int | None):
            raise ConfigurationError(
                f"{path / 'config.json'}: epochs must be a whole number, got {epochs!r}."
                " Correct the file."
            )
        method = method_of(settings)
        of_run = results.get(method)
        runs.append(
            Run(
                path=path,
                label=f"{label}, MAP" if label and path is not folder else label or method,
                history=_read_history(path / "metrics.csv"),
                settings=settings,
                options=options,
                results=of_run if isinstance(of_run, Mapping) else {},
                is_baseline=path is not folder,
            )
        )
    if not runs:
        raise ConfigurationError(
            f"{folder} has no metrics.csv. Either it is not the folder of a run, or the run has not"
            " finished its first epoch yet. Use the folder that you passed as --run-dir"
            " (run_dir=...)."
        )
    return runs


def _read_history(path: Path) -> History:
    try:
        rows = read_metrics(path)
    except InputError as error:
        raise ConfigurationError(str(error)) from error
    missing = [name for name in _COLUMNS if rows and name not in rows[0]]
    if missing:
        raise ConfigurationError(
            f"{path} has no column {' and no column '.join(missing)}: it is not the metrics.csv of"
            " a run. Use the folder of a run."
        )
    history = [row for row in rows if row["epoch"] is not None]
    if not series(history, "epoch")[0]:
        raise ConfigurationError(
            f"{path} has no finished epoch yet. Wait until the first epoch has finished."
        )
    return history


def _read(path: Path) -> dict[str, Any]:
    """Return the names and values in a JSON or YAML file, or nothing if there is no file."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".yaml":
            check_plain(text)
            content = require("yaml", f"Reading {path}", extra="cli").safe_load(text)
        else:
            content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {' '.join(str(error).split())}."
        ) from error
    if not isinstance(content, dict | None):
        kind = {list: "a list", str: "a text"}.get(type(content), "a number")
        raise ConfigurationError(
            f"{path} must map names to values, got {kind}. Correct the file, or remove the run from"
            " the report."
        )
    return content or {}
