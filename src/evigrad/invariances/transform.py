"""The base class of random transforms: noise, and a function of an input and its noise."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn


class Transform(nn.Module, ABC):
    """A random transform of inputs, x' = g(x, ε; h), with parameters h that can be learned.

    Noise is drawn separately from its use: an input keeps its noise in every batch, and the
    derivative in h is that of a deterministic function (the reparameterisation trick). A transform
    of your own defines ``sample`` and ``forward``.
    """

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw noise; its distribution must not depend on parameters.

        Args:
            n: The number of inputs.
            generator: A CPU generator, the only source of randomness.

        Returns:
            ε (n, ...), floating point, on the CPU, at least one number for each input.
        """

    @abstractmethod
    def forward(self, x: Tensor, eps: Tensor) -> Tensor:
        """Transform each input by its noise.

        Args:
            x: Inputs (n, ...).
            eps: Noise (n, ...) as drawn by ``sample``, on the device of x.

        Returns:
            Transformed inputs, (n, ...).
        """

    # ``nn.Module.apply`` takes a function that visits every submodule, and reaches this one too.
    def apply(self, x: Tensor | Callable[[nn.Module], None], eps: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Transform inputs by their noise, as ``transform(x, eps)`` does.

        Args:
            x: Inputs (n, ...); a function instead is called on every submodule, as by
                ``nn.Module.apply``.
            eps: Noise (n, ...).

        Returns:
            Transformed inputs (n, ...); for a function, this module.
        """
        if isinstance(x, Tensor):
            return self(x, eps)
        return super().apply(x)


def folded(raw: Tensor, limit: float) -> Tensor:
    """Return raw, reflected at 0 and at the limit (positive or infinite): a triangle wave.

    The derivative is 1 or -1 everywhere, so that a step of an optimiser moves the number as far as
    the unconstrained one, and one that overshoots is led back. A range of a symmetric distribution
    may be reflected at 0: u · η with u uniform on [-1, 1] has the same one for η and -η.
    """
    # Not ``abs``, whose derivative at 0, where a range may well start, is 0.
    raw = torch.where(raw < 0, -raw, raw)
    if not isfinite(limit):
        return raw
    raw = torch.remainder(raw, 2 * limit)
    return torch.where(raw <= limit, raw, 2 * limit - raw)
