"""Log-determinants of I + S by one Cholesky, and of I + S/δ or I + τ A ⊗ B from eigenvalues.

The cotangents are closed forms, so that one factorisation serves value and gradient. They have no
derivatives themselves: ``create_graph=True`` is an error rather than a wrong second derivative.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.linalg import LinAlgError  # pyright: ignore[reportAttributeAccessIssue]

from evigrad.core.algebra import first_order_only, is_finite
from evigrad.errors import EvigradWarning, NotPositiveDefiniteError

# The elements of a Gram matrix are known to a few roundings relative to the norms of their rows,
# and its smallest eigenvalue to a few eps * trace. A jitter below that repairs rounding; a larger
# one would hide a matrix that is truly indefinite.
JITTER_LIMIT_IN_ROUNDINGS = 10.0
# Tenfold steps: the jitter is at most ten times larger than needed.
JITTER_GROWTH = 10.0
# Errors of a Cholesky pivot, in roundings of its diagonal element, and of an eigenvalue, in
# roundings of the largest; every sum loses some roundings besides. Calibrated on trained and
# untrained networks (benchmarks/rounding.py): mostly within a factor of ten of the true error.
PIVOT_ROUNDINGS, EIGENVALUE_ROUNDINGS, SUM_ROUNDINGS = 4.0, 1.0, 8.0
# Of many eigenvalues that rounding hides, LAPACK's were wrong by 0.2 eps of the largest on average
# at most, both ways (Grams of 16 to 512 columns, spectra of four to eight decades), and by less in
# trained networks: this part of the error above is their common bias, and the rest has random
# signs.
HIDDEN_BIAS = 0.0625
# Rounding beyond this many nats plus this part of ℓ gets a warning, or a computation in float64.
# Estimates on different blocks differ by far more.
TOLERATED_NATS, TOLERATED_SHARE = 0.05, 1e-3
# Random vectors beyond the rank: with ten, missing a direction has a probability below 1e-10.
OVERSAMPLING = 10
# Up to this ratio of rank to size it is cheaper to diagonalise a matrix within its range.
LOW_RANK_SHARE = 0.4

_refused: ContextVar[bool] = ContextVar("refused", default=False)


class RoundingError(Exception):
    """Rounding loses too much of a log-determinant; a caller can repeat it in a wider dtype."""


@contextmanager
def rounding_refused() -> Iterator[None]:
    """Within this context, a warning about rounding is a ``RoundingError`` instead."""
    token = _refused.set(True)
    try:
        yield
    finally:
        _refused.reset(token)


def rounding_is_refused() -> bool:
    """Whether this is within ``rounding_refused``."""
    return _refused.get()


def check_rounding(error: Tensor, value: Tensor, dtype: torch.dtype) -> None:
    """Warn, or raise within ``rounding_refused``, where rounding of a matrix of ``dtype`` matters.

    ``error`` is an estimate of what it may have changed in the log-determinant ``value``, in nats.
    """
    nats, size = torch.stack([error.double(), value.double()]).tolist()
    if not is_tolerated(nats, size):
        _doubt(
            f"The log-determinant of a block, {size:.6g}, may be off by about {nats:.3g} nats"
            f" by rounding in {str(dtype).removeprefix('torch.')}: the prior precision is very"
            " small beside the curvature. gram_dtype=torch.float64, or weights in float64, avoids"
            " this."
        )


def is_tolerated(nats: float, value: float) -> bool:
    """Whether a log-determinant may be off by so many nats; True for NaN, refused elsewhere."""
    return not nats > TOLERATED_NATS + TOLERATED_SHARE * value


def _doubt(message: str) -> None:
    if rounding_is_refused():
        raise RoundingError(message)
    warnings.warn(message, EvigradWarning, stacklevel=3)


def log_det_identity_plus(matrix: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Return log|I + matrix| in nats, by one Cholesky factorisation of a sum of outer products.

    Its cotangent is (I + matrix)^{-1}. A factorisation that fails in float32 is repeated in
    float64; if that fails too, the matrix gets the smallest jitter on its diagonal that helps. A
    warning says by how much jitter or rounding may change the value (see ``check_rounding``).

    Raises:
        NotPositiveDefiniteError: I + matrix is not positive definite, beyond rounding, or not
            finite.
    """
    return _LogDetIdentityPlus.apply(matrix)


