"""Variants of image sets, in which every image is rotated, moved or scaled once."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import ConfigurationError, nearest
from evigrad.invariances.affine import sampling_grid

# Seeds of the random numbers. Each is a sequence, so that no single number, such as the seed of a
# subset or a training run, gives the same stream.
_SEEDS = {"train": (2306, 3968, 0), "test": (2306, 3968, 1)}
_PER_IMAGE = 2

# Number of images that are transformed together: enough to be fast, and few enough that copies in
# double precision are small compared with the whole set.
BATCH = 256


def _rotation(degrees: float, draws: Tensor, height: int, width: int) -> Tensor:
    angle = math.radians(degrees) * draws[:, 0]
    cosine, sine = angle.cos(), angle.sin()
    # The borders are at ±1, so a circle of pixels is an ellipse in these coordinates.
    ratio = height / width
    return _rows(cosine, -ratio * sine, sine / ratio, cosine, torch.zeros_like(draws))


def _translation(pixels: float, draws: Tensor, height: int, width: int) -> Tensor:
    # A pixel is 2 / width wide. Moving right means reading from further left.
    shift = -2 * pixels * draws / torch.tensor([width, height], device="cpu")
    one, zero = torch.ones_like(shift[:, 0]), torch.zeros_like(shift[:, 0])
    return _rows(one, zero, zero, one, shift)


def _scaling(octaves: float, draws: Tensor, height: int, width: int) -> Tensor:
    # Enlarging means reading from nearer to the center.
    inverse = torch.exp2(-octaves * draws[:, 0])
    zero = torch.zeros_like(inverse)
    return _rows(inverse, zero, zero, inverse, torch.zeros_like(draws))


def _rows(xx: Tensor, xy: Tensor, yx: Tensor, yy: Tensor, shift: Tensor) -> Tensor:
    linear = torch.stack([xx, xy, yx, yy], dim=1).unflatten(1, (2, 2))
    return torch.cat([linear, shift[:, :, None]], dim=2)


# From uniform draws (n, 2) in [−1, 1), height and width to the affine maps (n, 2, 3), from places
# in the result to places in the image, whose borders are at −1 and 1.
VARIANTS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "rotated90": partial(_rotation, 90.0),  # about the center by an angle uniform in ±90°
    "rotated180": partial(_rotation, 180.0),
    "translated8": partial(_translation, 8.0),  # in x and y by up to 8 pixels, uniformly
    "scaled": partial(_scaling, 1.0),  # about the center by exp(u), u uniform in ±log 2
}


def split_name(name: str) -> tuple[str, str | None]:
    """Return NAME and VARIANT of a name NAME:VARIANT. Without a variant, VARIANT is None."""
    base, colon, variant = name.partition(":")
    if not colon:
        return name, None
    if variant not in VARIANTS:
        raise ConfigurationError(
            f"The variant of '{base}' must be one of {', '.join(VARIANTS)}, got '{variant}'."
            f"{nearest(variant, VARIANTS)}"
        )
    return base, variant


def uniform_draws(part: str, rows: np.ndarray) -> Float[Tensor, "n 2"]:
    """Return two draws on [−1, 1) for each image in these ``rows`` of a ``part``, train or test."""
    # The stream of RandomState is frozen by contract. It fills row by row, so an image's numbers do
    # not depend on how many are drawn after them.
    count = int(rows.max()) + 1
    uniform = np.random.RandomState(_SEEDS[part]).random_sample((count, _PER_IMAGE))
    return torch.from_numpy(2 * uniform[rows] - 1)


def transformed(
    pixels: np.ndarray, variant: str, part: str, rows: np.ndarray
) -> Float[Tensor, "n channels height width"]:
    """Return the images in float32, each with a fixed random transform of the ``variant``.

    ``rows`` contains the images' positions in the whole ``part``, which is ``train`` or ``test``.
    Interpolation is bilinear, and the area outside the original image is black.
    """
    height, width = pixels.shape[-2:]
    maps = VARIANTS[variant](uniform_draws(part, rows), height, width)
    return resampled(pixels, maps)


def resampled(
    pixels: np.ndarray, maps: Float[Tensor, "n 2 3"]
) -> Float[Tensor, "n channels height width"]:
    """Return the images in float32, each resampled with an affine map from `VARIANTS`."""
    result = torch.empty(pixels.shape, dtype=torch.float32, device="cpu")
    for start in range(0, len(pixels), BATCH):
        batch = slice(start, start + BATCH)
        # In double precision, so that rounded places do not show.
        images = torch.from_numpy(pixels[batch]).double()
        grid = sampling_grid(maps[batch], *pixels.shape[-2:])
        result[batch] = F.grid_sample(images, grid, align_corners=False)
    return result
