"""Convolutions in which every datum has a weight, or a gradient of the weight, of its own.

The rows in a convolution's weight correlate each datum's input with its own gradient. Their inner
product with cotangents convolves each datum's input with its own cotangent, which forms no rows.
Which way is fastest depends on the size of the convolutions; the constants below are of a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn import grad as convolution_gradients

from evigrad import scratch

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
INPUT_GRADIENTS: dict[int, Callable[..., Tensor]] = {
    1: convolution_gradients.conv1d_input,
    2: convolution_gradients.conv2d_input,
    3: convolution_gradients.conv3d_input,
}
WEIGHT_GRADIENTS: dict[int, Callable[..., Tensor]] = {
    1: convolution_gradients.conv1d_weight,
    2: convolution_gradients.conv2d_weight,
    3: convolution_gradients.conv3d_weight,
}

# From so many multiplications for one datum, a convolution for each in turn is as fast as one
# convolution of all with the same weight; below, what it takes to start one counts.
_WORTH_A_CALL = 2**24

# Up to so many row columns times output channels, a convolution with one group per datum beats
# patches and a batched product on a CPU: it reads the input without a copy for each entry of the
# kernel. It needs more positions than such entries to pay.
_GROUPED_COLUMNS = 32


@dataclass(frozen=True)
class Geometry:
    """The settings of a convolution with D spatial dimensions.

    Attributes:
        kernel: Size of the kernel, D numbers.
        stride: D numbers.
        pads: Zeros in front of and behind each dimension.
        dilation: Distance between the kernel's entries, D numbers.
        groups: G, the number of channel groups.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def padded(self, x: Float[Tensor, "mF c *space"]) -> Float[Tensor, "mF c *padded"]:
        """The input with its zeros around it."""
        if not any(p for pair in self.pads for p in pair):
            return x
        return F.pad(x, [p for pair in reversed(self.pads) for p in pair])

    def split(self, x: Float[Tensor, "mF c *space"]) -> tuple[Tensor, dict[str, Any]]:
        """An input and the settings that PyTorch's functions take beside it.

        Args:
            x: Input of the convolution.

        Returns:
            The input, padded where its sides differ, and stride, padding and dilation.
        """
        even = all(before == behind for before, behind in self.pads)
        padding = tuple(before for before, _ in self.pads) if even else (0,) * len(self.kernel)
        settings = {"stride": self.stride, "padding": padding, "dilation": self.dilation}
        return (x if even else self.padded(x)), settings


def convolution_patches(
    x: Float[Tensor, "mF c *space"], parts: int, geometry: Geometry
) -> Float[Tensor, "m G i FT"]:
    """What the kernel is multiplied with at each of the T positions of the output.

    Args:
        x: Input of the convolution.
        parts: F, how many entries of dim 0 belong to each datum.
        geometry: Settings of the convolution.

    Returns:
        The patches; i counts a group's channels times the kernel's entries, in the order in which
        the weight holds them.
    """
    windows, dims = geometry.padded(x), len(geometry.kernel)
    settings = zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)
    for dim, (size, step, gap) in enumerate(settings):
        windows = windows.unfold(2 + dim, gap * (size - 1) + 1, step)[..., ::gap]
    # (m F, c, *positions, *kernel) → (m, c, *kernel, F, *positions)
    windows = windows.unflatten(0, (-1, parts))
    positions, entries = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    windows = windows.permute(0, 2, *entries, 1, *positions)
    inner = x.shape[1] // geometry.groups * prod(geometry.kernel)
    return windows.reshape(len(windows), geometry.groups, inner, -1)


