"""Run missing jobs one after another: trainings, and work with a trained network."""

import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from evigrad.errors import ConfigurationError, EvigradError
from evigrad.measure import evaluate_evidence
from evigrad.training import FitResult
from experiments.along import curves_along, evidence_along
from experiments.jobs import Job, Store, distinct, is_kept
from experiments.times import time_steps
from experiments.trainings import Place, trained

RUN = "run"  # folder of a training inside the folder of its job
PARTIAL = "partial.json"  # the finished part of a curve
_DIGITS = 6  # significant digits of the stored metrics of all epochs

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


def run(jobs: Sequence[Job], place: Place, tell: Tell | None = None) -> list[Failure]:
    """Run all missing jobs: first trainings, then jobs that need them, and finally timings.

    Args:
        jobs: Jobs to run.
        place: Folder and device.
        tell: Function that is called after every job.

    Returns:
        The failed jobs, and the jobs that needed them.
    """
    store = Store(place.results)
    left = missing(jobs, store)
    failures: list[Failure] = []
    in_order = sorted(left, key=lambda job: {"train": 0, "time": 2}.get(job.kind, 1))
    for over, job in enumerate(in_order, 1):
        if job.needs is None or store.result(job.needs) is not None:
            problem, seconds = attempt(job, place)
        else:
            problem, seconds = f"a required job failed ({job.needs.label})", 0.0
        if problem is not None:
            failures.append(Failure(job, problem))
        if tell is not None:
            message = f"{seconds:.0f} s" if problem is None else f"failed: {problem}"
            tell(f"{job.label}: {message}", over, len(left))
    return failures


def attempt(job: Job, place: Place) -> Outcome:
    """Run a job. Its error does not affect other jobs."""
    try:
        return None, perform(job, place)["job_seconds"]
    except EvigradError as error:
        reason = str(error)
    except Exception as error:  # such as PyTorch's error when the memory is full
        reason = f"{type(error).__name__}: {error}"
    # If the folder cannot be written, that is the reason of the failure.
    with suppress(ConfigurationError, OSError):
        Store(place.results).fail(job, reason)
    return reason, 0.0


def perform(job: Job, place: Place) -> dict[str, Any]:
    """Run or resume a job whose needs are done, and store its result.

    Args:
        job: Job.
        place: Where to run.

    Returns:
        The result.
    """
    torch.set_num_threads(place.threads)
    store = Store(place.results)
    folder, start = store.begin(job), time.perf_counter()
    job_result = _result(job, folder, store.folder(job.needs or job) / RUN, place)
    # The time of a resumed training includes its earlier runs.
    job_result["job_seconds"] = max(time.perf_counter() - start, job_result.get("seconds", 0.0))
    job_result |= {"machine": machine(place), "date": date.today().isoformat()}
    store.finish(job, job_result)
    return job_result


def _result(job: Job, folder: Path, run: Path, place: Place) -> dict[str, Any]:
    setup, result = trained(job.training, run, place)
    data, seed, options = setup.data.train, job.training["seed"], dict(job.options)
    if job.kind == "train":
        return _trained(result) | {"num_data": len(data[0])}
    if job.kind == "time":
        steps = job.training["hyper_steps"] or job.training["steps"]
        times = time_steps(result.evidence, data, job.training["batch_size"], steps)
        return {f"{name}_seconds": value for name, value in asdict(times).items()}
    partial = folder / PARTIAL
    if job.kind == "curves":
        return curves_along(result.evidence, data, seed=seed, partial=partial, **options)
    name = options.pop("estimator")
    if job.kind == "evaluate":
        return asdict(evaluate_evidence(result.evidence, data, name, seed=seed, **options))
    return evidence_along(result.evidence, data, name, seed=seed, partial=partial, **options)


def _trained(result: FitResult) -> dict[str, Any]:
    history: dict[str, dict[str, list[float]]] = {}
    for row in result.history:
        for name, value in row.items():
            if is_kept(name) and value is not None and math.isfinite(value):
                column = history.setdefault(name, {"epoch": [], "value": []})
                column["epoch"].append(row["epoch"] or 0)
                column["value"].append(float(f"{value:.{_DIGITS}g}"))
    return {
        "train": result.train_metrics,
        "test": result.test_metrics,
        "seconds": result.seconds,
        "epochs": len(result.history),
        "history": history,
        "num_weights": sum(w.numel() for w in result.evidence.weights().values()),
    }


def machine(place: Place) -> str:
    """Return processor or GPU, threads, and version of PyTorch."""
    if torch.cuda.is_available() and place.device != "cpu":
        name = torch.cuda.get_device_name()
    else:
        count = "1 thread" if place.threads == 1 else f"{place.threads} threads"
        name = f"{_processor()}, {count}"
    return f"{name}, PyTorch {torch.__version__}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
