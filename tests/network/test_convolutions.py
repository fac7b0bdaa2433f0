"""Every way to convolve with weights of each datum's own, against explicit patches."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from network.dense import random
from torch import Tensor

from evigrad.network import convolutions
from evigrad.network.convolutions import (
    Geometry,
    convolution_inner,
    convolution_patches,
    convolution_rows,
)

# Constants under which each way is taken.
WAYS = {
    "each": {"_WORTH_A_CALL": 0},
    "all": {"_WORTH_A_CALL": 2**62, "_WORTH_NO_COPY": 2**62},
}


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Arguments of a ``Geometry``, and a size that suits it."""
    dims = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, dilation, padding = each(1, 3), each(1, 2), each(0, 2)
    geometry = (kernel, each(1, 2), padding, dilation, draw(st.sampled_from([1, 2, 3])))
    space = (
        max(1, d * (k - 1) + 1 - 2 * p + draw(st.integers(0, 3)))
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    return geometry, tuple(space)


def operands(
    geometry: Geometry, space: tuple[int, ...], m: int = 2, k: int = 2, parts: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, gradients and cotangents that fit."""
    x = random(m * parts, 2 * geometry.groups, *space)
    weight = random(k, 3 * geometry.groups, 2, *geometry.kernel)
    out = geometry.convolve(x, weight[0])
    gradient = random(m, k, parts, *out.shape[1:], seed=1)
    cotangent = random(m, *weight.shape, seed=2)
    return x.requires_grad_(), gradient.requires_grad_(), cotangent


def explicit(x: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """Rows by patches of one datum's part at a time."""
    parts = gradient.shape[2]
    patches = convolution_patches(x, 1, geometry).unflatten(0, (-1, parts))
    columns = gradient.flatten(4).unflatten(3, (geometry.groups, -1))
    rows = torch.einsum("nkfgot,nfgit->nkgoi", columns, patches)
    return rows.reshape(*gradient.shape[:2], gradient.shape[3], -1, *geometry.kernel)


@pytest.mark.parametrize("way", WAYS)
@given(geometries(), st.integers(1, 2), st.sampled_from([1, 3]), st.booleans())
def test_rows_inner_and_derivatives(
    way: str, case: tuple[tuple[Any, ...], tuple[int, ...]], k: int, parts: int, last: bool
) -> None:
    geometry, space = Geometry(*case[0]), case[1]
    x, gradient, cotangent = operands(geometry, space, 2, k, parts)
    expected = explicit(x, gradient, geometry)
    value = (expected * cotangent).sum()
    slopes = torch.autograd.grad(value, [x, gradient])
    given_x = x
    if last and len(space) == 2:
        given_x = x.contiguous(memory_format=torch.channels_last)
    with mock.patch.dict(vars(convolutions), WAYS[way]):
        rows = convolution_rows(given_x, gradient, geometry)
        torch.testing.assert_close(rows, expected)
        with torch.no_grad():
            torch.testing.assert_close(convolution_rows(given_x, gradient, geometry), rows)
        inner = convolution_inner(given_x, gradient, cotangent, geometry)
        torch.testing.assert_close(inner, value)
        for a in (inner, (rows * cotangent).sum()):
            for actual_slope, slope in zip(
                torch.autograd.grad(a, [x, gradient]), slopes, strict=True
            ):
                torch.testing.assert_close(actual_slope, slope)


@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives(way: str) -> None:
    geometry = Geometry((2, 3), (1, 2), (1, 1), (1, 1), 2)
    x, gradient, cotangent = operands(geometry, (3, 4), parts=2)

    def value(a: Tensor, g: Tensor) -> Tensor:
        return convolution_rows(a, g, geometry).square().sum().log()

    def inner(a: Tensor, g: Tensor) -> Tensor:
        return convolution_inner(a, g, cotangent, geometry).square()

    with mock.patch.dict(vars(convolutions), WAYS[way]):
        assert torch.autograd.gradgradcheck(value, (x, gradient), fast_mode=True)
        assert torch.autograd.gradgradcheck(inner, (x, gradient), fast_mode=True)
