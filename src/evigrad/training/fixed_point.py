"""MacKay's fixed-point update of the prior's precisions, from the gradient of the evidence.

At a maximum of the log evidence with respect to the precision δ_g of prior group g, whose weights
deviate by d_g = w_g − w₀_g from the prior's mean,

    δ_g ‖d_g‖² = γ_g,    γ_g = −∂ℓ/∂log δ_g = tr_g(H (H + P0)⁻¹),

where ℓ = log|I + P0^{-1/2} H P0^{-1/2}|, H is the curvature matrix, and P0 is the prior's precision
matrix. The effective number of parameters γ_g, between 0 and P_g, measures how many of the group's
P_g weights the data determine. (Source: D. MacKay, 1992, *Bayesian Interpolation*, Neural
Computation 4, section 4; *A Practical Bayesian Framework for Backpropagation Networks*, ibid.) The
gradient of −log evidence / N with respect to log δ_g is (δ_g ‖d_g‖² − c γ_g) / 2N, where c is the
weight of the log-determinant (1 for the log evidence). Therefore, γ_g follows from the gradient for
every structure and estimator, and the update δ_g ← c γ_g / ‖d_g‖² has no additional cost. The
update needs no learning rate and corrects precisions by orders of magnitude within a few steps.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, NotFiniteError
from evigrad.evidence import Evidence

# In log precisions the derivative of the update at its fixed point is (1 − r) I − r diag(γ)⁻¹ L for
# a damping r. L_ij = −∂γ_i/∂log δ_j is the covariance of the numbers of vectors that a
# determinantal process takes from each group. diag(γ)⁻¹ L has eigenvalues in [0, 1], near 1 for
# weights that the data hardly determine. The undamped update may oscillate there, while a step
# damped by 2/3 leaves at most a third of the distance.
DAMPING = 2 / 3
# The largest factor by which a step divides a precision. It matters for undamped steps if γ is 0,
# as in a layer that no output depends on.
MAX_FACTOR = 100.0
# Precisions stay within 1e-12 and 1e12, so that kernels in float32 can be factored. A group that
# the data do not determine has no finite optimum.
LOG_LIMIT = 12 * math.log(10.0)


class FixedPoint:
    """Update precisions by damped steps δ ← (1 − rate) δ + rate · c γ / ‖w − w₀‖².

    The steps average precisions, not their logarithms. A random block gives an unbiased estimate of
    the effective number of parameters γ. Therefore, steps with a falling rate converge to the point
    where the mean gradient is zero.

    The update replaces the prior's optimizer. Call it after each ``backward``::

        update = FixedPoint(evidence)
        evidence.backward(block)
        update.step()

    γ is clipped at P_g, the number of weights with this precision, because the estimate from a
    small block may exceed P_g. A group whose weights equal the prior's mean has no finite optimum
    and keeps its precision.

    Args:
        evidence: Evidence with a learnable prior without a hyperprior.
        rate: Damping in (0, 1]. 1 is MacKay's update. For random blocks use a rate that falls
            during training, to average out the noise of the estimates.

    Raises:
        ConfigurationError: If the rate is out of range, or the prior is not learnable or has a
            hyperprior, which would change the fixed point.
    """

    def __init__(self, evidence: Evidence, rate: float | int = DAMPING) -> None:
        self.evidence = evidence
        if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 < rate <= 1:
            raise ConfigurationError(f"rate must be a number in (0, 1], got {rate}.")
        self.rate = float(rate)
        self._log_precision()

    def effective_parameters(self, squares: Tensor | None = None) -> Float[Tensor, " G"]:
        """Return the effective number of parameters γ (G,) of each learned prior group."""
        log_precision = self._log_precision()
        gradient = log_precision.grad
        if gradient is None:
            raise ConfigurationError(
                "The fixed-point update needs a gradient, but there is none. Call evidence.backward"
                " before each step."
            )
        if not torch.isfinite(gradient).all():
            raise NotFiniteError(
                "The gradient of the prior's precisions is NaN or infinite: weights or"
                " hyperparameters have diverged. Lower their learning rates."
            )
        squares = self._square_norms() if squares is None else squares
        most = self.evidence.prior.counts()
        with torch.no_grad():
            fitted = log_precision.double().exp() * squares
            gamma = fitted - 2 * self.evidence.num_data * gradient.double()
            gamma = gamma / self.evidence.log_det_weight
            return gamma.clamp(min=0.0).minimum(most.to(gamma))

    def start(self, zero: float, pretrained: float) -> None:
        """Set the initial values of the learned precisions.

        Args:
            zero: Precision of groups whose prior mean is zero.
            pretrained: Precision of groups with a nonzero prior mean.
        """
        prior, log_precision = self.evidence.prior, self._log_precision()
        if prior.factors() and prior.shape == "equal":
            return  # a posterior counts fully until the new data are seen
        with torch.no_grad():
            log_precision.fill_(math.log(zero))
            log_precision[prior.has_mean()] = math.log(pretrained)

    def step(self) -> None:
        """Update the precisions by the gradient of one ``backward``, and clear the gradient.

        The gradient must come from a single call of ``backward`` with the current weights and
        precisions.

        Raises:
            ConfigurationError: If there is no gradient.
            NotFiniteError: If the gradient is not finite.
        """
        log_precision = self._log_precision()
        squares = self._square_norms()
        gamma = self.effective_parameters(squares)
        with torch.no_grad():
            weighted = self.evidence.log_det_weight * gamma
            ratio = weighted / (log_precision.double().exp() * squares)
            factor = (1 + self.rate * (ratio - 1)).clamp(min=1 / MAX_FACTOR)
            change = torch.where(squares > 0, factor.log(), 0.0)
            moved = (log_precision.double() + change).clamp(-LOG_LIMIT, LOG_LIMIT)
            log_precision.copy_(moved)
        log_precision.grad = None

    # ------------------------------------------------------------ parts

    def _log_precision(self) -> nn.Parameter:
        prior = self.evidence.prior
        log_precision = prior.log_precision
        if log_precision is None or not log_precision.requires_grad:
            raise ConfigurationError(
                "The fixed-point update needs a learnable prior, but the precisions of this prior"
                " are fixed. Use GaussianPrior(learnable=True)."
            )
        if prior.hyperprior is not None:
            raise ConfigurationError(
                "The fixed-point update needs a prior without a hyperprior, because it maximizes"
                " only the log evidence. Remove the hyperprior, or learn the precisions with Adam."
            )
        return log_precision

    def _square_norms(self) -> Tensor:
        with torch.no_grad():
            return self.evidence.prior.square_norms(self.evidence.weights())
