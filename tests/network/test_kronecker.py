"""Sums of Kronecker inputs, against the explicit inputs."""

from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from network.dense import random, weights_of
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.network import KroneckerUse, Linearization, patch_grams, plan
from evigrad.network.convolutions import Geometry
from evigrad.network.kronecker import PatchInputs


def never(*_: object) -> bool:
    return False


# Patches of all examples at once and Grams whole, or of one example at a time and Grams in strips.
# Products by distance or of rows, of all examples or one at a time, where these are defined.
WAYS = {
    "whole": {"_has_rows": never, "_SHORTEST_SIDE": 1000},
    "pieces": {"_has_rows": never, "_SHORTEST_SIDE": 1000, "_PATCH_NUMBERS": 1, "_STRIP": 1},
    "distances": {"_has_rows": never, "_SHORTEST_SIDE": 1},
    "rows": {"_MANY_CHANNELS": 1000},
    "rows of one": {"_MANY_CHANNELS": 1000, "_PATCH_NUMBERS": 1},
    "rows of many entries": {"_MANY_CHANNELS": 1000, "_FEW_ENTRIES": 0},
}


def convolution_use(x: Tensor, gradients: Tensor, geometry: Geometry) -> KroneckerUse:
    return KroneckerUse(PatchInputs(x, len(gradients), geometry), gradients)


def check(use: KroneckerUse, inputs: Tensor, source: Tensor) -> None:
    """Sums and derivatives are those of the explicit inputs, (m, G, T, i), made of the source."""
    expected = torch.einsum("ngti,ngtj->gij", inputs, inputs)
    tolerances: Any = {"rtol": 1e-11, "atol": 1e-11 * max(1.0, float(expected.detach().norm()))}
    torch.testing.assert_close(use.inputs, inputs)
    assert use.positions == inputs.shape[2] and use.num_data == inputs.shape[0]
    gram = use.source.gram(torch.float64)
    torch.testing.assert_close(gram, expected, **tolerances)

    cotangent = random(*expected.shape, seed=5)
    value = (cotangent * expected).sum()
    (slope,) = torch.autograd.grad(value, source, retain_graph=True)
    inner = use.source.inner_gram(cotangent)
    torch.testing.assert_close(inner, value, **tolerances)
    for product in (inner, (cotangent * gram).sum()):
        (actual,) = torch.autograd.grad(product, source, retain_graph=True)
        torch.testing.assert_close(actual, slope, **tolerances)

    total = inputs.sum(2)
    torch.testing.assert_close(use.source.sum(torch.float64), total)
    weights = random(*total.shape, seed=6)
    sum_slope, right = (
        torch.autograd.grad((weights * t).sum(), source, retain_graph=True)[0]
        for t in (use.source.sum(torch.float64), total)
    )
    torch.testing.assert_close(sum_slope, right)

    detached = use.detach()
    assert type(detached.source) is type(use.source)
    for tensor in (detached.inputs, detached.gradients, detached.source.gram(torch.float64)):
        assert not tensor.requires_grad
    assert not detached.source.inner_gram(cotangent).requires_grad


def sides(geometry: Geometry) -> list[int]:
    return [p for size in reversed(geometry.padding) for p in (size, size)]


def convolution(geometry: Geometry, space: tuple[int, ...], parts: int) -> None:
    """A convolution's use, with patches made entry by entry of the kernel."""
    m, groups, dims = 2, geometry.groups, len(space)
    x = random(m * parts, 2 * groups, *space).requires_grad_()
    padded, out = F.pad(x, sides(geometry)), geometry.positions(space)
    pieces = []
    for index in torch.cartesian_prod(*(torch.arange(k) for k in geometry.kernel)).reshape(
        -1, dims
    ):
        piece = padded
        for dim, entry in enumerate(index.tolist()):
            start, step = entry * geometry.dilation[dim], geometry.stride[dim]
            places = torch.arange(start, start + step * (out[dim] - 1) + 1, step)
            piece = piece.index_select(2 + dim, places)
        pieces.append(piece.flatten(2))
    # (m F, c, entries, T) → (m, G, F T, i)
    patches = torch.stack(pieces, 2).unflatten(1, (groups, -1)).flatten(2, 3)
    patches = patches.unflatten(0, (m, parts)).permute(0, 2, 1, 4, 3).flatten(2, 3)
    gradients = random(m, 1, groups, patches.shape[2], 3)
    check(convolution_use(x, gradients, geometry), patches, x)


