"""Compute Jacobian rows of convolutions, inner products with these rows, and input patches.

A row of a convolution's weight is the correlation between an example's input and output gradient.
Inner products of rows and cotangents are computed without forming the rows. Each example's input is
convolved with the example's cotangent, and the result is multiplied by the output gradient. The
fastest algorithm depends on the sizes of the tensors. The sizes at which the algorithm changes were
measured on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import dot

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

# From this number of multiplications per example, one convolution per example is as fast as one for
# all examples. Below it, the cost of each call dominates.
_WORTH_A_CALL = 2**24

# If an example has several parts, a single convolution needs inputs, gradients and products in
# another order. From this number of entries per example, copying takes longer than separate calls.
_WORTH_NO_COPY = 2**16

# On a CPU, oneDNN takes 2 to 14 times as long as PyTorch's own algorithm for the gradient with
# respect to an input with at most this many channels, such as an image. PyTorch's algorithm forms a
# gradient for each entry of each patch, in parts of at most this size.
_FEW_CHANNELS = 4
_PATCHES_BYTES = 2**22

# On a CPU, a call of oneDNN takes at least 50 microseconds. Up to these numbers of images and of
# multiplications, with one position per pixel, PyTorch's own algorithm takes 30 to 90 % of the
# time.
_FEW_IMAGES = 16
_FEW_MULTIPLICATIONS = 2**22


@dataclass(frozen=True)
class Geometry:
    """Settings of a convolution with D spatial dimensions.

    Every attribute except ``groups`` contains D numbers.

    Attributes:
        kernel: Size of the kernel.
        stride: Distance between neighboring output positions.
        padding: Number of zeros on each side of the input.
        dilation: Distance between neighboring entries of the kernel.
        groups: G, the number of channel groups.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def positions(self, space: Sequence[int]) -> tuple[int, ...]:
        """Return the number of output positions along each spatial dimension of an input."""
        settings = zip(space, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple(
            (length + 2 * pad - gap * (size - 1) - 1) // step + 1
            for length, size, step, pad, gap in settings
        )

    def of_all(self, m: int) -> "Geometry":
        """Return settings for one convolution of m examples, each with separate channel groups."""
        return replace(self, groups=m * self.groups)

    def has_one_position(self, space: Sequence[int]) -> bool:
        """Return whether the kernel covers the entire input.

        The convolution is then a matrix product, which is faster on a CPU.
        """
        return (
            self.kernel == tuple(space)
            and self.groups == 1
            and set(self.dilation) == {1}
            and not any(self.padding)
        )

    def convolve(
        self,
        x: Float[Tensor, "n c *space"],
        weight: Float[Tensor, "o i *kernel"],
        bias: Float[Tensor, " o"] | None = None,
    ) -> Float[Tensor, "n o *positions"]:
        """Return the convolution of ``x`` with the weight, plus the bias if there is one."""
        if self.has_one_position(x.shape[2:]):
            product = F.linear(x.flatten(1), weight.flatten(1), bias)
            for _ in self.kernel:
                product.unsqueeze_(-1)  # in place, because the model could not change a view
            return product
        if self._is_small(x, weight):
            settings = (self.kernel, bias, self.stride, self.padding)
            return torch.ops.aten._slow_conv2d_forward(x, weight, *settings)
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return CONVOLUTIONS[len(self.kernel)](x, weight, bias, *settings)

    def input_gradient(
        self,
        shape: Sequence[int],
        weight: Float[Tensor, "o i *kernel"],
        gradient: Float[Tensor, "n o *positions"],
    ) -> Float[Tensor, "n c *space"]:
        """Return the gradient with respect to an input of this shape."""
        # Only the shape of this input is used. ``torch.nn.grad`` would copy the input.
        x = gradient.new_empty(shape)
        if self.has_one_position(shape[2:]):
            # Autocast would compute the product ``gradient @ weight`` in a narrower type.
            torch.mm(gradient.flatten(1), weight.flatten(1), out=x.flatten(1))
            return x
        is_small = self._is_small(x, weight)
        if not (is_small or self._has_few_channels(x)):
            return self._backward(gradient, x, weight, (True, False, False))[0]
        settings = (self.kernel, self.stride, self.padding, (True, False, False))
        # Without the overload's name, PyTorch would try another overload first.
        backward = torch.ops.aten._slow_conv2d_backward.output_mask
        if is_small:
            return backward(gradient, x, weight, *settings)[0]
        numbers = prod(weight.shape[1:]) * prod(gradient.shape[2:])
        size = max(1, _PATCHES_BYTES // (numbers * x.element_size()))
        parts = zip(gradient.split(size), x.split(size), strict=True)
        return _joined([backward(g, part, weight, *settings)[0] for g, part in parts])

    def _has_few_channels(self, x: Float[Tensor, "n c *space"]) -> bool:
        """Return whether PyTorch's own algorithm is faster than oneDNN's for ``input_gradient``."""
        return x.shape[1] <= _FEW_CHANNELS and self._has_own_algorithm(x)

    def _is_small(
        self, x: Float[Tensor, "n c *space"], weight: Float[Tensor, "o i *kernel"]
    ) -> bool:
        """Return whether PyTorch's own algorithm is faster than oneDNN's in both directions."""
        return (
            x.shape[0] <= _FEW_IMAGES
            and 0 < prod(x.shape[2:]) * x.shape[0] * weight.numel() <= _FEW_MULTIPLICATIONS
            and x.dtype == weight.dtype
            and self._has_own_algorithm(x)
        )

    def _has_own_algorithm(self, x: Tensor) -> bool:
        """Return whether PyTorch has its own algorithm, but usually chooses oneDNN's."""
        return (
            len(self.kernel) == 2
            and self.groups == 1
            and self.dilation == (1, 1)
            and x.device.type == "cpu"
            and x.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
        )

    def weight_gradient(
        self,
        x: Float[Tensor, "n c *space"],
        weight: Float[Tensor, "o i *kernel"],
        gradient: Float[Tensor, "n o *positions"],
    ) -> Float[Tensor, "o i *kernel"]:
        """Return the gradient with respect to a weight. Only the shape of ``weight`` is used."""
        return self._backward(gradient, x, weight, (False, True, False))[1]

    def _backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, output_mask: Sequence[bool]
    ) -> Sequence[Any]:
        # Not transposed, so there is no output padding.
        settings = (self.stride, self.padding, self.dilation, False, (0,) * len(self.kernel))
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, None, *settings, self.groups, output_mask
        )