def log_det_dense(matrix: Float[Tensor, "n n"], precision: Tensor) -> Float[Tensor, ""]:
    """log|I + P0^{-1/2} matrix P0^{-1/2}| in nats; P0's diagonal is one number or n."""
    precision = precision.to(matrix.dtype)
    if precision.ndim == 0:
        return log_det_identity_plus(matrix / precision)
    root = precision.reshape(-1).rsqrt()
    return log_det_identity_plus(root[:, None] * matrix * root)


def log_det_diagonal(diagonal: Tensor, precision: Tensor) -> Float[Tensor, ""]:
    """Return log|I + P0^{-1/2} D P0^{-1/2}| in nats for diagonal D and P0, one number or as many.

    Raises:
        NotPositiveDefiniteError: An element of I + P0^{-1} D is not positive or not finite.
    """
    precision = precision if precision.ndim == 0 else precision.reshape(-1)
    ratio = diagonal / precision.to(diagonal.dtype)
    finite = is_finite(ratio)
    if not finite or not bool((ratio > -1).all()):
        raise NotPositiveDefiniteError(_why_not(finite))
    return ratio.log1p().sum()


def psd_eigenvalues(
    matrix: Float[Tensor, "*batch n n"], rank: int | None = None
) -> Float[Tensor, "*batch r"]:
    """Return ascending eigenvalues of positive semidefinite matrices, negative ones set to zero.

    Differentiable once, for functions that treat equal eigenvalues equally (spectral functions):
    the cotangent V diag(v̄) Vᵀ needs no gaps between eigenvalues. It passes through the clamp, so
    that null directions keep their one-sided derivative.

    A sum of few outer products (``rank``, an upper bound) has its eigenvectors in their span, which
    its product with a random matrix finds (Halko, Martinsson & Tropp, 2011, section 4). The zero
    eigenvalues outside are left out, with their derivative: it vanishes for every change of the
    outer products.

    Raises:
        NotPositiveDefiniteError: The matrix is not finite.
    """
    return _PsdEigenvalues.apply(matrix, rank)


def log_det_kronecker(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"], factor: Tensor
) -> Float[Tensor, ""]:
    """Σ log|I + factor · A ⊗ B| over a batch, in nats, from the eigenvalues of A and B."""
    products = (factor.to(left.dtype) * left).unsqueeze(-1) * right.unsqueeze(-2)
    return products.log1p().sum()


def kronecker_rounding(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"], factor: Tensor
) -> Float[Tensor, ""]:
    """Return an estimate, in nats, of how rounding of A and B changes ``log_det_kronecker``.

    Errors have random signs, so that their squares add up, and for eigenvalues that rounding hides
    a common bias, as none is below zero.
    """
    unit = EIGENVALUE_ROUNDINGS * torch.finfo(left.dtype).eps
    parts = []
    with torch.no_grad():
        for eigenvalues, other in ((left, right), (right, left)):
            error = unit * eigenvalues.amax(-1, keepdim=True)
            hidden, bias = (
                (factor.to(eigenvalues) * part * error * other).log1p().sum(-1, keepdim=True)
                for part in (1.0, HIDDEN_BIAS)
            )
            seen = other.shape[-1] * error / eigenvalues
            changes = torch.minimum(hidden, seen)
            small = eigenvalues < PIVOT_ROUNDINGS * error
            parts.append((bias * small).sum() + changes.square().sum().sqrt())
        return parts[0] + parts[1]


def kronecker_rounding_rate(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"]
) -> float:
    """An upper bound on ``kronecker_rounding``, per unit of the factor."""
    unit = EIGENVALUE_ROUNDINGS * torch.finfo(left.dtype).eps
    with torch.no_grad():
        of_left = left.shape[-1] * left.amax(-1) * right.sum(-1)
        of_right = right.shape[-1] * right.amax(-1) * left.sum(-1)
        return (1 + HIDDEN_BIAS) * unit * float((of_left + of_right).sum())


