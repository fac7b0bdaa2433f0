"""What to expect of blocks that were not looked at yet, from those that were.

A block of rows B with scores λ is guessed to have Σ_r log(1 + λ_r/λ_Z), λ_Z a typical score of an
anchor (``scores``): the anchors hold most of what the largest rows have. How far off that is, is
learned for each column of the root, and for all groups, from the values ℓ(B|Z) that estimates come
upon. The values only steer which blocks are drawn how often: whatever they are, the expectation of
the estimate is the same bound.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# Blocks are drawn uniformly in this part of all cases: no weight is larger than M over it.
FLOOR = 0.03
# Part of the way to what was seen last.
RATE = 0.5
# An observation moves what is expected by no more than this factor.
LOG_LIMIT = math.log(1e3)


class Masses:
    """Learns ratios of what was seen to what was guessed, one for each column of the root."""

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}  # logarithms

    def expected(self, keys: Sequence[int], guesses: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
        """What is expected of ℓ(B|Z) for blocks, in nats once some were seen.

        Args:
            keys: The first column of each block's rows.
            guesses: Of the blocks.

        Returns:
            One number for each block, float64.
        """
        known = list(self._ratios.values())
        otherwise = sum(known) / len(known) if known else 0.0
        logs = [self._ratios.get(key, otherwise) for key in keys]
        return guesses * torch.tensor(logs, dtype=torch.float64).exp()

    def observe(self, column: int, guess: float, seen: float) -> None:
        """Learn from a block; from several in any order, also from the same one again.

        Args:
            column: The first column of its rows.
            guess: Of the block.
            seen: Its ℓ(B|Z).
        """
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
        """Take up a state of ``state_dict``.

        Args:
            state: What it returned.
        """
        self._ratios = dict(state["ratios"])


def probabilities(
    expected: Float[Tensor, " M"],
    counts: Float[Tensor, " M"] | None = None,
    floor: float = FLOOR,
) -> Float[Tensor, " M"]:
    """π of blocks: in proportion to what is expected of them, with a uniform floor.

    Args:
        expected: At least 0.
        counts: How many blocks each number stands for; None is one.
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
    """Σ_m e_m − e/π: added to an estimate by one block, it cancels most of what the draw is off by.

    Args:
        expected: Of all blocks, none of them learned from this draw.
        own: e, of the one that was drawn.
        probability: π, with which it was.

    Returns:
        A number in nats whose expectation is zero; 0 where nothing sensible is expected.
    """
    total = float(expected.sum())
    return total - own / probability if 0 < total < float("inf") else 0.0
