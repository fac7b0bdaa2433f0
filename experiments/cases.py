"""Results of jobs as rows: one row per case, with means and standard errors over seeds."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.jobs import Job, Store

# Keys that are named before a label.
_PARTS = ("block", "data_set", "variant", "size", "panel", "group")
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One point, curve or cell, for one seed.

    Attributes:
        keys: Keys that distinguish the case, such as ``{"panel": ..., "estimator": ...}``.
        seed: Seed of its jobs.
        jobs: Jobs by the names that ``read`` uses.
        read: Function from the results of these jobs to named numbers or lists of numbers. None is
            a missing value.
    """

    keys: Mapping[str, Any]
    seed: int
    jobs: Mapping[str, Job]
    read: Callable[[Mapping[str, dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Mean:
    """A number over the seeds, or one for each point of a curve.

    Attributes:
        mean: Mean. NaN if a value is unknown.
        error: Standard error. NaN for one seed.
        count: Number of seeds.
        by_seed: The value of each seed.
    """

    mean: Any
    error: Any
    count: int
    by_seed: Mapping[int, Any] = field(default_factory=dict[int, Any], compare=False)

    @classmethod
    def of(cls, by_seed: Mapping[int, Any]) -> "Mean":
        """Return the mean over the known values of each seed."""
        values = np.array(list(by_seed.values()), dtype=float)
        values[~np.isfinite(values)] = np.nan
        many = len(values) > 1
        error = values.std(0, ddof=1) / np.sqrt(len(values)) if many else values[0] * np.nan
        return cls(values.mean(0).tolist(), error.tolist(), len(values), by_seed)


def rows_of(cases: Iterable[Case], store: Store) -> list[Row]:
    """Return a row for each case with any result: its keys, and a ``Mean`` for each number."""
    grouped: dict[tuple[Any, ...], tuple[Row, dict[str, dict[int, Any]]]] = {}
    for case in cases:
        results = {name: store.result(job) for name, job in case.jobs.items()}
        finished = {name: result for name, result in results.items() if result is not None}
        if len(finished) < len(results):
            continue
        _, values = grouped.setdefault(tuple(case.keys.values()), (dict(case.keys), {}))
        for name, value in case.read(finished).items():
            values.setdefault(name, {})[case.seed] = value
    return [
        keys | {name: Mean.of(by_seed) for name, by_seed in values.items()}
        for keys, values in grouped.values()
    ]


def coverage(cases: Iterable[Case], rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """Return the progress of each case. Means over different seeds are not comparable.

    Args:
        cases: Cases of an experiment.
        rows: Rows of the results so far.

    Returns:
        Number of finished seeds and number of all seeds, by name of the case and in the order of
        the cases.
    """
    seeds = Counter(in_words(case.keys) for case in cases)
    done = {
        in_words(row): next(value.count for value in row.values() if isinstance(value, Mean))
        for row in rows
    }
    return {name: (done.get(name, 0), count) for name, count in seeds.items()}


def seeds_of(rows: Iterable[Row]) -> set[int]:
    """Return the seeds with any result."""
    return {seed for row in rows for v in row.values() if isinstance(v, Mean) for seed in v.by_seed}


def in_words(keys: Mapping[str, Any]) -> str:
    """Return a name of a case or row for people."""
    label = keys.get("label", keys.get("estimator", ""))
    return " ".join([*(str(keys[p]) for p in _PARTS if p in keys and "label" in keys), label])
