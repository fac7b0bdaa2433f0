"""Likelihoods for regression with noise that depends on the input."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from evigrad.errors import InputError
from evigrad.likelihoods.base import Likelihood, Metric
from evigrad.likelihoods.gaussian import LOG_TWO_PI
from evigrad.likelihoods.targets import check_one_per_output, total

FISHER_OF_LOG_VARIANCE = 0.5


class HeteroscedasticGaussian(Likelihood):
    """Gaussian noise that depends on the input: y = μ + exp(s/2)·ε. Targets are (m, D).

    The outputs f are (m, 2D): D means μ, then D log variances s. Rows use the Fisher information,
    diag(e^−s, ½), because the Hessian depends on the target. The network predicts the noise, so the
    likelihood has no parameters.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import HeteroscedasticGaussian
        >>> f = torch.tensor([[1.0, 0.0]])  # mean 1, log variance 0
        >>> HeteroscedasticGaussian().log_prob(f, torch.tensor([[1.0]]))
        tensor([-0.9189])

    See also: docs/likelihoods.md.
    """

    name = "heteroscedastic"
    couples_outputs = False
    outputs_are: ClassVar[str] = "first the means, then the log variances"

    def log_prob(self, f: Float[Tensor, "m C"], y: Float[Tensor, "m D"]) -> Float[Tensor, " m"]:
        mean, log_variance = self._of_targets(f)
        standardized = (y.to(f) - mean) * (-0.5 * log_variance).exp()
        return -0.5 * (standardized.square() + log_variance + LOG_TWO_PI).sum(dim=1)

    def _of_targets(self, f: Float[Tensor, "m C"]) -> tuple[Tensor, Tensor]:
        """Return means and log variances, (m, D) each."""
        mean, log_variance = f.chunk(2, dim=1)
        return mean, log_variance

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that there are two outputs per target, and that targets are finite numbers."""
        super().validate(f_shape, y)
        m, c = f_shape
        if c % 2 or tuple(y.shape) == (m, c):
            raise InputError(
                f"The model must have two outputs per target ({self.outputs_are}), got {c} outputs"
                f" for targets of shape {tuple(y.shape)}."
            )
        check_one_per_output((m, c // 2), y)
        if not y.is_floating_point():
            raise InputError(f"Targets must be floating point, got {y.dtype}. Use y.float().")

    def reference_targets(self, f: Float[Tensor, "m C"]) -> tuple[Tensor, Tensor]:
        """Return zeros and ones (m, D), for subclasses with another density."""
        mean = f.chunk(2, dim=1)[0]
        return torch.zeros_like(mean), torch.ones_like(mean)

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return the Fisher information diag(e^−s, ½), the mean of the Hessian over targets."""
        precision = (-f.chunk(2, dim=1)[1]).exp()
        constant = torch.full_like(precision, FISHER_OF_LOG_VARIANCE)
        return torch.cat([precision, constant], dim=1).diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return residual / variance for μ, and ½ (residual² / variance − 1) for s."""
        mean, log_variance = f.chunk(2, dim=1)
        error, precision = y.to(f) - mean, (-log_variance).exp()
        return torch.cat([error * precision, 0.5 * (error.square() * precision - 1.0)], dim=1)

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m D"], Float[Tensor, "m D"], Float[Tensor, "m D"]]:
        """Return the mean and variance of μ, and the mean noise variance exp(s + Var[s]/2)."""
        mean, log_variance = f.chunk(2, dim=1)
        epistemic, log_epistemic = covariance.diagonal(dim1=1, dim2=2).chunk(2, dim=1)
        return mean, epistemic, (log_variance + 0.5 * log_epistemic).exp()

    def variance_of_logs(self, covariance: Float[Tensor, "m C C"]) -> Float[Tensor, "m D"] | None:
        """Return the variances of the log standard deviations s/2."""
        return 0.25 * covariance.diagonal(dim1=1, dim2=2).chunk(2, dim=1)[1]

    def cdf(self, f: Float[Tensor, "m C"], y: Float[Tensor, "m D"]) -> Float[Tensor, "m D"]:
        """Return the normal probabilities of targets of at most y."""
        mean, log_variance = self._of_targets(f)
        return torch.special.ndtr((y.to(f) - mean) * (-0.5 * log_variance).exp())

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Float[Tensor, "m D"]:
        """Draw targets μ + exp(s/2)·ε."""
        mean, log_variance = self._of_targets(f.detach())
        noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=f.dtype)
        return mean + (0.5 * log_variance).exp() * noise.to(f.device)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        deviation = (-0.5 * f.chunk(2, dim=1)[1]).exp()
        constant = torch.full_like(deviation, FISHER_OF_LOG_VARIANCE**0.5)
        return torch.cat([deviation, constant], dim=1)

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> Mapping[str, Metric]:
        """Return the sums ``log_likelihood`` (nats) and ``squared_error`` of μ (units of y²)."""
        mean, _ = self._of_targets(f)
        return {**super().metrics(f, y), "squared_error": total((y.to(f) - mean).square())}


class NaturalGaussian(HeteroscedasticGaussian):
    """Gaussian noise that depends on the input, in natural parameters: y = μ + ε/√β.

    Targets are (m, D). The outputs f are (m, 2D): D numbers a = μβ, then D numbers b that give
    the precision β = softplus(b). Small noise requires large outputs, which the prior penalizes.
    This prevents training from treating the targets as noise-free. Rows use the Fisher information.
    Laplace approximations work better in these parameters (Immer et al. 2023, "Effective Bayesian
    heteroscedastic regression with deep neural networks").

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import NaturalGaussian
        >>> NaturalGaussian().log_prob(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0]])).shape
        torch.Size([1])

    See also: docs/likelihoods.md.
    """

    name = "natural-gaussian"
    couples_outputs = True
    outputs_are = "first mean times precision, then the softplus inverse of the precision"

    def _of_targets(self, f: Float[Tensor, "m C"]) -> tuple[Tensor, Tensor]:
        a, b = f.chunk(2, dim=1)
        precision = _precision(b)
        return a / precision, -precision.log()

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return the Fisher information, with β' = dβ/db.

        The diagonal entries are 1/β for a, and (μ²/β + 1/(2β²)) β'² for b. The entry between a and
        b is −μβ'/β.
        """
        a, b = f.chunk(2, dim=1)
        precision, slope = _precision(b), b.sigmoid()
        mean = a / precision
        between = (-mean * slope / precision).diag_embed()
        b_terms = (mean.square() / precision + 0.5 / precision.square()) * slope.square()
        upper = torch.cat([(1.0 / precision).diag_embed(), between], dim=2)
        return torch.cat([upper, torch.cat([between, b_terms.diag_embed()], dim=2)], dim=1)

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return y − E[y|f] for a, and −½ β' (y² − E[y²|f]) for b, with β' = dβ/db."""
        a, b = f.chunk(2, dim=1)
        precision = _precision(b)
        mean, y = a / precision, y.to(f)
        excess = y.square() - mean.square() - 1.0 / precision
        return torch.cat([y - mean, -0.5 * b.sigmoid() * excess], dim=1)

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m D"], Float[Tensor, "m D"], Float[Tensor, "m D"]]:
        """Return μ at f, the variance of μ to first order, and the noise variance at f."""
        mean, log_variance = self._of_targets(f)
        variance = log_variance.exp()
        b_terms = -mean * variance * f.chunk(2, dim=1)[1].sigmoid()
        slopes = torch.cat([variance.diag_embed(), b_terms.diag_embed()], dim=2)
        epistemic = torch.einsum("mdc,mce,mde->md", slopes, covariance, slopes)
        return mean, epistemic.clamp(min=0.0), variance

    def variance_of_logs(self, covariance: Float[Tensor, "m C C"]) -> None:
        """Return None, because ``moments`` averages nothing."""


def _precision(b: Tensor) -> Tensor:
    """Return softplus(b), but not 0 if it underflows, as for samples of very uncertain outputs."""
    return softplus(b).clamp(min=torch.finfo(b.dtype).tiny)
