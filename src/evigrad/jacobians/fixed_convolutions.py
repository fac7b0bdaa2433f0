"""A convolution whose weight gets no gradient, differentiable any number of times.

PyTorch's second derivative of a convolution also computes the one in the weight, wanted or not: one
convolution in three of a gradient through rows. With a fixed weight there are two linear maps, and
each is the other's derivative.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import Node

from evigrad.jacobians.geometry import CONVOLUTIONS, Geometry, input_gradient


def convolve(
    x: Float[Tensor, "mF c *space"],
    weight: Float[Tensor, "o i *kernel"],
    bias: Float[Tensor, " o"] | None,
    geometry: Geometry,
) -> Float[Tensor, "mF o *positions"]:
    """The convolution as PyTorch computes it, also under autocast, with a graph into x alone."""
    x, settings = geometry.split(x)
    return _Convolve.apply(x, weight, bias, settings | {"groups": geometry.groups})


def is_convolution(node: Node) -> bool:
    """Whether a node of an autograd graph is a convolution by ``convolve``."""
    return getattr(node, "_forward_cls", None) is _Convolve


class _Convolve(torch.autograd.Function):
    """x ↦ W x + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: dict[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.dtype, ctx.settings = x.shape, x.dtype, settings
        return CONVOLUTIONS[x.dim() - 2](x, weight, bias, **settings)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Wᵀ g."""
        (weight,) = ctx.saved_tensors
        of_x = _PullBack.apply(gradients[0], weight, ctx.shape, ctx.dtype, ctx.settings)
        return of_x, None, None, None


class _PullBack(torch.autograd.Function):
    """g ↦ Wᵀ g, in the type of the convolution's input."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        weight: Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        settings: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype, ctx.settings = gradient.dtype, settings
        return input_gradient(shape, weight.to(gradient.dtype), gradient, settings).to(dtype)

    @staticmethod
    def backward(ctx: Any, *vectors: Tensor) -> tuple[Tensor | None, ...]:
        """W v."""
        (weight,) = ctx.saved_tensors
        vector = vectors[0].to(ctx.dtype)
        product = _Convolve.apply(vector, weight.to(ctx.dtype), None, ctx.settings)
        return product, None, None, None, None
