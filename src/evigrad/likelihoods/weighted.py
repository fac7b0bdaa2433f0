"""A likelihood with a weight for each example."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evigrad.core.roots import RootRows
from evigrad.errors import InputError
from evigrad.inputs import refuse_where
from evigrad.likelihoods.base import Likelihood, Metric
from evigrad.likelihoods.targets import as_numbers, check_whole_labels, like


class Weighted(Likelihood):
    """A likelihood that multiplies the log density of each example by a weight w.

    A weight of two means that an example was seen twice, and a weight of zero means that it was not
    seen. Sums of log likelihoods and curvatures over examples become weighted sums. N is still the
    number of examples. ``targets`` combines targets and weights in one tensor, which you pass as
    targets. Metrics and predictions ignore the weights.

    The weight also multiplies the normalizer of the density. If the noise of each example is σ/√w,
    the learned σ of a Gaussian is therefore too small by a factor of the square root of the mean
    weight. If the mean weight is 1, the learned σ is correct. In ``kfac``, only the factor of the
    gradients is weighted, so a weight of two is not equivalent to repeating the example.

    Args:
        likelihood: Likelihood of the targets.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Categorical, Weighted
        >>> likelihood = Weighted(Categorical())
        >>> y = likelihood.targets(torch.tensor([0, 1]), torch.tensor([2.0, 0.5]))
        >>> likelihood.log_prob(torch.zeros(2, 2), y)
        tensor([-1.3863, -0.3466])

    See also: docs/likelihoods.md.
    """

    name = "weighted"

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood
        self.couples_outputs = likelihood.couples_outputs  # pyright: ignore[reportAttributeAccessIssue]
        self.has_conditions = likelihood.has_conditions
        self.is_classification = likelihood.is_classification  # pyright: ignore[reportAttributeAccessIssue]

    def targets(self, y: Any, weights: Any) -> Float[Tensor, "... D"]:
        """Return targets and weights in one tensor.

        Args:
            y: Targets of the wrapped likelihood, (m,), (m, C), or with positions (m, …): a tensor
                or an array. For numbers, (m,) means (m, 1).
            weights: Non-negative weights, one per target: (m,) or (m, …).

        Returns:
            A float64 tensor with the weights as the last entry of the last dimension.

        Raises:
            InputError: If there is not one weight per target, or a weight is negative or not
                finite.
        """
        y, weights = as_numbers(y), as_numbers(weights)
        columns = y.unsqueeze(-1) if self._has_labels or y.ndim == 1 else y
        if weights.shape != columns.shape[:-1]:
            raise InputError(
                f"Weights must have the shape {tuple(columns.shape[:-1])}, one weight per"
                f" target, got {tuple(weights.shape)} for targets of shape {tuple(y.shape)}."
            )
        weights = weights.to(y.device).double()
        _check_weights(weights)
        return torch.cat([columns.double(), weights[..., None]], -1)

    def at(self, y: Tensor) -> Likelihood:
        if not self.has_conditions:
            return self
        here = copy.copy(self)
        here._modules = {"likelihood": self.likelihood.at(self.split(y)[0])}
        return here

    @property
    def defines_hessian(self) -> bool:
        return self.likelihood.defines_hessian

    def plain_targets(self, y: Tensor) -> Tensor:
        return self.likelihood.plain_targets(self.split(y)[0])

    @property
    def _has_labels(self) -> bool:
        """Return whether the wrapped likelihood's targets are single labels (m,)."""
        return self.likelihood.has_labels

    def split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of the wrapped likelihood, and the weights."""
        targets, weights = y[..., :-1], y[..., -1]
        return (targets.squeeze(-1).long() if self._has_labels else targets), weights

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        """Return the weight times the log density of the wrapped likelihood."""
        targets, weights = self.split(y)
        return weights.to(f) * self.likelihood.log_prob(f, like(f, targets))

    def _targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Return targets of the wrapped likelihood, numbers in the type of the outputs."""
        return like(f, self.split(y)[0])

    def weights(self, y: Tensor) -> Float[Tensor, "m ..."]:
        """Return the weights, times the wrapped likelihood's factors for examples or outputs."""
        targets, weights = self.split(y)
        factors = self.likelihood.weights(targets)
        if factors is None:
            return weights
        return weights.view(-1, *[1] * (factors.ndim - 1)) * factors

    def counted(self, y: Tensor) -> Bool[Tensor, "..."]:
        """Return which targets have positive weight and count in the wrapped likelihood."""
        targets, weights = self.split(y)
        counts = self.likelihood.counted(targets)
        return weights > 0 if counts is None else counts & (weights > 0)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check the wrapped likelihood's targets, and check that weights are non-negative."""
        is_real = isinstance(y, Tensor) and y.is_floating_point()
        super().validate(f_shape, y.nan_to_num(nan=0.0) if is_real else y)
        columns = 2 if self._has_labels else 1
        if self._has_labels and is_real and y.ndim == 2:
            check_whole_labels(y[:, :-1])
        if y.ndim != 2 or y.shape[1] < columns or not is_real:
            raise InputError(
                "Targets must be combined with their weights, got a tensor of dtype"
                f" {y.dtype} and shape {tuple(y.shape)}. Use likelihood.targets(y, weights)."
            )
        targets, weights = self.split(y)
        _check_weights(weights)
        self.likelihood.validate(f_shape, targets)

    def check_derivatives(self, f: Float[Tensor, "m C"], y: Tensor, curvature: str = "ggn") -> None:
        self.likelihood.check_derivatives(f, self._targets(f, y), curvature)

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return the wrapped likelihood's unweighted score. ``weights`` scales the rows later."""
        return self.likelihood.score(f, self._targets(f, y))

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Tensor:
        """Draw targets, each with a weight of one."""
        return self.targets(self.likelihood.sample(f, generator), f.new_ones(len(f)))

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> Mapping[str, Metric]:
        """Return the wrapped likelihood's metrics, without weights."""
        return self.likelihood.metrics(f, self._targets(f, y))

    # Curvatures are those of the wrapped likelihood, at weight one.

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        return self.likelihood.hessian(f)

    def root(
        self, f: Float[Tensor, "m C"], columns: Tensor | None = None, kind: str = "subblock"
    ) -> RootRows:
        return self.likelihood.root(f, columns, kind)

    def num_rows(self, num_outputs: int) -> int:
        return self.likelihood.num_rows(num_outputs)

    def row_norms(self, f: Float[Tensor, "m C"], kind: str) -> Float[Tensor, "m C"]:
        return self.likelihood.row_norms(f, kind)

    def condensed(self, f: Float[Tensor, "m C"], kind: str) -> Float[Tensor, "m D"]:
        return self.likelihood.condensed(f, kind)

    def row_scores(
        self, condensed: Float[Tensor, "m D"], kind: str
    ) -> tuple[Float[Tensor, "m K"], Float[Tensor, " m"] | None]:
        return self.likelihood.row_scores(condensed, kind)

    def reported(self) -> dict[str, float]:
        return self.likelihood.reported()


def _check_weights(weights: Tensor) -> None:
    wrong = ~(weights >= 0) | weights.isinf()
    refuse_where(wrong, weights, "must be finite and at least 0", "Weight")


def unweighted(likelihood: Likelihood) -> Likelihood:
    """Return the likelihood that ``Weighted`` wraps, or else the likelihood itself."""
    return likelihood.likelihood if isinstance(likelihood, Weighted) else likelihood
