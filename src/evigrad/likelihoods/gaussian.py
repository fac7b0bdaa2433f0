"""A likelihood for regression with Gaussian noise."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.core.roots import RootRows
from evigrad.likelihoods.noisy import Noisy

LOG_TWO_PI = math.log(2.0 * math.pi)


class Gaussian(Noisy):
    """Independent Gaussian noise on each output: y = f + σ·ε. Targets (m, C) are floating point.

    Args:
        noise: Standard deviation σ (not the variance) in units of y: one number for all outputs, or
            one per output. Default: 1.
        num_outputs: Number of outputs C. Set it to learn one σ per output, starting from a single
            number.
        learnable: Whether ``log_noise`` = log σ, of shape () or (C,), is learned. Default: True.
        missing: With ``"nan"``, targets of NaN are missing. Default: None, they are errors.

    Raises:
        ConfigurationError: If σ is not positive and finite, the number of values is not 1 or C,
            or ``learnable`` or ``missing`` has another value.

    Examples:
        >>> from evigrad.likelihoods import Gaussian
        >>> Gaussian(noise=0.5).reported()
        {'noise': 0.5}
        >>> Gaussian(num_outputs=2).reported()
        {'noise/0': 1.0, 'noise/1': 1.0}

    See also: docs/likelihoods.md.
    """

    name = "gaussian"

    def log_prob(self, f: Float[Tensor, "m C"], y: Float[Tensor, "m C"]) -> Float[Tensor, " m"]:
        log_noise = self.log_noise.to(f)
        standardized = (self._filled(f, y) - f) * (-log_noise).exp()
        constant = log_noise + 0.5 * LOG_TWO_PI
        return -self._masked(0.5 * standardized.square() + constant, y).sum(dim=1)

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return Λ = diag(σ⁻²), differentiable in ``log_noise``."""
        return (-2.0 * self.log_noise.to(f)).exp().expand(f.shape).diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return the residual divided by σ², differentiable in f and ``log_noise``."""
        return self._masked(self._filled(f, y) - f, y) * (-2.0 * self.log_noise.to(f)).exp()

    def noise_variance(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        """Return σ² for each output."""
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
        """Return unit vectors with the scale 1/σ."""
        return self._units(f, columns, kind)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        return (-self.log_noise.to(f)).exp().expand(f.shape)
