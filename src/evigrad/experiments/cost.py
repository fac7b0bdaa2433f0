"""What a job is expected to take, from the work that is in it.

The work is counted: steps and estimates, passes through the network, products of rows with each
other, matrices as large as the weights. What a unit of each takes was fitted to jobs that were
timed on one thread of a CPU, by ``benchmarks/experiment_seconds.py``. It is for planning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from evigrad.cli.setup import default_model, sizes_of
from evigrad.errors import EvigradError
from evigrad.estimators import EstimatorSpec
from evigrad.experiments.jobs import Job
from evigrad.models import make_model
from evigrad.training import AUTO
from evigrad.training.schedules import count_rounds, is_evaluated
from evigrad.training.settings import BASELINES, plan_epochs

# Passes forward and backward, over one forward.
_BOTH_WAYS = 3
# An estimate with its gradient, over its value.
_WITH_GRADIENT = 3


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


@dataclass
class Work:
    """Amounts of work; and, as rates, the seconds of a unit of each.

    Attributes:
        jobs: To load data, and to build a network.
        steps: Of the weights.
        estimates: Of the log evidence.
        passes: Floating-point operations of training the weights and of evaluations.
        values: Outputs of layers in the same passes: they are written and read.
        row_passes: As ``passes``, of the rows of estimates.
        row_values: As ``values``, of the rows of estimates.
        products: Those of products of rows.
        dense: Those of matrices as large as the weights of a layer, or of all.
    """

    jobs: float = 0.0
    steps: float = 0.0
    estimates: float = 0.0
    passes: float = 0.0
    values: float = 0.0
    row_passes: float = 0.0
    row_values: float = 0.0
    products: float = 0.0
    dense: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int | float) -> "Work":
        return Work(*(times * getattr(self, f.name) for f in fields(self)))

    def seconds(self, rates: "Work") -> float:
        """How long it takes, if a unit takes what ``rates`` say."""
        return sum(getattr(self, f.name) * getattr(rates, f.name) for f in fields(self))


RATES = Work(
    jobs=0.526,
    steps=3.94e-3,
    estimates=1.07e-3,
    passes=1.08e-11,
    values=1.16e-9,
    row_passes=1.14e-11,
    row_values=2.70e-9,
    products=1.51e-12,
    dense=6.24e-12,
)


@dataclass(frozen=True)
class Network:
    """What a network does with one datum, all of its transforms.

    Attributes:
        flops: Forwards.
        values: Outputs of layers in that.
        weights: Numbers of each parameter.
    """

    flops: float
    values: float
    weights: tuple[int, ...]


def expected_seconds(job: Job, speed: float = 1.0) -> float | None:
    """About how long a job takes by itself, on one thread of a CPU.

    Args:
        job: Any.
        speed: Of this machine, over that of the rates.

    Returns:
        Seconds; None if its data set or its estimator is not known beforehand.
    """
    work = work_of(job)
    return None if work is None else work.seconds(RATES) / speed


def work_of(job: Job) -> Work | None:
    """The work of a job.

    Args:
        job: Any.

    Returns:
        Amounts; None if its data set or its estimator is not known beforehand.
    """
    train = (job if job.needs is None else job.needs).config
    shape = shape_of(train)
    if shape is None or AUTO in (train["estimator"], job.config.get("estimator")):
        return None
    try:
        network = network_of(train, shape)
    except EvigradError:
        return None
    samples = 1 if train["invariance"] is None else train["samples"]
    network = Network(samples * network.flops, samples * network.values, network.weights)
    num_data = min(train["subset"] or shape.train, shape.train)
    if job.kind == "train":
        return Work(jobs=1.0) + _training(job.config, shape, network, num_data)
    name = job.config.get("estimator") or train["estimator"]
    spec = EstimatorSpec.parse(name)
    one = _estimate(spec, network, num_data, shape.outputs)
    if job.kind == "time":
        step = _step(train, network, num_data)
        return Work(jobs=1.0) + (one * _WITH_GRADIENT + step) * (job.config["repeats"] + 2)
    blocks = _blocks(spec, num_data, shape.outputs, train["anchor_share"])
    blocks = min(blocks, job.config["blocks"] or blocks)
    if job.kind == "evaluate":
        return Work(jobs=1.0) + one * blocks
    points = len(job.config["grid"])
    each = one * points
    if job.config["hyperparameter"] == "precision":
        each = _passed_once(each, one)
    return Work(jobs=1.0) + each * blocks


def _training(config: Mapping[str, Any], shape: Shape, network: Network, num_data: int) -> Work:
    named = (config[name] for name in ("batch_size", "epochs", "burn_in", "every"))
    epochs, burn_in, often = plan_epochs(num_data, *named)
    steps = epochs * ceil(num_data / config["batch_size"])
    work = _step(config, network, num_data) * steps
    tests = config["test_subset"] or shape.test
    every_epoch = range(1, epochs + 1)
    evaluations = sum(is_evaluated(n, epochs, config["eval_every"]) for n in every_epoch)
    work.passes += evaluations * (num_data + tests) * network.flops
    work.values += evaluations * (num_data + tests) * network.values
    if config["estimator"] is None or config["estimator"] in BASELINES:
        return work
    spec = EstimatorSpec.parse(config["estimator"])
    one = _estimate(spec, network, num_data, shape.outputs) * _WITH_GRADIENT
    for every, count, learned in (
        (often, config["steps"], True),
        (config["hyper_every"] or often, config["hyper_steps"] or config["steps"],
         config["invariance"] is not None and config["learn_invariance"]),
    ):  # fmt: skip
        if not learned:
            continue
        rounds = count_rounds(epochs, burn_in, every)
        part = one * (rounds * count)
        if spec.subset is None and spec.outputs is None and config["invariance"] is None:
            part = _passed_once(part, one * rounds)  # all steps of a round share the passes
        work += part
    return work


def _step(config: Mapping[str, Any], network: Network, num_data: int) -> Work:
    batch = min(config["batch_size"], num_data)
    passes = _BOTH_WAYS * batch
    return Work(steps=1.0, passes=passes * network.flops, values=passes * network.values)


def _passed_once(work: Work, once: Work) -> Work:
    """Work of which the passes are made as often as in another one."""
    return replace(work, row_passes=once.row_passes, row_values=once.row_values)


def _estimate(spec: EstimatorSpec, network: Network, num_data: int, outputs: int) -> Work:
    """The value of one block."""
    most = num_data * outputs if spec.rows else num_data
    data = min(spec.subset or most, most)
    rows = data if spec.rows else data * min(spec.outputs or outputs, outputs)
    passes = _BOTH_WAYS * rows
    work = Work(
        estimates=1.0, row_passes=passes * network.flops, row_values=passes * network.values
    )
    total = sum(network.weights)
    if spec.structure == "ntk":
        work.products = float(rows) ** 2 * (2 * total + rows / 3)
    elif spec.structure == "full":
        work.dense = _gram(total, rows)
    elif spec.structure == "blockdiag":
        work.dense = sum(_gram(weights, rows) for weights in network.weights)
    return work


def _gram(weights: int, rows: int) -> float:
    """The log-determinant of a sum of outer products, in the smaller one of two spaces."""
    small, large = sorted((weights, rows))
    return float(small) ** 2 * (2 * large + small / 3)


def _blocks(spec: EstimatorSpec, num_data: int, outputs: int, anchor_share: float) -> int:
    if spec.rows:
        rows = num_data * outputs
        own = (spec.subset or rows) * (1 - anchor_share if spec.anchored else 1)
        return ceil(round(rows / max(own, 1.0), 6))
    of_outputs = 1 if spec.iid else ceil(outputs / (spec.outputs or outputs))
    return ceil(num_data / (spec.subset or num_data)) * of_outputs


def shape_of(train: Mapping[str, Any]) -> Shape | None:
    """The shape of a training's data set.

    Args:
        train: Its options.

    Returns:
        The shape, None if it is not known beforehand.
    """
    return SHAPES.get(train["data"].partition(":")[0])


def network_of(train: Mapping[str, Any], shape: Shape) -> Network:
    """The network of a training, built once to count what it does.

    Args:
        train: Its options.
        shape: Of its data set.

    Returns:
        Its amounts for a datum.

    Raises:
        EvigradError: If there is no such network.
    """
    name = train["model"] or default_model(shape.input)
    return _counted(name, train["depth"], train["width"], shape.input, shape.outputs)


@cache
def _counted(
    name: str, depth: int | None, width: int | None, shape: tuple[int, ...], outputs: int
) -> Network:
    model = make_model(name, shape, outputs, seed=0, **sizes_of(name, depth, width))
    values = 0.0

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal values
        values += output.numel() if isinstance(output, Tensor) else 0

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(1, *shape))
    weights = tuple(w.numel() for w in model.parameters())
    return Network(float(counter.get_total_flops()), values, weights)
