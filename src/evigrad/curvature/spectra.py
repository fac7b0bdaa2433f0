"""Log-determinants from eigenvalues that are computed once, for many steps on the prior."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.curvature.linalg import (
    check_rounding,
    is_tolerated,
    kronecker_rounding,
    kronecker_rounding_rate,
    log_det_kronecker,
    psd_eigenvalues,
)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues that a log-determinant needs, of A ⊗ B / count or of one matrix.

    Attributes:
        left: Those of A, or of the matrix.
        right: Those of B, or 1.
        count: The number of examples, or 1.
    """

    left: Tensor
    right: Tensor
    count: int

    def log_det(self, precision: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """log|I + A ⊗ B / (precision · count)| in nats, differentiable in the precision."""
        return log_det_kronecker(self.left, self.right, self._factor(precision))

    def rounding(self, precision: Float[Tensor, ""]) -> Tensor:
        """See ``kronecker_rounding``."""
        return kronecker_rounding(self.left, self.right, self._factor(precision.detach()))

    @cached_property
    def rounding_rate(self) -> float:
        """See ``kronecker_rounding_rate``."""
        return kronecker_rounding_rate(self.left, self.right) / self.count

    def _factor(self, precision: Tensor) -> Tensor:
        return (precision.to(self.left.dtype) * self.count).reciprocal()


class Spectra(dict[Hashable, Spectrum | None]):
    """A cache of spectra of matrices without a graph."""

    def at_second_use(self, key: Hashable, matrix: Callable[[], Tensor]) -> Spectrum | None:
        """The spectrum of a matrix; None at the first call, where one Cholesky is cheaper."""
        # Eigenvalues take the time of four to five factorisations, those of a step and a half with
        # its gradient.
        if key not in self:
            self[key] = None
            return None
        if (found := self[key]) is None:
            values = psd_eigenvalues(matrix().detach())
            found = self[key] = Spectrum(values, values.new_ones(1), 1)
        return found


def check_spectra(used: Sequence[tuple[Spectrum, Tensor]], value: Tensor) -> None:
    """``check_rounding`` of spectra at their precisions; a cheap bound spares most steps it."""
    if not used:
        return
    precisions = torch.stack([precision.detach().double() for _, precision in used]).tolist()
    bound = sum(found.rounding_rate / own for (found, _), own in zip(used, precisions, strict=True))
    value = value.detach()
    if not is_tolerated(bound, float(value)):
        errors = [found.rounding(precision) for found, precision in used]
        check_rounding(torch.stack(errors).sum(), value, errors[0].dtype)
