"""A likelihood for counts."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import ConfigurationError, InputError
from evigrad.inputs import refuse_where
from evigrad.likelihoods.base import Metric
from evigrad.likelihoods.missing import Independent


class Counts(Independent):
    """Independent counts with log means f, or log rates f if exposures are conditions."""

    has_whole_targets = True

    def __init__(self, missing: str | None = None, exposure: bool = False) -> None:
        super().__init__(missing)
        if not isinstance(exposure, bool):
            raise ConfigurationError(
                f"exposure must be True or False, got {exposure!r}. Combine the exposures with the"
                " targets: likelihood.targets(y, exposure=...)."
            )
        self.conditions = {"exposure": 1.0} if exposure else {}

    def extra_repr(self) -> str:
        """Return the settings for the module's repr."""
        parts = [super().extra_repr(), "exposure=True" if self.conditions else ""]
        return ", ".join(part for part in parts if part)

    def log_means(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        """Return the log means of counts with log rates f, under the exposures of ``at``."""
        return f + self.condition("exposure", f).log() if self.conditions else f

    def _with_means(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return log means and counts, for targets with exposures."""
        counts, conditions = self.split(y)
        return (f + conditions["exposure"].to(f).log() if conditions else f), counts

    def validate_condition(self, name: str, values: Float[Tensor, "m ... C"]) -> None:
        """Check that exposures are positive, and neither tiny nor huge."""
        wrong = ~((values > 1e-30) & (values < 1e30))
        refuse_where(wrong, values, "must be finite and positive", "Exposure")

    def validate_observed(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that the targets are counts 0, 1, 2, … (floating point or integer)."""
        if y.is_complex():
            raise InputError(f"Counts must be real whole numbers, got {y.dtype}. Use y.real.")
        refuse_where((y < 0) | (y % 1 != 0), y, "must be a count, a whole number of at least 0")

    def variance_of_logs(self, covariance: Float[Tensor, "m C C"]) -> Float[Tensor, "m C"]:
        """Return the variances of the log rates."""
        return covariance.diagonal(dim1=1, dim2=2)

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> Mapping[str, Metric]:
        """Return the sums ``log_likelihood`` (nats) and ``squared_error`` of means (counts²)."""
        metrics = super().metrics(f, y)
        f, counts = self._with_means(f, y)
        return {**metrics, "squared_error": self._squared(counts.to(f) - f.exp(), counts)}


class Poisson(Counts):
    """C independent counts with log rates f: p(y_c|f) = Poisson(exp f_c). Targets are (m, C).

    With ``exposure=True``, each count has an exposure e, such as the length of time or the size of
    the population that was observed. Then p(y_c|f) = Poisson(e exp f_c). Combine counts and
    exposures with ``targets(y, exposure=e)``. Predictions are for an exposure of 1, unless you call
    ``Predictive.with_conditions``.

    Args:
        missing: With ``"nan"``, counts of NaN are missing. Default: None, they are errors.
        exposure: Whether targets contain exposures. Default: False.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Poisson
        >>> Poisson().log_prob(torch.zeros(1, 1), torch.tensor([[2.0]]))
        tensor([-1.6931])
        >>> likelihood = Poisson(exposure=True)
        >>> likelihood.targets(torch.tensor([[2.0]]), exposure=torch.tensor([0.5]))
        tensor([[2.0000, 0.5000]], dtype=torch.float64)

    See also: docs/likelihoods.md.
    """

    name = "poisson"

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        f, y = self._with_means(f, y)
        counts = self._masked(y.to(f), y)
        return self._masked(counts * f - f.exp() - torch.lgamma(counts + 1.0), y).sum(dim=1)

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return Λ = diag(means)."""
        return self.log_means(f).exp().diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return counts minus means."""
        f, y = self._with_means(f, y)
        return self._masked(y.to(f) - f.exp(), y)

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m C"], Float[Tensor, "m C"], Float[Tensor, "m C"]]:
        """Return the moments of counts with log-normal means, whose mean is exp(f + variance/2)."""
        return log_normal_moments(self.log_means(f), covariance)

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Tensor:
        """Draw counts, combined with exposures if there are any."""
        mean = self.log_means(f.detach()).exp().to(generator.device)
        return self.combined(torch.poisson(mean, generator=generator).to(f.device), f)

    def cdf(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return the probabilities of counts of at most y."""
        f, y = self._with_means(f, y)
        last = y.to(f).floor()
        p = torch.special.gammaincc(last.clamp(min=0.0) + 1.0, f.exp())
        return torch.where(last < 0, 0.0, p)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        return (0.5 * self.log_means(f)).exp()


def log_normal_moments(
    f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
) -> tuple[Float[Tensor, "m C"], Float[Tensor, "m C"], Float[Tensor, "m C"]]:
    """Return the mean and variance of exp f for uncertain outputs f, and the mean again."""
    variance = covariance.diagonal(dim1=1, dim2=2)
    rate = (f + 0.5 * variance).exp()
    return rate, rate.square() * variance.expm1(), rate