def convolution_patches(
    x: Float[Tensor, "mF c *space"], parts: int, g: Geometry
) -> Float[Tensor, "m G i FT"]:
    """Return the patches that the kernel multiplies at each of T output positions.

    ``parts`` is F, the number of entries in dimension 0 of ``x`` per example. Each patch has
    i entries, one for each pair of a channel and a kernel entry, ordered as in the weight.
    """
    windows, dims = x, len(g.kernel)
    if any(g.padding):
        windows = F.pad(x, [p for size in reversed(g.padding) for p in (size, size)])
    for dim, (size, step, gap) in enumerate(zip(g.kernel, g.stride, g.dilation, strict=True)):
        windows = windows.unfold(2 + dim, gap * (size - 1) + 1, step)
        windows = windows if gap == 1 else windows[..., ::gap]
    # (m F, c, *positions, *kernel) → (m, c, *kernel, F, *positions)
    windows = windows.unflatten(0, (-1, parts))
    positions, entries = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    windows = windows.permute(0, 2, *entries, 1, *positions)
    inner = x.shape[1] // g.groups * prod(g.kernel)
    return windows.reshape(len(windows), g.groups, inner, -1)


def convolution_rows(
    x: Float[Tensor, "mF c *space"], gradient: Float[Tensor, "m k F o *positions"], g: Geometry
) -> Tensor:
    """Return the rows (m, k, o, c / groups, *kernel) of the weight, given the output gradients."""
    m, k, parts, out = gradient.shape[:4]
    inner = (x.shape[1] // g.groups, *g.kernel)
    graph = torch.is_grad_enabled() and (x.requires_grad or gradient.requires_grad)
    if not x.is_cuda and not graph and _at_once(x, gradient, g) == 1:
        rows = x.new_empty(m, k * out, *inner)
        for row, datum, datum_gradient in zip(rows, x.split(parts), gradient.split(1), strict=True):
            row.copy_(g.weight_gradient(datum, row, _columns(datum_gradient, g)))
    else:
        patches = convolution_patches(x, parts, g)
        # (m, k, F, G, o', T) → (m, G, k, o', F, T): one product for each example and group.
        columns = gradient.reshape(m, k, parts, g.groups, out // g.groups, -1)
        columns = columns.permute(0, 3, 1, 4, 2, 5).reshape(m, g.groups, -1, patches.shape[3])
        rows = columns @ patches.mT
    # (m, G, k o', ...) → (m, k, o, c / groups, *kernel)
    return rows.reshape(m, g.groups, k, -1, *inner).transpose(1, 2).flatten(2, 3)


def convolution_inner(
    x: Float[Tensor, "mF c *space"],
    gradient: Float[Tensor, "m k F o *positions"],
    cotangent: Float[Tensor, "m k o i *kernel"],
    g: Geometry,
) -> Float[Tensor, ""]:
    """Return Σ cotangent · rows without forming the rows. The cotangent gets no gradient."""
    return _Inner.apply(x, gradient, cotangent, g, _at_once(x, gradient, g))


def _at_once(x: Tensor, gradient: Tensor, g: Geometry) -> int:
    """Return how many examples to convolve at once: one if this is as fast, or else all."""
    (m, _, parts), numbers = gradient.shape[:3], prod(gradient.shape[1:])
    multiplications = numbers * (x.shape[1] // g.groups) * prod(g.kernel)
    copied = parts * prod(x.shape[1:]) + numbers if parts > 1 else 0
    return 1 if multiplications >= _WORTH_A_CALL or copied >= _WORTH_NO_COPY else m


def _columns(gradient: Float[Tensor, "m k F o *positions"], g: Geometry) -> Tensor:
    """Return the gradients of all examples next to each other, (F, m G k o', *positions)."""
    columns = gradient.unflatten(3, (g.groups, -1)).movedim(2, 0).transpose(2, 3)
    return columns.flatten(1, 4)


def _kernels(weights: Float[Tensor, "m k o i *kernel"], g: Geometry) -> Tensor:
    """Return the weights of all examples next to each other, (m G k o', i, *kernel)."""
    return weights.unflatten(2, (g.groups, -1)).transpose(1, 2).flatten(0, 3)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _convolved(
    x: Float[Tensor, "mF c *space"],
    weights: Float[Tensor, "m k o i *kernel"],
    parts: int,
    g: Geometry,
    at_once: int,
) -> Float[Tensor, "m k F o *positions"]:
    """Convolve each example with its own k weights, as channel groups of one convolution."""
    pieces = []
    for data, weight_chunk in zip(x.split(at_once * parts), weights.split(at_once), strict=True):
        m, k, out = weight_chunk.shape[:3]
        # (m F, c, *space) → (F, m c, *space)
        side_by_side = data.unflatten(0, (m, -1)).transpose(0, 1).flatten(1, 2)
        products = g.of_all(m).convolve(side_by_side, _kernels(weight_chunk, g))
        # (F, m G k o', *positions) → (m, k, F, o, *positions)
        products = products.unflatten(1, (m, g.groups, k, out // g.groups))
        pieces.append(products.movedim((1, 3), (0, 1)).flatten(3, 4))
    return _joined(pieces)


def _pulled_back(
    shape: torch.Size,
    weights: Float[Tensor, "m k o i *kernel"],
    gradient: Float[Tensor, "m k F o *positions"],
    g: Geometry,
    at_once: int,
) -> Float[Tensor, "mF c *space"]:
    """Return the gradient of ``_convolved`` with respect to its input, whose shape is given."""
    pieces = []
    for chunk, weight_chunk in zip(gradient.split(at_once), weights.split(at_once), strict=True):
        m, parts = len(weight_chunk), chunk.shape[2]
        joined_shape = (parts, m * shape[1], *shape[2:])
        pulled = g.of_all(m).input_gradient(
            joined_shape, _kernels(weight_chunk, g), _columns(chunk, g)
        )
        # (F, m c, *space) → (m F, c, *space)
        pieces.append(pulled.unflatten(1, (m, -1)).transpose(0, 1).flatten(0, 1))
    return _joined(pieces)


class _Inner(torch.autograd.Function):
    """Σ cotangent · rows as ⟨each example convolved with its cotangent, gradient⟩.

    The value is linear in the gradients, so the convolutions are its derivative with respect to
    them. The tensors are as large as the network's activations, so they are written once and scaled
    in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gradient: Tensor,
        cotangent: Tensor,
        g: Geometry,
        at_once: int,
    ) -> Tensor:
        products = _convolved(x, cotangent, gradient.shape[2], g, at_once)
        ctx.save_for_backward(x, gradient, cotangent)
        ctx.products, ctx.settings = products, (g, at_once)
        return dot(products, gradient)

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
        x, gradient, cotangent = ctx.saved_tensors
        factor, again = factors[0].to(gradient.dtype), torch.is_grad_enabled()
        scaled = torch.mul if again else Tensor.mul_
        x_cotangent = gradient_cotangent = None
        if ctx.needs_input_grad[0]:
            x_cotangent = scaled(_pulled_back(x.shape, cotangent, gradient, *ctx.settings), factor)
        if ctx.needs_input_grad[1]:
            products, ctx.products = ctx.products, None
            if again or products is None:  # with a separate graph, or a second call
                products = _convolved(x, cotangent, gradient.shape[2], *ctx.settings)
            gradient_cotangent = scaled(products, factor)
        return x_cotangent, gradient_cotangent, None, None, None


def fixed_convolution(
    x: Float[Tensor, "mF c *space"],
    weight: Float[Tensor, "o i *kernel"],
    bias: Float[Tensor, " o"] | None,
    g: Geometry,
) -> Float[Tensor, "mF o *positions"]:
    """Return the same convolution as PyTorch, with an autograd graph only for ``x``."""
    # PyTorch's second derivative of a convolution always computes the derivative in the weight too,
    # which is one of three convolutions of a gradient through rows. With a fixed weight there are
    # two linear maps, each of which is the other's derivative, any number of times.
    # The weight gets the contiguous layout: gradients of many outputs are faster with channels
    # first, but networks trained with channels last would switch at every layer.
    weight = weight.clone(memory_format=torch.contiguous_format)
    if not x.requires_grad:
        return g.convolve(x, weight, bias)
    return FixedConvolution.apply(x, weight, bias, g)


class FixedConvolution(torch.autograd.Function):
    """The convolution x ↦ W x + b, differentiable only with respect to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.dtype, ctx.geometry = x.shape, x.dtype, g
        return g.convolve(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        pull_back = _PullBack.apply if torch.is_grad_enabled() else _pull_back
        x_gradient = pull_back(gradients[0], weight, ctx.shape, ctx.dtype, ctx.geometry)
        return x_gradient, None, None, None


def _pull_back(
    gradient: Tensor, weight: Tensor, shape: torch.Size, dtype: torch.dtype, g: Geometry
) -> Tensor:
    return g.input_gradient(shape, weight.to(gradient.dtype), gradient).to(dtype)


class _PullBack(torch.autograd.Function):
    """g ↦ Wᵀ g, in the type of the convolution's input."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        weight: Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        g: Geometry,
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype, ctx.geometry = gradient.dtype, g
        return _pull_back(gradient, weight, shape, dtype, g)

    @staticmethod
    def backward(ctx: Any, *vectors: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        vector = vectors[0].to(ctx.dtype)
        product = FixedConvolution.apply(vector, weight.to(ctx.dtype), None, ctx.geometry)
        return product, None, None, None, None
