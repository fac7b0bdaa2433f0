"""Doing what is missing: job by job, or some of them side by side."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from evigrad.engine.allocator import kept_memory
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.experiments.jobs import Job, distinct
from evigrad.experiments.work import KINDS, Place, perform

# Called with what happened to a job, in words, and how many of how many are over.
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Failure:
    """A job that could not be done.

    Attributes:
        job: The job.
        reason: Why, in words.
    """

    job: Job
    reason: str


def missing(jobs: list[Job], place: Place) -> list[Job]:
    """The jobs without a result, and what they need, in an order in which they can be done.

    Args:
        jobs: Wanted.
        place: Where results are.

    Returns:
        Each once.
    """
    return [job for job in distinct(jobs) if place.store.result(job) is None]


def run(jobs: list[Job], place: Place, tell: Tell | None = None) -> list[Failure]:
    """Do all that is missing. What measures time comes last, with nothing beside it.

    Args:
        jobs: Wanted.
        place: Where, and how many at once.
        tell: Told of every job that is over.

    Returns:
        The jobs that failed, and those that needed them.
    """
    left = missing(jobs, place)
    side_by_side = [job for job in left if not KINDS[job.kind].alone]
    ordered = side_by_side + [job for job in left if KINDS[job.kind].alone]
    failures: list[Failure] = []
    over = 0

    def done(job: Job, problem: str | None, seconds: float) -> None:
        nonlocal over
        over += 1
        if problem is not None:
            failures.append(Failure(job, problem))
        if tell is not None:
            words = f"{seconds:.0f} s" if problem is None else f"failed: {problem}"
            tell(f"{job.kind} {job.label}: {words}", over, len(ordered))

    in_pool = place.jobs > 1 and len(side_by_side) > 1
    if in_pool:
        for job, problem, seconds in _pooled(side_by_side, place):
            done(job, problem, seconds)
    for job in ordered[len(side_by_side) :] if in_pool else ordered:
        broken = _broken_need(job, failures)
        problem, seconds = (broken, 0.0) if broken else _attempt(job, place)
        done(job, problem, seconds)
    return failures


def _attempt(job: Job, place: Place) -> tuple[str | None, float]:
    """What went wrong, if anything, and the seconds that it took."""
    try:
        with kept_memory():  # of this process, which may be one of several
            return None, perform(job, place)["job_seconds"]
    except EvigradError as error:
        reason = str(error)
    except Exception as error:
        # As PyTorch's own, out of memory: the other jobs do not depend on it.
        reason = f"{type(error).__name__}: {error}"
    # Where nothing can be written that is the reason itself.
    with suppress(ConfigurationError, OSError):
        place.store.fail(job, reason)
    return reason, 0.0


def _broken_need(job: Job, failures: list[Failure]) -> str | None:
    broken = {failure.job.id for failure in failures}
    if job.needs is not None and job.needs.id in broken:
        return f"what it needs failed ({job.needs.kind} {job.needs.label})"
    return None


def _pooled(jobs: list[Job], place: Place) -> Iterator[tuple[Job, str | None, float]]:
    """Jobs as they are over, none before what it needs."""
    waiting, broken = list(jobs), list[Failure]()
    running: dict[Future[Any], Job] = {}
    # A fresh interpreter each: threads of a forked one would hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(place.jobs, len(jobs)), mp_context=context) as pool:
        try:
            while waiting or running:
                open_ids = {job.id for job in [*waiting, *running.values()]}
                for job in list(waiting):
                    if job.needs is not None and job.needs.id in open_ids:
                        continue
                    waiting.remove(job)
                    if problem := _broken_need(job, broken):
                        broken.append(Failure(job, problem))
                        yield job, problem, 0.0
                    else:
                        running[pool.submit(_attempt, job, place)] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                    job = running.pop(future)
                    problem, seconds = future.result()
                    if problem is not None:
                        broken.append(Failure(job, problem))
                    yield job, problem, seconds
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
