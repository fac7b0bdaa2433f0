"""Runs that die at a given moment, and runs that must be the same."""

import csv
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from evigrad.training.history import MetricsFile

TIMES = "seconds"
# What may differ between runs that are the same.
_BESIDE = (TIMES, "checkpoint_every")


class Killed(BaseException):
    """Nothing that a program could catch, but for this test."""


class Death:
    """Counts the moments of a run at which a file changes, and dies at one of them.

    From there on nothing that is tried changes a file any more, as after ``kill -9``.
    """

    def __init__(self, moment: int | None = None) -> None:
        self.moment, self.count = moment, 0
        self.what: list[str] = []

    def pass_by(self, what: str) -> None:
        if self.moment is not None and self.count >= self.moment:
            raise Killed(what)
        self.what.append(what)
        self.count += 1

    @contextmanager
    def watching(self) -> Iterator["Death"]:
        """Around each replacement, in the middle of each file and of each row of the metrics."""
        replace, save, unlink = os.replace, torch.save, Path.unlink
        append = MetricsFile.write

        def watched_replace(source: Any, target: Any) -> None:
            self.pass_by(f"before {Path(target).name}")
            replace(source, target)
            self.pass_by(f"after {Path(target).name}")

        def watched_save(state: Any, file: Any) -> None:
            file.write(b"half of a checkpoint")
            file.flush()
            self.pass_by("in checkpoint.pt")
            file.seek(0)
            file.truncate()
            save(state, file)

        def watched_append(metrics: MetricsFile, row: Any) -> None:
            metrics._file.write(b"1,0.")
            metrics._file.flush()
            self.pass_by("in a row")
            metrics._file.truncate(metrics._file.tell() - 4)
            append(metrics, row)
            self.pass_by("after a row")

        def watched_unlink(path: Path, missing_ok: bool = False) -> None:
            if self.moment is not None and self.count >= self.moment:
                raise Killed("clearing up")
            unlink(path, missing_ok)

        with (
            patch("os.replace", watched_replace),
            patch("torch.save", watched_save),
            patch.object(MetricsFile, "write", watched_append),
            patch.object(Path, "unlink", watched_unlink),
        ):
            yield self


@contextmanager
def dying_at_call(owner: Any, name: str, number: int) -> Iterator[None]:
    """Die at the given call of a method, from 1."""
    method, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Killed(name)
        return method(*args, **kwargs)

    with patch.object(owner, name, counted):
        yield


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal to the last bit, whatever it is made of; times excepted."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and one.stride() == other.stride(), where
        equal = (one == other) | ((one != one) & (other != other))
        assert bool(equal.all()), f"{where}: {int((~equal).sum())} of {one.numel()} numbers differ"
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            if key not in _BESIDE:
                assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}/{index}")
    elif one != one:
        assert other != other, where
    else:
        assert one == other, f"{where}: {one} and {other}"


def state_of(folder: Path) -> dict[str, Any]:
    """A run's checkpoint, without times."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    column = state["history"]["columns"].index(TIMES)
    for row in state["history"]["rows"]:
        row[column] = None
    return state


def metrics_of(folder: Path) -> list[dict[str, str]]:
    """The text of each cell of a run's metrics, without times."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: cell for name, cell in row.items() if name != TIMES} for row in rows]


def assert_same_runs(one: Path, other: Path) -> None:
    """Two folders with runs that are the same, times excepted."""
    assert_same(state_of(one), state_of(other))
    assert metrics_of(one) == metrics_of(other)
    assert {p.name for p in one.iterdir()} == {p.name for p in other.iterdir()}
    for name in ("config.json", "results.json"):
        if (one / name).exists():
            texts = [json.loads((folder / name).read_text()) for folder in (one, other)]
            assert_same(texts[0], texts[1], name)


def killed(train: Callable[[], object]) -> bool:
    """Whether a run died."""
    try:
        train()
    except Killed:
        return True
    return False
