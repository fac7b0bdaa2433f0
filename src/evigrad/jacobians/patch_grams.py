"""The Gram matrix of a convolution's patches, computed without the patches where that is faster.

With stride and dilation 1, the products of two entries of the patches depend only on the distance
of the entries, up to patches that reach beyond the output's positions. Summed over *all* shifts t
of the kernel,

    Σ_t x[t+u, c] x[t+v, c'] = C_{v-u}[c, c'],    C_d[c, c'] = Σ_s x[s, c] x[s+d, c'],

where x is zero outside of the image. C is the weight gradient of a convolution of x with itself:
for a 3 x 3 kernel 25 matrices of c x c numbers, half of which are transposes of the others, instead
of 81. Shifts outside of the output's positions are subtracted again; their patches are few, and
hold only the rims of the image. On a GPU such correlations are rounded as convolutions are (to
TF32, unless PyTorch is told otherwise).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.jacobians.geometry import Geometry, convolution_patches, weight_gradient

# Most numbers in the patches that exist at once (64 MiB in float32).
_PATCH_NUMBERS = 2**24

# How much longer a multiplication takes in a correlation than in a product of matrices.
_CORRELATION_COST = 2


def patch_gram(x: Float[Tensor, "M c *space"], geometry: Geometry) -> Float[Tensor, "G i i"]:
    """Σ a aᵀ over the patches a of all inputs and positions, without a graph."""
    x = x.detach()
    if _has_distances(x, geometry):
        return _gram_by_distance(*_in_two_dimensions(x, geometry))
    gram = None
    for chunk in _chunks(x, geometry):
        patches = convolution_patches(chunk, len(chunk), geometry)[0]
        gram = patches @ patches.mT if gram is None else gram.baddbmm_(patches, patches.mT)
    assert gram is not None  # there are data
    return gram


def patch_gram_pull(
    x: Float[Tensor, "M c *space"], matrix: Float[Tensor, "G i i"], geometry: Geometry
) -> Float[Tensor, "M c *space"]:
    """Half of the gradient in x of ⟨matrix, ``patch_gram``⟩, for a symmetric matrix; no graph."""
    x, matrix = x.detach(), matrix.detach()
    if _has_distances(x, geometry):
        flat, of_two = _in_two_dimensions(x, geometry)
        return _pull_by_distance(flat, matrix, of_two).reshape(x.shape)
    return torch.cat([_pull(chunk, matrix, geometry) for chunk in _chunks(x, geometry)])


def patch_sum(x: Float[Tensor, "M c *space"], geometry: Geometry) -> Float[Tensor, "M c *kernel"]:
    """The patches summed over all positions, differentiable."""
    # Each entry of the kernel sums a box of x, the product of one interval for each dimension.
    for dim, (before, behind) in enumerate(geometry.pads):
        size, step, gap = geometry.kernel[dim], geometry.stride[dim], geometry.dilation[dim]
        length = x.shape[2 + dim]
        positions = (before + length + behind - gap * (size - 1) - 1) // step + 1
        entries = gap * torch.arange(size, device=x.device)[:, None] - before
        seen = entries + step * torch.arange(positions, device=x.device)
        counts = (seen[..., None] == torch.arange(length, device=x.device)).any(1)
        x = (x.movedim(2 + dim, -1) @ counts.to(x.dtype).mT).movedim(-1, 2 + dim)
    return x


def _chunks(x: Tensor, geometry: Geometry) -> Iterator[Tensor]:
    """Inputs of a few data each, whose patches fit ``_PATCH_NUMBERS``."""
    each = prod(_out(x, geometry)) * x.shape[1] * prod(geometry.kernel)
    yield from x.split(max(1, _PATCH_NUMBERS // max(1, each)))


def _out(x: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """Number of the output's positions along each dimension."""
    return tuple(
        (before + length + behind - gap * (size - 1) - 1) // step + 1
        for length, (before, behind), size, step, gap in zip(
            x.shape[2:],
            geometry.pads,
            geometry.kernel,
            geometry.stride,
            geometry.dilation,
            strict=True,
        )
    )


