"""Doing what is missing: one after the other, side by side, or on a cluster."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import submitit
import yaml

from evigrad import EvigradError, kept_memory
from evigrad.errors import ConfigurationError
from experiments.jobs import Job, Store, distinct
from experiments.trainings import Place, processes
from experiments.work import RUN, perform

# Called with what happened to a job, in words, and how many of how many are over.
Tell = Callable[[str, int, int], None]
# What went wrong, if anything, and the seconds that it took.
Outcome = tuple[str | None, float]


@dataclass(frozen=True)
class Failure:
    """A job that could not be done, and why, in words."""

    job: Job
    reason: str


def missing(jobs: Sequence[Job], store: Store) -> list[Job]:
    """The jobs without a result, and what they need, each once, in an order to do them in.

    An imported training has a result but no network: it is trained again where that is needed.
    """
    every = distinct(jobs)
    left = {job.id for job in every if store.result(job) is None}
    needed = [job.needs for job in every if job.id in left and job.needs is not None]
    left |= {job.id for job in needed if not (store.folder(job) / RUN).exists()}
    return [job for job in every if job.id in left]


def run(
    jobs: Sequence[Job], place: Place, tell: Tell | None = None, cluster: Path | None = None
) -> list[Failure]:
    """Do all that is missing: trainings, what needs them, and alone, what measures time.

    Args:
        jobs: Wanted.
        place: Where, and how many at once.
        tell: Told of every job that is over.
        cluster: A file as of ``cluster_executor``, to run there. Default: on this machine.

    Returns:
        The jobs that failed, and those that needed them.
    """
    store = Store(place.results)
    left = missing(jobs, store)
    waves: list[list[Job]] = [[], [], []]
    for job in left:
        waves[{"train": 0, "time": 2}.get(job.kind, 1)].append(job)
    failures: list[Failure] = []
    over = 0
    if left:
        store.project()
    alone = place.jobs == 1 or len(left) < 2 or cluster is not None
    with nullcontext() if alone else processes(place.jobs) as pool:
        for number, wave in enumerate(waves):
            ready = [j for j in wave if j.needs is None or store.result(j.needs) is not None]
            broken = [
                (job, (f"what it needs failed ({job.needs.label})", 0.0))
                for job in wave
                if job.needs is not None and job not in ready
            ]
            over_now = _done(ready, place, pool if number < 2 else None, cluster)
            for job, (problem, seconds) in chain(broken, over_now):
                over += 1
                if problem is not None:
                    failures.append(Failure(job, problem))
                if tell is not None:
                    words = f"{seconds:.0f} s" if problem is None else f"failed: {problem}"
                    tell(f"{job.label}: {words}", over, len(left))
    return failures


def _done(
    jobs: Sequence[Job], place: Place, pool: ProcessPoolExecutor | None, cluster: Path | None
) -> Iterator[tuple[Job, Outcome]]:
    """Jobs that do not need each other, as they are over."""
    if cluster is not None and jobs:
        executor = cluster_executor(cluster, place)
        with executor.batch():
            handles = [executor.submit(attempt, job, place) for job in jobs]
        by_id = {handle.job_id: job for handle, job in zip(handles, jobs, strict=True)}
        for handle in submitit.helpers.as_completed(handles, poll_frequency=1.0):
            yield by_id[handle.job_id], _outcome(handle)
    elif pool is None:
        for job in jobs:
            yield job, attempt(job, place)
    else:
        futures = {pool.submit(attempt, job, place): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], _outcome(future)


def _outcome(over: Future[Outcome] | submitit.Job[Outcome]) -> Outcome:
    """Of a process that may have been killed, as for its memory or its time."""
    error = over.exception()
    return over.result() if error is None else (f"{type(error).__name__}: {error}", 0.0)


def cluster_executor(file: Path, place: Place) -> submitit.AutoExecutor:
    """What gives jobs to a cluster.

    Args:
        file: YAML: ``cluster``, as slurm, and parameters of submitit's ``AutoExecutor``, as
            timeout_min, gpus_per_node, slurm_partition, slurm_array_parallelism.
        place: Its folder of results is one that all machines see.

    Returns:
        The executor, whose own files are in the folder of results.

    Raises:
        ConfigurationError: If the file cannot be read, or there is no such cluster or parameter.
    """
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        cluster = settings.pop("cluster", None)
        executor = submitit.AutoExecutor(folder=place.results / "cluster", cluster=cluster)
        executor.update_parameters(**settings)
    except Exception as error:  # submitit's are of many types
        raise ConfigurationError(f"The cluster of {file} cannot be used: {error}") from error
    return executor


def attempt(job: Job, place: Place) -> Outcome:
    """Do a job; an error is its own, and the other jobs do not depend on it."""
    try:
        with kept_memory():  # of this process, which may be one of several
            return None, perform(job, place)["job_seconds"]
    except EvigradError as error:
        reason = str(error)
    except Exception as error:  # as PyTorch's own, out of memory
        reason = f"{type(error).__name__}: {error}"
    # Where nothing can be written that is the reason itself.
    with suppress(ConfigurationError, OSError):
        Store(place.results).fail(job, reason)
    return reason, 0.0
