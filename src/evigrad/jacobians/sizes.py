"""Sizes that a plan knows before the first pass."""

from dataclasses import dataclass
from math import prod

from evigrad.jacobians.layers import Linear
from evigrad.jacobians.paths import JacobianPlan


@dataclass(frozen=True)
class MatrixUse:
    """Sizes of the one use of a weight as a matrix.

    Attributes:
        positions: T, how often a datum is multiplied with the matrix.
        inputs: Columns of the matrix.
        outputs: Rows of the matrix.
    """

    positions: int
    inputs: int
    outputs: int


def matrix_uses(plan: JacobianPlan) -> dict[str, MatrixUse]:
    """The weights whose rows are sums of products of one pair of matrices, with their sizes.

    Args:
        plan: Any plan.

    Returns:
        Linear weights that are used once, and not under augmentation samples (whose Kronecker
        factors are means, and no longer exact).
    """
    found = {}
    for name in plan.kronecker:
        if len(plan.uses[name]) > 1:
            continue
        (rule, _, parts, samples, inputs, outputs, _) = plan.uses[name][0]
        if rule == Linear.name and samples == 1:
            found[name] = MatrixUse(parts * prod(inputs[:-1]), inputs[-1], outputs[-1])
    return found
