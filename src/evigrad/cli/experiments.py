"""What the commands that run experiments have in common: their options, and running one."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from evigrad.cli.messages import results_console, show
from evigrad.cli.setup import (
    INVARIANCE,
    MOST_THREADS,
    NETWORK,
    check_range,
    device_name,
    set_up,
)
from evigrad.cli.train import FIT_TYPES
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.experiments import Experiment, Job, Place, Store, missing, present, run
from evigrad.experiments.cases import Case, jobs_in
from evigrad.experiments.checks import problems
from evigrad.experiments.kinds import kind_of

PLACE_TYPES: dict[str, Any] = {
    "results": str,
    "jobs": int | None,
    "data_dir": str | None,
    "device": str,
    "threads": int | None,
}
# Beside the options of a training, which name the folder of the data already.
# Jobs at once where nothing is said: more of them may be too much for the memory.
_MOST_JOBS = 4
PLACE_OF_TRAINING = ("results", "jobs", "device", "threads")


def place_of(
    results: str = "results",
    jobs: int | None = None,
    data_dir: str | None = None,
    device: str = "auto",
    threads: int | None = None,
) -> Place:
    """Where experiments run.

    Args:
        results: Folder of all results, by what they are results of: nothing is run twice, what was
            interrupted goes on, and the folder can be moved.
        jobs: Runs side by side, each in a process of its own. What measures time runs alone.
            Default: one for each core of the CPU, four at most; one on a GPU.
        data_dir: Folder with NAME_train.parquet and NAME_test.parquet. Default: the environment
            variable EVIGRAD_DATA.
        device: Where to compute: cpu, cuda, or auto (cuda if there is one).
        threads: CPU threads of each run. Default: the cores, divided by the runs side by side.

    Returns:
        The place.

    Raises:
        ConfigurationError: If a number makes no sense.
    """
    for name, value in (("jobs", jobs), ("threads", threads)):
        if value is not None:
            check_range(name, value, 1, MOST_THREADS)
    cores = torch.get_num_threads()
    on_cpu = device_name(device) == "cpu"
    together = jobs or (1 if not on_cpu else max(1, min(cores // (threads or 1), _MOST_JOBS)))
    each = threads or max(1, cores // together)
    return Place(Store(results), data_dir, device, each, together)


def place_from(options: Namespace) -> Place:
    """The place that options name.

    Args:
        options: With those of ``PLACE_TYPES``.

    Returns:
        The place.
    """
    return place_of(**{name: options[name] for name in PLACE_TYPES})


def training_options(options: Namespace) -> dict[str, Any]:
    """Those of a training among the options of a command.

    Args:
        options: Of a command with ``evigrad.cli.train.add_training``.

    Returns:
        Name to value.
    """
    known = {*NETWORK, *INVARIANCE, *FIT_TYPES} - {*PLACE_TYPES, "progress"}
    found = {name: options[name] for name in known if name in options}
    if found["model"] is None:  # known by the data alone, and part of every title
        names = ("data", "data_dir", "target", "likelihood")
        found["model"] = set_up(**{name: options[name] for name in names}).model_name
    return found


def add_list(group: Any, flag: str, kind: type, default: Sequence[Any] | None, words: str) -> None:
    """Add an option that takes several values.

    Args:
        group: Where it goes.
        flag: As ``--seeds``.
        kind: Type of each value.
        default: Values where there are none, or None.
        words: Its description.
    """
    group.add_argument(
        flag,
        type=kind,
        nargs="+",
        default=None if default is None else list(default),
        metavar="N" if kind is int else "NAME",
        help=words,
    )


def reproduce(experiment: Experiment, place: Place) -> int:
    """Run what is missing of an experiment, draw its figure, print its table.

    Args:
        experiment: Any.
        place: Where.

    Returns:
        The exit code: 1 where a run failed.
    """
    cases = kind_of(experiment).cases(experiment)
    jobs = jobs_in(cases)
    forbidden = _left_out(cases, missing(jobs, place), place)
    jobs = [job for job in jobs if job.id not in forbidden]
    left = missing(jobs, place)
    preset = f", {experiment.preset}" if experiment.preset else ""
    show("note", f"{experiment.name}{preset}: {experiment.title}")
    if jobs:
        done = len(jobs) - len(left)
        show("note", f"{done} of {len(jobs)} jobs are done, in {place.store.path}")
    start = time.perf_counter()
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(experiment.name, total=len(left))

        def tell(words: str, over: int, count: int) -> None:
            bar.update(task, completed=over)
            line = f"[{over}/{count}] {words}"
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True, style="dim")

        failures = run(jobs, place, tell)
    by_reason: dict[str, list[str]] = {}
    for failure in failures:
        name = f"{failure.job.kind} {failure.job.label}"
        by_reason.setdefault(failure.reason, []).append(name)
    for reason, names in by_reason.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        show("warning", f"{names[0]}{others} failed: {reason}")
    if left:
        show("note", f"{len(left) - len(failures)} jobs in {time.perf_counter() - start:.0f} s")
    try:
        shown = present(experiment, place.store)
    except EvigradError as error:
        show("error", str(error))
        return 1
    results_console().print(shown.table, markup=False, highlight=False, soft_wrap=True)
    for remark in shown.remarks:
        show("note", remark)
    show("note", f"Figure, tables and summary: {shown.folder}")
    return 1 if failures or forbidden else 0


def _left_out(cases: Sequence[Case], left: Sequence[Job], place: Place) -> set[str]:
    """The jobs that cannot be done here, after saying why; refuses if nothing could be shown."""
    found = problems(left, place)
    forbidden = {job.id for jobs in found.values() for job in jobs}
    if cases and all(any(job.id in forbidden for job in case.jobs.values()) for case in cases):
        raise ConfigurationError("\n".join(found))
    for reason, jobs in found.items():
        show("warning", f"{len(jobs)} of {len(left)} jobs are left out: {reason}")
        for job in jobs:
            place.store.fail(job, reason)
    return forbidden
