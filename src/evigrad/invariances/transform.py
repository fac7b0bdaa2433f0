"""The base class of random transforms, two transforms, and functions for ranges."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, listed, nearest
from evigrad.inputs import bare_names


class Transform(nn.Module, ABC):
    """A random transform of inputs, x' = g(x, ε; h), with learnable parameters h.

    To write your own transform, define ``sample``, which draws the noise ε, and ``forward``, which
    applies g. The noise does not depend on h. The derivative with respect to h is therefore the
    derivative of a deterministic function (the reparameterization trick).

    Attributes:
        bounds: Smallest and largest value of each parameter by name, such as
            ``{"width": (0.0, 8.0)}``. One of the two may be infinite. After the first use of the
            transform, ``self.width`` is the parameter reflected at both bounds, with a derivative
            of 1 or −1. So ``self.width`` is within the bounds after every optimizer step.
            ``get_parameter("width")`` is the parameter itself, which may be outside the bounds.

    Examples:
        >>> import torch
        >>> from evigrad.invariances import Transform
        >>> class Shift(Transform):
        ...     bounds = {"width": (0.0, 2.0)}
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.width = torch.nn.Parameter(torch.tensor(0.5))
        ...     def sample(self, n, generator):
        ...         return 2 * torch.rand(n, 1, generator=generator) - 1
        ...     def forward(self, x, eps):
        ...         return x + self.width * eps
        >>> Shift()(torch.zeros(2, 1), torch.tensor([[1.0], [-1.0]])).flatten().tolist()
        [0.5, -0.5]

    See also: docs/inputs.md.
    """

    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})
    _is_bounded = False

    def __getattr__(self, name: str) -> Any:
        """Return a parameter inside its bounds, and everything else as ``nn.Module`` does."""
        value = super().__getattr__(name)
        # Before the first use, for example in __init__, you set the parameter itself.
        if not (self._is_bounded and name in self.bounds and isinstance(value, Tensor)):
            return value
        return reflected(value, *self.bounds[name])

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self._is_bounded = True
        return super().__call__(*arguments, **keywords)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter without reflection. See ``nn.Module.get_parameter``."""
        parameter = self._parameters.get(target)
        return super().get_parameter(target) if parameter is None else parameter

    def check_bounds(self) -> None:
        """Check that the bounds are valid and contain the parameters, then apply the bounds."""
        parameters = dict(self.named_parameters(recurse=False))
        whose = f"bounds of {type(self).__name__}"
        for name, (low, high) in self.bounds.items():
            if name not in parameters:
                raise ConfigurationError(
                    f"The {whose} must name its parameters ({listed(list(parameters)) or 'none'}),"
                    f" got '{name}'.{nearest(name, parameters)}"
                )
            if not low < high or not (math.isfinite(low) or math.isfinite(high)):
                raise ConfigurationError(
                    f"The {whose} must be a lower bound and a larger upper bound, one of which"
                    f" may be infinite, got {name}={(low, high)}."
                )
            value = parameters[name].detach()
            if bool(((value < low) | (value > high)).any()):
                raise ConfigurationError(
                    f"The parameter '{name}' of {type(self).__name__} must start within its bounds"
                    f" {(low, high)}, got {value.tolist()}."
                )
        self._is_bounded = True

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw noise from a distribution that does not depend on the parameters.

        Args:
            n: Number of inputs.
            generator: CPU generator for all random numbers.

        Returns:
            ε (n, ...), floating point, on the CPU, with at least one number per input.
        """

    @abstractmethod
    def forward(self, x: Tensor, eps: Tensor) -> Tensor:
        """Transform each input by its noise.

        Args:
            x: Inputs (n, ...).
            eps: Noise (n, ...) from ``sample``, on the device of x.

        Returns:
            Transformed inputs, (n, ...).
        """

    # ``nn.Module.apply`` takes a function that visits every submodule, including this one.
    def apply(self, x: Tensor | Callable[[nn.Module], None], eps: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ``self(x, eps)``.

        If ``x`` is a function, call it on every submodule, as ``nn.Module.apply`` does.
        """
        if isinstance(x, Tensor):
            return self(x, eps)
        return super().apply(x)


def folded(raw: Tensor, limit: float) -> Tensor:
    """Return ``raw``, reflected at 0 and at ``limit``, which is positive or infinite.

    The derivative is 1 or −1 everywhere. So an optimizer step moves the value as far as it would
    without bounds, and a step beyond a bound is reflected back. Reflection at 0 does not change a
    distribution such as u · η, where u is uniform on [−1, 1], because η and −η are equivalent.
    """
    # Not ``abs``, whose derivative at 0, a likely start of a range, is 0.
    raw = torch.where(raw < 0, -raw, raw)
    if not math.isfinite(limit):
        return raw
    raw = torch.remainder(raw, 2 * limit)
    return torch.where(raw <= limit, raw, 2 * limit - raw)


