"""Missing targets of likelihoods whose outputs are independent."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evigrad.errors import ConfigurationError
from evigrad.inputs import refuse_where
from evigrad.likelihoods.base import Metric
from evigrad.likelihoods.conditional import Conditional
from evigrad.likelihoods.targets import check_one_per_output, total

MISSING = (None, "nan")


class Independent(Conditional):
    """A likelihood with one independent target per output, some of which may be missing.

    With ``missing="nan"``, a target of NaN was not observed. Its output then has no log density, no
    score and no curvature. N counts examples, including those without any observed target.
    """

    couples_outputs = False

    def __init__(self, missing: str | None = None) -> None:
        super().__init__()
        if missing not in MISSING:
            raise ConfigurationError(f"missing must be None or 'nan', got {missing!r}.")
        self.missing = missing

    def extra_repr(self) -> str:
        """Return how missing targets are marked, for the module's repr."""
        return "" if self.missing is None else f"missing={self.missing!r}"

    def observed(self, y: Tensor) -> Bool[Tensor, "m C"]:
        """Return which targets are not missing."""
        return ~y.isnan()

    def weights(self, y: Tensor) -> Float[Tensor, "m C"] | None:
        """Return 1 for each observed target and 0 for each missing one, or None for all ones."""
        return None if self.missing is None else self.observed(self.plain_targets(y)).to(y.dtype)

    def validate_plain(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that each example has C targets, which ``validate_observed`` accepts."""
        if isinstance(y, Tensor) and y.is_floating_point():
            if self.missing is None:
                words = (
                    "is NaN. Remove or impute such targets, or skip them with"
                    f' {type(self).__name__}(missing="nan")'
                )
                refuse_where(y.isnan(), y, words)
            else:
                y = y.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        super().validate_plain(f_shape, y)
        check_one_per_output(f_shape, y)
        self.validate_observed(f_shape, y)

    def validate_observed(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check the range of targets (m, C), in which missing targets are zero."""

    def _filled(self, f: Tensor, y: Tensor) -> Tensor:
        """Return targets in the dtype of f. Where they are missing, they are equal to f."""
        y = y.to(f)
        return y if self.missing is None else torch.where(y.isnan(), f.detach(), y)

    def _squared(self, errors: Tensor, y: Tensor) -> Metric:
        """Return the sum of squared errors, summed over the outputs of each example.

        If targets may be missing, return the number of outputs times the sum over the observed
        targets, and their number.
        """
        squares = total(self._masked(errors.square(), y))
        if self.missing is None:
            return squares
        return squares * errors.shape[1], total(self.observed(y))

    def _masked(self, values: Tensor, y: Tensor) -> Tensor:
        """Return values (m, C) of each target, with zeros where targets are missing."""
        return values if self.missing is None else torch.where(y.isnan(), 0.0, values)
