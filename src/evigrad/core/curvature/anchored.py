"""The anchored bound on a log-determinant, ℓ(Z) + Σ_b w_b ℓ(B_b|Z).

Z are the anchors, B_b are drawn parts of the other rows, and w_b are their weights. ℓ is an
entropy, so ℓ(B|Z) = ℓ(Z ∪ B) − ℓ(Z). If the rows of Z come first, one Cholesky factor of
I + S_{Z ∪ B} contains both terms, where S is the Gram matrix of the rows. The logarithms of its
diagonal sum to ½ ℓ(Z) over the rows of Z, and to ½ ℓ(B|Z) over the rows of B.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from evigrad.core.algebra import first_order_only
from evigrad.core.block import Conditioning
from evigrad.core.curvature.linalg import factor_identity_plus


@dataclass(frozen=True)
class LogDet:
    """The log-determinant ℓ of a block, in nats.

    Attributes:
        value: ℓ, or the anchored bound on ℓ, with a graph if gradients are enabled.
        entropies: ℓ(Z), ℓ(B_1|Z), … if the block has anchors, otherwise empty.
    """

    value: Float[Tensor, ""]
    entropies: tuple[float, ...] = ()


def log_det_conditional(matrix: Float[Tensor, "R R"], conditioning: Conditioning) -> LogDet:
    """Return ℓ(Z) + Σ_b w_b ℓ(B_b|Z) in nats, from the Gram matrix S of the rows.

    The entries of S for rows of different parts are ignored. The result is differentiable once.

    Raises:
        NotPositiveDefiniteError: If I + S is not finite, or not positive definite beyond rounding.
    """
    value, entropies = _LogDetConditional.apply(matrix, conditioning)
    return LogDet(value, tuple(entropies.tolist()))


class _LogDetConditional(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor]:
        parts = conditioning.parts.to(matrix.device)
        anchors = (parts == 0).nonzero().squeeze(1)
        head = len(anchors)
        entropies: list[Tensor] = []
        factors: list[Tensor] = []
        rows: list[Tensor] = []
        # Without parts, or with empty parts, only the anchors are left.
        chosen = [(parts == b + 1).nonzero().squeeze(1) for b in range(len(conditioning.weights))]
        for index, part_rows in enumerate(chosen or [anchors[:0]]):
            both = torch.cat([anchors, part_rows])
            factor = factor_identity_plus(matrix.index_select(0, both).index_select(1, both))
            logs = 2 * factor.diagonal().double().log()
            if index == 0:
                entropies.append(logs[:head].sum())
            if chosen:
                entropies.append(logs[head:].sum())
            factors.append(factor)
            rows.append(both)
        ctx.save_for_backward(*factors, *rows)
        ctx.head, ctx.weights, ctx.like = head, conditioning.weights, matrix.new_empty(0)
        ctx.size = len(matrix)
        weights = torch.tensor([1.0, *conditioning.weights], dtype=torch.float64, device="cpu")
        entropy_vector = torch.stack(entropies)
        ctx.mark_non_differentiable(entropy_vector)
        return (weights.to(entropy_vector) @ entropy_vector).to(matrix.dtype), entropy_vector

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> tuple[Tensor, None]:
        saved = ctx.saved_tensors
        factors, rows = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        like, head = ctx.like, ctx.head
        gradient = like.new_zeros(ctx.size, ctx.size)
        for number, (factor, both) in enumerate(zip(factors, rows, strict=True)):
            # The rows of a part add a low-rank term to the inverse for the anchors:
            # (I + S)⁻¹ = (I + S_ZZ)⁻¹ + Y Yᵀ. Yᵀ contains the last rows of the factor's inverse.
            last = factor.new_zeros(len(factor), len(factor) - head)
            last[head:].fill_diagonal_(1.0)
            y = torch.linalg.solve_triangular(factor.mT, last, upper=True)
            part = (y @ y.mT).to(like.dtype)
            if ctx.weights:
                part.mul_(ctx.weights[number])
            if head and number == 0:
                # The head of the factor belongs to the anchors.
                part[:head, :head] += torch.cholesky_inverse(factor[:head, :head]).to(like.dtype)
            # Restore the order of the rows. Products with rows of other parts have no derivative.
            spread = like.new_zeros(ctx.size, len(both)).index_copy_(0, both, part)
            gradient.index_add_(1, both, spread)
        return gradient.mul_(cotangent), None
