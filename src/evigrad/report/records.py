"""Read the folder of a run for a report."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evigrad.data.files import require
from evigrad.errors import ConfigurationError, InputError
from evigrad.plots import History, series
from evigrad.training.metrics import read_metrics
from evigrad.training.settings import BASELINES

# The folder of the MAP run that ``evigrad train --compare-map`` makes inside a run's folder.
MAP_FOLDER = "map"
# Columns that every table of a run's metrics has.
_COLUMNS = ("epoch", "loss")


@dataclass(frozen=True)
class Record:
    """A run, or the finished part of one.

    Attributes:
        path: Its folder.
        label: Its name in the report.
        key: Its name in files' names, unique in a report.
        history: One row for each finished epoch, one at least.
        settings: The content of ``config.json``.
        options: The content of ``config.yaml``; empty for a run that was started from Python.
        results: The part of ``results.json`` on this run; empty before there is one.
        is_baseline: Whether it is the MAP run that another one is compared with.
    """

    path: Path
    label: str
    key: str
    history: History
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    results: Mapping[str, Any]
    is_baseline: bool = False

    @property
    def method(self) -> str:
        """Name of the estimator or the baseline by which hyperparameters were learned."""
        return _method(self.settings)

    @property
    def epochs(self) -> int:
        """The number of finished epochs."""
        return int(series(self.history, "epoch")[0][-1])

    @property
    def planned(self) -> int:
        """The number of epochs in the settings."""
        return int(self.settings.get("epochs") or self.epochs)

    def columns(self, prefix: str) -> dict[str, str]:
        """Hyperparameter columns that have a value, by what follows a prefix as ``precision/``."""
        return {
            column.removeprefix(prefix): column
            for column in self.history[0]
            if column.startswith(prefix) and series(self.history, column)[0]
        }

    def last(self, column: str) -> float | None:
        """The last known value of a column; None if there is none, or it is not finite."""
        values = series(self.history, column)[1]
        return values[-1] if values else None

    def changes(self, columns: Sequence[str]) -> bool:
        """Whether one of these columns changes over the epochs, because it was learned."""
        return any(len(set(series(self.history, column)[1])) > 1 for column in columns)


def read_runs(paths: Sequence[str | Path]) -> list[Record]:
    """Read runs, and the MAP runs inside of them.

    Args:
        paths: Their folders.

    Returns:
        Each MAP run directly before the run that it is compared with. Of a run that has no epoch
        yet there is only its MAP run.

    Raises:
        ConfigurationError: If one is no folder of a run, has no finished epoch, or its files
            cannot be read; the text says which.
    """
    folders = [Path(path) for path in paths]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigurationError("A run is named twice; name each one once.")
    alone = len(folders) == 1
    names = [folder.resolve().name for folder in folders]
    records = []
    for folder, name in zip(folders, names, strict=True):
        label = name if names.count(name) == 1 else str(folder)
        records += _read_with_map(folder, None if alone else label)
    keys = _unique([re.sub(r"[^\w.]+", "-", r.label).strip("-.").lower() for r in records])
    return [replace(record, key=key) for record, key in zip(records, keys, strict=True)]


def _unique(names: Sequence[str]) -> list[str]:
    """Names made unique by numbers at their end."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in found:
            number += 1
            candidate = f"{name}-{number}"
        found.append(candidate)
    return found


def _read_with_map(folder: Path, label: str | None) -> list[Record]:
    """A run and its MAP run; named by their methods where there is no label."""
    if not folder.is_dir():
        raise ConfigurationError(f"There is no folder {folder}; name the folder of a run.")
    options = _read_options(folder / "config.yaml")
    results = _read_json(folder / "results.json", optional=True)
    found = []
    for path in (folder / MAP_FOLDER, folder):
        if not (path / "metrics.csv").is_file():
            continue
        settings = _read_json(path / "config.json")
        method = _method(settings)
        name = label or method
        if label is not None and path is not folder:
            name = f"{label}, MAP"
        found.append(
            Record(
                path=path,
                label=name,
                key="",
                history=_read_history(path / "metrics.csv"),
                settings=settings,
                options=options,
                results=_results_of(method, results),
                is_baseline=path is not folder,
            )
        )
    if not found:
        raise ConfigurationError(
            f"{folder} has no metrics.csv: it is not the folder of a run, or its first epoch is not"
            " over yet. Name the folder that --run-dir (run_dir=...) named."
        )
    return found


def _read_history(path: Path) -> History:
    try:
        rows = read_metrics(path)
    except InputError as error:
        raise ConfigurationError(str(error)) from error
    missing = [name for name in _COLUMNS if rows and name not in rows[0]]
    if missing:
        raise ConfigurationError(
            f"{path} has no column {' and no column '.join(missing)}: it is not the metrics.csv of"
            " a run."
        )
    history = [row for row in rows if row["epoch"] is not None]
    if not series(history, "epoch")[0]:
        raise ConfigurationError(f"{path} has no epoch yet; wait until the first one is over.")
    return history


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ConfigurationError(
            f"There is no file {path}, which every run has: {path.parent} is not the folder of a"
            " run."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    return _mapping(path, content)


def _read_options(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    yaml: Any = require("yaml", f"Reading {path}", extra="cli")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        words = " ".join(str(error).split())
        raise ConfigurationError(f"{path} cannot be read: {words}.") from error
    return _mapping(path, content or {})


def _mapping(path: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} cannot be read: it holds no names with values.")
    return content


def _method(settings: Mapping[str, Any]) -> str:
    name = str(settings.get("estimator") or "map")
    return BASELINES.get(name, name)


def _results_of(method: str, results: Mapping[str, Any]) -> Mapping[str, Any]:
    found = results.get(method, {})
    return found if isinstance(found, Mapping) else {}