def _pull(x: Tensor, matrix: Float[Tensor, "G i i"], geometry: Geometry) -> Tensor:
    """``patch_gram_pull`` by patches."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        patches = convolution_patches(leaf, len(leaf), geometry)[0]
    return torch.autograd.grad(patches, leaf, matrix @ patches.detach())[0]


def _has_distances(x: Tensor, geometry: Geometry) -> bool:
    """Whether the Gram matrix by distance is defined, and faster than patches."""
    kernel = geometry.kernel
    if len(kernel) > 2 or set(geometry.stride) != {1}:
        return False
    if any(gap > 1 and size > 1 for gap, size in zip(geometry.dilation, kernel, strict=True)):
        return False
    x, geometry = _in_two_dimensions(x, geometry)
    channels = x.shape[1] // geometry.groups
    numbers = prod(x.shape[2:]) * prod(_reach(geometry)) * channels**2
    for rim in _rims(x, geometry):
        places = prod(_out(rim.strip, rim.geometry))
        numbers += places * (channels * prod(rim.geometry.kernel)) ** 2
    explicit = prod(_out(x, geometry)) * (channels * prod(geometry.kernel)) ** 2
    return _CORRELATION_COST * numbers < explicit


def _in_two_dimensions(x: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    if len(geometry.kernel) == 2:
        return x, geometry
    ones = ((1, *geometry.kernel), (1, *geometry.stride), ((0, 0), *geometry.pads), (1, 1))
    return x[:, :, None], Geometry(*ones, geometry.groups)


def _reach(geometry: Geometry) -> tuple[int, int]:
    """How many distances there are down (zero and more) and across (of both signs)."""
    return geometry.kernel[0], 2 * geometry.kernel[1] - 1


def _distances(geometry: Geometry, device: torch.device) -> Int[Tensor, " pairs"]:
    """For each pair (u, v) of the kernel's entries, the number of the distance v - u."""
    height, width = geometry.kernel
    down, across = (torch.arange(size, device=device) for size in geometry.kernel)
    rows = (down - down[:, None] + height - 1)[:, None, :, None]
    columns = (across - across[:, None] + width - 1)[None, :, None, :]
    return (rows * (2 * width - 1) + columns).flatten()


def _gram_by_distance(x: Float[Tensor, "M c h w"], geometry: Geometry) -> Float[Tensor, "G i i"]:
    (height, width), groups, channels = geometry.kernel, geometry.groups, x.shape[1]
    inner = channels // groups
    settings = {"stride": (1, 1), "padding": (0, width - 1), "dilation": (1, 1), "groups": groups}
    weight = x.new_empty(channels, inner, *_reach(geometry))
    half = weight_gradient(F.pad(x, (0, 0, 0, height - 1)), weight, x, settings)
    # (G, distances, c, c'); those of the other sign are transposes.
    half = half.reshape(groups, inner, inner, -1).permute(0, 3, 1, 2).contiguous()
    other = half[:, width * 2 - 1 :].flip(1).mT
    pairs = torch.cat([other, half], dim=1).index_select(1, _distances(geometry, x.device))
    pairs = pairs.reshape(groups, height, width, height, width, inner, inner)
    for rim in _rims(x, geometry):
        patches = rim.patches(rim.strip)
        # (G, u, c, v, c') → (G, u, v, c, c')
        product = (patches @ patches.mT).reshape(
            groups, -1, inner, patches.shape[1] // inner, inner
        )
        down, across = rim.entries
        block = pairs[:, down, across, down, across]
        block -= product.transpose(2, 3).reshape(block.shape)
    return pairs.permute(0, 5, 1, 2, 6, 3, 4).reshape(groups, inner * height * width, -1)


