"""Predicted entropies of blocks, calibrated by the blocks that were evaluated.

A block of rows B with scores λ is predicted to have Σ_r log(1 + λ_r/λ_Z), λ_Z a typical score of an
anchor (``scores``): the anchors hold most of what the largest rows have. The ratio to the true
value is learned for each column of the root, and for all groups, from the values ℓ(B|Z) of
estimates. Predictions only steer which blocks are drawn how often: the expectation of the estimate
is the same bound whatever they are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# Blocks are drawn uniformly in this part of all cases: no weight exceeds M / FLOOR.
FLOOR = 0.03
# Step size of a ratio's logarithm towards the last observation.
RATE = 0.5
# An observation changes a ratio by no more than this factor.
LOG_LIMIT = math.log(1e3)


class Masses:
    """Learns the ratio of observed to predicted entropies for each calibration group."""

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}  # logarithms

    def expected(self, keys: Sequence[int], guesses: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
        """Calibrated predictions of ℓ(B|Z), in nats once some were observed, float64."""
        known = list(self._ratios.values())
        otherwise = sum(known) / len(known) if known else 0.0
        logs = [self._ratios.get(key, otherwise) for key in keys]
        return guesses * torch.tensor(logs, dtype=torch.float64).exp()

    def observe(self, column: int, guess: float, seen: float) -> None:
        """Learn from a block's ℓ(B|Z); blocks may come in any order, and again."""
        if not (guess > 0 and seen > 0 and math.isfinite(seen / guess)):
            return
        known = list(self._ratios.values())
        otherwise = sum(known) / len(known) if known else 0.0
        rate = RATE if column in self._ratios else 1.0
        before = self._ratios.get(column, otherwise)
        step = math.log(seen / guess) - before
        self._ratios[column] = before + rate * min(max(step, -LOG_LIMIT), LOG_LIMIT)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, for a checkpoint."""
        return {"ratios": dict(self._ratios)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of ``state_dict``."""
        self._ratios = dict(state["ratios"])


def probabilities(
    expected: Float[Tensor, " M"],
    counts: Float[Tensor, " M"] | None = None,
    floor: float = FLOOR,
) -> Float[Tensor, " M"]:
    """π of blocks: in proportion to their predictions, with a uniform floor.

    Args:
        expected: Predictions, at least 0.
        counts: How many blocks each number stands for; None for one each.
        floor: The part of all cases in which blocks are drawn uniformly.

    Returns:
        Positive numbers that add up to 1, float64.
    """
    uniform = torch.ones_like(expected) if counts is None else counts
    uniform = uniform / uniform.sum()
    total = float(expected.sum())
    if not 0 < total < float("inf"):
        return uniform
    return (1 - floor) * expected / total + floor * uniform


def control_variate(expected: Float[Tensor, " M"], own: float, probability: float) -> float:
    """Σ_m e_m − e/π, which cancels most of the error of an estimate by one block.

    Args:
        expected: e_m of all blocks, none of them learned from this draw.
        own: e, the prediction for the block that was drawn.
        probability: π, its probability.

    Returns:
        A number in nats whose expectation is zero; 0 where predictions are useless.
    """
    total = float(expected.sum())
    return total - own / probability if 0 < total < float("inf") else 0.0
