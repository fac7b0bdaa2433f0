"""Compute the Gram matrix of a convolution's patches, and its gradient with respect to the input.

A patch has a row of entries for each row of the kernel. With vertical stride and dilation 1, all
pairs of kernel rows at distance d share the products of image rows y and y + d:

    Σ_p a[p, u] a[p, v]ᵀ = Σ_y r_y r_{y+v-u}ᵀ,    y from u to u + h - 1.

Here, a[p, u] is row u of the patch at position p. The r_y are the windows along image row y, and h
is the number of vertical positions. Sharing divides the number of products by the height of the
kernel. The ranges of y differ only by a few rows at the border.

With many channels, it is faster to use horizontal distances as well. The products of two entries
then depend only on their distance, except for patches beyond the output's positions. Summed over
*all* shifts t of the kernel,

    Σ_t x[t+u, c] x[t+v, c'] = C_{v-u}[c, c'],    C_d[c, c'] = Σ_s x[s, c] x[s+d, c'],

where x is zero outside the image. C is the weight gradient of a convolution of x with itself. For a
3 x 3 kernel, C consists of 15 matrices of size c x c, instead of 81. The remaining 10 of the 25
distances give transposes. Shifts that are not positions of the output are then subtracted. These
shifts overlap only the border of the image. On a GPU, these convolutions must not round to TF32
(``modes.without_tf32``), because the small eigenvalues of the result would be lost.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.core.algebra import sum_of_grams
from evigrad.network.convolutions import Geometry, convolution_patches

# Largest number of entries in the patches that are in memory at once (64 MiB in float32).
_PATCH_NUMBERS = 2**24

# From this side length of an image, and with several channels per group, correlations take 20 to
# 75 % of the time of products of patches on a CPU. At a side length of 4 they take longer.
_SHORTEST_SIDE = 6
# Up to this many entries of a row, products of single rows are small, and several threads compute
# them side by side. One thread takes the same time, and more entries take more memory.
_FEW_ENTRIES = 32
# From this number of channels, and with few shifts to subtract, correlations take 50 to 75 % of the
# time of products of rows on a CPU.
_MANY_CHANNELS = 16


def patch_gram(x: Float[Tensor, "M c *space"], g: Geometry) -> Float[Tensor, "G i i"]:
    """Return Σ a aᵀ over the patches a of all inputs and positions, without a graph."""
    x = x.detach()
    if prod(g.positions(x.shape[2:])) > 1:  # otherwise the inputs are the patches
        if _has_rows(x, g):
            return _gram_by_rows(x, g)
        if _has_distances(x, g):
            return _gram_by_distance(x, g)
    return sum_of_grams(convolution_patches(chunk, len(chunk), g)[0] for chunk in _chunks(x, g))


def patch_gram_pull(
    x: Float[Tensor, "M c *space"], matrix: Float[Tensor, "G i i"], g: Geometry
) -> Float[Tensor, "M c *space"]:
    """Return half the gradient of ⟨matrix, ``patch_gram``⟩ with respect to x, without a graph.

    ``matrix`` must be symmetric.
    """
    x, matrix = x.detach(), matrix.detach()
    if _has_distances(x, g):
        return _pull_by_distance(x, matrix, g)
    return torch.cat([_pull(chunk, matrix, g) for chunk in _chunks(x, g)])


def patch_sum(x: Float[Tensor, "M c *space"], g: Geometry) -> Float[Tensor, "M c *kernel"]:
    """Return the sum of the patches over all positions, with a graph."""
    # Each entry of the kernel sums a box of x, with one interval for each dimension.
    for dim, positions in enumerate(g.positions(x.shape[2:])):
        length, entries = x.shape[2 + dim], torch.arange(g.kernel[dim], device=x.device)
        first = g.dilation[dim] * entries[:, None] - g.padding[dim]
        seen = first + g.stride[dim] * torch.arange(positions, device=x.device)
        counts = (seen[..., None] == torch.arange(length, device=x.device)).any(1)
        x = (x.movedim(2 + dim, -1) @ counts.to(x.dtype).mT).movedim(-1, 2 + dim)
    return x


def _chunks(x: Tensor, g: Geometry) -> Iterator[Tensor]:
    """Yield the inputs in chunks of a few examples, whose patches fit ``_PATCH_NUMBERS``."""
    numbers_per_datum = prod(g.positions(x.shape[2:])) * x.shape[1] * prod(g.kernel)
    yield from x.split(max(1, _PATCH_NUMBERS // max(1, numbers_per_datum)))


def _pull(x: Tensor, matrix: Float[Tensor, "G i i"], g: Geometry) -> Tensor:
    """Return ``patch_gram_pull``, computed from patches."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        patches = convolution_patches(leaf, len(leaf), g)[0]
    return torch.autograd.grad(patches, leaf, matrix @ patches.detach())[0]


