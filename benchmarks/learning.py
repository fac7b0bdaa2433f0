"""Shared parts of the tables of trained networks: options and finished runs.

A run is a row of the table for one seed. It becomes a line of a CSV file when it ends. A script
skips runs with a line in that file, also in ``docs/results``, and resumes where it was stopped.
"""

import argparse
import csv
import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

Result = dict[str, Any]


class Results:
    """Finished runs in a CSV file. Several processes may add to it.

    Args:
        path: Path of the file, which need not exist.
        columns: Columns of the file. They include ``row`` and ``seed``, which identify a run. A run
            has all columns. None is an empty cell, and values that are neither text nor numbers are
            JSON.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = list(columns)

    def read(self) -> list[Result]:
        """Return all runs so far, in the order in which they ended."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return self._read(file)

    def has(self, row: str, seed: int) -> bool:
        """Return whether any process has finished a run."""
        return _is_in(self.read(), row, seed)

    def add(self, run: Result) -> None:
        """Store a run, unless another process has stored the same one."""
        if run.keys() != set(self.columns):
            raise ValueError(f"A run has {', '.join(self.columns)}, not {', '.join(run)}.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if _is_in(self._read(file), run["row"], run["seed"]):
                return
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({key: _cell(value) for key, value in run.items()})

    def _read(self, file: TextIO) -> list[Result]:
        text = file.read()
        reader = csv.DictReader(text.splitlines(keepends=True), strict=True)
        if reader.fieldnames not in (None, self.columns):
            raise SystemExit(
                f"{self.path} has the columns {', '.join(reader.fieldnames or [])}, but runs of"
                f" this script have {', '.join(self.columns)}. Use another --results."
            )
        try:
            lines = list(reader)
        except csv.Error:  # within quotes
            lines = [{}]
        whole = all(
            line.keys() == set(self.columns) and None not in line.values() for line in lines
        )
        if text and not (whole and text.endswith("\n")):
            raise SystemExit(
                f"{self.path} has a broken line. Remove it, and its run will run again."
            )
        return [{key: _value(cell) for key, cell in line.items()} for line in lines]


def _is_in(runs: list[Result], row: str, seed: int) -> bool:
    return any((run["row"], run["seed"]) == (row, seed) for run in runs)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _value(cell: str) -> Any:
    if not cell:
        return None
    try:
        return json.loads(cell)
    except json.JSONDecodeError:
        return cell


def make_parser(
    description: str | None, seeds: Sequence[int] | None = (0, 1, 2)
) -> argparse.ArgumentParser:
    """Return the common options, to which a script adds its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-dir", default=None, help="folder with the Parquet files")
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        help="folder with the CSV file of the runs, which do not run again",
    )
    parser.add_argument(
        "--pages", type=Path, nargs="*", default=[], help="pages to insert the table into"
    )
    parser.add_argument(
        "--table", action="store_true", help="only print the table of the existing runs"
    )
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options and set the threads. There are no seeds with --table."""
    options = parser.parse_args(arguments)
    if options.table:
        options.seeds = []
    torch.set_num_threads(options.threads)
    return options
