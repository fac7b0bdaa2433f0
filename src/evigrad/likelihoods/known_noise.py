"""A likelihood for measurements whose errors are known."""

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.inputs import refuse_where
from evigrad.likelihoods.gaussian import LOG_TWO_PI
from evigrad.likelihoods.noisy import Noisy


class KnownNoise(Noisy):
    """Gaussian noise with a known part for each target and a learned rest: y = f + s·ε + σ·ε'.

    The known standard deviations s, such as measurement errors, are combined with the targets:
    ``targets(y, noise=s)``. The learned σ is the noise that they leave out, and σ² + s² is the
    variance of a target. ``reported`` shows σ as ``noise``. Predictions are without measurement
    errors, unless you pass them to ``Predictive.with_conditions``.

    Args:
        noise: Learned standard deviation σ at the start, in units of y: one number for all outputs,
            or one per output. Default: 1.
        num_outputs: Number of outputs C. Set it to learn one σ per output, starting from a single
            number.
        learnable: Whether ``log_noise`` = log σ, of shape () or (C,), is learned. Default: True.
        missing: With ``"nan"``, targets of NaN are missing. Default: None, they are errors.

    Raises:
        ConfigurationError: If σ is not positive and finite, the number of values is not 1 or C,
            or ``learnable`` or ``missing`` has another value.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import KnownNoise
        >>> likelihood = KnownNoise(noise=0.3)
        >>> y = likelihood.targets(torch.zeros(2, 1), noise=torch.tensor([0.0, 0.4]))
        >>> likelihood.at(y).noise_variance(torch.zeros(2, 1)).flatten()
        tensor([0.0900, 0.2500], grad_fn=<ViewBackward0>)

    See also: docs/likelihoods.md.
    """

    name = "known-noise"
    conditions = {"noise": 0.0}

    def _variance(self, f: Tensor, noise: Tensor) -> Tensor:
        return (2.0 * self.log_noise.to(f)).exp() + noise.to(f).square()

    def validate_condition(self, name: str, values: Float[Tensor, "m ... C"]) -> None:
        """Check that standard deviations are finite and not negative."""
        wrong = (values < 0) | values.isinf()
        words = "must be finite and at least 0, because it is a standard deviation"
        refuse_where(wrong, values, words, "Noise")

    def log_prob(self, f: Float[Tensor, "m C"], y: Float[Tensor, "m D"]) -> Float[Tensor, " m"]:
        y, conditions = self.split(y)
        variance = self._variance(f, conditions["noise"])
        squares = (self._filled(f, y) - f).square() / variance
        return -0.5 * self._masked(squares + variance.log() + LOG_TWO_PI, y).sum(dim=1)

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return Λ = diag(1 / (σ² + s²)), differentiable in ``log_noise``."""
        return self.noise_variance(f).reciprocal().diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return the residual divided by σ² + s²."""
        y, conditions = self.split(y)
        return self._masked(self._filled(f, y) - f, y) / self._variance(f, conditions["noise"])

    def noise_variance(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        """Return σ² + s² for each output."""
        return self._variance(f, self.condition("noise", f)).expand(f.shape)

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Float[Tensor, "m D"]:
        """Draw targets, combined with the known noise."""
        noise = torch.randn(f.shape, generator=generator, device=generator.device, dtype=f.dtype)
        scale = self.noise_variance(f.detach()).detach().sqrt()
        return self.combined(f.detach() + scale * noise.to(f.device), f)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        return self.noise_variance(f).rsqrt()
