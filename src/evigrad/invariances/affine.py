"""Random affine transforms of images, as in Augerino (Benton et al., 2020)."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, InputError, nearest
from evigrad.invariances.transform import Transform, folded

# The generators of the affine group of the plane, on homogeneous coordinates (x, y, 1).
_MATRICES = {
    "translation_x": ((0, 0, 1), (0, 0, 0), (0, 0, 0)),
    "translation_y": ((0, 0, 0), (0, 0, 1), (0, 0, 0)),
    "rotation": ((0, -1, 0), (1, 0, 0), (0, 0, 0)),
    "scale_x": ((1, 0, 0), (0, 0, 0), (0, 0, 0)),
    "scale_y": ((0, 0, 0), (0, 1, 0), (0, 0, 0)),
    "shear": ((0, 1, 0), (1, 0, 0), (0, 0, 0)),
}
GENERATORS = tuple(_MATRICES)

# Upper limits of the ranges. A translation by 1 leaves half of the width or height in view, a
# rotation by ±π is a full circle, and e² is a factor of more than seven.
LIMITS = {
    "translation_x": 1.0,
    "translation_y": 1.0,
    "rotation": math.pi,
    "scale_x": 2.0,
    "scale_y": 2.0,
    "shear": 2.0,
}

# The matrix exponential is a Taylor polynomial of the matrix over 2^5, squared five times. The
# limits keep its 1-norm below 7.2 (rotation, scale and shear in one column), so that the remainder,
# 2^5 · (7.2 / 2^5)^11 / 11!, is below 1e-13.
_SQUARINGS = 5
_ORDER = 10


class AffineInvariance(Transform):
    """Resample images under random affine maps exp(Σ_i u_i η_i G_i), with u_i uniform on [−1, 1].

    G_i is a generator, such as ``rotation``, and η_i is its range. For each pixel of the result,
    the map gives the position in the image from which the pixel is read, with bilinear
    interpolation. Beyond the borders, the value is ``fill``. The origin is the center of the image.
    Rotations do not distort images that are not square.

    Translations are in units of half the image's width or height, up to 1, and rotations are in
    radians, up to π. Scales and shear are natural logarithms of stretch factors, up to 2, along the
    axes for scales and along the diagonals for shear. Each range is a parameter with the
    generator's name, or a buffer if it is not learned. ``ranges`` returns η, which is the parameter
    reflected at 0 and at its upper limit in `LIMITS`. The derivative of η is 1 or −1.

    Args:
        ranges: Initial ranges: one number for all generators, or a dictionary by name
            (`GENERATORS`). Generators that are not named are neither used nor learned. Default:
            0.1.
        learn: Whether the ranges are learned, or the names of the learned ranges. Default: True.
        flip: Whether to mirror each image left to right with probability 1/2. Default: False.
        fill: Value beyond the borders: one number, or one per channel. Default: 0, which is black
            in raw images and the mean in normalized images, where black is −mean / std.

    Raises:
        ConfigurationError: If a generator does not exist, a range is outside its limits, or
            ``fill`` is not finite.

    Examples:
        >>> import torch
        >>> from evigrad.invariances import AffineInvariance
        >>> transform = AffineInvariance({"rotation": 0.5, "shear": 0.1})
        >>> noise = transform.sample(3, torch.Generator().manual_seed(0))
        >>> transform(torch.rand(3, 1, 8, 8), noise).shape
        torch.Size([3, 1, 8, 8])

    See also: docs/inputs.md.
    """

    matrices: Tensor
    fill: Tensor

    def __init__(
        self,
        ranges: float | int | Mapping[str, float | int] = 0.1,
        learn: bool | Collection[str] = True,
        flip: bool = False,
        fill: float | int | Sequence[float] = 0.0,
    ) -> None:
        super().__init__()
        initial = dict(ranges) if isinstance(ranges, Mapping) else dict.fromkeys(GENERATORS, ranges)
        learnable = (initial if learn else ()) if isinstance(learn, bool) else learn
        learnable = [learnable] if isinstance(learnable, str) else list(learnable)
        for name in (*initial, *learnable):
            if name not in GENERATORS:
                raise ConfigurationError(
                    f"A generator must be one of {', '.join(GENERATORS)}, got '{name}'."
                    f"{nearest(name, GENERATORS)}"
                )
        for name in GENERATORS:
            value = float(initial.get(name, 0.0))
            if not 0 <= value <= LIMITS[name]:
                raise ConfigurationError(
                    f"The range of {name} must be between 0 and {LIMITS[name]:.4g}, got {value}."
                )
            if name in learnable:
                self.register_parameter(name, nn.Parameter(torch.tensor(value)))
            else:
                self.register_buffer(name, torch.tensor(value))
        self.flip = flip
        values = torch.tensor(fill, dtype=torch.get_default_dtype(), device="cpu").reshape(-1, 1, 1)
        if len(values) == 0 or not bool(values.isfinite().all()):
            raise ConfigurationError(
                f"fill must be one finite number, or one per channel, got {fill}."
            )
        self._is_filled = bool(values.any())  # here, because a later read from a GPU would block
        # On PyTorch's default device, like all other modules.
        device = torch.get_default_device()
        self.register_buffer("fill", values.to(device), persistent=False)
        matrices = torch.tensor([_MATRICES[name] for name in GENERATORS], device=device)
        matrices = matrices.to(torch.get_default_dtype()).flatten(1)
        self.register_buffer("matrices", matrices, persistent=False)

    @property
    def ranges(self) -> Float[Tensor, "6"]:
        """Return the ranges η in the order of `GENERATORS`. Gradients flow to the parameters."""
        return torch.stack([folded(getattr(self, name), LIMITS[name]) for name in GENERATORS])

    def named_ranges(self) -> dict[str, float]:
        """Return the range η of each generator, by name."""
        return dict(zip(GENERATORS, self.ranges.tolist(), strict=True))

    def sample(self, n: int, generator: torch.Generator) -> Float[Tensor, "n u"]:
        """Draw u, (n, 6), uniform on [−1, 1). With ``flip``, a seventh column decides the flips."""
        return 2 * torch.rand(n, 6 + self.flip, generator=generator, device="cpu") - 1

    def forward(
        self, x: Float[Tensor, "n channels height width"], eps: Float[Tensor, "n u"]
    ) -> Float[Tensor, "n channels height width"]:
        """Resample floating-point images with the noise ``eps`` from ``sample``."""
        self._check(x)
        height, width = x.shape[-2:]
        maps = self.maps(eps, height, width)
        # Half precision cannot distinguish neighboring pixels of a large image.
        dtype = torch.promote_types(x.dtype, torch.float32)
        grid = sampling_grid(maps.to(dtype), height, width)
        if not self._is_filled:
            return F.grid_sample(x.to(dtype), grid, align_corners=False).to(x.dtype)
        fill = self.fill.to(dtype)
        return (F.grid_sample(x.to(dtype) - fill, grid, align_corners=False) + fill).to(x.dtype)

    def maps(self, eps: Float[Tensor, "n u"], height: int, width: int) -> Float[Tensor, "n 2 3"]:
        """Return the affine maps from positions in the result to positions in the image.

        Each map is a 2x3 matrix that acts on (x, y, 1), where the image's borders are at −1 and 1.
        The maps are in float64, or in float32 if the device has no float64. ``eps`` is noise from
        ``sample``.
        """
        dtype = torch.float32 if eps.device.type == "mps" else torch.float64
        algebra = (eps[:, :6].to(dtype) * self.ranges.to(dtype)) @ self.matrices.to(dtype)
        # From coordinates with borders at ±1 to coordinates with square pixels, and back.
        sides = torch.tensor([width, height], dtype=dtype, device="cpu") / max(width, height)
        there = torch.cat([sides, sides.new_ones(1)]).to(eps.device)
        # The unit of each translation is half of its own side.
        along = torch.ones(3, 3, dtype=dtype, device="cpu")
        along[:2, 2] = sides
        group = matrix_exponential(algebra.unflatten(1, (3, 3)) * along.to(eps.device))
        maps = (group * there / there[:, None])[:, :2]
        if self.flip:
            mirror = torch.where(eps[:, 6] < 0, -1.0, 1.0).to(dtype)
            maps = torch.cat([maps[..., :1] * mirror[:, None, None], maps[..., 1:]], dim=2)
        return maps

    def _check(self, x: Tensor) -> None:
        if x.dim() != 4 or not x.is_floating_point():
            raise InputError(
                "AffineInvariance needs images (n, channels, height, width) of floating-point"
                f" numbers, got shape {tuple(x.shape)} and type {x.dtype}."
            )
        if len(self.fill) not in (1, x.shape[1]):
            raise InputError(
                f"fill must have one value, or one per channel ({x.shape[1]}), got"
                f" {len(self.fill)}."
            )

    def extra_repr(self) -> str:
        words = [f"{name}={value:.3g}" for name, value in self.named_ranges().items()]
        return ", ".join(words + ["flip=True"] * self.flip)


def matrix_exponential(matrices: Float[Tensor, "n 3 3"]) -> Float[Tensor, "n 3 3"]:
    """Return the exponential of each matrix, whose 1-norm must be at most 7.2.

    For such matrices, the result is as accurate as ``torch.matrix_exp``, and the derivative takes a
    third of the time. The norms are not checked, because the CPU would have to wait for a GPU.
    """
    scaled = matrices / 2**_SQUARINGS
    one = torch.eye(3, dtype=matrices.dtype, device=matrices.device).expand_as(matrices)
    result = torch.add(one, scaled, alpha=1 / _ORDER)
    for k in range(_ORDER - 1, 0, -1):
        result = torch.baddbmm(one, scaled, result, alpha=1 / k)
    for _ in range(_SQUARINGS):
        result = torch.bmm(result, result)
    return result


def sampling_grid(
    maps: Float[Tensor, "n 2 3"], height: int, width: int
) -> Float[Tensor, "n height width 2"]:
    """Return the position (x, y) from which each pixel is read, like ``F.affine_grid`` but faster.

    ``maps`` act on (x, y, 1). The image's borders are at −1 and 1 (``align_corners=False``).
    """
    x, y = (
        (2 * torch.arange(size, dtype=maps.dtype, device=maps.device) + 1) / size - 1
        for size in (width, height)
    )
    column_terms = maps[:, :, 0, None, None] * x
    row_terms = (maps[:, :, 1, None] * y + maps[:, :, 2, None])[..., None]
    return (column_terms + row_terms).permute(0, 2, 3, 1)
