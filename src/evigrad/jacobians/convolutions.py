"""Rows of a convolution's weight: a correlation of each datum's input with its own gradient."""

from collections.abc import Callable, Sequence
from math import prod

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn import grad as convolution_gradients

Pads = Sequence[tuple[int, int]]

_WEIGHT_GRADIENTS: dict[int, Callable[..., Tensor]] = {
    1: convolution_gradients.conv1d_weight,
    2: convolution_gradients.conv2d_weight,
    3: convolution_gradients.conv3d_weight,
}

# Up to so many row columns times output channels, a convolution with one group per datum beats
# patches and a batched product on a CPU: it reads the input without a copy for each entry of the
# kernel. It needs more positions than such entries to pay.
_GROUPED_COLUMNS = 32


def _padded(x: Float[Tensor, "m c *space"], pads: Pads) -> Float[Tensor, "m c *padded"]:
    """Pad with zeros in front of and behind each spatial dimension."""
    if not any(p for pair in pads for p in pair):
        return x
    return F.pad(x, [p for pair in reversed(pads) for p in pair])


def convolution_patches(
    x: Float[Tensor, "m c *space"],
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
    groups: int,
) -> Float[Tensor, "m G i T"]:
    """What the kernel is multiplied with at each of the T positions of the output.

    Args:
        x: Input of the convolution.
        kernel: Size of the kernel in each of the D spatial dimensions.
        stride: Its stride, D numbers.
        pads: Zeros in front of and behind each dimension.
        dilation: Distance between the kernel's entries, D numbers.
        groups: G, the number of channel groups.

    Returns:
        The patches; i counts a group's channels times the kernel's entries, in the order in which
        the weight holds them.
    """
    windows, dims = _padded(x, pads), len(kernel)
    for dim, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        windows = windows.unfold(2 + dim, gap * (size - 1) + 1, step)[..., ::gap]
    # (m, c, *positions, *kernel) → (m, c, *kernel, *positions)
    positions, entries = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
    windows = windows.permute(0, 1, *entries, *positions)
    inner = x.shape[1] // groups * prod(kernel)
    return windows.reshape(x.shape[0], groups, inner, -1)


def convolution_rows(
    x: Float[Tensor, "m c *space"],
    gradient: Float[Tensor, "m k o *positions"],
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The rows in the weight of a convolution.

    Args:
        x: Input of the convolution.
        gradient: Gradients of the k rows of each datum in its output.
        kernel: Size of the kernel in each of the D spatial dimensions.
        stride: Its stride, D numbers.
        pads: Zeros in front of and behind each dimension.
        dilation: Distance between the kernel's entries, D numbers.
        groups: The number of channel groups.

    Returns:
        Rows of shape (m, k, o, c / groups, *kernel).
    """
    m, k, out = gradient.shape[:3]
    shape = (m, k, out, x.shape[1] // groups, *kernel)
    spread = 1 < prod(kernel) < prod(gradient.shape[3:])
    if spread and not x.is_cuda and k * out <= _GROUPED_COLUMNS * groups:
        return _grouped_rows(x, gradient, kernel, stride, pads, dilation, groups).reshape(shape)
    patches = convolution_patches(x, kernel, stride, pads, dilation, groups)
    # (m, k, G, o', T) → (m, G, k o', T): one product for each datum and group.
    g = gradient.flatten(3).unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)
    rows = (g @ patches.mT).unflatten(2, (k, -1)).transpose(1, 2)
    return rows.reshape(shape)


def _grouped_rows(
    x: Float[Tensor, "m c *space"],
    gradient: Float[Tensor, "m k o *positions"],
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The same as the weight gradient of one convolution in which every datum is a group.

    Returns:
        Rows of shape (m, k, o, i, *kernel) or one that holds the same entries in order.
    """
    m, k, out = gradient.shape[:3]
    if all(before == behind for before, behind in pads):
        padding = [before for before, _ in pads]
    else:
        x, padding = _padded(x, pads), [0] * len(kernel)
    weight_gradient = _WEIGHT_GRADIENTS[len(kernel)]
    g = gradient.unflatten(2, (groups, -1)).transpose(1, 2)  # (m, G, k, o', *positions)
    rows = weight_gradient(
        x.reshape(1, -1, *x.shape[2:]),
        (m * k * out, x.shape[1] // groups, *kernel),
        g.reshape(1, -1, *gradient.shape[3:]),
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        groups=m * groups,
    )
    return rows.reshape(m, groups, k, out // groups, *rows.shape[1:]).transpose(1, 2)
