"""A convolution's settings, its patches, and its two gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Geometry:
    """The settings of a convolution with D spatial dimensions.

    Attributes:
        kernel: Size of the kernel, D numbers.
        stride: D numbers.
        pads: Zeros before and after each dimension.
        dilation: Distance between the kernel's entries, D numbers.
        groups: G, the number of channel groups.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def padded(self, x: Float[Tensor, "mF c *space"]) -> Float[Tensor, "mF c *padded"]:
        """The input with zeros around it."""
        if not any(p for pair in self.pads for p in pair):
            return x
        return F.pad(x, [p for pair in reversed(self.pads) for p in pair])

    def split(self, x: Float[Tensor, "mF c *space"]) -> tuple[Tensor, dict[str, Any]]:
        """The input, padded where its sides differ, and stride, padding and dilation."""
        even = all(before == behind for before, behind in self.pads)
        padding = tuple(before for before, _ in self.pads) if even else (0,) * len(self.kernel)
        settings = {"stride": self.stride, "padding": padding, "dilation": self.dilation}
        return (x if even else self.padded(x)), settings


def input_gradient(
    shape: Sequence[int],
    weight: Float[Tensor, "o i *kernel"],
    gradient: Float[Tensor, "n o *positions"],
    settings: Mapping[str, Any],
) -> Float[Tensor, "n c *space"]:
    """The gradient in the input, which has this shape; settings include the groups."""
    # Only the shape of this input is read; ``torch.nn.grad`` would copy the input first.
    x = gradient.new_empty(shape)
    return _backward(gradient, x, weight, settings, (True, False, False))[0]


def weight_gradient(
    x: Float[Tensor, "n c *space"],
    weight: Float[Tensor, "o i *kernel"],
    gradient: Float[Tensor, "n o *positions"],
    settings: Mapping[str, Any],
) -> Float[Tensor, "o i *kernel"]:
    """The gradient in the weight; of the contiguous ``weight`` no values are read."""
    return _backward(gradient, x, weight, settings, (False, True, False))[1]


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor, settings: Mapping[str, Any], wanted: Sequence[bool]
) -> Sequence[Any]:
    stride, padding, dilation = (settings[name] for name in ("stride", "padding", "dilation"))
    # Not transposed, hence no output padding.
    rest = (stride, padding, dilation, False, (0,) * len(stride), settings["groups"])
    return torch.ops.aten.convolution_backward(gradient, x, weight, None, *rest, wanted)


def convolution_patches(
    x: Float[Tensor, "mF c *space"], parts: int, geometry: Geometry
) -> Float[Tensor, "m G i FT"]:
    """The input that the kernel is multiplied with at each of the output's T positions.

    Args:
        x: Input of the convolution.
        parts: F, how many entries of dim 0 belong to each datum.
        geometry: Settings of the convolution.

    Returns:
        The patches; i counts a group's channels times the kernel's entries, in the weight's order.
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
