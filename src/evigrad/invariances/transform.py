"""The base class of random transforms, and the ranges of those that have some."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import isfinite
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class Ranged(Protocol):
    """A transform with ranges, as ``AffineInvariance``: half the width of what it draws."""

    @property
    def ranges(self) -> Tensor:
        """The ranges, with a graph to the parameters that are learned."""
        ...

    def named_ranges(self) -> dict[str, float]:
        """The ranges as numbers, in their order, by the names of their parameters."""
        ...


def ranged_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that have ranges, by their names in the model."""
    return {
        path: module
        for path, module in model.named_modules()
        if callable(getattr(module, "named_ranges", None))
    }


def learnable_ranges(module: nn.Module) -> list[str]:
    """The names of a module's ranges that are trainable parameters."""
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    assert isinstance(module, Ranged)
    return [name for name in module.named_ranges() if name in trainable]


def range_values(model: nn.Module) -> dict[str, float]:
    """The ranges by name, without those fixed at zero; with paths if several modules have some."""
    modules = ranged_modules(model)
    found: dict[str, float] = {}
    for path, module in modules.items():
        learnable = learnable_ranges(module)
        front = f"{path}." if len(modules) > 1 else ""
        assert isinstance(module, Ranged)
        for name, value in module.named_ranges().items():
            if value != 0 or name in learnable:
                found[front + name] = value
    return found