def _pull_by_distance(
    x: Float[Tensor, "M c h w"], matrix: Float[Tensor, "G i i"], geometry: Geometry
) -> Float[Tensor, "M c h w"]:
    (height, width), groups, channels = geometry.kernel, geometry.groups, x.shape[1]
    inner = channels // groups
    pairs = matrix.reshape(groups, inner, height, width, inner, height, width)
    pairs = pairs.permute(0, 2, 3, 5, 6, 1, 4).contiguous()  # (G, u, v, c, c')
    sizes = (2 * height - 1, 2 * width - 1)
    kernel = x.new_zeros(groups, prod(sizes), inner, inner)
    kernel.index_add_(1, _distances(geometry, x.device), pairs.flatten(1, 4))
    kernel = kernel.permute(0, 2, 3, 1).reshape(channels, inner, *sizes)
    pulled = F.conv2d(x, kernel, padding=(height - 1, width - 1), groups=groups)
    for rim in _rims(x, geometry):
        down, across = rim.entries
        block = pairs[:, down, across, down, across].flatten(3, 4).flatten(1, 2)
        with torch.enable_grad():
            strip = rim.strip.detach().requires_grad_()
            patches = rim.patches(strip)
        # (G, u, v, c, c') → (G, u, c, v, c')
        size = patches.shape[1]
        product = block.transpose(2, 3).reshape(groups, size, size) @ patches.detach()
        (of_strip,) = torch.autograd.grad(patches, strip, product)
        pulled.narrow(rim.dim, rim.start, strip.shape[rim.dim]).sub_(of_strip)
    return pulled


@dataclass(frozen=True)
class _Rim:
    """Shifts of the kernel that meet the image, but are no positions of the output.

    Attributes:
        strip: The part of the image that they meet.
        dim: The dimension along which the strip is a part of the image.
        start: Where the strip starts there.
        entries: Which entries of the kernel meet it, down and across.
        geometry: A convolution of the strip whose positions are these shifts.
    """

    strip: Float[Tensor, "M c h w"]
    dim: int
    start: int
    entries: tuple[slice, slice]
    geometry: Geometry

    def patches(self, strip: Float[Tensor, "M c h w"]) -> Float[Tensor, "G i n"]:
        """The patches of all data; i counts the kernel's entries, and the channels within."""
        patches = convolution_patches(strip, len(strip), self.geometry)[0]
        patches = patches.unflatten(1, (-1, prod(self.geometry.kernel)))
        return patches.transpose(1, 2).flatten(1, 2)


def _rims(x: Float[Tensor, "M c h w"], geometry: Geometry) -> Iterator[_Rim]:
    """The rims of all shifts outside of the output's positions, each shift once."""
    (height, width), (down, across) = geometry.kernel, geometry.pads
    # Shifts above and below the output, at any place across.
    for entries, start in _outside(x.shape[2], height, down):
        size = entries.stop - entries.start
        strip = x.narrow(2, start, size)
        g = replace(geometry, kernel=(size, width), pads=((0, 0), (width - 1, width - 1)))
        yield _Rim(strip, 2, start, (entries, slice(0, width)), g)
    # Shifts left and right of it, at those of the output's positions down that meet the image.
    pads = (min(down[0], height - 1), min(down[1], height - 1))
    for entries, start in _outside(x.shape[3], width, across):
        size = entries.stop - entries.start
        strip = x.narrow(3, start, size)
        g = replace(geometry, kernel=(height, size), pads=(pads, (0, 0)))
        yield _Rim(strip, 3, start, (slice(0, height), entries), g)


def _outside(length: int, size: int, pads: tuple[int, int]) -> Iterator[tuple[slice, int]]:
    """The kernel entries that meet the image, and where, for each shift outside of the output."""
    first, last = -pads[0], length + pads[1] - size
    for shift in (*range(1 - size, first), *range(max(last + 1, 1 - size), length)):
        start, stop = max(0, -shift), min(size, length - shift)
        yield slice(start, stop), shift + start
