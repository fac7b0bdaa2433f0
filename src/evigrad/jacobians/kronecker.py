"""Kronecker factors of one use of a weight: its inputs, its gradients and their sums."""

import copy
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import ConfigurationError
from evigrad.jacobians.convolutions import Geometry, convolution_patches, inner_product

# Most numbers in the patches that exist at once (64 MiB in float32).
_PATCH_NUMBERS = 2**24
# A Gram matrix is symmetric: four strips need five eighths of the products. Strips of fewer than 64
# rows would multiply below full speed.
_STRIPS, _STRIP = 4, 64


class KroneckerUse:
    """One use of a weight as a matrix, the same matrix at T positions.

    The rows of the weight, reshaped to (G, out, in), are Σ_T gradients ⊗ inputs; G is the number
    of channel groups, whose blocks are stacked along the weight's dim 0.

    Args:
        inputs: The factors that the matrix multiplies; may have a lower precision.
        gradients: Gradients of the rows in the product.
    """

    gradients: Float[Tensor, "m k G T o"]

    def __init__(
        self, inputs: Float[Tensor, "m G T i"] | None, gradients: Float[Tensor, "m k G T o"]
    ) -> None:
        self._inputs = inputs
        self.gradients = gradients

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
        found = copy.copy(self)
        found.gradients = self.gradients.to(dtype)
        if scale is not None:
            found.gradients = found.gradients * scale.to(dtype)[:, :, None, None, None]
        return found

    def detach(self) -> "KroneckerUse":
        """The same factors without a graph."""
        return KroneckerUse(self.inputs.detach(), self.gradients.detach())

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
            lambda x: _patch_gram(x, geometry),
            lambda x, c: _patch_gram_pull(x, c, geometry),
        )

    def inner_input_gram(self, cotangent: Float[Tensor, "G i i"]) -> Float[Tensor, ""]:
        """See ``KroneckerUse.inner_input_gram``."""
        geometry = self._geometry
        return _Form.apply(
            self._x.to(cotangent.dtype),
            _symmetric(cotangent),
            lambda x, c: _patch_gram_pull(x, c, geometry),
        )

    def input_sum(self) -> Float[Tensor, "m G i"]:
        """See ``KroneckerUse.input_sum``."""
        sums = _patch_sum(self._x.to(self.gradients.dtype), self._geometry)
        sums = sums.unflatten(0, (self.num_data, -1)).sum(1)
        return sums.reshape(self.num_data, self._geometry.groups, -1)

    def detach(self) -> "ConvolutionUse":
        """See ``KroneckerUse.detach``."""
        return ConvolutionUse(self._x.detach(), self.gradients.detach(), self._geometry)


def add_gram(gram: Float[Tensor, "G n n"], rows: Float[Tensor, "G n R"]) -> None:
    """Add rows rowsᵀ above the diagonal; ``mirrored`` completes the sum of several."""
    for strip in _strips(gram.shape[1]):
        rest = slice(strip.start, None)
        gram[:, strip, rest].baddbmm_(rows[:, strip], rows[:, rest].mT)


def mirrored(gram: Float[Tensor, "G n n"]) -> Float[Tensor, "G n n"]:
    """The sum of ``add_gram`` with what is above the diagonal copied below it, in place."""
    for strip in _strips(gram.shape[1]):
        gram[:, strip.stop :, strip] = gram[:, strip, strip.stop :].mT
    return gram


def _strips(size: int) -> Iterator[slice]:
    step = max(_STRIP, -(-size // _STRIPS))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def inner_gram(rows: Float[Tensor, "G R i"], cotangent: Float[Tensor, "G i i"]) -> Tensor:
    """⟨cotangent, rowsᵀ rows⟩; once differentiable in the rows."""
    return _Form.apply(rows, _symmetric(cotangent), _gram_pull)


def _symmetric(matrix: Float[Tensor, "G i i"]) -> Float[Tensor, "G i i"]:
    return (matrix + matrix.mT).detach() / 2


def _gram(a: Float[Tensor, "G R i"]) -> Float[Tensor, "G i i"]:
    return a.mT @ a


def _patch_gram(x: Float[Tensor, "M c *space"], g: Geometry) -> Float[Tensor, "G i i"]:
    """Σ a aᵀ over the patches a of all inputs and positions, without a graph."""
    size = x.shape[1] // g.groups * prod(g.kernel)
    gram = x.new_zeros(g.groups, size, size)
    for chunk in _chunks(x.detach(), g):
        add_gram(gram, convolution_patches(chunk, len(chunk), g)[0])
    return mirrored(gram)


def _patch_gram_pull(
    x: Float[Tensor, "M c *space"], matrix: Float[Tensor, "G i i"], g: Geometry
) -> Float[Tensor, "M c *space"]:
    """Half of the gradient in x of ⟨matrix, ``_patch_gram``⟩, for a symmetric matrix; no graph."""
    pulled = []
    for chunk in _chunks(x.detach(), g):
        with torch.enable_grad():
            leaf = chunk.detach().requires_grad_()
            patches = convolution_patches(leaf, len(leaf), g)[0]
        product = matrix.detach() @ patches.detach()
        pulled += torch.autograd.grad(patches, leaf, product)
    return torch.cat(pulled)


def _patch_sum(x: Float[Tensor, "M c *space"], g: Geometry) -> Float[Tensor, "M c *kernel"]:
    """The patches summed over all positions, differentiable."""
    # Each entry of the kernel sums a box of x, the product of one interval for each dimension.
    for dim, positions in enumerate(g.positions(x.shape[2:])):
        length, entries = x.shape[2 + dim], torch.arange(g.kernel[dim], device=x.device)
        first = g.dilation[dim] * entries[:, None] - g.padding[dim]
        seen = first + g.stride[dim] * torch.arange(positions, device=x.device)
        counts = (seen[..., None] == torch.arange(length, device=x.device)).any(1)
        x = (x.movedim(2 + dim, -1) @ counts.to(x.dtype).mT).movedim(-1, 2 + dim)
    return x


def _chunks(x: Tensor, g: Geometry) -> Iterator[Tensor]:
    """Inputs of a few data each, whose patches fit ``_PATCH_NUMBERS``."""
    each = prod(g.positions(x.shape[2:])) * x.shape[1] * prod(g.kernel)
    yield from x.split(max(1, _PATCH_NUMBERS // max(1, each)))


def _gram_pull(a: Float[Tensor, "G R i"], matrix: Float[Tensor, "G i i"]) -> Tensor:
    return a @ matrix


# A Gram matrix is quadratic in the inputs x, so ⟨C, gram(x)⟩ with symmetric C is ⟨x, pull(x, C)⟩
# for a linear map of x that is symmetric too, and its gradient is twice pull(x, C).
_Pull = Callable[[Tensor, Tensor], Tensor]


def _refuse_a_graph() -> None:
    if torch.is_grad_enabled():
        raise ConfigurationError(
            "Sums of Kronecker factors have first derivatives only: leave out create_graph=True."
        )


class _Gram(torch.autograd.Function):
    """A Gram matrix gram(x) with one product in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gram: Callable[[Tensor], Tensor], pull: _Pull) -> Tensor:
        ctx.save_for_backward(x)
        ctx.pull = pull
        return gram(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_a_graph()
        (x,), (cotangent,) = ctx.saved_tensors, cotangents
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
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_a_graph()
        (pulled,), (cotangent,) = ctx.saved_tensors, cotangents
        return 2 * cotangent * pulled, None, None