@st.composite
def plain_geometries(draw: st.DrawFn) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Stride and dilation 1, with kernels and pads of all sizes, also larger than the image."""
    dims = draw(st.integers(1, 2))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, padding = each(1, 4), each(0, 4)
    if draw(st.booleans()):  # the padding of most networks
        padding = tuple(k // 2 for k in kernel)
    space = tuple(
        max(1, k - 2 * p) + draw(st.integers(0, 4)) for k, p in zip(kernel, padding, strict=True)
    )
    ones = (1,) * dims
    return (kernel, ones, padding, ones, draw(st.sampled_from([1, 1, 2]))), space


@pytest.mark.parametrize("way", WAYS)
@given(case=plain_geometries(), parts=st.integers(1, 2))
def test_plain_convolutions(
    way: str, case: tuple[tuple[Any, ...], tuple[int, ...]], parts: int
) -> None:
    with mock.patch.dict(vars(patch_grams), WAYS[way]):
        convolution(Geometry(*case[0]), case[1], parts)


@pytest.mark.parametrize("way", WAYS)
def test_square_convolutions(way: str) -> None:
    for size in [3, 5]:
        for padding in [0, 1, 2, 3]:
            with mock.patch.dict(vars(patch_grams), WAYS[way]):
                convolution(Geometry((size, size), (1, 1), (padding,) * 2, (1, 1), 1), (6, 5), 1)


@pytest.mark.parametrize("way", WAYS)
def test_other_convolutions(way: str) -> None:
    for geometry, space in [
        (((3, 2), (2, 1), (1, 0), (1, 1), 2), (5, 4)),
        (((3, 2), (1, 1), (2, 1), (2, 3), 1), (6, 5)),
        (((2,), (3,), (1,), (2,), 1), (7,)),
        (((2, 1, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2), 2), (3, 3, 4)),
        (((1, 1), (2, 2), (0, 0), (1, 1), 1), (4, 5)),
        (((1, 3), (1, 1), (0, 1), (2, 1), 1), (4, 5)),
    ]:
        with mock.patch.dict(vars(patch_grams), WAYS[way]):
            convolution(Geometry(*geometry), space, 2)


@pytest.mark.parametrize(
    "kernel, stride, space", [((3, 2), (1, 1), (7, 6)), ((4, 1), (1, 2), (5, 1))]
)
def test_a_single_image_of_one_channel(kernel, stride, space) -> None:
    geometry = Geometry(kernel, stride, (0, 0), (1, 1), 1)
    positions = prod(geometry.positions(space))
    use = convolution_use(random(1, 1, *space), random(1, 1, 1, positions, 3), geometry)
    patches = use.inputs.flatten(0, 2)
    torch.testing.assert_close(use.source.gram(torch.float64)[0], patches.mT @ patches)


def test_the_usual_convolution_forms_no_patches() -> None:
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    use = convolution_use(random(2, 16, 8, 8), random(2, 1, 1, 64, 3), geometry)
    with mock.patch.object(patch_grams, "_chunks", side_effect=AssertionError):
        gram = use.source.gram(torch.float64)
        inner = use.source.inner_gram(gram)
    torch.testing.assert_close(inner, gram.square().sum())


@pytest.mark.parametrize("padding", [0, 1])
def test_rows_of_few_channels_are_as_exact_as_patches(padding: int) -> None:
    x = random(200, 3, 20, 20).float()
    geometry = Geometry((5, 5), (1, 1), (padding,) * 2, (1, 1), 1)
    use = convolution_use(x, random(200, 1, 1, (16 + 2 * padding) ** 2, 3).float(), geometry)
    patches = use.inputs.double().flatten(0, 2)
    exact = patches.mT @ patches
    with mock.patch.object(patch_grams, "convolution_patches", side_effect=AssertionError):
        gram = use.source.gram(torch.float32)[0]
    assert float((gram - exact).abs().max() / exact.abs().max()) < 3e-6


def test_explicit_inputs() -> None:
    inputs = random(3, 2, 4, 5).requires_grad_()
    check(KroneckerUse(inputs, random(3, 2, 2, 4, 3)), inputs, inputs)


def test_second_derivatives_are_refused() -> None:
    inputs = random(3, 1, 4, 2).requires_grad_()
    use = KroneckerUse(inputs, random(3, 2, 1, 4, 3))
    for value in (use.source.inner_gram(random(1, 2, 2)), use.source.gram(torch.float64).sum()):
        with pytest.raises(ConfigurationError, match="differentiated only once"):
            torch.autograd.grad(value, inputs, create_graph=True)


def test_sums_in_another_type() -> None:
    x = random(2, 2, 5, 5).float()
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    use = convolution_use(x.requires_grad_(), random(2, 1, 1, 25, 3).float(), geometry)
    gram = use.source.gram(torch.float64)
    expected = use.inputs.double().flatten(0, 2)
    torch.testing.assert_close(gram[0], expected.mT @ expected)
    inner = use.source.inner_gram(random(1, 18, 18))
    assert inner.dtype == torch.float64
    (gradient,) = torch.autograd.grad(inner, x)
    assert gradient.dtype == torch.float32 and gradient.any()


@pytest.mark.parametrize("way", WAYS)
def test_of_a_linearization(way: str) -> None:
    """The derivative in a hyperparameter, through the network before the convolution."""
    model: Any = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1), nn.Tanh()
    )
    model = nn.Sequential(nn.PReLU(), model, nn.Flatten(), nn.Linear(2 * 16, 3)).double()
    weights = weights_of(model, ["0.weight"])
    x, vectors = random(3, 2, 4, 4), random(3, 2, 3)
    jacobian_plan = plan(model, weights, x)
    linearization = Linearization(model, weights, x, jacobian_plan, differentiable=True)
    name, slopes, values = "1.2.weight", [], []
    with mock.patch.dict(vars(patch_grams), WAYS[way]):
        (use,) = linearization.factors(vectors, [name])[name]
        cotangent = random(1, 27, 27)
        for value in (
            use.source.inner_gram(cotangent),
            (torch.einsum("ngti,ngtj->gij", use.inputs, use.inputs) * cotangent).sum(),
        ):
            values.append(value)
            slopes += torch.autograd.grad(value, model[0].weight, retain_graph=True)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*slopes)
    assert slopes[0].abs() > 1e-6
