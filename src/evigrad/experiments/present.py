"""What is shown of an experiment: its figure, its table, how much of it is done."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evigrad.errors import ConfigurationError
from evigrad.experiments.cases import Case, Row, coverage, jobs_in, rows_of, seeds_of
from evigrad.experiments.definition import Experiment
from evigrad.experiments.jobs import Job
from evigrad.experiments.kinds import kind_of
from evigrad.experiments.store import Store, write_json
from evigrad.experiments.work import KINDS
from evigrad.plots import save
from evigrad.training.files import replacing

SUMMARY = "summary.json"
_MOST_NAMES = 12  # in a sentence


@dataclass(frozen=True)
class State:
    """How much of an experiment is done.

    Attributes:
        done: Jobs with a result.
        total: Jobs in all.
        spent: Seconds that those took, one after the other.
    """

    done: int
    total: int
    spent: float


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


def state_of(experiment: Experiment, store: Store) -> State:
    """How much of an experiment is done.

    Args:
        experiment: Any.
        store: Results.

    Returns:
        The state.
    """
    return _state([store.result(job) for job in jobs_of(experiment)])


def _state(results: Sequence[Mapping[str, Any] | None]) -> State:
    known = [result for result in results if result is not None]
    spent = float(sum(result["job_seconds"] for result in known))
    return State(done=len(known), total=len(results), spent=spent)


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
    state = _state(results)
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
