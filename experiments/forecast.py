"""Predict how long jobs take on this machine, before any of them runs.

A few examples of random data go through the network of a job. From two sizes follow the time of
each example and that of each call. Matrix products and eigenvalues are timed once, and scaled by
their numbers of operations. The steps are counted from the settings of the training. Nothing is
loaded, so the data sets need not be here.

The prediction ignores evaluations of the test data and checkpoints. Its error is about a factor of
two (``benchmarks/forecast.py``).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from evigrad.cli.setup import read_invariance
from evigrad.core.names import Estimator
from evigrad.errors import EvigradError
from evigrad.evidence import Evidence
from evigrad.likelihoods import Categorical
from evigrad.models import make_network
from evigrad.network.modes import seeded
from evigrad.priors import GaussianPrior
from experiments.along import PRECISION
from experiments.checks import INVARIANCE, SHAPES, network_record
from experiments.jobs import WITHOUT_ESTIMATE, Job
from experiments.trainings import Place

# Numbers of examples of the two measurements. The second takes about half a second.
_FEW, _MORE, _MOST, _SECONDS = 2, 6, 64, 0.5
# Each time is the shortest of the calls that this number of seconds allows, and at least of two.
_REPEATED = 0.3
# Sizes of the matrices whose products and eigenvalues are timed.
_PRODUCT, _EIGEN = 768, 384
# Operations of a Cholesky factorization and of an inverse, divided by n³, and of the Gram matrix of
# R rows of n numbers, divided by R² n.
_FACTOR, _GRAM = 1.0, 1.25
# Seconds of a step on a statistic that is kept, without its matrices.
_KEPT_STEP = 5e-4
# Share of the rows of an anchored estimator that its draws have in common.
_ANCHORS = 0.9
# Repetitions inside the job that measures a time.
_REPETITIONS = 8


@dataclass(frozen=True)
class Line:
    """The time of a call in seconds, as a linear function of the number of examples."""

    call: float
    example: float

    def of(self, count: float) -> float:
        """Return the time for ``count`` examples in one call."""
        return self.call + self.example * count


def forecast(jobs: Sequence[Job], place: Place) -> dict[str, float]:
    """Return the predicted seconds of each job by its id. Jobs of unknown data are left out.

    Args:
        jobs: Jobs.
        place: Threads and device of the runs.
    """
    torch.set_num_threads(place.threads)
    seconds: dict[str, float] = {}
    for job in jobs:
        if job.training["data"].partition(":")[0] not in SHAPES:
            continue
        try:
            seconds[job.id] = _seconds(job, _costs_of(job.training))
        except EvigradError:  # ``checks.problems`` reports why the job cannot run
            continue
    return seconds


def _seconds(job: Job, costs: "_Costs") -> float:
    training, options = job.training, job.options
    if job.kind == "train":
        return costs.training(training)
    if job.kind == "time":
        spec = Estimator.parse(training["estimator"])
        return _REPETITIONS * (costs.estimate(spec, True) + costs.step(training["batch_size"]))
    if job.kind == "curves":
        # All estimators share one pass over the data and one kernel per point.
        return len(options["grid"]) * costs.estimate(Estimator.parse("ntk-N-C"), False)
    spec = Estimator.parse(options["estimator"])
    most = math.inf if options["blocks"] is None else options["blocks"]
    blocks = min(most, costs.blocks(spec))
    if job.kind == "evaluate":
        return blocks * costs.estimate(spec, False)
    points = len(options["grid"])
    if options["hyperparameter"] == PRECISION:
        return blocks * (costs.estimate(spec, False) + costs.eigen(spec) + points * _KEPT_STEP)
    return blocks * points * costs.estimate(spec, False)


class _Costs:
    """Times of the repeated parts of trainings of one network on data of one size.

    Args:
        model: The network, with random weights.
        shape: Shape of an input.
        num_outputs: C, the number of classes.
        num_data: N, the number of training examples.
        learned: Names of the model's learned hyperparameters.
        lines: The measured times, which data sets of other sizes share.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: Sequence[int],
        num_outputs: int,
        num_data: int,
        learned: Sequence[str],
        lines: "dict[tuple[str, bool], Line]",
    ) -> None:
        self.model, self.num_outputs, self.num_data = model, num_outputs, num_data
        self.learned = list(learned)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(_MOST, *shape, generator=generator)
        self.y = torch.randint(num_outputs, (_MOST,), generator=generator)
        self._lines = lines

    # ------------------------------------------------------------ trainings

    def training(self, settings: Mapping[str, Any]) -> float:
        """Return the time of a training with these settings."""
        epochs, batch = settings["epochs"], settings["batch_size"]
        batches = math.ceil(self.num_data / batch)
        total = epochs * batches * self.step(min(batch, self.num_data))
        if settings["estimator"] in WITHOUT_ESTIMATE:
            return total
        spec, rounds = Estimator.parse(settings["estimator"]), _rounds
        steps, every = settings["steps"], settings["every"]
        hyper_steps = settings["hyper_steps"] or steps
        apart = settings["hyper_every"] is not None or settings["hyper_steps"] is not None
        if self.learned and not apart:
            return total + rounds(settings, every) * self.round(spec, steps, True)
        total += rounds(settings, every) * self.round(spec, steps, False)
        if self.learned:
            of_model = rounds(settings, settings["hyper_every"] or every)
            total += of_model * self.round(spec, hyper_steps, True)
        return total

    def round(self, spec: Estimator, steps: int, of_model: bool) -> float:
        """Return the time of a round of steps, of the model's hyperparameters or of the prior."""
        choice = self.step(self.num_data) / 3 if spec.anchored else 0.0  # a forward pass
        if not of_model and spec.is_full_batch:
            return self.estimate(spec, False) + steps * (_KEPT_STEP + self._solve_kept(spec))
        if not of_model and spec.anchored:  # the steps share the pass over the anchors
            rows = _ANCHORS + steps * (1 - _ANCHORS)
            return choice + rows * self.estimate(spec, False) + steps * self.solve(spec)
        return choice + steps * self.estimate(spec, of_model)

    def step(self, count: int) -> float:
        """Return the time of a step of the weights on ``count`` examples."""
        return self._line("map", False).of(count)

    # ------------------------------------------------------------ estimates

    def blocks(self, spec: Estimator) -> int:
        """Return the number of blocks of a partition."""
        if spec.rows:
            drawn = (spec.subset or 1) * ((1 - _ANCHORS) if spec.anchored else 1)
            return max(1, round(self.num_data * self.num_outputs / drawn))
        of_outputs = 1 if spec.outputs is None else math.ceil(self.num_outputs / spec.outputs)
        return max(1, round(self.num_data / self._examples(spec))) * of_outputs

    def estimate(self, spec: Estimator, of_model: bool) -> float:
        """Return the time of an estimate and its gradient, without ``solve``."""
        drawn = 1 if spec.rows else spec.outputs or self.num_outputs
        outputs = "C" if drawn >= self.num_outputs else str(drawn)
        line = self._line(f"{spec.structure}-{{}}-{outputs}", of_model and bool(self.learned))
        products = 0.0
        if spec.kind.keeps_rows or spec.structure in ("full", "blockdiag"):
            rows, weights = self._rows(spec), sum(w.numel() for w in self.model.parameters())
            products = _GRAM * rows * weights * min(rows, weights) * _operation_seconds()
        # Larger blocks than the measured ones go through the network twice.
        again = self.step(self._examples(spec)) if of_model and self.learned else 0.0
        return line.of(self._examples(spec)) + again + products + self.solve(spec)

    def solve(self, spec: Estimator) -> float:
        """Return the time of a log-determinant and its gradient for a kept statistic."""
        if spec.structure == "kfac":
            sizes = [(len(w), w.numel() // len(w)) for w in self.model.parameters() if w.dim() > 1]
            return sum(_eigen_seconds(size) for pair in sizes for size in pair)
        if spec.structure == "diag":
            return 0.0
        weights = sum(w.numel() for w in self.model.parameters())
        return _FACTOR * min(self._rows(spec), weights) ** 3 * _operation_seconds()

    def eigen(self, spec: Estimator) -> float:
        """Return the time of the eigenvalues that all steps on a single precision share."""
        weights = sum(w.numel() for w in self.model.parameters())
        if spec.structure in ("kfac", "diag"):
            return 0.0
        return _eigen_seconds(min(self._rows(spec), weights))

    def _solve_kept(self, spec: Estimator) -> float:
        """Return the time of ``solve`` for a later step. KFAC keeps its eigenvalues."""
        return 0.0 if spec.structure == "kfac" else self.solve(spec)

    def _examples(self, spec: Estimator) -> int:
        return min(spec.subset or self.num_data, self.num_data)

    def _rows(self, spec: Estimator) -> int:
        if spec.rows:
            return spec.subset or 1
        # A softmax has one degree of freedom less than outputs.
        each = self.num_outputs - 1 if spec.outputs is None else spec.outputs
        return self._examples(spec) * each

    def _line(self, name: str, of_model: bool) -> Line:
        """Return the measured time of a step of the weights (``map``) or of an estimator."""
        key = (name, of_model)
        if key not in self._lines:
            few = self._measured(name, of_model, _FEW)
            size = min(max(int(_SECONDS * _FEW / few), _MORE), _MOST)
            more = self._measured(name, of_model, size)
            example = max((more - few) / (size - _FEW), 0.2 * more / size)
            self._lines[key] = Line(max(few - _FEW * example, 0.0), example)
        return self._lines[key]

    def _measured(self, name: str, of_model: bool, size: int) -> float:
        x, y = self.x[:size], self.y[:size]
        evidence = Evidence(
            self.model,
            Categorical(),
            GaussianPrior("layerwise"),
            estimator=f"ntk-{size}-1" if name == "map" else name.format(size),
            num_data=size,
            hyperparameters=self.learned,
            generator=0,
        )
        weights = list(evidence.weights().values())
        wrt = None if of_model else ["prior"]

        def act() -> None:
            if name == "map":
                torch.autograd.grad(evidence.map_loss(x, y), weights, allow_unused=True)
            else:
                evidence.backward(x, y, wrt=wrt)

        for _ in range(2):  # derivatives are checked in these passes
            act()
        return _shortest(act)


def _rounds(settings: Mapping[str, Any], every: int) -> int:
    first = settings["burn_in"] or every
    return len(range(first, settings["epochs"] + 1, every))


def _costs_of(training: Mapping[str, Any]) -> _Costs:
    name = training["data"].partition(":")[0]
    shape, num_outputs, num_data = SHAPES[name]
    options = ("model", "depth", "width", *INVARIANCE)
    network = _network(name, tuple((option, training[option]) for option in options))
    num_data = min(training["subset"] or num_data, num_data)
    model, learned, lines = network
    return _Costs(model, shape, num_outputs, num_data, learned, lines)


@cache
def _network(
    data: str, settings: tuple[tuple[str, Any], ...]
) -> tuple[nn.Module, Sequence[str], dict[tuple[str, bool], Line]]:
    """Return a network, the names of its learned hyperparameters, and a place for its times."""
    training = {"data": data, **dict(settings)}
    invariance = read_invariance(*(training[option] for option in INVARIANCE))
    black = [0.0] * SHAPES[data][0][0]
    averaged = None if invariance is None else invariance.as_record(black)
    model = make_network({"model": network_record(training), "invariance": averaged}, 0)
    return model, () if invariance is None else invariance.hyperparameters, {}


# ------------------------------------------------------------ the machine


@cache
def _operation_seconds() -> float:
    """Return the time of a multiplication and an addition in a large matrix product."""
    a = torch.ones(_PRODUCT, _PRODUCT)
    return _shortest(lambda: a @ a) / (2 * _PRODUCT**3)


def _eigen_seconds(size: int) -> float:
    """Return the time of the eigenvalues and eigenvectors of a symmetric matrix."""
    return _eigen_unit() * size**3


@cache
def _eigen_unit() -> float:
    with seeded(0, torch.device("cpu")):
        a = torch.randn(_EIGEN, _EIGEN)
    return _shortest(lambda: torch.linalg.eigh(a + a.mT)) / _EIGEN**3


def _shortest(act: Callable[[], object]) -> float:
    """Return the time of the shortest of several calls, in seconds."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < _REPEATED:
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return min(times)
