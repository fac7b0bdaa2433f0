"""Convolutions in which every datum has its own weight, or its own gradient of the weight.

The rows in a convolution's weight correlate each datum's input with its own gradient. Their inner
product with cotangents convolves each datum's input with its own cotangent and forms no rows.
Which way is fastest depends on the sizes; the constants below were measured on a CPU.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.jacobians import scratch
from evigrad.jacobians.geometry import (
    CONVOLUTIONS,
    Geometry,
    convolution_patches,
    input_gradient,
    weight_gradient,
)

# From so many multiplications per datum, one convolution per datum is as fast as one for all data;
# below, the cost of starting each call counts.
_WORTH_A_CALL = 2**24

# Where a datum has several parts, one convolution of all data needs input, gradient and products in
# another order. From so many numbers per datum, copying them takes longer than separate calls.
_WORTH_NO_COPY = 2**16

# Up to so many k x output channels per group, a convolution with one group per datum beats patches
# and a batched product on a CPU: it does not copy the input for each entry of the kernel. It pays
# only with more positions than such entries.
_GROUPED_COLUMNS = 32


def convolution_rows(
    x: Float[Tensor, "mF c *space"], gradient: Float[Tensor, "m k F o *positions"], g: Geometry
) -> Tensor:
    """The rows (m, k, o, c / groups, *kernel) in the weight, from the output's gradients."""
    k, parts, out = gradient.shape[1:4]
    if not x.is_cuda:
        if _one_by_one(x, gradient, g):
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
    """Σ cotangent · rows without forming the rows; the cotangent gets no gradient."""
    x, settings = g.split(x)
    if _one_by_one(x, gradient, g):
        return _Inner.apply(x, gradient, cotangent, g, settings, _convolve_each, _pull_back_each)
    return _Inner.apply(x, gradient, cotangent, g, settings, _convolve_all, _pull_back_all)


def inner_product(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    """Σ a b for tensors of one shape, in single precision at least."""
    if a.dtype.itemsize < torch.float32.itemsize:
        a, b = a.float(), b.float()
    # Not (a * b).sum(), which fills a tensor of their size first.
    return torch.dot(a.reshape(-1), b.reshape(-1))


def _one_by_one(x: Tensor, gradient: Tensor, g: Geometry) -> bool:
    """Whether one convolution per datum is as fast as one for all data."""
    numbers = prod(gradient.shape[1:])
    if numbers * (x.shape[1] // g.groups) * prod(g.kernel) >= _WORTH_A_CALL:
        return True
    parts = gradient.shape[2]
    return parts > 1 and parts * prod(x.shape[1:]) + numbers >= _WORTH_NO_COPY


def _by_group(weights: Tensor, g: Geometry) -> Tensor:
    """Weights (m, k, o, ...) as (m, G, k, o', ...)."""
    return weights.unflatten(2, (g.groups, -1)).transpose(1, 2)


def _by_output(weights: Tensor, k: int, inner: Sequence[int]) -> Tensor:
    """Weights (m, G, ...) that hold (m, G, k, o', *inner) as (m, k, o, *inner)."""
    m, groups = weights.shape[:2]
    return weights.reshape(m, groups, k, -1, *inner).transpose(1, 2).flatten(2, 3)


def _side_by_side(x: Tensor, m: int) -> Tensor:
    """Inputs (m F, c, ...) as (F, m c, ...): every datum is a group of channels."""
    return x.unflatten(0, (m, -1)).transpose(0, 1).flatten(1, 2)


def _grouped_rows(x: Tensor, gradient: Tensor, g: Geometry) -> Tensor:
    """The rows as the weight gradient of one convolution in which every datum is a group."""
    m, k, parts, out = gradient.shape[:4]
    x, settings = g.split(x)
    columns = _columns_all(gradient, g)
    inner = (x.shape[1] // g.groups, *g.kernel)
    settings = settings | {"groups": m * g.groups}
    weight = x.new_empty(m * k * out, *inner)
    rows = weight_gradient(_side_by_side(x, m), weight, columns, settings)
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
    """Each datum convolved with its own k weights, one datum after the other."""
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
    """``_convolve_each`` as one convolution in which every datum is a group."""
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
    each, settings = (gradient.shape[2], *shape[1:]), settings | {"groups": g.groups}
    kernels = _by_group(weights, g).flatten(1, 3)
    columns = _columns_each(gradient, g)
    return torch.cat(
        [
            input_gradient(each, kernel, datum, settings)
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
    """``_pull_back_each`` as one convolution in which every datum is a group."""
    m, parts = len(weights), gradient.shape[2]
    pulled = input_gradient(
        (parts, m * shape[1], *shape[2:]),
        _by_group(weights, g).flatten(0, 3),
        _columns_all(gradient, g),
        settings | {"groups": m * g.groups},
    )
    # (F, m c, *space) → (m F, c, *space)
    return pulled.unflatten(1, (m, -1)).transpose(0, 1).flatten(0, 1)


class _Rows(torch.autograd.Function):
    """The gradient of ``_convolve_each`` in its weights, (m, k, o, i, *kernel), datum by datum.

    PyTorch's own derivative of such a gradient takes several times as long.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gradient: Tensor, g: Geometry, settings: dict[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(x, gradient)
        ctx.geometry, ctx.settings = g, settings
        k, parts, out = gradient.shape[1:4]
        inner, settings = (x.shape[1] // g.groups, *g.kernel), settings | {"groups": g.groups}
        data, columns = x.unflatten(0, (-1, parts)), _columns_each(gradient, g)
        rows = scratch.empty((len(data), k * out, *inner), x)
        for datum, column, row in zip(data.unbind(), columns, rows.unbind(), strict=True):
            row.copy_(weight_gradient(datum, row, column, settings))
        return _by_output(rows.unflatten(1, (g.groups, -1)), k, inner)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Cotangents of input and gradients, from operations that have derivatives."""
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

    The value is linear in the gradients, so the convolutions are its derivative in them. The
    tensors are as large as the network's activations: each is written once, and scaled in place.
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
        products = convolve(x, cotangent, gradient.shape[2], g, settings)
        ctx.save_for_backward(x, gradient, cotangent)
        ctx.products, ctx.settings = products, (g, settings)
        ctx.convolve, ctx.pull_back = convolve, pull_back
        return inner_product(products, gradient)

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
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
