"""The time of a step: medians over a few repetitions, which other load on the machine affects."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evigrad.evidence import Evidence

# Repetitions of one step stop after so many seconds, or so many of them.
SECONDS = 2.0
_MOST_REPETITIONS = 20


@dataclass(frozen=True)
class StepTimes:
    """Median times in seconds.

    Attributes:
        estimate: An estimate with its gradient, and its share of the draw.
        draw: The start of a round of estimates, as drawing a partition or choosing anchors.
        step: A step of the weights on a batch, without the optimiser.
    """

    estimate: float
    draw: float
    step: float


def time_steps(
    evidence: Evidence, data: tuple[Tensor, Tensor], batch_size: int, steps: int
) -> StepTimes:
    """Time what a training with an estimator repeats.

    Args:
        evidence: The model's evidence; its gradients change.
        data: Training data on the model's device.
        batch_size: Data in a step of the weights.
        steps: Estimates in a round, which share a draw.

    Returns:
        The times.
    """
    x, y = data
    stream = evidence.blocks(data)
    blocks = iter(stream)
    weights = list(evidence.weights().values())

    def draw() -> None:
        for _ in range(stream.period):
            next(iter(stream))

    def step() -> None:
        loss = evidence.map_loss(x[:batch_size], y[:batch_size])
        torch.autograd.grad(loss, weights, allow_unused=True)

    drawn = median_seconds(draw, x.device) / stream.period
    estimate = median_seconds(lambda: evidence.backward(next(blocks)), x.device)
    return StepTimes(estimate + drawn / steps, drawn, median_seconds(step, x.device))


def median_seconds(action: Callable[[], Any], device: torch.device) -> float:
    """Median of three calls or more after an uncounted one; of one call where it takes long."""
    action()  # the first call allocates and plans
    times: list[float] = []
    while len(times) < 3 or (sum(times) < SECONDS and len(times) < _MOST_REPETITIONS):
        _wait(device)
        start = time.perf_counter()
        action()
        _wait(device)
        times.append(time.perf_counter() - start)
        if times[0] > SECONDS:
            break
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
