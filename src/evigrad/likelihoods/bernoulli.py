"""A likelihood for independent yes-or-no labels."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from evigrad.errors import InputError
from evigrad.inputs import refuse_where
from evigrad.likelihoods.base import Metric
from evigrad.likelihoods.missing import Independent
from evigrad.likelihoods.targets import total


class Bernoulli(Independent):
    """C yes-or-no labels with p(y_c=1|f) = sigmoid(f_c). Targets (m, C) are zeros and ones.

    Args:
        missing: With ``"nan"``, labels of NaN are missing. Default: None, they are errors.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Bernoulli
        >>> Bernoulli().probabilities(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])

    See also: docs/likelihoods.md.
    """

    name = "bernoulli"
    is_classification = True

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        signs = 2.0 * self._masked(y.to(f), y) - 1.0
        return self._masked(logsigmoid(signs * f), y).sum(dim=1)

    def validate_observed(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that the labels are zeros or ones (floating point, integer or bool)."""
        if y.is_complex():
            raise InputError(f"Labels must be real zeros and ones, got {y.dtype}. Use y.real.")
        words = (
            "must be 0 or 1 (for one of several classes, use Categorical). Mark missing labels with"
            ' NaN and use Bernoulli(missing="nan")'
        )
        refuse_where((y != 0) & (y != 1), y, words)

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return Λ = diag(p(1 − p))."""
        return (logsigmoid(f) + logsigmoid(-f)).exp().diag_embed()

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return labels minus probabilities."""
        return self._masked(y.to(f) - f.sigmoid(), y)

    def _num_correct(self, f: Tensor, y: Tensor) -> Metric | None:
        if self.missing is None:
            return super()._num_correct(f, y)
        observed = self.observed(y)
        return total(observed & ((f > 0) == (y > 0.5))), total(observed)

    def probabilities(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        """Return the probability that each label is 1, the sigmoid of its output."""
        return f.sigmoid()

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Float[Tensor, "m C"]:
        """Draw zeros and ones in the dtype of f."""
        uniform = torch.rand(f.shape, generator=generator, device=generator.device, dtype=f.dtype)
        return (uniform.to(f.device) < f.detach().sigmoid()).to(f.dtype)

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        return (0.5 * (logsigmoid(f) + logsigmoid(-f))).exp()
