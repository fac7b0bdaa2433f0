"""Predict how long jobs take on the processors of this machine, before any of them runs.

A few examples of random data go through the network of a job. Two numbers of examples give the time
of a call and the time of an example. If the first of the two is slow, it alone gives the time of an
example. A network that averages over transforms of its inputs is measured with two transforms, and
the time of an example is scaled to their number. Matrix products and eigenvalues are timed once,
and scaled by their numbers of operations. The steps are counted from the settings of the training.
Nothing is loaded, so the data sets need not be here.

The prediction ignores evaluations of the test data and checkpoints. Its error is about a factor of
two (``benchmarks/forecast.py``).
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from evigrad.cli.setup import read_invariance
from evigrad.core.names import Estimator
from evigrad.errors import EvigradError
from evigrad.evidence import Evidence
from evigrad.likelihoods import Categorical
from evigrad.models import make_network
from evigrad.priors import GaussianPrior
from evigrad.training.learner import step_groups
from evigrad.training.plan import plan_schedule, planned
from evigrad.training.settings import Schedule
from experiments.along import PRECISION
from experiments.checks import INVARIANCE, SHAPES, base_of, network_record
from experiments.jobs import WITHOUT_ESTIMATE, Job
from experiments.trainings import Place

# Numbers of examples of the two measurements. The second takes about a second, or has
# ``_MORE`` examples. It is omitted if the first takes longer than ``_SLOW`` seconds.
_FEW, _MORE, _MOST, _SECONDS, _SLOW = 2, 8, 64, 1.0, 1.5
# Largest number of transforms of an example in a measurement.
_TRANSFORMS = 2
# Each time is the shortest of the calls that this number of seconds allows, and at least of two.
# A call that takes longer than ``_SLOW`` is not repeated.
_REPEATED = 0.3
# Sizes of the matrices whose products and eigenvalues are timed.
_PRODUCT, _EIGEN = 768, 384
# Operations of the Gram matrix of R rows of n numbers, divided by R² n.
_GRAM = 1.25
# Seconds of a step on a statistic that is kept, without its matrices.
_KEPT_STEP = 5e-4
# Share of the rows of an anchored estimator that its draws have in common.
_ANCHORS = 0.9
# Repetitions inside the job that measures a time.
_REPETITIONS = 8
# Settings of a training that determine the number of its steps.
_SCHEDULE = ("epochs", "batch_size", "burn_in", "every", "steps", "hyper_every", "hyper_steps")


@dataclass(frozen=True)
class Line:
    """The time of a call in seconds, as a linear function of the number of examples."""

    call: float
    example: float

    def time_of(self, count: float) -> float:
        """Return the time for ``count`` examples in one call."""
        return self.call + self.example * count


def forecast(job: Job, place: Place) -> float | None:
    """Return the predicted time of a job in seconds. None if its data have an unknown size.

    Args:
        job: Job.
        place: Threads of the run.
    """
    name = base_of(job.training)
    if name not in SHAPES:
        return None
    torch.set_num_threads(place.threads)
    options = ("model", "depth", "width", *INVARIANCE)
    try:
        times = _times(name, tuple((option, job.training[option]) for option in options))
        num_data = min(job.training["subset"] or SHAPES[name][2], SHAPES[name][2])
        return _seconds(job, _Costs(times, num_data))
    except EvigradError:  # ``checks.problems`` reports why the job cannot run
        return None


def _seconds(job: Job, costs: "_Costs") -> float:
    training, options = job.training, job.options
    if job.kind == "train":
        return costs.training(training)
    if job.kind == "time":
        spec = Estimator.parse(training["estimator"])
        return _REPETITIONS * (
            costs.estimate(spec, bool(costs.times.learned)) + costs.step(training["batch_size"])
        )
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


class _Times:
    """Measured times of one network.

    Args:
        data: Name of a data set in ``SHAPES``, whose inputs the network takes.
        settings: Settings of the network and of its invariance.

    Attributes:
        model: The network, with random weights.
        num_outputs: C, the number of classes.
        num_weights: Number of parameters.
        learned: Names of the model's learned hyperparameters.
    """

    def __init__(self, data: str, settings: Mapping[str, Any]) -> None:
        shape, self.num_outputs, _ = SHAPES[data]
        samples = min(settings["samples"], _TRANSFORMS)
        measured = {**settings, "samples": samples}
        invariance = read_invariance(*(measured[option] for option in INVARIANCE))
        self._repeats = 1.0 if invariance is None else settings["samples"] / samples
        black = [0.0] * shape[0]
        averaged = None if invariance is None else invariance.as_record(black)
        record = network_record({"data": data, **settings})
        self.model = make_network({"model": record, "invariance": averaged}, 0)
        self.num_weights = sum(weight.numel() for weight in self.model.parameters())
        self.learned = () if invariance is None else invariance.hyperparameters
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(_MOST, *shape, generator=generator)
        self._y = torch.randint(self.num_outputs, (_MOST,), generator=generator)
        self._lines: dict[tuple[str, bool], Line] = {}

    def line(self, name: str, of_model: bool) -> Line:
        """Return the measured time of a step of the weights (``map``) or of an estimator."""
        key = (name, of_model)
        if key not in self._lines:
            act = self._act(name, of_model)
            # Derivatives are checked in passes 1, 2 and 4, and the shortest call is pass 3 or 5.
            for _ in range(2):
                act(_FEW)
            few = _shortest(lambda: act(_FEW))
            example = few / _FEW
            if few < _SLOW:
                size = min(max(int(_SECONDS / example), _MORE), _MOST)
                more = _shortest(lambda: act(size))
                example = max((more - few) / (size - _FEW), 0.2 * more / size)
            call = max(few - _FEW * example, 0.0)
            self._lines[key] = Line(call, self._repeats * example)
        return self._lines[key]

    def _act(self, name: str, of_model: bool) -> Callable[[int], None]:
        """Return a step or an estimate of a number of examples, at most ``_MOST``."""
        evidence = Evidence(
            self.model,
            Categorical(),
            GaussianPrior("layerwise"),
            estimator=f"ntk-{_MOST}-1" if name == "map" else name.format(_MOST),
            num_data=_MOST,
            hyperparameters=self.learned,
            generator=0,
        )
        weights = list(evidence.weights().values())
        wrt = None if of_model else ["prior"]

        def act(size: int) -> None:
            x, y = self._x[:size], self._y[:size]
            if name == "map":
                torch.autograd.grad(evidence.map_loss(x, y), weights, allow_unused=True)
            else:
                evidence.backward(x, y, wrt=wrt)

        return act


@cache
def _times(data: str, settings: tuple[tuple[str, Any], ...]) -> _Times:
    return _Times(data, dict(settings))


class _Costs:
    """Predicted times of the repeated parts of trainings of one network on N examples."""

    def __init__(self, times: _Times, num_data: int) -> None:
        self.times, self.num_data = times, num_data

    # ------------------------------------------------------------ trainings

    def training(self, settings: Mapping[str, Any]) -> float:
        """Return the time of a training with these settings."""
        schedule = Schedule(**{name: settings[name] for name in _SCHEDULE})
        schedule = plan_schedule(schedule, self.num_data)
        batches = math.ceil(self.num_data / schedule.batch_size)
        step = self.step(min(schedule.batch_size, self.num_data))
        total = planned(schedule.epochs) * batches * step
        if settings["estimator"] in WITHOUT_ESTIMATE:
            return total
        spec = Estimator.parse(settings["estimator"])
        names = ["prior.log_precision", *(f"model.{name}" for name in self.times.learned)]
        for group in step_groups(schedule, names):
            of_model = any(name.startswith("model.") for name in group.names)
            total += group.rounds * self.round(spec, group.steps, of_model)
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
        return self.times.line("map", False).time_of(count)

    # ------------------------------------------------------------ estimates

    def blocks(self, spec: Estimator) -> int:
        """Return the number of blocks of a partition."""
        if spec.rows:
            drawn = (spec.subset or 1) * ((1 - _ANCHORS) if spec.anchored else 1)
            return max(1, round(self.num_data * self.times.num_outputs / drawn))
        output_groups = (
            1 if spec.outputs is None else math.ceil(self.times.num_outputs / spec.outputs)
        )
        return max(1, round(self.num_data / self._examples(spec))) * output_groups

    def estimate(self, spec: Estimator, of_model: bool) -> float:
        """Return the time of an estimate and its gradient, including ``solve``."""
        drawn = 1 if spec.rows else spec.outputs or self.times.num_outputs
        outputs = "C" if drawn >= self.times.num_outputs else str(drawn)
        line = self.times.line(f"{spec.structure}-{{}}-{outputs}", of_model)
        products = 0.0
        if spec.structure_type.keeps_rows or spec.structure in ("full", "blockdiag"):
            rows, weights = self._rows(spec), self.times.num_weights
            products = _GRAM * rows * weights * min(rows, weights) * _operation_seconds()
        # Larger blocks than the measured ones go through the network twice.
        again = self.step(self._examples(spec)) if of_model else 0.0
        return line.time_of(self._examples(spec)) + again + products + self.solve(spec)

    def solve(self, spec: Estimator) -> float:
        """Return the time of a log-determinant and its gradient for a kept statistic."""
        if spec.structure == "kfac":
            sizes = [
                (len(w), w.numel() // len(w)) for w in self.times.model.parameters() if w.dim() > 1
            ]
            return sum(_eigen_seconds(size) for pair in sizes for size in pair)
        if spec.structure == "diag":
            return 0.0
        # A Cholesky factorization and an inverse take n³ operations.
        return min(self._rows(spec), self.times.num_weights) ** 3 * _operation_seconds()

    def eigen(self, spec: Estimator) -> float:
        """Return the time of the eigenvalues that all steps on a single precision share."""
        if spec.structure in ("kfac", "diag"):
            return 0.0
        return _eigen_seconds(min(self._rows(spec), self.times.num_weights))

    def _solve_kept(self, spec: Estimator) -> float:
        """Return the time of ``solve`` for a later step. KFAC keeps its eigenvalues."""
        return 0.0 if spec.structure == "kfac" else self.solve(spec)

    def _examples(self, spec: Estimator) -> int:
        return min(spec.subset or self.num_data, self.num_data)

    def _rows(self, spec: Estimator) -> int:
        if spec.rows:
            return spec.subset or 1
        # A softmax has one degree of freedom less than outputs.
        per_example = self.times.num_outputs - 1 if spec.outputs is None else spec.outputs
        return self._examples(spec) * per_example


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
    a = torch.randn(_EIGEN, _EIGEN, generator=torch.Generator().manual_seed(0))
    return _shortest(lambda: torch.linalg.eigh(a + a.mT)) / _EIGEN**3


def _shortest(act: Callable[[], object]) -> float:
    """Return the time of the shortest of several calls, in seconds."""
    times: list[float] = []
    while sum(times) < (_SLOW if len(times) < 2 else _REPEATED):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return min(times)