def _why_not(finite: bool) -> str:
    """Say why a matrix has no log-determinant, and what to do."""
    if not finite:
        return (
            "the curvature is NaN or infinite. Look for non-finite weights, inputs or outputs of"
            " the network, or a prior precision or noise that has run to zero; in float32 an"
            " overflow can be avoided with gram_dtype=torch.float64."
        )
    return (
        "I + S is not positive definite, and not by rounding alone: the curvature is no sum of"
        " outer products of rows. Check that the precisions are positive; in float32, try"
        " gram_dtype=torch.float64."
    )


def _shifted(matrix: Tensor, shift: float) -> Tensor:
    result = matrix.clone()
    result.diagonal().add_(shift)
    return result


def _factor(matrix: Tensor) -> Tensor | None:
    """The Cholesky factor, or None where there is none (also for NaN)."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return factor if int(info) == 0 else None


def factor_identity_plus(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return the lower Cholesky factor of I + matrix, see ``log_det_identity_plus``.

    It is in float64 where float32 failed.

    Raises:
        NotPositiveDefiniteError: As ``log_det_identity_plus``.
    """
    sizes = 1 + matrix.detach().diagonal()
    factor = _factor(_shifted(matrix, 1.0))
    if factor is not None:
        _check_pivots(sizes, factor.detach().diagonal().square(), matrix.dtype)
        return factor
    if not is_finite(matrix):
        raise NotPositiveDefiniteError(_why_not(False))
    precise = _shifted(matrix.to(torch.float64), 1.0)
    if matrix.dtype != torch.float64 and (factor := _factor(precise)) is not None:
        _check_pivots(sizes, factor.diagonal().square(), matrix.dtype)
        return factor
    # The matrix has the rounding of the dtype in which it was made.
    rounding = torch.finfo(matrix.dtype).eps * float(precise.diagonal().mean())
    jitter, limit = rounding, JITTER_LIMIT_IN_ROUNDINGS * rounding * len(matrix)
    while 0 < jitter <= limit:
        if (factor := _factor(_shifted(precise, jitter))) is not None:
            # Exact pivots are at least 1, and at most the jitter and the limit below these.
            pivots = factor.diagonal().square()
            excess = float((pivots / (pivots - jitter - limit).clamp(min=1.0)).log().sum())
            _doubt(
                f"I + S was not positive definite by rounding: {jitter:.3g} was added to its"
                f" diagonal, whose mean is {float(precise.diagonal().mean()):.3g}. The"
                f" log-determinant may be too large by up to about {excess:.3g} nats;"
                " gram_dtype=torch.float64, or weights in float64, avoids this."
            )
            return factor
        jitter *= JITTER_GROWTH
    raise NotPositiveDefiniteError(_why_not(True))


def _check_pivots(sizes: Tensor, pivots: Tensor, dtype: torch.dtype) -> None:
    """``check_rounding`` of Σ log pivots, each off by some roundings of its size.

    Exact pivots are 1 or more. The roundings have random signs, so that their squares add up.
    """
    unit, value = torch.finfo(dtype).eps, pivots.log().sum()
    errors = (PIVOT_ROUNDINGS * unit * sizes / pivots).log1p()
    check_rounding(errors.square().sum().sqrt() + SUM_ROUNDINGS * unit * value, value, dtype)