def _has_rows(x: Tensor, g: Geometry) -> bool:
    """Return whether ``_gram_by_rows`` is possible and faster than the other algorithms."""
    few_shifts = all(2 * pad >= size - 1 for pad, size in zip(g.padding, g.kernel, strict=True))
    return (
        len(g.kernel) == 2
        and g.kernel[0] > 1
        and g.groups == g.stride[0] == g.dilation[0] == 1
        and not (few_shifts and x.shape[1] >= _MANY_CHANNELS and _has_distances(x, g))
    )


def _gram_by_rows(x: Float[Tensor, "M c h w"], g: Geometry) -> Float[Tensor, "1 i i"]:
    (height, width), channels = g.kernel, x.shape[1]
    (down, across), gap = g.padding, g.dilation[1]
    sums = None
    for chunk in _chunks(x, replace(g, kernel=(1, width))):
        padded = F.pad(chunk, (across, across, down, down + height - 1))
        windows = padded.unfold(3, gap * (width - 1) + 1, g.stride[1])[..., ::gap]
        rows = windows.permute(2, 1, 4, 0, 3).reshape(padded.shape[2], channels * width, -1)
        new = _row_products(rows.contiguous(), height)
        sums = new if sums is None else sums.add_(new)
    assert sums is not None
    # Pair (u, v) of kernel rows has the sums of row u at distance v - u, or a transpose.
    rows_of_kernel = range(height)
    places = [[u * height + max(v - u, 0) for v in rows_of_kernel] for u in rows_of_kernel]
    pairs = sums.transpose(1, 2).flatten(0, 1)[x.new_tensor(places, dtype=torch.long)]
    del sums  # as large as the result
    above = torch.ones(height, height, dtype=torch.bool, device=x.device).triu()
    pairs = torch.where(above[..., None, None], pairs, pairs.transpose(0, 1).mT)
    pairs = pairs.view(height, height, channels, width, channels, width)
    return pairs.permute(2, 0, 3, 4, 1, 5).reshape(1, height * channels * width, -1)


