"""The kinds of jobs: trainings, and what is done with a trained network."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from evigrad.cli.resume import CONFIGURATION
from evigrad.cli.setup import Setup
from evigrad.errors import ConfigurationError
from evigrad.experiments.configuration import as_file, make_settings, make_setup
from evigrad.experiments.curves import curve
from evigrad.experiments.jobs import Job
from evigrad.experiments.store import Store
from evigrad.plots import series
from evigrad.training import FitResult, RunDirectory, evaluate_evidence, prepare

RUN = "run"  # the folder of a training inside that of its job
# Of a timing: estimates that are not counted, and how many are, within a time.
_WARMUPS = 2
_SECONDS = 20.0


@dataclass(frozen=True)
class Place:
    """Where jobs find what they need, and where they run; no result depends on it.

    Attributes:
        store: Of the results.
        data_dir: Folder of data sets.
        device: As cpu or cuda.
        threads: CPU threads of each job.
        jobs: How many at once, each in a process of its own if there are several.
    """

    store: Store
    data_dir: str | None = None
    device: str = "auto"
    threads: int = 1
    jobs: int = 1


def perform(job: Job, place: Place) -> dict[str, Any]:
    """Do a job whose needs are done, or go on with it, and keep its result.

    Args:
        job: Any.
        place: Where.

    Returns:
        The result.

    Raises:
        ConfigurationError: If there is no such kind of job.
    """
    if job.kind not in KINDS:
        raise ConfigurationError(f"There are no jobs of the kind '{job.kind}'.")
    torch.set_num_threads(place.threads)
    folder = place.store.begin(job)
    start = time.perf_counter()
    found = KINDS[job.kind].work(job, folder, place)
    # A training that goes on knows what it took before.
    found["job_seconds"] = max(time.perf_counter() - start, found.get("seconds", 0.0))
    found["machine"] = machine(place)
    found["date"] = date.today().isoformat()
    place.store.finish(job, found)
    return found


def machine(place: Place) -> str:
    """The machine in words.

    Args:
        place: Where jobs run.

    Returns:
        Processor or GPU, threads, version of PyTorch.
    """
    uses_gpu = torch.cuda.is_available() and place.device != "cpu"
    if uses_gpu:
        name = torch.cuda.get_device_name()
    else:
        count = "1 thread" if place.threads == 1 else f"{place.threads} threads"
        name = f"{_processor()}, {count}"
    return f"{name}, PyTorch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _train(job: Job, folder: Path, place: Place) -> dict[str, Any]:
    setup, result = trained(job, folder, place)
    last = result.history[-1]
    learned = ("precision", "noise", "range", "model")
    return {
        "name": result.estimator or "map",
        "train": result.train_metrics,
        "test": result.test_metrics,
        "seconds": result.seconds,
        "epochs": len(result.history),
        "history": _recorded(result),
        "hyperparameters": {
            name: value for name, value in last.items() if name.partition("/")[0] in learned
        },
        "num_data": len(setup.data.train[0]),
        "num_weights": sum(w.numel() for w in result.evidence.weights().values()),
    }


def _recorded(result: FitResult) -> dict[str, dict[str, list[float]]]:
    """What can be drawn over the epochs, where it is known."""
    wanted = [
        name
        for name in result.history[0]
        if name in ("log_evidence", "loss") or name.startswith(("test_", "train_", "range/"))
    ]
    found = {}
    for name in wanted:
        epochs, values = series(result.history, name)
        if epochs:
            found[name] = {"epoch": epochs, "value": values}
    return found


def trained(job: Job, folder: Path, place: Place) -> tuple[Setup, FitResult]:
    """Train, or go on with a training, or take up one that is done.

    Args:
        job: A training.
        folder: Its folder.
        place: Where.

    Returns:
        Data and network, and the result with the trained model in it.
    """
    setup = make_setup(job.config, place.data_dir, place.device)
    data = setup.data
    settings = make_settings(job.config, data.likelihood, setup.hyperparameters)
    run = prepare(setup.make_model(), data.train, settings, test=data.test, network=setup.network)
    directory = RunDirectory(folder / RUN, resume=True)
    if not (directory.path / CONFIGURATION).exists():
        directory.write_text(CONFIGURATION, as_file(job.config))
    return setup, run.train(directory, resume=True, progress=False)


def _of_trained(job: Job, place: Place) -> tuple[Setup, FitResult]:
    if job.needs is None:
        raise ConfigurationError(f"A job of the kind '{job.kind}' needs a training.")
    return trained(job.needs, place.store.folder(job.needs), place)


def _evaluate(job: Job, folder: Path, place: Place) -> dict[str, Any]:
    setup, result = _of_trained(job, place)
    config = job.config
    value = evaluate_evidence(
        result.evidence,
        setup.data.train,
        config["estimator"],
        seed=config["seed"],
        blocks=config["blocks"],
    )
    return asdict(value)


def _curve(job: Job, folder: Path, place: Place) -> dict[str, Any]:
    setup, result = _of_trained(job, place)
    return curve(result.evidence, setup.data.train, job.config, folder)


def _time(job: Job, folder: Path, place: Place) -> dict[str, Any]:
    """Seconds of an estimate with its gradient, and of a step of the weights."""
    setup, result = _of_trained(job, place)
    evidence, (x, y) = result.evidence, setup.data.train
    stream = evidence.blocks((x, y))
    blocks = iter(stream)

    def estimate() -> None:
        evidence.backward(next(blocks))

    batch = slice(0, job.needs.config["batch_size"] if job.needs else None)
    weights = list(evidence.weights().values())

    def step() -> None:
        torch.autograd.grad(evidence.map_loss(x[batch], y[batch]), weights)

    def draw() -> None:
        for _ in range(stream.period):
            next(iter(stream))

    times = {
        name: statistics.median(_timed(work, job.config["repeats"]))
        for name, work in (("estimate", estimate), ("draw", draw), ("step", step))
    }
    times["draw"] /= stream.period
    return {
        # With its part of what a round begins with: a partition is drawn, anchors are chosen.
        "estimate_seconds": times["estimate"] + times["draw"] / job.config["round"],
        "draw_seconds": times["draw"],
        "step_seconds": times["step"],
    }


def _timed(work: Callable[[], None], repeats: int) -> list[float]:
    """Seconds of each call, of as many as fit into a time, but one at least."""
    spent, times = 0.0, []
    for number in range(-_WARMUPS, repeats):
        if times and spent > _SECONDS:
            break
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
        spent += taken
        # A slow one needs no second warm-up: what it plans is a small part of it.
        if number >= 0 or (number == -1 and taken > _SECONDS / 2):
            times.append(taken)
    return times


@dataclass(frozen=True)
class Kind:
    """How a kind of job is done.

    Attributes:
        work: Does it: from a job, its folder and the place to a result.
        alone: Whether nothing may run beside it, as it measures time.
    """

    work: Callable[[Job, Path, Place], dict[str, Any]]
    alone: bool = False


KINDS = {
    "train": Kind(_train),
    "evaluate": Kind(_evaluate),
    "curve": Kind(_curve),
    "time": Kind(_time, alone=True),
}
