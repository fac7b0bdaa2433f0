"""Log-determinants given anchors: ℓ(Z) + Σ_b w_b ℓ(B_b|Z), the anchored bound.

ℓ is an entropy: ℓ(B|Z) = ℓ(Z ∪ B) − ℓ(Z). With Z first, one Cholesky factor of I + S_{Z ∪ B} holds
both: the logarithms of its diagonal add up to ℓ(Z) over its head and to ℓ(B|Z) over its tail.
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
    """ℓ of a block, in nats.

    Attributes:
        value: ℓ, or its estimate given anchors; with a graph where one was asked for.
        entropies: ℓ(Z), ℓ(B_1|Z), … given anchors; else empty.
    """

    value: Float[Tensor, ""]
    entropies: tuple[float, ...] = ()


def log_det_conditional(matrix: Float[Tensor, "R R"], conditioning: Conditioning) -> LogDet:
    """Return ℓ(Z) + Σ_b w_b ℓ(B_b|Z), in nats, from the Gram matrix S of the rows.

    Products of rows of different parts are not used. Differentiable once.

    Raises:
        NotPositiveDefiniteError: I + S is not positive definite, beyond rounding, or not finite.
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
        # Without parts, or with empty ones, the anchors alone are left.
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
            # A part's own rows add a matrix of their own rank to the anchors' inverse:
            # (I + S)⁻¹ = (I + S_ZZ)⁻¹ + Y Yᵀ, Y the last columns of the factor's inverse.
            last = factor.new_zeros(len(factor), len(factor) - head)
            last[head:].fill_diagonal_(1.0)
            y = torch.linalg.solve_triangular(factor.mT, last, upper=True)
            part = (y @ y.mT).to(like.dtype)
            if ctx.weights:
                part.mul_(ctx.weights[number])
            if head and number == 0:
                # The head of the factor is the anchors' own.
                part[:head, :head] += torch.cholesky_inverse(factor[:head, :head]).to(like.dtype)
            # Back into the order of the rows. Products with rows of other parts have no derivative.
            spread = like.new_zeros(ctx.size, len(both)).index_copy_(0, both, part)
            gradient.index_add_(1, both, spread)
        return gradient.mul_(cotangent), None
