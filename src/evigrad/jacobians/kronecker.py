"""Kronecker factors of one use of a weight: its inputs, its gradients and their sums."""

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import ConfigurationError
from evigrad.jacobians.convolutions import Geometry, convolution_patches, inner_product
from evigrad.jacobians.patch_grams import patch_gram, patch_gram_pull, patch_sum


class KroneckerUse:
    """One use of a weight as a matrix, the same matrix at T positions.

    The rows of the weight, reshaped to (G, out, in), are Σ_T gradients ⊗ inputs; G is the number
    of channel groups, whose blocks are stacked along the weight's dim 0.

    Args:
        inputs: The factors that the matrix multiplies; may have a lower precision.
        gradients: Gradients of the rows in the product.
        transposed: Whether the weight is (in, out).
    """

    gradients: Float[Tensor, "m k G T o"]

    def __init__(
        self,
        inputs: Float[Tensor, "m G T i"] | None,
        gradients: Float[Tensor, "m k G T o"],
        transposed: bool = False,
    ) -> None:
        self._inputs = inputs
        self.gradients, self.transposed = gradients, transposed

    @property
    def inputs(self) -> Float[Tensor, "m G T i"]:
        """The factors that the matrix multiplies, in the gradients' type."""
        assert self._inputs is not None
        return self._inputs.to(self.gradients.dtype)

    @property
    def num_data(self) -> int:
        """The number of data, m."""
        return self.gradients.shape[0]

    @property
    def positions(self) -> int:
        """The number of positions of a datum, T."""
        return self.gradients.shape[3]

    def input_gram(self, dtype: torch.dtype) -> Float[Tensor, "G i i"]:
        """Σ a aᵀ over data and positions, summed in this type; once differentiable."""
        return _Gram.apply(self._flat(dtype), _gram, _gram_pull)

    def inner_input_gram(self, cotangent: Float[Tensor, "G i i"]) -> Float[Tensor, ""]:
        """⟨cotangent, ``input_gram``⟩ in the cotangent's type; once differentiable in inputs."""
        return inner_gram(self._flat(cotangent.dtype), cotangent)

    def input_sum(self) -> Float[Tensor, "m G i"]:
        """The inputs summed over positions."""
        return self.inputs.sum(2)

    def scaled(self, scale: Float[Tensor, "m k"] | None, dtype: torch.dtype) -> "KroneckerUse":
        """The same use, with gradients in this type and times the scale of each row (None: 1)."""
        scaled_use = copy.copy(self)
        scaled_use.gradients = self.gradients.to(dtype)
        if scale is not None:
            scaled_use.gradients = scaled_use.gradients * scale.to(dtype)[:, :, None, None, None]
        return scaled_use

    def detach(self) -> "KroneckerUse":
        """The same factors without a graph."""
        return KroneckerUse(self.inputs.detach(), self.gradients.detach(), self.transposed)

    def _flat(self, dtype: torch.dtype) -> Float[Tensor, "G mT i"]:
        assert self._inputs is not None
        return self._inputs.to(dtype).transpose(0, 1).flatten(1, 2)


class ConvolutionUse(KroneckerUse):
    """One use of a convolution's weight on x; its patches are formed only when read."""

    def __init__(
        self,
        x: Float[Tensor, "mF c *space"],
        gradients: Float[Tensor, "m k G FT o"],
        geometry: Geometry,
    ) -> None:
        super().__init__(None, gradients)
        self._x, self._geometry = x, geometry

    @property
    def inputs(self) -> Float[Tensor, "m G T i"]:
        """The patches, computed anew at each reading."""
        x = self._x.to(self.gradients.dtype)
        return convolution_patches(x, len(x) // self.num_data, self._geometry).mT

    def input_gram(self, dtype: torch.dtype) -> Float[Tensor, "G i i"]:
        """See ``KroneckerUse.input_gram``."""
        geometry = self._geometry
        return _Gram.apply(
            self._x.to(dtype),
            lambda x: patch_gram(x, geometry),
            lambda x, c: patch_gram_pull(x, c, geometry),
        )

    def inner_input_gram(self, cotangent: Float[Tensor, "G i i"]) -> Float[Tensor, ""]:
        """See ``KroneckerUse.inner_input_gram``."""
        geometry = self._geometry
        return _Form.apply(
            self._x.to(cotangent.dtype),
            _symmetric(cotangent),
            lambda x, c: patch_gram_pull(x, c, geometry),
        )

    def input_sum(self) -> Float[Tensor, "m G i"]:
        """See ``KroneckerUse.input_sum``."""
        sums = patch_sum(self._x.to(self.gradients.dtype), self._geometry)
        sums = sums.unflatten(0, (self.num_data, -1)).sum(1)
        return sums.reshape(self.num_data, self._geometry.groups, -1)

    def detach(self) -> "ConvolutionUse":
        """See ``KroneckerUse.detach``."""
        return ConvolutionUse(self._x.detach(), self.gradients.detach(), self._geometry)


def inner_gram(rows: Float[Tensor, "G R i"], cotangent: Float[Tensor, "G i i"]) -> Tensor:
    """⟨cotangent, rowsᵀ rows⟩; once differentiable in the rows."""
    return _Form.apply(rows, _symmetric(cotangent), _gram_pull)


def _symmetric(matrix: Float[Tensor, "G i i"]) -> Float[Tensor, "G i i"]:
    return (matrix + matrix.mT).detach() / 2


def _gram(a: Float[Tensor, "G R i"]) -> Float[Tensor, "G i i"]:
    return a.mT @ a


def _gram_pull(a: Float[Tensor, "G R i"], matrix: Float[Tensor, "G i i"]) -> Tensor:
    return a @ matrix


# A Gram matrix is quadratic in the inputs x, so ⟨C, gram(x)⟩ with symmetric C is ⟨x, pull(x, C)⟩
# for a linear map of x that is symmetric too, and its gradient is twice pull(x, C).
_Pull = Callable[[Tensor, Tensor], Tensor]


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward pass of an autograd function, refusing ``create_graph=True``.

    ``once_differentiable`` would let it pass silently where no cotangent has a graph.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "Log-determinants and sums of Kronecker factors have first derivatives only: leave"
                " out create_graph=True."
            )
        return backward(ctx, *cotangents)

    return wrapped


class _Gram(torch.autograd.Function):
    """A Gram matrix gram(x) with one product in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gram: Callable[[Tensor], Tensor], pull: _Pull) -> Tensor:
        ctx.save_for_backward(x)
        ctx.pull = pull
        return gram(x)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return 2 * ctx.pull(x, _symmetric(cotangent)), None, None


class _Form(torch.autograd.Function):
    """⟨C, gram(x)⟩ = ⟨x, pull(x, C)⟩ for a symmetric matrix C.

    The forward pass computes pull(x, C), half of the gradient: both cost one product together.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, pull: _Pull) -> Tensor:
        pulled = pull(x, matrix)
        ctx.save_for_backward(pulled)
        return inner_product(x, pulled)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (pulled,) = ctx.saved_tensors
        return 2 * cotangent * pulled, None, None