class _LogDetIdentityPlus(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        factor = factor_identity_plus(matrix)
        ctx.save_for_backward(factor)
        ctx.dtype = matrix.dtype
        value = 2 * factor.diagonal().log().sum()
        if not bool(value.isfinite()):
            raise NotPositiveDefiniteError(_why_not(False))
        return value.to(matrix.dtype)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (factor,) = ctx.saved_tensors
        inverse = torch.cholesky_inverse(factor)
        return inverse.mul_(cotangent).to(ctx.dtype)


class _PsdEigenvalues(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rank: int | None) -> Tensor:
        if ctx.needs_input_grad[0] or _is_of_low_rank(matrix, rank):
            values, vectors = psd_eigen(matrix, rank)
            ctx.save_for_backward(vectors)
            return values
        check_finite_curvature(matrix)
        (values,) = _eigen(lambda a: [torch.linalg.eigvalsh(a)], matrix)
        return values.clamp(min=0)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (vectors,) = ctx.saved_tensors
        return (vectors * cotangent.unsqueeze(-2)) @ vectors.mT, None


def psd_eigen(
    matrix: Float[Tensor, "*batch n n"], rank: int | None = None
) -> tuple[Float[Tensor, "*batch r"], Float[Tensor, "*batch n r"]]:
    """Return eigenvalues and eigenvectors of positive semidefinite matrices, without a graph.

    Of a sum of few outer products (``rank``, see ``psd_eigenvalues``) these are the ones of its
    range: r is less than n then, and all eigenvalues outside are zero.

    Raises:
        NotPositiveDefiniteError: The matrix is not finite.
    """
    check_finite_curvature(matrix)
    if rank is None or not _is_of_low_rank(matrix, rank):
        values, vectors = _eigen(torch.linalg.eigh, matrix)
        return values.clamp(min=0), vectors
    basis = _span(matrix, rank + OVERSAMPLING)
    values, vectors = _eigen(torch.linalg.eigh, basis.mT @ matrix @ basis)
    return values.clamp(min=0), basis @ vectors


def check_finite_curvature(matrix: Tensor) -> None:
    """Raise NotPositiveDefiniteError for a curvature that is NaN or infinite."""
    if not is_finite(matrix):
        raise NotPositiveDefiniteError(_why_not(False))


def _is_of_low_rank(matrix: Tensor, rank: int | None) -> bool:
    return rank is not None and rank + OVERSAMPLING <= LOW_RANK_SHARE * matrix.shape[-1]


def _span(matrix: Tensor, size: int) -> Tensor:
    """An orthonormal basis (n, size) of a space that holds the range of a matrix of lower rank."""
    generator = torch.Generator().manual_seed(0)
    shape = (*matrix.shape[:-1], size)
    probes = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(matrix)
    return torch.linalg.qr(matrix @ probes).Q


def _eigen(decompose: Callable[[Tensor], Any], matrix: Tensor) -> Sequence[Tensor]:
    """Return a decomposition, eigenvalues first, computed in float64 where float32 fails."""
    # In float32 LAPACK may not converge (seen with repeated eigenvalues), or return NaN silently.
    with suppress(LinAlgError):
        decomposition = decompose(matrix)
        if bool(decomposition[0].isfinite().all()):
            return decomposition
    try:
        return [part.to(matrix.dtype) for part in decompose(matrix.to(torch.float64))]
    except LinAlgError as error:
        raise NotPositiveDefiniteError(
            f"LAPACK finds no eigenvalues of the curvature, of {matrix.shape[-1]} columns and a"
            f" largest entry of {float(matrix.abs().max()):.3g}, in float64 either: {error}."
            " Look for weights or hyperparameters that have diverged."
        ) from error


# ------------------------------------------------------------ one matrix, many precisions


@dataclass(frozen=True)
class MatrixSpectrum:
    """The eigenvalues of a symmetric positive semidefinite matrix.

    Attributes:
        values: In float64, where they are as exact as the matrix allows. Zeros may be missing.
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
            largest = 1 + self.largest.double() / precision.detach().double()
            # An eigenvalue that is exactly zero, as of rows of zeros, has no rounding.
            _check_pivots(largest * (self.values > 0), 1 + ratios.detach(), self.dtype)
        return value.to(self.dtype)


class Spectra(dict[Hashable, MatrixSpectrum | None]):
    """A cache of the spectra of matrices without a graph."""

    def at_second_use(
        self, key: Hashable, matrix: Callable[[], Tensor], rank: int | None = None
    ) -> MatrixSpectrum | None:
        """Return the spectrum of a matrix; None at the first call, where a Cholesky is cheaper.

        ``rank`` is an upper bound, of a sum of few outer products.
        """
        # Eigenvalues take the time of four to five factorisations, those of a step and a half with
        # its gradient.
        if key not in self:
            self[key] = None
            return None
        if (spectrum := self[key]) is None:
            dense_matrix = matrix().detach()
            values = psd_eigenvalues(dense_matrix.double(), rank)
            spectrum = self[key] = MatrixSpectrum(
                values, dense_matrix.dtype, dense_matrix.diagonal().amax()
            )
        return spectrum
