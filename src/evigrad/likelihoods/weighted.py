"""Data that count more or less than others."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evigrad.core.roots import RootRows
from evigrad.errors import InputError
from evigrad.likelihoods.base import Likelihood, refuse_where


class Weighted(Likelihood):
    """Another likelihood with a weight for each datum: its log density counts w times.

    A weight of two is a datum that was seen twice, one of zero is none; sums over the data become
    weighted sums, of log likelihoods and of curvatures. The normalizer of a density counts w times
    too: the learned noise of a Gaussian is divided by the root of the mean weight, compared with a
    known noise σ/√w of each example. Weights that average 1 serve both meanings. N still counts
    the data. ``targets`` puts targets and weights together in one tensor, as all that takes targets
    needs them then. Metrics and predictions are those of the other likelihood, without weights. In
    ``kfac`` the factor of the gradients is weighted and that of the inputs is not: there
    repetitions are not the same.

    Args:
        likelihood: The other one.
    """

    name = "weighted"

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood
        self.couples_outputs = likelihood.couples_outputs  # pyright: ignore[reportAttributeAccessIssue]
        self.is_classification = likelihood.is_classification  # pyright: ignore[reportAttributeAccessIssue]

    def targets(self, y: Tensor, weights: Tensor) -> Float[Tensor, "... D"]:
        """Targets with their weights behind them.

        Args:
            y: Targets of the other likelihood, (m,), (m, C), or with positions (m, …).
            weights: Non-negative, one for each target: (m,) or (m, …).

        Returns:
            float64, with the weights as the last entry of the last dimension.

        Raises:
            InputError: If there are not as many weights as targets.
        """
        columns = y.unsqueeze(-1) if self._has_labels else y
        if weights.shape != columns.shape[:-1]:
            raise InputError(
                f"Weights of shape {tuple(weights.shape)} do not fit targets of shape"
                f" {tuple(y.shape)}: give one for each datum, {tuple(columns.shape[:-1])}."
            )
        return torch.cat([columns.double(), weights.to(y.device).double()[..., None]], -1)

    @property
    def _has_labels(self) -> bool:
        """Whether the other likelihood's targets are single labels (m,)."""
        return self.is_classification and self.couples_outputs

    def split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return targets of the other likelihood, and weights."""
        targets, weights = y[..., :-1], y[..., -1]
        return (targets.squeeze(-1).long() if self._has_labels else targets), weights

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        """The weight times the other log density."""
        targets, weights = self.split(y)
        return weights.to(f) * self.likelihood.log_prob(f, _like(f, targets))

    def _targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Targets of the other likelihood, numbers in the type of the outputs."""
        return _like(f, self.split(y)[0])

    def weights(self, y: Tensor) -> Float[Tensor, " m"]:
        return self.split(y)[1]

    def counted(self, y: Tensor) -> Bool[Tensor, "..."]:
        """Targets of positive weight that the other likelihood counts."""
        targets, weights = self.split(y)
        counts = self.likelihood.counted(targets)
        return weights > 0 if counts is None else counts & (weights > 0)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Refuse anything but targets of the other likelihood with non-negative weights."""
        super().validate(f_shape, y)
        columns = 2 if self._has_labels else 1
        if y.ndim != 2 or y.shape[1] < columns or not y.is_floating_point():
            raise InputError(
                "Targets need their weights: give likelihood.targets(y, weights), which puts both"
                f" into one tensor, not {y.dtype} of shape {tuple(y.shape)}."
            )
        targets, weights = self.split(y)
        refuse_where(weights < 0, weights, "is a negative weight")
        self.likelihood.validate(f_shape, targets)

    def check_derivatives(self, f: Float[Tensor, "m C"], y: Tensor, curvature: str = "ggn") -> None:
        self.likelihood.check_derivatives(f, self._targets(f, y), curvature)

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """The score of the other likelihood; the rows made of it are weighted by ``weights``."""
        return self.likelihood.score(f, self._targets(f, y))

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Tensor:
        """Targets of weight one."""
        return self.targets(self.likelihood.sample(f, generator), f.new_ones(len(f)))

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> dict[str, float]:
        """Each datum counts once."""
        return self.likelihood.metrics(f, self._targets(f, y))

    # Curvatures are those of the other likelihood at weight one.

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


def unweighted(likelihood: Likelihood) -> Likelihood:
    """The likelihood of single data."""
    return likelihood.likelihood if isinstance(likelihood, Weighted) else likelihood


def _like(f: Tensor, targets: Tensor) -> Tensor:
    return targets.to(f) if targets.is_floating_point() else targets
