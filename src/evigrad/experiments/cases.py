"""Results of jobs as rows: one for each case, means and standard errors over the seeds."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evigrad.experiments.jobs import Job, distinct
from evigrad.experiments.store import Store

# Keys that are named before a label.
_PARTS = ("block", "data_set", "variant", "size", "panel", "group")
# None where there is none.
Value = float | list[float] | None


@dataclass(frozen=True)
class Case:
    """What is shown as one point, curve or cell, of one seed.

    Attributes:
        keys: What tells it from others, as ``{"panel": ..., "estimator": ...}``.
        seed: Of its jobs.
        jobs: By the words that ``read`` knows them by.
        read: From the results of these jobs to named numbers, or lists of numbers.
    """

    keys: Mapping[str, Any]
    seed: int
    jobs: Mapping[str, Job]
    read: Callable[[Mapping[str, dict[str, Any]]], dict[str, Value]]


def jobs_in(cases: Sequence[Case]) -> list[Job]:
    """All jobs of cases.

    Args:
        cases: Any.

    Returns:
        Each once, with what it needs before it.
    """
    return distinct([job for case in cases for job in case.jobs.values()])


@dataclass(frozen=True)
class Mean:
    """A number over the seeds.

    Attributes:
        mean: Their mean, or one for each point of a curve.
        error: Its standard error; NaN of a single one.
        count: How many seeds.
        by_seed: What it is the mean of.
    """

    mean: Any
    error: Any
    count: int
    by_seed: Mapping[int, Any] = field(default_factory=dict[int, Any], compare=False)


Row = dict[str, Any]


def rows_of(cases: Iterable[Case], store: Store) -> list[Row]:
    """What is known of each case.

    Args:
        cases: Of an experiment.
        store: Results.

    Returns:
        In the order of the cases, for those with any result: their keys, and a ``Mean`` for each
        number.
    """
    found: dict[tuple[Any, ...], tuple[Row, dict[int, dict[str, Value]]]] = {}
    for case in cases:
        results = {name: store.result(job) for name, job in case.jobs.items()}
        if any(result is None for result in results.values()):
            continue
        known = {name: result for name, result in results.items() if result is not None}
        _, values = found.setdefault(tuple(case.keys.values()), (dict(case.keys), {}))
        values[case.seed] = case.read(known)
    return [keys | _means(values) for keys, values in found.values()]


def _means(values: Mapping[int, dict[str, Value]]) -> dict[str, Mean]:
    means: dict[str, Mean] = {}
    for name in next(iter(values.values())):
        column = {seed: each[name] for seed, each in values.items()}
        curves = [value for value in column.values() if isinstance(value, list)]
        if curves:
            pairs = [mean_and_error(list(point)) for point in zip(*curves, strict=True)]
            mean, error = [m for m, _ in pairs], [e for _, e in pairs]
        else:
            mean, error = mean_and_error(list(column.values()))
        means[name] = Mean(mean, error, len(column), column)
    return means


def coverage(cases: Iterable[Case], rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """How much of each case is done: means of different seeds are not to be compared.

    Args:
        cases: Of an experiment.
        rows: What is known of them.

    Returns:
        By a case's keys in words, in the order of the cases: how many seeds are done, and how many
        there are.
    """
    seeds = Counter(in_words(case.keys) for case in cases)
    done = {
        in_words(row): next(value.count for value in row.values() if isinstance(value, Mean))
        for row in rows
    }
    return {name: (done.get(name, 0), count) for name, count in seeds.items()}


def seeds_of(rows: Iterable[Row]) -> set[int]:
    """The seeds of which something is known.

    Args:
        rows: Of an experiment.

    Returns:
        The seeds.
    """
    return {seed for row in rows for v in row.values() if isinstance(v, Mean) for seed in v.by_seed}


def in_words(keys: Mapping[str, Any]) -> str:
    """What tells a case, or its row, from others, for people.

    Args:
        keys: As those of a case.

    Returns:
        The words.
    """
    own = keys.get("label", keys.get("estimator", ""))
    parts = [str(keys[part]) for part in _PARTS if part in keys and "label" in keys]
    return " ".join([*parts, own])


def mean_and_error(values: list[Any]) -> tuple[float, float]:
    """Mean and its standard error.

    Args:
        values: Of the seeds; None where there is none.

    Returns:
        NaN for what is not known.
    """
    if not values or any(v is None or not math.isfinite(v) for v in values):
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error
