"""What a random transform is: noise, and a function of an input and its noise."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn


class Transform(nn.Module, ABC):
    """A random transform of inputs, x' = g(x, ε; h), with parameters h that can be learned.

    What is random is drawn apart from what is done with it: an input keeps its noise in whatever
    batch it comes, and the derivative in h is that of a deterministic function (the
    reparameterisation trick). A transform of one's own has ``sample`` and ``forward``.
    """

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw noise; its distribution must not depend on parameters.

        Args:
            n: For how many inputs.
            generator: On the CPU; the only source of randomness.

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
            x: Inputs (n, ...); a function in their place is called on every submodule, as
                ``nn.Module.apply`` does it.
            eps: Noise (n, ...).

        Returns:
            Transformed inputs (n, ...); for a function, this module.
        """
        if isinstance(x, Tensor):
            return self(x, eps)
        return super().apply(x)


def folded(raw: Tensor, limit: float) -> Tensor:
    """A number between 0 and a limit out of any number, by reflection at both.

    The derivative is 1 or -1 everywhere, so that a step of an optimiser moves the number as far as
    the unconstrained one, and one that overshoots is led back. A range of a symmetric distribution
    may be reflected at 0: u · η with u uniform on [-1, 1] has the same one for η and -η.

    Args:
        raw: Unconstrained; itself where it lies between 0 and the limit.
        limit: Positive, or infinite.

    Returns:
        The triangle wave of period 2 · limit, of the shape of raw.
    """
    # Not ``abs``, whose derivative at 0, where a range may well start, is 0.
    raw = torch.where(raw < 0, -raw, raw)
    if not isfinite(limit):
        return raw
    raw = torch.remainder(raw, 2 * limit)
    return torch.where(raw <= limit, raw, 2 * limit - raw)
