"""Checks of jobs before anything runs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from evigrad.cli.setup import choose_device, default_model, read_invariance, sizes_of
from evigrad.core.names import Estimator
from evigrad.core.partition import Partition
from evigrad.data import available, load
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.models import make_model
from experiments.along import PRECISION
from experiments.jobs import WITHOUT_ESTIMATE, Job
from experiments.trainings import Place

# Shape of an input, number of classes and number of training examples of data sets. Jobs can be
# checked without loading the data.
SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "digits": ((1, 8, 8), 10, 1438),
    "mnist5k": ((1, 28, 28), 10, 4000),
    "mnist": ((1, 28, 28), 10, 60_000),
    "fashion_mnist": ((1, 28, 28), 10, 60_000),
    "cifar10": ((3, 32, 32), 10, 50_000),
    "cifar100": ((3, 32, 32), 100, 50_000),
    "tiny_imagenet": ((3, 64, 64), 200, 100_000),
}
INVARIANCE = ("invariance", "initial_range", "learn_invariance", "flip", "samples", "average")


def problems(jobs: Sequence[Job], place: Place) -> dict[str, list[Job]]:
    """Return what prevents jobs, before any of them runs.

    Args:
        jobs: Missing jobs.
        place: Where they would run.

    Returns:
        Reasons, with the jobs that each reason prevents and the jobs that need those.
    """
    checked: dict[Any, str | None] = {}  # each data set and network is checked once

    def reason(key: Any, attempt: Callable[[], Any]) -> str | None:
        if key not in checked:
            checked[key] = None
            try:
                attempt()
            except EvigradError as error:
                checked[key] = str(error)
        return checked[key]

    jobs_by_reason: dict[str, list[Job]] = {}
    for job in jobs:
        settings = job.training
        network = tuple(settings[name] for name in ("data", "model", "depth", "width"))
        problem = (
            reason("device", partial(choose_device, place.device))
            or reason(settings["data"], partial(_find, settings["data"], place.data_dir))
            or reason(network, partial(network_of, settings))
            or reason(Job("train", settings).id, partial(_check, settings["estimator"], settings))
            or reason(job.id, partial(_check_options, job))
        )
        if problem is not None:
            jobs_by_reason.setdefault(problem, []).append(job)
    return jobs_by_reason


def _find(name: str, data_dir: str | None) -> None:
    if name.partition(":")[0] not in available(data_dir):
        load(name, data_dir)  # raises the error


def base_of(training: Mapping[str, Any]) -> str:
    """Return the name of a training's data set, without the variant."""
    return training["data"].partition(":")[0]


def network_of(training: Mapping[str, Any]) -> nn.Module | None:
    """Return the network of a training, with initial weights and without any invariance.

    Args:
        training: Options of the training.

    Returns:
        The network. None if the shape of the data is unknown before loading.

    Raises:
        EvigradError: If there is no such network, or if it does not accept the data.
    """
    if base_of(training) not in SHAPES:
        return None
    return make_model(**network_record(training), seed=0)


def network_record(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of the network of a training, for data in ``SHAPES``."""
    shape, num_outputs, _ = SHAPES[base_of(training)]
    name = training["model"] or default_model(shape)
    sizes = sizes_of(name, training["depth"], training["width"])
    return {"name": name, "input_shape": shape, "num_outputs": num_outputs, **sizes}


def _check(estimator: str | None, training: Mapping[str, Any]) -> None:
    if estimator in WITHOUT_ESTIMATE:
        return
    spec = Estimator.parse(estimator or "")
    if (name := base_of(training)) in SHAPES:
        _, num_outputs, num_data = SHAPES[name]
        Partition(spec, min(training["subset"] or num_data, num_data), num_outputs)


def _check_options(job: Job) -> None:
    single = [job.options["estimator"]] if "estimator" in job.options else []
    for estimator in job.options.get("estimators", single):
        _check(estimator, job.training)
    if job.kind not in ("curve", "curves"):
        return
    name, least = job.options["hyperparameter"], min(job.options["grid"])
    if name == PRECISION:
        if least <= 0:
            raise ConfigurationError(
                f"A precision must be positive, but the grid starts at {least:g}."
            )
        return
    invariance = read_invariance(*(job.training[option] for option in INVARIANCE))
    ranges = [] if invariance is None else list(invariance.ranges)
    if name not in ranges:
        raise ConfigurationError(
            f"There is no hyperparameter '{name}' to draw along. Use {PRECISION}, or the range of a"
            f" transform of the training's invariance ({', '.join(ranges) or 'it has none'})."
        )
