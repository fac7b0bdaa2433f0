"""A convolution whose weight gets no gradient, differentiable as often as one likes.

PyTorch's second derivative of a convolution computes that in the weight too, wanted or not: one
convolution in three of a gradient through rows. With the weight fixed there are two linear maps,
each of which is the other's derivative.
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
    """A convolution with a graph into its input alone.

    Args:
        x: Input.
        weight: The kernel.
        bias: Added to each channel.
        geometry: Settings.

    Returns:
        What PyTorch's function gives, under autocast too.
    """
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
        """The convolution."""
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
    """g ↦ Wᵀ g."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        weight: Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        settings: dict[str, Any],
    ) -> Tensor:
        """The derivative of the convolution, in the type of its input."""
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
