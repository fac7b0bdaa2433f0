"""Gram matrices as functions of precisions and rows, with derivatives that copy no rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from evigrad.curvature.kernel_rows import add_part, part_of, slabs
from evigrad.curvature.linalg import first_order_only


class MixedGrams(Function):
    """Σ weight · Gram over kept Grams, without a scaled copy of each."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *grams: Tensor) -> Tensor:
        """The sum, with one weight for each Gram."""
        ctx.save_for_backward(*grams)
        total = weights[0] * grams[0]
        for weight, gram in zip(weights[1:], grams[1:], strict=True):
            total.addcmul_(weight, gram)
        return total

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """The derivative in the weights; the Grams have none."""
        flat = cotangent.reshape(-1)
        products = [torch.dot(gram.reshape(-1), flat) for gram in ctx.saved_tensors]
        return torch.stack(products), *[None] * len(products)


class RowsGram(Function):
    """A P0^{-1} Aᵀ of the rows A of one parameter in several chunks.

    The backward pass keeps only the inputs (autograd would keep a scaled copy of all rows), and
    reads the rows once for both cotangents.
    """

    @staticmethod
    def forward(ctx: Any, like: Tensor, precision: Tensor, *chunks: Tensor) -> Tensor:
        """The Gram matrix of the chunks' rows, in the dtype and on the device of ``like``."""
        ctx.like = like
        ctx.save_for_backward(precision, *chunks)
        gram = like.new_zeros(())
        for columns, slab in slabs(chunks, like):
            slab = slab * part_of(precision.to(like), columns).rsqrt()
            gram = gram + slab @ slab.mT
        return gram

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """The derivatives in precision and rows."""
        precision, *chunks = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        inverse = precision.to(ctx.like).reciprocal()
        of_precision = torch.zeros_like(inverse) if wanted[1] else None
        of_chunks = [
            torch.empty_like(c) if w else None for c, w in zip(chunks, wanted[2:], strict=True)
        ]
        for columns, slab in slabs(chunks, ctx.like):
            weight = part_of(inverse, columns)
            # ⟨S̄, A P0^{-1} Aᵀ⟩ has the cotangent (S̄ + S̄ᵀ) A P0^{-1} for A.
            product = ((cotangent + cotangent.mT) @ slab).mul_(weight)
            if of_precision is not None:
                add_part(of_precision, columns, -0.5 * weight * (product * slab).sum(0))
            for chunk, part in zip(of_chunks, product.split([len(c) for c in chunks]), strict=True):
                if chunk is not None:
                    chunk[:, columns] = part.to(chunk)
        of_precision = None if of_precision is None else of_precision.to(precision.dtype)
        return None, of_precision, *of_chunks


def chained(
    precisions: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    arguments: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """Derivatives in the ``arguments`` that the precisions are computed from; None where none."""
    pairs = [(precisions[name], cotangent) for name, cotangent in cotangents.items()]
    pairs = [(precision, c.to(precision)) for precision, c in pairs if precision.requires_grad]
    if not arguments or not pairs:
        return [None] * len(arguments)
    outputs, weights = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, list(arguments), list(weights), allow_unused=True)
