"""Regression whose noise depends on the input."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from evigrad.errors import InputError
from evigrad.likelihoods.base import Likelihood, check_one_per_output, total
from evigrad.likelihoods.gaussian import LOG_TWO_PI

FISHER_OF_LOG_VARIANCE = 0.5


class HeteroscedasticGaussian(Likelihood):
    """Normal noise of which the network says how much: y = μ + exp(s/2)·ε; y is (m, D).

    The outputs f are (m, 2D): the D means μ, then the D log variances s. Rows are those of the
    Fisher information, diag(e^−s, ½), as the Hessian depends on the target. There is no noise to
    learn: the network learns it.
    """

    name = "heteroscedastic"
    couples_outputs = False
    outputs_are: ClassVar[str] = "the means and behind them the log variances"

    def log_prob(self, f: Float[Tensor, "m C"], y: Float[Tensor, "m D"]) -> Float[Tensor, " m"]:
        mean, log_variance = self._of_targets(f)
        standardised = (y.to(f) - mean) * (-0.5 * log_variance).exp()
        return -0.5 * (standardised.square() + log_variance + LOG_TWO_PI).sum(dim=1)

    def _of_targets(self, f: Float[Tensor, "m C"]) -> tuple[Tensor, Tensor]:
        """Means and log variances, (m, D) each."""
        mean, log_variance = f.chunk(2, dim=1)
        return mean, log_variance

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Refuse outputs that are not in pairs, and anything but D finite numbers a datum."""
        super().validate(f_shape, y)
        m, c = f_shape
        if c % 2 or tuple(y.shape) == (m, c):
            raise InputError(
                f"The model has {c} outputs for targets {tuple(y.shape)}: give it two for each"
                f" target, {self.outputs_are}."
            )
        check_one_per_output((m, c // 2), y)
        if not y.is_floating_point():
            raise InputError(f"Targets must be floating point, not {y.dtype}; use y.float().")

    def reference_targets(self, f: Float[Tensor, "m C"]) -> tuple[Tensor, Tensor]:
        """Zeros and ones (m, D), for classes with another density."""
        mean = f.chunk(2, dim=1)[0]
        return torch.zeros_like(mean), torch.ones_like(mean)

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """The Fisher information diag(e^−s, ½), the mean of the Hessian over targets."""
        precision = (-f.chunk(2, dim=1)[1]).exp()
        constant = torch.full_like(precision, FISHER_OF_LOG_VARIANCE)
        return torch.cat([precision, constant], dim=1).diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """The residual over the variance, and half of its standardised square minus 1."""
        mean, log_variance = f.chunk(2, dim=1)
        error, precision = y.to(f) - mean, (-log_variance).exp()
        return torch.cat([error * precision, 0.5 * (error.square() * precision - 1.0)], dim=1)

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m D"], Float[Tensor, "m D"], Float[Tensor, "m D"]]:
        """The outputs' own, and E e^s = exp(s + variance/2) of a log-normal noise variance."""
        mean, log_variance = f.chunk(2, dim=1)
        epistemic, of_log = covariance.diagonal(dim1=1, dim2=2).chunk(2, dim=1)
        return mean, epistemic, (log_variance + 0.5 * of_log).exp()

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Float[Tensor, "m D"]:
        """Targets μ + exp(s/2)·ε."""
        mean, log_variance = self._of_targets(f.detach())
        noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=f.dtype)
        return mean + (0.5 * log_variance).exp() * noise.to(f.device)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        deviation = (-0.5 * f.chunk(2, dim=1)[1]).exp()
        constant = torch.full_like(deviation, FISHER_OF_LOG_VARIANCE**0.5)
        return torch.cat([deviation, constant], dim=1)

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> dict[str, float]:
        """``log_likelihood`` (nats) and ``squared_error`` of the means (units of y²), sums."""
        mean, _ = self._of_targets(f)
        return super().metrics(f, y) | {"squared_error": total((y.to(f) - mean).square())}


class NaturalGaussian(HeteroscedasticGaussian):
    """The same density by its natural parameters: y = μ + ε/√β; y is (m, D).

    These are those of "Effective Bayesian heteroscedastic regression with deep neural networks"
    (Immer et al. 2023), where they make Laplace approximations work better.
    The outputs f are (m, 2D): the D numbers a = μβ, then the D numbers b with the precision
    β = softplus(b). A small noise takes large outputs, which the prior keeps small: training does
    not take its targets for free of noise. Rows are those of the Fisher information.
    """

    name = "natural-gaussian"
    couples_outputs = True
    outputs_are = "mean times precision, and behind them what the softplus makes precisions"

    def _of_targets(self, f: Float[Tensor, "m C"]) -> tuple[Tensor, Tensor]:
        a, b = f.chunk(2, dim=1)
        precision = _precision(b)
        return a / precision, -precision.log()

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """The Fisher information: 1/β of a, (μ²/β + 1/2β²) β'² of b, −μβ'/β between them."""
        a, b = f.chunk(2, dim=1)
        precision, slope = _precision(b), b.sigmoid()
        mean = a / precision
        between = (-mean * slope / precision).diag_embed()
        of_b = (mean.square() / precision + 0.5 / precision.square()) * slope.square()
        upper = torch.cat([(1.0 / precision).diag_embed(), between], dim=2)
        return torch.cat([upper, torch.cat([between, of_b.diag_embed()], dim=2)], dim=1)

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Errors of y, and half of those of y² times −β'."""
        a, b = f.chunk(2, dim=1)
        precision = _precision(b)
        mean, y = a / precision, y.to(f)
        excess = y.square() - mean.square() - 1.0 / precision
        return torch.cat([y - mean, -0.5 * b.sigmoid() * excess], dim=1)

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m D"], Float[Tensor, "m D"], Float[Tensor, "m D"]]:
        """The network's own mean and noise, and the variance of the mean to first order."""
        mean, log_variance = self._of_targets(f)
        variance = log_variance.exp()
        of_b = -mean * variance * f.chunk(2, dim=1)[1].sigmoid()
        slopes = torch.cat([variance.diag_embed(), of_b.diag_embed()], dim=2)
        epistemic = torch.einsum("mdc,mce,mde->md", slopes, covariance, slopes)
        return mean, epistemic.clamp(min=0.0), variance


def _precision(b: Tensor) -> Tensor:
    """softplus(b), and not 0 where it underflows: samples of very uncertain outputs come there."""
    return softplus(b).clamp(min=torch.finfo(b.dtype).tiny)