def _row_products(rows: Float[Tensor, "h i n"], height: int) -> Float[Tensor, "k i k i"]:
    """Return Σ_y rows[y] rows[y + d]ᵀ at (u, :, d, :) over the rows y that overlap kernel row u.

    The last ``height`` - 1 rows must be zero.
    """
    _, entries, numbers = rows.shape
    length = len(rows) - height + 1
    positions = length - height + 1

    def operands(first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return rows, and for each row y the transposed matrix of rows y to y + height - 1."""
        chunk = rows[first:stop]
        size = (stop - first, height * entries, numbers)
        return chunk, chunk.as_strided(size, (entries * numbers, numbers, 1)).mT

    middle = range(height - 1, positions)  # the rows that overlap all rows of the kernel
    shared, others = None, [*range(length)]
    if entries <= _FEW_ENTRIES or not middle:
        products = torch.bmm(*operands(0, length))
    else:
        shared = torch.addbmm(
            rows.new_zeros(entries, height * entries), *operands(middle.start, middle.stop)
        )
        others = [*range(middle.start), *range(middle.stop, length)]
        rims = [operands(0, middle.start), operands(middle.stop, length)]
        products = torch.cat([torch.bmm(*rim) for rim in rims])
    overlaps = [[float(u <= y < u + positions) for y in others] for u in range(height)]
    sums = (rows.new_tensor(overlaps) @ products.flatten(1)).unflatten(1, products.shape[1:])
    sums = sums if shared is None else sums.add_(shared)
    return sums.unflatten(2, (height, entries))


def _has_distances(x: Tensor, g: Geometry) -> bool:
    """Return whether ``_gram_by_distance`` is possible and faster than products of patches."""
    return (
        len(g.kernel) == 2
        and max(g.kernel) > 1
        and x.shape[1] > g.groups
        and set(g.stride) == set(g.dilation) == {1}
        and all(pad < size for pad, size in zip(g.padding, g.kernel, strict=True))
        and min(x.shape[2:]) >= max(_SHORTEST_SIDE, *g.kernel)
    )


def _distances(g: Geometry, device: torch.device) -> Int[Tensor, " pairs"]:
    """Return the index of the distance v - u for each pair (u, v) of the kernel's entries."""
    height, width = g.kernel
    down, across = (torch.arange(size, device=device) for size in g.kernel)
    rows = (down - down[:, None] + height - 1)[:, None, :, None]
    columns = (across - across[:, None] + width - 1)[None, :, None, :]
    return (rows * (2 * width - 1) + columns).flatten()


def _gram_by_distance(x: Float[Tensor, "M c h w"], g: Geometry) -> Float[Tensor, "G i i"]:
    (height, width), channels = g.kernel, x.shape[1]
    inner, reach = channels // g.groups, 2 * width - 1
    correlation = replace(g, kernel=(height, reach), padding=(0, width - 1))
    below = F.pad(x, (0, 0, 0, height - 1))
    half = correlation.weight_gradient(below, x.new_empty(channels, inner, height, reach), x)
    # Vertical distances ≥ 0, (G, distances, c, c'). The remaining matrices are transposes.
    half = half.reshape(g.groups, inner, inner, -1).permute(0, 3, 1, 2).contiguous()
    every = torch.cat([half[:, reach:].flip(1).mT, half], dim=1)
    pairs = every.index_select(1, _distances(g, x.device))
    pairs = pairs.reshape(g.groups, height, width, height, width, inner, inner)
    gram = pairs.permute(0, 5, 1, 2, 6, 3, 4).contiguous()
    for rim in _rims(x, g):
        patches = convolution_patches(F.pad(rim.strip, rim.pads), len(x), rim.geometry)[0]
        block = rim.block(gram)
        block -= (patches @ patches.mT).reshape(block.shape)
    return gram.reshape(g.groups, inner * height * width, -1)


def _pull_by_distance(
    x: Float[Tensor, "M c h w"], matrix: Float[Tensor, "G i i"], g: Geometry
) -> Float[Tensor, "M c h w"]:
    (height, width), channels = g.kernel, x.shape[1]
    inner, sizes = channels // g.groups, (2 * height - 1, 2 * width - 1)
    matrix = matrix.reshape(g.groups, inner, height, width, inner, height, width)
    kernel = x.new_zeros(g.groups, prod(sizes), inner, inner)
    pairs = matrix.permute(0, 2, 3, 5, 6, 1, 4)
    kernel.index_add_(1, _distances(g, x.device), pairs.reshape(g.groups, -1, inner, inner))
    kernel = kernel.permute(0, 2, 3, 1).reshape(channels, inner, *sizes)
    every = replace(g, kernel=sizes, padding=(height - 1, width - 1))
    pulled = every.convolve(x, kernel)
    for rim, pulled_rim in zip(_rims(x, g), _rims(pulled, g), strict=True):
        block = rim.block(matrix).reshape(g.groups, -1, inner * prod(rim.geometry.kernel))
        pulled_strip = _pull(F.pad(rim.strip, rim.pads), block, rim.geometry)
        pulled_rim.strip.sub_(F.pad(pulled_strip, [-pad for pad in rim.pads]))
    return pulled


class _Rim(NamedTuple):
    """Kernel shifts on one side that overlap the image, but are not positions of the output.

    Attributes:
        strip: The part of the image that they overlap.
        pads: Zeros around the strip, for ``torch.nn.functional.pad``.
        geometry: The convolution of the padded strip whose positions are these shifts.
        entries: The kernel's vertical and horizontal entries that overlap the strip.
    """

    strip: Float[Tensor, "M c h w"]
    pads: list[int]
    geometry: Geometry
    entries: tuple[slice, slice]

    def block(self, matrix: Float[Tensor, "G c h w c h w"]) -> Tensor:
        """Return the part of a matrix for pairs of kernel entries that both overlap the strip."""
        down, across = self.entries
        return matrix[:, :, down, across, :, down, across]


def _rims(x: Float[Tensor, "M c h w"], g: Geometry) -> Iterator[_Rim]:
    """Yield rims that together contain each shift outside the output's positions once."""
    for dim, size in enumerate(g.kernel):
        outside = size - 1 - g.padding[dim]
        # Above and below: all horizontal shifts. Left and right: only vertical output positions.
        beyond = g.padding[0] if dim else g.kernel[1] - 1
        kernel = (g.kernel[0], outside) if dim else (outside, g.kernel[1])
        geometry = replace(g, kernel=kernel, padding=(0, 0))
        for start, first, pads in (
            (0, size - outside, [outside - 1, 0]),
            (x.shape[2 + dim] - outside, 0, [0, outside - 1]),
        ):
            if outside:
                along, other = slice(first, first + outside), slice(None)
                entries = (other, along) if dim else (along, other)
                pads = [*pads, beyond, beyond] if dim else [beyond, beyond, *pads]
                yield _Rim(x.narrow(2 + dim, start, outside), pads, geometry, entries)
