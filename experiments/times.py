"""Times of the repeated parts of a training."""

from dataclasses import dataclass

from torch import Tensor

from evigrad.evidence import Evidence
from evigrad.measure.judging import median_seconds, step_seconds


@dataclass(frozen=True)
class StepTimes:
    """Median times in seconds.

    Attributes:
        estimate: An estimate with its gradient, and its share of the draw.
        draw: The start of a round of estimates, such as drawing a partition or choosing anchors.
        step: A step of the weights on a batch, without the optimizer.
    """

    estimate: float
    draw: float
    step: float


def time_steps(
    evidence: Evidence, data: tuple[Tensor, Tensor], batch_size: int, steps: int
) -> StepTimes:
    """Return the times of the repeated parts, for rounds of ``steps`` that share a draw.

    The gradients of ``evidence`` change.
    """
    x, y = data
    stream = evidence.blocks(data)
    blocks = iter(stream)

    def draw() -> None:
        for _ in range(stream.period):
            next(iter(stream))

    drawn = median_seconds(draw, x.device) / stream.period
    estimate = median_seconds(lambda: evidence.backward(next(blocks)), x.device)
    step = step_seconds(evidence, x[:batch_size], y[:batch_size])
    return StepTimes(estimate + drawn / steps, drawn, step)
