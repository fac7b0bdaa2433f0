"""Regression with normal noise."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evigrad.core.roots import RootRows, check_root, one_hot
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods.base import Likelihood, by_entry, check_one_per_output, total

LOG_TWO_PI = math.log(2.0 * math.pi)


class Gaussian(Likelihood):
    """Independent normal noise on each output: y = f + σ·ε; y is (m, C), floating point.

    Args:
        noise: σ, the standard deviation in the units of y (not the variance): one number for all
            outputs, or one for each.
        num_outputs: C, to get one learnable σ for each output from a single number.
        learnable: Whether ``log_noise`` = log σ, of shape () or (C,), requires a gradient.

    Raises:
        ConfigurationError: If a σ is not a positive number, their number is not C, or
            ``learnable`` is no bool.
    """

    name = "gaussian"
    couples_outputs = False

    def __init__(
        self,
        noise: float | int | Sequence[float | int] | Tensor = 1.0,
        num_outputs: int | None = None,
        learnable: bool = True,
    ) -> None:
        super().__init__()
        try:
            device = noise.device if isinstance(noise, Tensor) else "cpu"
            value = torch.as_tensor(noise, dtype=torch.float64, device=device).detach()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"noise must be numbers, not {noise!r}.") from error
        if not value.numel() or not bool(((value > 0) & torch.isfinite(value)).all()):
            raise ConfigurationError(
                f"noise is a standard deviation: positive and finite, not {noise!r}."
            )
        if num_outputs is not None and value.ndim == 0 and num_outputs > 0:
            value = value.expand(num_outputs)
        if value.ndim > 1 or (num_outputs is not None and value.shape != (num_outputs,)):
            raise ConfigurationError(
                f"noise of shape {tuple(value.shape)} with num_outputs={num_outputs}: give one"
                " number, or one for each output."
            )
        log_noise = value.log().to(torch.get_default_dtype(), copy=True)
        if not isinstance(learnable, bool):
            raise ConfigurationError(f"learnable is True or False, not {learnable!r}.")
        self.log_noise = nn.Parameter(log_noise, requires_grad=learnable)

    def log_prob(self, f: Float[Tensor, "m C"], y: Float[Tensor, "m C"]) -> Float[Tensor, " m"]:
        log_noise = self.log_noise.to(f)
        standardised = (y.to(f) - f) * (-log_noise).exp()
        constant = log_noise + 0.5 * LOG_TWO_PI
        return -(0.5 * standardised.square() + constant).sum(dim=1)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Refuse anything but C finite floating-point numbers for each datum."""
        super().validate(f_shape, y)
        check_one_per_output(f_shape, y)
        if not y.is_floating_point():
            raise InputError(f"Targets must be floating point, not {y.dtype}; use y.float().")
        if self.log_noise.ndim and len(self.log_noise) != f_shape[1]:
            raise InputError(
                f"The likelihood has {len(self.log_noise)} noises, the model {f_shape[1]} outputs;"
                f" use Gaussian(num_outputs={f_shape[1]}) or one noise for all."
            )

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Λ = diag(σ⁻²), differentiable in ``log_noise``."""
        return (-2.0 * self.log_noise.to(f)).exp().expand(f.shape).diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """The residual over σ², differentiable in ``log_noise`` too."""
        return (y.to(f) - f) * (-2.0 * self.log_noise.to(f)).exp()

    def noise_variance(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        """σ²."""
        return (2.0 * self.log_noise.to(f)).exp().expand(f.shape)

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Float[Tensor, "m C"]:
        """Targets f + σ·ε."""
        noise = torch.randn(f.shape, generator=generator, device=generator.device, dtype=f.dtype)
        return f.detach() + self.log_noise.detach().to(f).exp() * noise.to(f.device)

    def root(
        self,
        f: Float[Tensor, "m C"],
        columns: Int[Tensor, "m k"] | None = None,
        kind: str = "subblock",
    ) -> RootRows:
        """Unit vectors, with 1/σ as their scale."""
        check_root(kind)
        scale = self._diagonal_root(f)
        if columns is not None:
            scale = scale.gather(1, columns.clamp(min=0).long())
        return RootRows(one_hot(f, columns), scale)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        return (-self.log_noise.to(f)).exp().expand(f.shape)

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> dict[str, float]:
        """``log_likelihood`` (nats) and ``squared_error`` (units of y, squared), sums."""
        return super().metrics(f, y) | {"squared_error": total((y.to(f) - f).square())}

    def reported(self) -> dict[str, float]:
        """``noise``, or ``noise/OUTPUT``: σ, in the units of y."""
        return by_entry("noise", self.log_noise.detach().exp())
