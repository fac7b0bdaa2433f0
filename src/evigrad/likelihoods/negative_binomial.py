"""A likelihood for counts that vary more than Poisson counts."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from evigrad.errors import ConfigurationError
from evigrad.likelihoods.poisson import Counts, log_normal_moments
from evigrad.likelihoods.special import betainc, with_derivative
from evigrad.likelihoods.targets import precisely


class NegativeBinomial(Counts):
    """C independent counts with log means f and variance μ + d μ², where μ = exp f.

    The dispersion d is learned. With d = 0, counts would be Poisson. The second derivative of
    −log p(y|f) depends on the targets. Λ is therefore its mean over the targets, the Fisher
    information μ / (1 + d μ) of each output (J. Hilbe, 2011, *Negative Binomial Regression*, 2nd
    edition, section 8.3). With ``exposure=True``, μ = e exp f for the exposure e of each count, as
    for ``Poisson``.

    Args:
        dispersion: Value of d at the start. Default: 0.5.
        learnable: Whether ``log_dispersion`` = log d is learned. Default: True.
        missing: With ``"nan"``, counts of NaN are missing. Default: None, they are errors.
        exposure: Whether targets contain exposures. Default: False.

    Raises:
        ConfigurationError: If d is not positive and finite, or ``learnable``, ``missing`` or
            ``exposure`` has another value.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import NegativeBinomial
        >>> round(NegativeBinomial(2.0).reported()["dispersion"], 3)
        2.0

    See also: docs/likelihoods.md.
    """

    name = "negative-binomial"

    def __init__(
        self,
        dispersion: float = 0.5,
        learnable: bool = True,
        missing: str | None = None,
        exposure: bool = False,
    ) -> None:
        super().__init__(missing, exposure)
        is_number = isinstance(dispersion, float | int) and not isinstance(dispersion, bool)
        if not (is_number and 0 < dispersion < math.inf):
            raise ConfigurationError(
                f"dispersion must be positive and finite, got {dispersion!r}. For counts without"
                " extra variance, use Poisson()."
            )
        if not isinstance(learnable, bool):
            raise ConfigurationError(f"learnable must be True or False, got {learnable!r}.")
        self.log_dispersion = nn.Parameter(
            torch.tensor(math.log(dispersion), device="cpu"), requires_grad=learnable
        )

    @property
    def dispersion(self) -> Tensor:
        """The current d of the variance μ + d μ², without a graph."""
        return self.log_dispersion.detach().exp()

    def _spread(self, f: Tensor) -> Tensor:
        """Return log(1 + d μ) for log means f, without overflow."""
        return torch.nn.functional.softplus(f + self.log_dispersion.to(f))

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        means, y = self._with_means(f, y)
        # A small dispersion makes the terms large, and their sum small.
        precise = precisely(means)
        counts, log_d = self._masked(y.to(precise), y), self.log_dispersion.to(precise)
        r = (-log_d).exp()
        choices = torch.lgamma(counts + r) - torch.lgamma(r) - torch.lgamma(counts + 1.0)
        log_p = choices + counts * (precise + log_d) - (counts + r) * self._spread(precise)
        return self._masked(log_p, y).sum(dim=1).to(f)

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return the Fisher information, differentiable in ``log_dispersion``."""
        return self._diagonal_root(f).square().diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return (y − μ) / (1 + d μ)."""
        f, y = self._with_means(f, y)
        return self._masked((y.to(f) - f.exp()) * (-self._spread(f)).exp(), y)

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m C"], Float[Tensor, "m C"], Float[Tensor, "m C"]]:
        """Return the moments of counts with log-normal means (see ``Poisson.moments``)."""
        mean, epistemic, noise = log_normal_moments(self.log_means(f), covariance)
        second = epistemic + mean.square()  # E[μ²]
        return mean, epistemic, noise + self.log_dispersion.to(f).exp() * second

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Tensor:
        """Draw Poisson counts whose means follow a gamma distribution."""
        r = (-self.log_dispersion.detach().to(f)).exp()
        shape = r.expand(f.shape).to(generator.device).contiguous()
        gamma = torch._standard_gamma(shape, generator)  # pyright: ignore[reportPrivateImportUsage]
        rate = self.log_means(f.detach()).exp() * gamma.to(f) / r
        counts = torch.poisson(rate.to(generator.device), generator=generator).to(f.device)
        return self.combined(counts, f)

    def cdf(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return the probabilities of counts of at most y."""
        f, y = self._with_means(f, y)
        last, log_d = y.to(f).floor(), self.log_dispersion.to(f)
        odds, counts = f + log_d, last.clamp(min=0.0)  # the logarithm of d μ
        a, b = (-log_d).exp(), counts + 1.0
        p = betainc(a, b, (-odds).sigmoid(), odds.sigmoid())

        def derivative() -> Tensor:
            scale = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
            return -(scale + a * logsigmoid(-odds) + b * logsigmoid(odds)).exp()

        return torch.where(last < 0, 0.0, with_derivative(odds, p, derivative))

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        f = self.log_means(f)
        return (0.5 * (f - self._spread(f))).exp()

    def reported(self) -> dict[str, float]:
        """Return d as ``dispersion``."""
        return {"dispersion": self.dispersion.item()}
