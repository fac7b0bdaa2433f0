"""A likelihood for regression with Gaussian noise."""

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
    """Independent Gaussian noise on each output: y = f + σ·ε. Targets are (m, C), floating point.

    Args:
        noise: Standard deviation σ in units of y (not the variance): one number for all outputs, or
            one per output. Default: 1.
        num_outputs: Number of outputs C. Set it to learn one σ per output, starting from a single
            number.
        learnable: Whether ``log_noise`` = log σ, of shape () or (C,), is learned.

    Raises:
        ConfigurationError: If a σ is not a positive number, the number of σ is not 1 or C, or
            ``learnable`` is not a bool.

    Examples:
        >>> from evigrad.likelihoods import Gaussian
        >>> Gaussian(noise=0.5).reported()
        {'noise': 0.5}
        >>> Gaussian(num_outputs=2).reported()
        {'noise/0': 1.0, 'noise/1': 1.0}

    See also: docs/likelihoods.md.
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
            raise ConfigurationError(
                f"noise must be one number or a sequence of numbers, got {noise!r}."
            ) from error
        if not value.numel() or not bool(((value > 0) & torch.isfinite(value)).all()):
            raise ConfigurationError(
                f"noise must be positive and finite (a standard deviation), got {noise!r}."
            )
        if num_outputs is not None and value.ndim == 0 and num_outputs > 0:
            value = value.expand(num_outputs)
        if value.ndim > 1 or (num_outputs is not None and value.shape != (num_outputs,)):
            raise ConfigurationError(
                "noise must be one number or one number per output, got the shape"
                f" {tuple(value.shape)} with num_outputs={num_outputs}."
            )
        log_noise = value.log().to(torch.get_default_dtype(), copy=True)
        if not isinstance(learnable, bool):
            raise ConfigurationError(f"learnable must be True or False, got {learnable!r}.")
        self.log_noise = nn.Parameter(log_noise, requires_grad=learnable)

    def log_prob(self, f: Float[Tensor, "m C"], y: Float[Tensor, "m C"]) -> Float[Tensor, " m"]:
        log_noise = self.log_noise.to(f)
        standardized = (y.to(f) - f) * (-log_noise).exp()
        constant = log_noise + 0.5 * LOG_TWO_PI
        return -(0.5 * standardized.square() + constant).sum(dim=1)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that there are C finite floating-point numbers per example."""
        super().validate(f_shape, y)
        check_one_per_output(f_shape, y)
        if not y.is_floating_point():
            raise InputError(f"Targets must be floating point, got {y.dtype}. Use y.float().")
        if self.log_noise.ndim and len(self.log_noise) != f_shape[1]:
            raise InputError(
                f"The likelihood must have one noise per output, got {len(self.log_noise)} for"
                f" {f_shape[1]} outputs. Use Gaussian(num_outputs={f_shape[1]}), or one noise for"
                " all."
            )

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return Λ = diag(σ⁻²), differentiable in ``log_noise``."""
        return (-2.0 * self.log_noise.to(f)).exp().expand(f.shape).diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return the residual divided by σ², also differentiable in ``log_noise``."""
        return (y.to(f) - f) * (-2.0 * self.log_noise.to(f)).exp()

    def noise_variance(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        """Return σ²."""
        return (2.0 * self.log_noise.to(f)).exp().expand(f.shape)

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Float[Tensor, "m C"]:
        """Draw targets f + σ·ε."""
        noise = torch.randn(f.shape, generator=generator, device=generator.device, dtype=f.dtype)
        return f.detach() + self.log_noise.detach().to(f).exp() * noise.to(f.device)

    def root(
        self,
        f: Float[Tensor, "m C"],
        columns: Int[Tensor, "m k"] | None = None,
        kind: str = "subblock",
    ) -> RootRows:
        """Return unit vectors scaled by 1/σ."""
        check_root(kind)
        scale = self._diagonal_root(f)
        if columns is not None:
            scale = scale.gather(1, columns.clamp(min=0).long())
        return RootRows(one_hot(f, columns), scale)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        return (-self.log_noise.to(f)).exp().expand(f.shape)

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> dict[str, float]:
        """Return sums: ``log_likelihood`` (nats) and ``squared_error`` (units of y, squared)."""
        return super().metrics(f, y) | {"squared_error": total((y.to(f) - f).square())}

    def reported(self) -> dict[str, float]:
        """Return σ in units of y, named ``noise`` or ``noise/OUTPUT``."""
        return by_entry("noise", self.log_noise.detach().exp())
