"""A likelihood for regression with heavy-tailed noise."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.core.roots import RootRows
from evigrad.errors import ConfigurationError
from evigrad.likelihoods.noisy import Noisy
from evigrad.likelihoods.special import betainc, with_derivative


class StudentT(Noisy):
    """Independent noise on each output, y = f + σ·ε, where ε follows Student's t distribution.

    This noise has heavy tails, so a few large errors have little effect on the network. With
    Gaussian noise, the network would fit these errors. The second derivative of −log p(y|f) depends
    on the targets and is negative for large errors. Λ is therefore the mean of this derivative over
    the targets, the Fisher information (ν + 1) / (ν + 3) / σ² for each output.

    Args:
        noise: Scale σ in units of y: one number for all outputs, or one per output. The standard
            deviation of the noise is σ √(ν / (ν − 2)). Default: 1.
        num_outputs: Number of outputs C. Set it to learn one σ per output, starting from a single
            number.
        learnable: Whether ``log_noise`` = log σ, of shape () or (C,), is learned. Default: True.
        degrees: Degrees of freedom ν, larger than 2 so that the noise has a finite variance. A
            smaller number gives heavier tails. ν is not learned. Default: 4.
        missing: With ``"nan"``, targets of NaN are missing. Default: None, they are errors.

    Raises:
        ConfigurationError: If σ is not positive and finite, the number of values is not 1 or C,
            ``learnable`` is not a bool, or ``degrees`` is not a finite number larger than 2.

    Examples:
        >>> from evigrad.likelihoods import StudentT
        >>> StudentT(noise=0.5).reported()
        {'noise': 0.5}

    See also: docs/likelihoods.md.
    """

    name = "student-t"

    def __init__(
        self,
        noise: float | int | Sequence[float | int] | Tensor = 1.0,
        num_outputs: int | None = None,
        learnable: bool = True,
        degrees: float | int = 4.0,
        missing: str | None = None,
    ) -> None:
        super().__init__(noise, num_outputs, learnable, missing)
        is_number = isinstance(degrees, float | int) and not isinstance(degrees, bool)
        if not (is_number and 2 < degrees < math.inf):
            raise ConfigurationError(
                f"degrees must be a finite number larger than 2, got {degrees!r}."
            )
        self.degrees = float(degrees)

    def extra_repr(self) -> str:
        """Return the degrees of freedom for the module's repr."""
        parts = [f"degrees={self.degrees:g}", super().extra_repr()]
        return ", ".join(part for part in parts if part)

    def log_prob(self, f: Float[Tensor, "m C"], y: Float[Tensor, "m C"]) -> Float[Tensor, " m"]:
        log_noise = self.log_noise.to(f)
        standardized = (self._filled(f, y) - f) * (-log_noise).exp()
        return self._masked(self._log_density(standardized) - log_noise, y).sum(dim=1)

    def _log_density(self, standardized: Tensor) -> Tensor:
        nu = self.degrees
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
        return constant - 0.5 * (nu + 1) * (standardized.square() / nu).log1p()

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return the Fisher information, differentiable in ``log_noise``."""
        return self._diagonal_root(f).square().diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return (ν + 1) e / (ν σ² + e²) for the errors e = y − f."""
        nu, error = self.degrees, self._masked(self._filled(f, y) - f, y)
        return (nu + 1) * error / (nu * (2.0 * self.log_noise.to(f)).exp() + error.square())

    def root(
        self,
        f: Float[Tensor, "m C"],
        columns: Int[Tensor, "m k"] | None = None,
        kind: str = "subblock",
    ) -> RootRows:
        """Return unit vectors with the scale √((ν + 1) / (ν + 3)) / σ."""
        return self._units(f, columns, kind)

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m C"], Float[Tensor, "m C"], Float[Tensor, "m C"]]:
        """Return the mean f, the variance of the outputs, and the noise variance σ² ν / (ν − 2)."""
        noise = (2.0 * self.log_noise.to(f)).exp() * (self.degrees / (self.degrees - 2))
        return f, covariance.diagonal(dim1=1, dim2=2), noise.expand(f.shape)

    def cdf(self, f: Float[Tensor, "m C"], y: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        """Return the probabilities of targets of at most y."""
        standardized = (y.to(f) - f) * (-self.log_noise.to(f)).exp()
        share = standardized.square() / self.degrees  # may be infinite
        tail = 0.5 * betainc(0.5 * self.degrees, 0.5, 1 / (1 + share), 1 / (1 + 1 / share))
        value = torch.where(standardized > 0, 1.0 - tail, tail)
        return with_derivative(standardized, value, lambda: self._log_density(standardized).exp())

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Float[Tensor, "m C"]:
        """Draw targets f + σ·ε, where ε follows Student's t distribution."""
        where = {"device": generator.device, "dtype": f.dtype}
        normal = torch.randn(f.shape, generator=generator, **where)
        shape = torch.full(f.shape, 0.5 * self.degrees, **where)
        gamma = torch._standard_gamma(shape, generator)  # pyright: ignore[reportPrivateImportUsage]
        noise = normal * (0.5 * self.degrees / gamma).sqrt()
        return f.detach() + self.log_noise.detach().to(f).exp() * noise.to(f.device)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        share = math.sqrt((self.degrees + 1) / (self.degrees + 3))
        return (share * (-self.log_noise.to(f)).exp()).expand(f.shape)
