"""What is shown of an experiment: its figure, its table, how much of it is done."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evigrad.drawing import save
from evigrad.errors import ConfigurationError
from evigrad.experiments.cases import Case, Row, coverage, jobs_in, rows_of, seeds_of
from evigrad.experiments.cost import expected_seconds
from evigrad.experiments.definition import Experiment
from evigrad.experiments.jobs import Job
from evigrad.experiments.kinds import kind_of
from evigrad.experiments.store import Store, write_json
from evigrad.experiments.work import KINDS
from evigrad.training.files import replacing

# Seconds of ``_yardstick`` on the machine of the rates of ``evigrad.experiments.cost``.
_REFERENCE = 0.10

SUMMARY = "summary.json"
_MOST_NAMES = 12  # in a sentence


@dataclass(frozen=True)
class State:
    """How much of an experiment is done.

    Attributes:
        done: Jobs with a result.
        total: Jobs in all.
        spent: Seconds of those that are done.
        left: Seconds that the others are expected to take one after the other on a thread of a
            CPU; None if that is not known of one.
    """

    done: int
    total: int
    spent: float
    left: float | None


@dataclass(frozen=True)
class Shown:
    """The files of an experiment.

    Attributes:
        folder: Where they are.
        figure: As PNG; None for a table alone.
        table: As Markdown.
        remarks: What theory demands and whether it holds.
        state: How much was done.
    """

    folder: Path
    figure: Path | None
    table: str
    remarks: Sequence[str]
    state: State


def jobs_of(experiment: Experiment) -> list[Job]:
    """All jobs of an experiment.

    Args:
        experiment: Any.

    Returns:
        Each once, with what it needs before it.
    """
    return jobs_in(kind_of(experiment).cases(experiment))


def has_results(experiment: Experiment, store: Store) -> bool:
    """Whether there is something to present.

    Args:
        experiment: Any.
        store: Results.

    Returns:
        True too where nothing is to be run.
    """
    cases = kind_of(experiment).cases(experiment)
    return not cases or bool(rows_of(cases, store))


def state_of(experiment: Experiment, store: Store, speed: float = 1.0) -> State:
    """How much of an experiment is done.

    Args:
        experiment: Any.
        store: Results.
        speed: Of this machine, over that of the rates of ``evigrad.experiments.cost``.

    Returns:
        The state.
    """
    jobs = jobs_of(experiment)
    return _state(jobs, [store.result(job) for job in jobs], speed)


def _state(
    jobs: Sequence[Job],
    results: Sequence[Mapping[str, Any] | None],
    speed: float = 1.0,
) -> State:
    known = [result for result in results if result is not None]
    expected = [
        expected_seconds(job, speed)
        for job, result in zip(jobs, results, strict=True)
        if result is None
    ]
    left = None if None in expected else math.fsum(each for each in expected if each is not None)
    spent = float(sum(result["job_seconds"] for result in known))
    return State(done=len(known), total=len(jobs), spent=spent, left=left)


def machine_speed() -> float:
    """Speed of this machine over that of the rates, from a third of a second of work.

    Returns:
        Above 1 for a faster machine.
    """
    _yardstick()
    return _REFERENCE / min(_yardstick() for _ in range(3))


def _yardstick() -> float:
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 8, 28, 28, generator=generator)
    kernel = torch.randn(16, 8, 5, 5, generator=generator)
    matrix = torch.randn(600, 600, generator=generator)
    torch.set_num_threads(1)
    try:
        start = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.conv2d(images, kernel)
            torch.mm(matrix, matrix)
        return time.perf_counter() - start
    finally:
        torch.set_num_threads(before)


def _warnings(
    cases: Sequence[Case],
    rows: Sequence[Row],
    done: Sequence[tuple[Job, Mapping[str, Any] | None]],
    store: Store,
) -> list[str]:
    """What is not there, and what forbids to compare the rows with each other, in words."""
    found = []
    covered = coverage(cases, rows)
    if left := [name for name, (some, _) in covered.items() if not some]:
        found.append(f"Not run: {_enumerated(left)}.")
    partial = {name: both for name, both in covered.items() if 0 < both[0] < both[1]}
    if len(set(partial.values())) == 1 and len(partial) + len(left) == len(covered):
        some, all_ = next(iter(partial.values()))
        found.append(f"So far {some} of {all_} seeds.")
    elif partial:
        words = [f"{name} ({some} of {all_})" for name, (some, all_) in partial.items()]
        found.append(f"Means of fewer seeds than those of the others: {_enumerated(words)}.")
    reasons = [store.failure(job) for job, result in done if result is None]
    for reason, count in Counter(reason for reason in reasons if reason is not None).items():
        found.append(f"Failed, {count} {'job' if count == 1 else 'jobs'}: {reason}")
    timed = {result["machine"] for job, result in done if result and KINDS[job.kind].alone}
    if len(timed) > 1:
        found.append(f"Times of several machines: {'; '.join(sorted(timed))}.")
    return found


def _enumerated(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def shown_in(experiment: Experiment, store: Store) -> Path:
    """The folder of an experiment's figure and tables.

    Args:
        experiment: Any.
        store: Results.

    Returns:
        A folder of it.
    """
    # One of a command line has no preset, and others may have its name.
    return store.path / "shown" / experiment.name / (experiment.preset or experiment.digest)


def present(experiment: Experiment, store: Store) -> Shown:
    """Draw what is known of an experiment, and write its table.

    Args:
        experiment: Any.
        store: Results; the files go into a folder of it.

    Returns:
        The files.

    Raises:
        ConfigurationError: If there is no result as yet.
    """
    kind = kind_of(experiment)
    cases = kind.cases(experiment)
    rows = rows_of(cases, store)
    if cases and not rows:
        preset = f" ({experiment.preset})" if experiment.preset else ""
        raise ConfigurationError(f"Nothing of {experiment.name}{preset} is done.")
    folder = shown_in(experiment, store)
    folder.mkdir(parents=True, exist_ok=True)
    table = kind.table(experiment, rows)
    for ending, text in (
        ("md", table.markdown() + "\n"),
        ("csv", table.csv()),
        ("tex", table.latex()),
    ):
        with replacing(folder / f"table.{ending}") as file:
            file.write(text.encode("utf-8"))
    picture = None
    if kind.figure is not None:
        figure = kind.figure(experiment, rows)
        picture = save(figure, folder / "figure.png")
        figure.savefig(folder / "figure.pdf")
    jobs = jobs_in(cases)
    results = [store.result(job) for job in jobs]
    state = _state(jobs, results)
    remarks = [] if kind.remarks is None else kind.remarks(experiment, rows)
    remarks = [*remarks, *_warnings(cases, rows, list(zip(jobs, results, strict=True)), store)]
    known = [result for result in results if result is not None]
    write_json(
        folder / SUMMARY,
        {
            "name": experiment.name,
            "preset": experiment.preset,
            "shows": experiment.shows,
            "seeds": sorted(seeds_of(rows)),
            "num_data": sorted({result["num_data"] for result in known if "num_data" in result}),
            "jobs": [state.done, state.total],
            "seconds": state.spent,
            "machines": sorted({result["machine"] for result in known}),
            "dates": sorted({result["date"] for result in known}),
            "remarks": remarks,
        },
    )
    return Shown(folder, picture, table.markdown(), remarks, state)
