"""A likelihood for counts."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import InputError
from evigrad.likelihoods.base import refuse_where
from evigrad.likelihoods.missing import Independent


class Counts(Independent):
    """Independent counts with log means f."""

    def validate_observed(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that the targets are counts 0, 1, 2, … (floating point or integer)."""
        if y.is_complex():
            raise InputError(f"Counts must be real whole numbers, got {y.dtype}. Use y.real.")
        refuse_where((y < 0) | (y % 1 != 0), y, "must be a count, a whole number of at least 0")

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> dict[str, float]:
        """Return the sums ``log_likelihood`` (nats) and ``squared_error`` of rates (counts²)."""
        return super().metrics(f, y) | {"squared_error": self._squared(y.to(f) - f.exp(), y)}


class Poisson(Counts):
    """C independent counts with log rates f: p(y_c|f) = Poisson(exp f_c). Targets are (m, C).

    If examples were observed over different lengths of time or for populations of different sizes,
    add the logarithm of the exposure to the outputs in the model.

    Args:
        missing: With ``"nan"``, counts of NaN are missing. Default: None, they are errors.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Poisson
        >>> Poisson().log_prob(torch.zeros(1, 1), torch.tensor([[2.0]]))
        tensor([-1.6931])

    See also: docs/likelihoods.md.
    """

    name = "poisson"

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        counts = self._masked(y.to(f), y)
        return self._masked(counts * f - f.exp() - torch.lgamma(counts + 1.0), y).sum(dim=1)

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return Λ = diag(rates)."""
        return f.exp().diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return counts minus rates."""
        return self._masked(y.to(f) - f.exp(), y)

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m C"], Float[Tensor, "m C"], Float[Tensor, "m C"]]:
        """Return the moments of counts with log-normal rates, whose mean is exp(f + variance/2)."""
        return log_normal_moments(f, covariance)

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Float[Tensor, "m C"]:
        """Draw counts in the dtype of f."""
        rate = f.detach().exp().to(generator.device)
        return torch.poisson(rate, generator=generator).to(f.device)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        return (0.5 * f).exp()


def log_normal_moments(
    f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
) -> tuple[Float[Tensor, "m C"], Float[Tensor, "m C"], Float[Tensor, "m C"]]:
    """Return the mean and variance of exp f for uncertain outputs f, and the mean again."""
    variance = covariance.diagonal(dim1=1, dim2=2)
    rate = (f + 0.5 * variance).exp()
    return rate, rate.square() * variance.expm1(), rate
