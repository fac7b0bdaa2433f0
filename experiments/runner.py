"""Run missing jobs: one after another, side by side, or on a cluster."""

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

# Called with a message about a job, the number of ended jobs, and the number of all jobs.
Tell = Callable[[str, int, int], None]
# The error of a job, or None, and the seconds that the job took.
Outcome = tuple[str | None, float]


@dataclass(frozen=True)
class Failure:
    """A job that failed, and why."""

    job: Job
    reason: str


def missing(jobs: Sequence[Job], store: Store) -> list[Job]:
    """Return the jobs without a result and the jobs that they need, in a possible order.

    An imported training has a result but no network. It is trained again if its network is needed.
    """
    every = distinct(jobs)
    left = {job.id for job in every if store.result(job) is None}
    needed = [job.needs for job in every if job.id in left and job.needs is not None]
    left |= {job.id for job in needed if not (store.folder(job) / RUN).exists()}
    return [job for job in every if job.id in left]


def run(
    jobs: Sequence[Job], place: Place, tell: Tell | None = None, cluster: Path | None = None
) -> list[Failure]:
    """Run all missing jobs: first trainings, then jobs that need them, and timings by themselves.

    Args:
        jobs: Jobs to run.
        place: Folder, device and number of parallel runs.
        tell: Function that is called after every job.
        cluster: File for ``cluster_executor``. Default: run on this machine.

    Returns:
        The failed jobs, and the jobs that needed them.
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
                (job, (f"a required job failed ({job.needs.label})", 0.0))
                for job in wave
                if job.needs is not None and job not in ready
            ]
            over_now = _done(ready, place, pool if number < 2 else None, cluster)
            for job, (problem, seconds) in chain(broken, over_now):
                over += 1
                if problem is not None:
                    failures.append(Failure(job, problem))
                if tell is not None:
                    message = f"{seconds:.0f} s" if problem is None else f"failed: {problem}"
                    tell(f"{job.label}: {message}", over, len(left))
    return failures


def _done(
    jobs: Sequence[Job], place: Place, pool: ProcessPoolExecutor | None, cluster: Path | None
) -> Iterator[tuple[Job, Outcome]]:
    """Yield independent jobs when they end."""
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
    """Return the outcome of a process that may have been killed, for example for its memory."""
    error = over.exception()
    return over.result() if error is None else (f"{type(error).__name__}: {error}", 0.0)


def cluster_executor(file: Path, place: Place) -> submitit.AutoExecutor:
    """Return the executor that submits jobs to a cluster.

    Args:
        file: YAML file with ``cluster``, such as slurm, and parameters of submitit's
            ``AutoExecutor``, such as timeout_min, gpus_per_node, slurm_partition,
            slurm_array_parallelism.
        place: Place with a folder of results that all machines can access.

    Returns:
        The executor. Its own files are in the folder of results.

    Raises:
        ConfigurationError: If the file cannot be read, or if there is no such cluster or parameter.
    """
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        cluster = settings.pop("cluster", None)
        executor = submitit.AutoExecutor(folder=place.results / "cluster", cluster=cluster)
        executor.update_parameters(**settings)
    except Exception as error:  # submitit raises errors of many types
        raise ConfigurationError(f"The cluster of {file} cannot be used: {error}") from error
    return executor


def attempt(job: Job, place: Place) -> Outcome:
    """Run a job. Its error does not affect other jobs."""
    try:
        with kept_memory():  # this process may be one of several
            return None, perform(job, place)["job_seconds"]
    except EvigradError as error:
        reason = str(error)
    except Exception as error:  # such as PyTorch's error when the memory is full
        reason = f"{type(error).__name__}: {error}"
    # If the folder cannot be written, that is the reason of the failure.
    with suppress(ConfigurationError, OSError):
        Store(place.results).fail(job, reason)
    return reason, 0.0
