"""log|I + S/δ| for many precisions δ, from eigenvalues that are computed once."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.curvature.linalg import PIVOT_ROUNDINGS, check_rounding, psd_eigenvalues


@dataclass(frozen=True)
class MatrixSpectrum:
    """The eigenvalues of a symmetric positive semidefinite matrix.

    Attributes:
        values: In float64, where they are as exact as the matrix allows.
        dtype: The type of the matrix.
        largest: Its largest diagonal element.
    """

    values: Float[Tensor, " n"]
    dtype: torch.dtype
    largest: Tensor

    def log_det(self, precision: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """log|I + matrix / precision| in nats, differentiable in the precision."""
        ratios = self.values / precision.to(self.values.dtype)
        value = ratios.log1p().sum()
        with torch.no_grad():  # the matrix's own rounding, as of the pivots of a factorisation
            unit = PIVOT_ROUNDINGS * torch.finfo(self.dtype).eps
            error = unit * (1 + self.largest.double() / precision.detach().double())
            check_rounding((error / (1 + ratios)).log1p().sum(), value, self.dtype)
        return value.to(self.dtype)


class Spectra(dict[Hashable, MatrixSpectrum | None]):
    """A cache of the spectra of matrices without a graph."""

    def at_second_use(self, key: Hashable, matrix: Callable[[], Tensor]) -> MatrixSpectrum | None:
        """The spectrum of a matrix; None at the first call, where one Cholesky is cheaper."""
        # Eigenvalues take the time of four to five factorisations, those of a step and a half with
        # its gradient.
        if key not in self:
            self[key] = None
            return None
        if (found := self[key]) is None:
            own = matrix().detach()
            values = psd_eigenvalues(own.double())
            found = self[key] = MatrixSpectrum(values, own.dtype, own.diagonal().amax())
        return found
