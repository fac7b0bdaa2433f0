"""Results of jobs as rows: one for each case, means and standard errors over the seeds."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evigrad.experiments.jobs import Job
from evigrad.experiments.store import Store

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


@dataclass(frozen=True)
class Mean:
    """A number over the seeds.

    Attributes:
        mean: Their mean, or one for each point of a curve.
        error: Its standard error; NaN of a single one.
        count: How many seeds.
    """

    mean: Any
    error: Any
    count: int


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
    found: dict[tuple[Any, ...], tuple[Row, list[dict[str, Value]]]] = {}
    for case in cases:
        results = {name: store.result(job) for name, job in case.jobs.items()}
        if any(result is None for result in results.values()):
            continue
        known = {name: result for name, result in results.items() if result is not None}
        _, values = found.setdefault(tuple(case.keys.values()), (dict(case.keys), []))
        values.append(case.read(known))
    return [keys | _means(values) for keys, values in found.values()]


def _means(values: list[dict[str, Value]]) -> dict[str, Mean]:
    means: dict[str, Mean] = {}
    for name in values[0]:
        column = [each[name] for each in values]
        curves = [value for value in column if isinstance(value, list)]
        if curves:
            pairs = [mean_and_error(list(point)) for point in zip(*curves, strict=True)]
            means[name] = Mean([m for m, _ in pairs], [e for _, e in pairs], len(column))
        else:
            means[name] = Mean(*mean_and_error(column), len(column))
    return means


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