def reflected(raw: Tensor, low: float, high: float) -> Tensor:
    """Return ``raw``, reflected at ``low`` and ``high``, one of which may be infinite."""
    if math.isinf(low):
        return high - folded(high - raw, math.inf)
    # Inside, return the value itself and not one rounded from it.
    inside = (raw >= low) & (raw <= high)
    return torch.where(inside, raw, low + folded(raw - low, high - low))


class InputScale(Transform):
    """Multiply each feature by a learnable positive scale: automatic relevance determination.

    The evidence shrinks the scales of features that do not help (MacKay, 1994). The transform is
    not random. Use it as the first layer of a network, or inside ``Averaged``. Learn the scales
    from the evidence, because the training loss cannot distinguish a scale from the first layer's
    weights.

    Args:
        shape: Shape of one input, or of its last dimensions.
        scale: Initial scale of every feature. Default: 1.

    Attributes:
        log_scale: Logarithms of the scales, of shape ``shape``.

    Raises:
        ConfigurationError: If the initial scale is not positive and finite.

    Examples:
        >>> import torch
        >>> from evigrad.invariances import InputScale
        >>> InputScale(2, scale=3.0)(torch.ones(1, 2)).tolist()
        [[3.0, 3.0]]

    See also: docs/inputs.md.
    """

    def __init__(self, shape: int | Sequence[int], scale: float | int = 1.0) -> None:
        super().__init__()
        if not 0 < scale < math.inf:
            raise ConfigurationError(f"scale must be positive and finite, got {scale}.")
        self.log_scale = nn.Parameter(torch.full(_sizes(shape), math.log(scale)))

    @property
    def scales(self) -> Tensor:
        """Return the scale of each feature, as a differentiable function of ``log_scale``."""
        return self.log_scale.exp()

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Return zeros of shape (n, 1), because the transform is not random."""
        return torch.zeros(n, 1, device="cpu")

    def forward(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        """Return the inputs (n, ...) times the scales. ``eps`` is ignored."""
        return x * self.scales


class AdditiveNoise(Transform):
    """Add noise: x + σ ε with ε standard normal and a learnable noise level σ.

    Args:
        shape: Shape of one input.
        level: Initial level σ, in units of the inputs. Default: 0.1.
        per_feature: Whether each feature has its own level. Default: False.

    Attributes:
        raw_level: The level, possibly with a negative sign, because an optimizer step may cross 0.
            Its shape is ``shape`` if ``per_feature`` is true, and () otherwise.

    Raises:
        ConfigurationError: If the initial level is negative or not finite.

    Examples:
        >>> import torch
        >>> from evigrad.invariances import AdditiveNoise
        >>> noise = AdditiveNoise(2, level=0.5)
        >>> noise(torch.zeros(1, 2), torch.tensor([[1.0, -2.0]])).tolist()
        [[0.5, -1.0]]

    See also: docs/inputs.md.
    """

    def __init__(
        self, shape: int | Sequence[int], level: float | int = 0.1, per_feature: bool = False
    ) -> None:
        super().__init__()
        if not 0 <= level < math.inf:
            raise ConfigurationError(f"level must be finite and at least 0, got {level}.")
        self.shape = _sizes(shape)
        self.raw_level = nn.Parameter(torch.full(self.shape if per_feature else (), float(level)))

    @property
    def level(self) -> Tensor:
        """Return the noise level σ, as a differentiable function of ``raw_level``."""
        return folded(self.raw_level, math.inf)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw standard normal noise (n, *shape)."""
        return torch.randn(n, *self.shape, generator=generator, device="cpu")

    def forward(self, x: Tensor, eps: Tensor) -> Tensor:
        """Return the inputs (n, *shape) plus scaled noise, in the dtype of the inputs."""
        return x + (self.level * eps.to(x.dtype)).to(x.dtype)


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


# ------------------------------------------------------------ ranges


def ranged_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules of a model that have ranges, such as ``AffineInvariance``, by name.

    A module has ranges if it has a method ``named_ranges``.
    """
    named = {
        path: module
        for path, module in model.named_modules()
        if callable(getattr(module, "named_ranges", None))
    }
    bare = bare_names(model, named)
    return {bare[path]: module for path, module in named.items()}


def learnable_ranges(module: Any) -> list[str]:
    """Return the names of a module's ranges that are trainable parameters."""
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    return [name for name in module.named_ranges() if name in trainable]


def range_values(model: nn.Module) -> dict[str, float]:
    """Return a model's ranges by name, without ranges that are fixed at zero."""
    modules = ranged_modules(model)
    ranges: dict[str, float] = {}
    for path, module in modules.items():
        learnable = learnable_ranges(module)
        front = f"{path}." if len(modules) > 1 else ""
        for name, value in module.named_ranges().items():
            if value != 0 or name in learnable:
                ranges[front + name] = value
    return ranges


def bounded_values(model: nn.Module) -> dict[int, Tensor]:
    """Return the reflected value of each parameter that has ``bounds``, by the parameter's id."""
    return {
        id(parameter): getattr(module, name).detach()
        for module in model.modules()
        if isinstance(module, Transform)
        for name, parameter in module.named_parameters(recurse=False)
        if name in module.bounds
    }
