"""Transforms for inputs of any shape, mostly tables."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.invariances.transform import Transform, folded


class InputScale(Transform):
    """x · s with a learnable positive scale for each feature: automatic relevance determination.

    The evidence shrinks the scales of features that do not help (MacKay, 1994). Nothing in it is
    random: it works as a first layer of a network, and inside ``Averaged``. Learn the scales on the
    evidence: the training loss cannot tell a scale from the first layer's weights.

    Args:
        shape: Shape of one input, or of its last dimensions.
        scale: Initial scale of every feature.

    Attributes:
        log_scale: Logarithms of the scales, of this shape.

    Raises:
        ConfigurationError: If the initial scale is not positive and finite.
    """

    def __init__(self, shape: int | Sequence[int], scale: float | int = 1.0) -> None:
        super().__init__()
        if not 0 < scale < math.inf:
            raise ConfigurationError(f"scale={scale}: must be positive and finite")
        self.log_scale = nn.Parameter(torch.full(_sizes(shape), math.log(scale)))

    @property
    def scales(self) -> Tensor:
        """The scale of each feature, with a graph to ``log_scale``."""
        return self.log_scale.exp()

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Zeros (n, 1): there is nothing to draw, but each input must have some noise."""
        return torch.zeros(n, 1)

    def forward(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        """The inputs (n, ...) times the scales; there is no noise in it."""
        return x * self.scales


class AdditiveNoise(Transform):
    """x + σ ε with ε standard normal and a learnable noise level σ.

    Args:
        shape: Shape of one input.
        level: Initial level, in the units of the inputs.
        per_feature: Whether each feature has a level of its own.

    Attributes:
        raw_level: The level, up to its sign: an optimiser may step across 0. It has the shape
            ``shape`` if per feature, else ().

    Raises:
        ConfigurationError: If the initial level is negative or not finite.
    """

    def __init__(
        self, shape: int | Sequence[int], level: float | int = 0.1, per_feature: bool = False
    ) -> None:
        super().__init__()
        if not 0 <= level < math.inf:
            raise ConfigurationError(f"level={level}: must not be negative, and finite")
        self.shape = _sizes(shape)
        self.raw_level = nn.Parameter(torch.full(self.shape if per_feature else (), float(level)))

    @property
    def level(self) -> Tensor:
        """The noise level σ, with a graph to ``raw_level``."""
        return folded(self.raw_level, math.inf)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw standard normal noise (n, *shape)."""
        return torch.randn(n, *self.shape, generator=generator)

    def forward(self, x: Tensor, eps: Tensor) -> Tensor:
        """The inputs (n, *shape) with the noise times its level, in the dtype of the inputs."""
        return x + (self.level * eps.to(x.dtype)).to(x.dtype)


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)
