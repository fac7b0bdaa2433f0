"""What is wrong with jobs that can be known before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from evigrad.blocks.partitions import Partition
from evigrad.cli.invariance import read_invariance
from evigrad.cli.setup import choose_device, default_model, sizes_of
from evigrad.data import available, load
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.estimators import EstimatorSpec
from evigrad.experiments.curves import PRECISION
from evigrad.experiments.jobs import Job
from evigrad.experiments.work import Place
from evigrad.models import make_model
from evigrad.training.settings import BASELINES


@dataclass(frozen=True)
class Shape:
    """What is known of a data set without loading it.

    Attributes:
        input: Shape of one input.
        outputs: Number of classes C.
        train: Number of training data.
        test: Number of test data.
    """

    input: tuple[int, ...]
    outputs: int
    train: int
    test: int


SHAPES = {
    "digits": Shape((1, 8, 8), 10, 1438, 359),
    "mnist5k": Shape((1, 28, 28), 10, 4000, 1000),
    "mnist": Shape((1, 28, 28), 10, 60_000, 10_000),
    "fashion_mnist": Shape((1, 28, 28), 10, 60_000, 10_000),
    "cifar10": Shape((3, 32, 32), 10, 50_000, 10_000),
    "cifar100": Shape((3, 32, 32), 100, 50_000, 10_000),
    "tiny_imagenet": Shape((3, 64, 64), 200, 100_000, 10_000),
}


class Checks:
    """Looks at jobs, at each data set and network once.

    Args:
        place: Where they would run.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: dict[tuple[Any, ...], str | None] = {}

    def problem(self, job: Job) -> str | None:
        """Why a job cannot be done.

        Args:
            job: Any.

        Returns:
            Words, or None if nothing is known against it.
        """
        train = (job if job.needs is None else job.needs).config
        return (
            self._once(("device",), lambda: choose_device(self._place.device))
            or self._once(("data", train["data"]), lambda: self._find(train["data"]))
            or self._problem_of_network(train)
            or self._once(("job", job.id), lambda: _check(job, train))
        )

    def _problem_of_network(self, train: Mapping[str, Any]) -> str | None:
        shape = shape_of(train)
        if shape is None:
            return None
        names = (shape, train["model"], train["depth"], train["width"])
        return self._once(("network", *names), lambda: network_of(train, shape))

    def _once(self, key: tuple[Any, ...], attempt: Any) -> str | None:
        if key not in self._known:
            self._known[key] = None
            try:
                attempt()
            except EvigradError as error:
                self._known[key] = str(error)
        return self._known[key]

    def _find(self, name: str) -> None:
        if name.partition(":")[0] not in available(self._place.data_dir):
            load(name, self._place.data_dir)  # says what is wrong


def shape_of(train: Mapping[str, Any]) -> Shape | None:
    """The shape of a training's data set.

    Args:
        train: Its options.

    Returns:
        The shape, None if it is not known beforehand.
    """
    return SHAPES.get(train["data"].partition(":")[0])


def network_of(train: Mapping[str, Any], shape: Shape) -> nn.Module:
    """The network of a training.

    Args:
        train: Its options.
        shape: Of its data set.

    Returns:
        The network with initial weights, without any invariance.

    Raises:
        EvigradError: If there is no such network, or it does not take such data.
    """
    name = train["model"] or default_model(shape.input)
    sizes = sizes_of(name, train["depth"], train["width"])
    return make_model(name, shape.input, shape.outputs, seed=0, **sizes)


def problems(jobs: Sequence[Job], place: Place) -> dict[str, list[Job]]:
    """What forbids jobs, before any of them runs.

    Args:
        jobs: Those that are missing.
        place: Where they would run.

    Returns:
        Reasons, and the jobs that each forbids, those that need them with them.
    """
    checks = Checks(place)
    found: dict[str, list[Job]] = {}
    for job in jobs:
        reason = next(filter(None, (checks.problem(each) for each in job.chain())), None)
        if reason is not None:
            found.setdefault(reason, []).append(job)
    return found


def _check(job: Job, train: Mapping[str, Any]) -> None:
    name = job.config.get("estimator")
    shape = shape_of(train)
    if name is not None and name not in BASELINES:
        spec = EstimatorSpec.parse(name)
        if shape is not None:
            Partition(spec, min(train["subset"] or shape.train, shape.train), shape.outputs)
    if job.kind == "curve":
        _check_hyperparameter(job.config, train)


def _check_hyperparameter(curve: Mapping[str, Any], train: Mapping[str, Any]) -> None:
    name, least = curve["hyperparameter"], min(curve["grid"])
    if name == PRECISION:
        if least <= 0:
            raise ConfigurationError(f"A precision is positive; the grid begins at {least:g}.")
        return
    options = ("invariance", "initial_range", "learn_invariance", "flip", "samples", "average")
    invariance = read_invariance(*(train[option] for option in options))
    ranges = [] if invariance is None else list(invariance.ranges)
    if name not in ranges:
        raise ConfigurationError(
            f"There is no hyperparameter '{name}' to go along: {PRECISION}, or the range of a"
            f" transform of the training's invariance ({', '.join(ranges) or 'it has none'})."
        )
