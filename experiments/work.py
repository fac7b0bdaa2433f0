"""The kinds of jobs: trainings, and work with a trained network."""

import math
import platform
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from evigrad.measure import evaluate_evidence
from evigrad.training import FitResult
from experiments.along import curves_along, evidence_along
from experiments.jobs import Job, Store, is_kept
from experiments.times import time_steps
from experiments.trainings import Place, trained

RUN = "run"  # folder of a training inside the folder of its job
PARTIAL = "partial.json"  # the finished part of a curve
_DIGITS = 6  # significant digits of the stored metrics of all epochs


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
