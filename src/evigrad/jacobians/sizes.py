"""Sizes that a plan knows before the first pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from evigrad.jacobians.layers import Linear
from evigrad.jacobians.paths import JacobianPlan


@dataclass(frozen=True)
class MatrixUse:
    """Sizes of the only use of a weight as a matrix.

    Attributes:
        positions: T, how often a datum is multiplied with the matrix, over all its samples.
        inputs: Columns of the matrix.
        outputs: Rows of the matrix.
    """

    positions: int
    inputs: int
    outputs: int


def matrix_uses(plan: JacobianPlan, weights: Mapping[str, Tensor]) -> dict[str, MatrixUse]:
    """Sizes of the linear layers and ungrouped convolutions that are used once."""
    found = {}
    for name in plan.kronecker:
        if len(plan.uses[name]) > 1:
            continue
        (rule, _, parts, _, inputs, outputs, _) = plan.uses[name][0]
        shape = weights[name].shape
        if rule == Linear.name:
            found[name] = MatrixUse(parts * prod(inputs[:-1]), shape[1], shape[0])
        elif shape[1] == inputs[0]:
            found[name] = MatrixUse(parts * prod(outputs[1:]), prod(shape[1:]), shape[0])
    return found