def convolution_rows(
    x: Float[Tensor, "mF c *space"], gradient: Float[Tensor, "m k F o *positions"], g: Geometry
) -> Tensor:
    """The rows in the weight of a convolution.

    Args:
        x: Input of the convolution.
        gradient: Gradients of the k rows of each datum in its output.
        g: Settings of the convolution.

    Returns:
        Rows of shape (m, k, o, c / groups, *kernel).
    """
    k, parts, out = gradient.shape[1:4]
    if not x.is_cuda:
        if _work(x, gradient, g) >= _WORTH_A_CALL:
            x, settings = g.split(x)
            return _Rows.apply(x, gradient, g, settings)
        spread = 1 < prod(g.kernel) < prod(gradient.shape[4:]) * parts
        if spread and k * out <= _GROUPED_COLUMNS * g.groups:
            return _grouped_rows(x, gradient, g)
    patches = convolution_patches(x, parts, g)
    # (m, k, F, G, o', T) → (m, G, k, o', F, T): one product for each datum and group.
    columns = gradient.flatten(4).unflatten(3, (g.groups, -1)).permute(0, 3, 1, 4, 2, 5)
    rows = columns.flatten(4).flatten(2, 3) @ patches.mT
    return _by_output(rows, k, (x.shape[1] // g.groups, *g.kernel))


def convolution_inner(
    x: Float[Tensor, "mF c *space"],
    gradient: Float[Tensor, "m k F o *positions"],
    cotangent: Float[Tensor, "m k o i *kernel"],
    g: Geometry,
) -> Float[Tensor, ""]:
    """The inner product of the rows in the weight with cotangents, without the rows.

    Args:
        x: Input of the convolution.
        gradient: Gradients of the k rows of each datum in its output.
        cotangent: Cotangents of the rows, which get no gradient themselves.
        g: Settings of the convolution.

    Returns:
        Σ cotangent · rows, with a graph into input and gradients.
    """
    x, settings = g.split(x)
    if _work(x, gradient, g) >= _WORTH_A_CALL:
        return _Inner.apply(x, gradient, cotangent, g, settings, _convolve_each, _pull_back_each)
    return _Inner.apply(x, gradient, cotangent, g, settings, _convolve_all, _pull_back_all)


def inner_product(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    """Σ a b for tensors of one shape, in single precision at least."""
    if a.dtype.itemsize < torch.float32.itemsize:
        a, b = a.float(), b.float()
    # Not (a * b).sum(), which fills a tensor of their size first.
    return torch.dot(a.reshape(-1), b.reshape(-1))


def _work(x: Tensor, gradient: Tensor, g: Geometry) -> int:
    """Multiplications for one datum."""
    return prod(gradient.shape[1:]) * (x.shape[1] // g.groups) * prod(g.kernel)


def _by_group(weights: Tensor, g: Geometry) -> Tensor:
    """Weights (m, k, o, ...) as (m, G, k, o', ...), as group after group wants them."""
    return weights.unflatten(2, (g.groups, -1)).transpose(1, 2)


def _by_output(weights: Tensor, k: int, inner: Sequence[int]) -> Tensor:
    """Weights (m, G, ...) that hold (m, G, k, o', *inner) as (m, k, o, *inner)."""
    m, groups = weights.shape[:2]
    return weights.reshape(m, groups, k, -1, *inner).transpose(1, 2).flatten(2, 3)


def _side_by_side(x: Tensor, m: int) -> Tensor:
    """Inputs (m F, c, ...) as (F, m c, ...), every datum a group of channels."""
    return x.unflatten(0, (m, -1)).transpose(0, 1).flatten(1, 2)


def _grouped_rows(x: Tensor, gradient: Tensor, g: Geometry) -> Tensor:
    """The rows as the weight gradient of one convolution in which every datum is a group."""
    m, k, parts, out = gradient.shape[:4]
    x, settings = g.split(x)
    columns = _columns_all(gradient, g)
    inner = (x.shape[1] // g.groups, *g.kernel)
    rows = WEIGHT_GRADIENTS[len(g.kernel)](
        _side_by_side(x, m), (m * k * out, *inner), columns, groups=m * g.groups, **settings
    )
    return _by_output(rows.reshape(m, g.groups, -1), k, inner)


def _columns_each(gradient: Float[Tensor, "m k F o *positions"], g: Geometry) -> Sequence[Tensor]:
    """For each datum, its gradients as one output (F, G k o', *positions)."""
    columns = gradient.transpose(1, 2).unflatten(3, (g.groups, -1)).transpose(2, 3)
    return columns.flatten(2, 4).unbind()


def _columns_all(gradient: Float[Tensor, "m k F o *positions"], g: Geometry) -> Tensor:
    """The gradients of all data side by side, (F, m G k o', *positions)."""
    columns = gradient.unflatten(3, (g.groups, -1)).movedim(2, 0).transpose(2, 3)
    return columns.flatten(1, 4)


def _convolve_each(
    x: Float[Tensor, "mF c *space"],
    weights: Float[Tensor, "m k o i *kernel"],
    parts: int,
    g: Geometry,
    settings: dict[str, Any],
) -> Float[Tensor, "m k F o *positions"]:
    """Each datum convolved with its own k weights, one after the other."""
    convolve, k = CONVOLUTIONS[len(g.kernel)], weights.shape[1]
    kernels = _by_group(weights, g).flatten(1, 3)
    data = x.unflatten(0, (-1, parts))
    products = torch.stack(
        [
            convolve(datum, kernel, groups=g.groups, **settings)
            for datum, kernel in zip(data.unbind(), kernels.unbind(), strict=True)
        ]
    )
    # (m, F, G k o', *positions) → (m, k, F, o, *positions)
    products = products.unflatten(2, (g.groups, k, -1)).transpose(2, 3).flatten(3, 4)
    return products.transpose(1, 2)


def _convolve_all(
    x: Float[Tensor, "mF c *space"],
    weights: Float[Tensor, "m k o i *kernel"],
    parts: int,
    g: Geometry,
    settings: dict[str, Any],
) -> Float[Tensor, "m k F o *positions"]:
    """The same by one convolution in which every datum is a group."""
    m, k, out = weights.shape[:3]
    products = CONVOLUTIONS[len(g.kernel)](
        _side_by_side(x, m),
        _by_group(weights, g).flatten(0, 3),
        groups=m * g.groups,
        **settings,
    )
    # (F, m G k o', *positions) → (m, k, F, o, *positions)
    products = products.unflatten(1, (m, g.groups, k, out // g.groups))
    return products.movedim((1, 3), (0, 1)).flatten(3, 4)


def _pull_back_each(
    shape: torch.Size,
    weights: Float[Tensor, "m k o i *kernel"],
    gradient: Float[Tensor, "m k F o *positions"],
    g: Geometry,
    settings: dict[str, Any],
) -> Float[Tensor, "mF c *space"]:
    """The gradient of ``_convolve_each`` in its input, which has this shape."""
    pull, parts = INPUT_GRADIENTS[len(g.kernel)], gradient.shape[2]
    kernels = _by_group(weights, g).flatten(1, 3)
    columns = _columns_each(gradient, g)
    return torch.cat(
        [
            pull((parts, *shape[1:]), kernel, datum, groups=g.groups, **settings)
            for kernel, datum in zip(kernels.unbind(), columns, strict=True)
        ]
    )


def _pull_back_all(
    shape: torch.Size,
    weights: Float[Tensor, "m k o i *kernel"],
    gradient: Float[Tensor, "m k F o *positions"],
    g: Geometry,
    settings: dict[str, Any],
) -> Float[Tensor, "mF c *space"]:
    """The gradient of ``_convolve_all`` in its input, which has this shape."""
    m, parts = len(weights), gradient.shape[2]
    pulled = INPUT_GRADIENTS[len(g.kernel)](
        (parts, m * shape[1], *shape[2:]),
        _by_group(weights, g).flatten(0, 3),
        _columns_all(gradient, g),
        groups=m * g.groups,
        **settings,
    )
    # (F, m c, *space) → (m F, c, *space)
    return pulled.unflatten(1, (m, -1)).transpose(0, 1).flatten(0, 1)


class _Rows(torch.autograd.Function):
    """The gradient of ``_convolve_each`` in its weights, one datum after the other.

    PyTorch's own derivative of such a gradient takes several times as long.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gradient: Tensor, g: Geometry, settings: dict[str, Any]
    ) -> Tensor:
        """The rows (m, k, o, i, *kernel)."""
        ctx.save_for_backward(x, gradient)
        ctx.geometry, ctx.settings = g, settings
        k, parts, out = gradient.shape[1:4]
        correlate, inner = WEIGHT_GRADIENTS[len(g.kernel)], (x.shape[1] // g.groups, *g.kernel)
        data, columns = x.unflatten(0, (-1, parts)), _columns_each(gradient, g)
        rows = scratch.empty((len(data), k * out, *inner), x)
        for datum, column, row in zip(data.unbind(), columns, rows.unbind(), strict=True):
            row.copy_(correlate(datum, (k * out, *inner), column, groups=g.groups, **settings))
        return _by_output(rows.unflatten(1, (g.groups, -1)), k, inner)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Cotangents of input and gradients; made of what can be differentiated again."""
        x, gradient = ctx.saved_tensors
        g, settings, (cotangent,) = ctx.geometry, ctx.settings, cotangents
        of_x = of_gradient = None
        if ctx.needs_input_grad[0]:
            of_x = _pull_back_each(x.shape, cotangent, gradient, g, settings)
        if ctx.needs_input_grad[1]:
            of_gradient = _convolve_each(x, cotangent, gradient.shape[2], g, settings)
        return of_x, of_gradient, None, None


class _Inner(torch.autograd.Function):
    """Σ cotangent · rows as ⟨each datum convolved with its cotangent, gradient⟩.

    The value is linear in both, and so the convolutions are its derivative in the gradients. The
    tensors are as large as the activations of the network: each is written once, and scaled in
    place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gradient: Tensor,
        cotangent: Tensor,
        g: Geometry,
        settings: dict[str, Any],
        convolve: Callable[..., Tensor],
        pull_back: Callable[..., Tensor],
    ) -> Tensor:
        """The inner product."""
        products = convolve(x, cotangent, gradient.shape[2], g, settings)
        ctx.save_for_backward(x, gradient, cotangent)
        ctx.products, ctx.settings = products, (g, settings)
        ctx.convolve, ctx.pull_back = convolve, pull_back
        return inner_product(products, gradient)

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
        """The derivatives in input and gradients."""
        x, gradient, cotangent = ctx.saved_tensors
        factor, again = factors[0].to(gradient.dtype), torch.is_grad_enabled()
        scaled = torch.mul if again else Tensor.mul_
        of_x = of_gradient = None
        if ctx.needs_input_grad[0]:
            of_x = scaled(ctx.pull_back(x.shape, cotangent, gradient, *ctx.settings), factor)
        if ctx.needs_input_grad[1]:
            products, ctx.products = ctx.products, None
            if again or products is None:  # with a graph of its own, or a second call
                products = ctx.convolve(x, cotangent, gradient.shape[2], *ctx.settings)
            of_gradient = scaled(products, factor)
        return of_x, of_gradient, None, None, None, None, None
