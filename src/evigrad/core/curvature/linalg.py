"""Log-determinants of I + S from a Cholesky factor, and of I + S/δ or I + τ A ⊗ B from eigenvalues.

Gradients have closed forms, so one factorization yields both value and gradient. Second derivatives
are not supported. With ``create_graph=True``, an error is raised.
"""

import math
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

# The entries of a Gram matrix are accurate to a few roundings relative to the norms of their rows,
# and its smallest eigenvalue to a few eps * trace. A smaller jitter repairs rounding. A larger one
# would hide a matrix that is truly indefinite.
JITTER_LIMIT_IN_ROUNDINGS = 10.0
# Tenfold steps: the jitter is at most ten times larger than needed.
JITTER_GROWTH = 10.0
# Errors of a Cholesky pivot in roundings of its diagonal element, of an eigenvalue in roundings of
# the largest one, and of sums. Calibrated on trained and untrained networks. The estimated error is
# rarely below the true one, and 5 to 50 times as large in half of the cases, because sums of some
# processors round less than those of others (benchmarks/README.md).
PIVOT_ROUNDINGS, EIGENVALUE_ROUNDINGS, SUM_ROUNDINGS = 4.0, 1.0, 8.0
# The mean error of many eigenvalues hidden by rounding was at most 0.2 eps of the largest one, with
# either sign (Grams of 16 to 512 columns, spectra of four to eight decades), and less in trained
# networks. This part of the error above is their common bias. The rest has random signs.
HIDDEN_BIAS = 0.0625
# Rounding errors beyond this many nats plus this share of ℓ cause a warning, or a computation in
# float64. Estimates on different blocks differ by far more.
TOLERATED_NATS, TOLERATED_SHARE = 0.05, 1e-3
# Random vectors beyond the rank: with ten, the probability to miss a direction is below 1e-10.
OVERSAMPLING = 10
# Up to this ratio of rank to size, it is cheaper to diagonalize a matrix within its range.
LOW_RANK_SHARE = 0.4

_refused: ContextVar[bool] = ContextVar("refused", default=False)


class RoundingError(Exception):
    """Raised if rounding makes a log-determinant inaccurate.

    The caller can compute the log-determinant again in a wider dtype.
    """


@contextmanager
def rounding_refused() -> Iterator[None]:
    """Raise a ``RoundingError`` instead of warning about rounding, within this context."""
    token = _refused.set(True)
    try:
        yield
    finally:
        _refused.reset(token)


def rounding_is_refused() -> bool:
    """Return whether this call is within ``rounding_refused``."""
    return _refused.get()


def check_rounding(error: Tensor, value: Tensor, dtype: torch.dtype) -> None:
    """Warn if a rounding error matters, or raise a RoundingError within ``rounding_refused``.

    ``error`` is the estimated error of the log-determinant ``value``, in nats, for a matrix of type
    ``dtype``.
    """
    nats, size = torch.stack([error.double(), value.double()]).tolist()
    if not is_tolerated(nats, size):
        _doubt(
            f"The log-determinant of a block, {size:.6g}, may be off by about {nats:.3g} nats,"
            f" because of rounding in {str(dtype).removeprefix('torch.')}. The prior precision is"
            " very small compared with the curvature. Use gram_dtype=torch.float64, or weights in"
            " float64."
        )


def is_tolerated(nats: float, value: float) -> bool:
    """Return whether a rounding error in nats is acceptable. NaN is accepted and detected later."""
    return not nats > TOLERATED_NATS + TOLERATED_SHARE * value


def _doubt(message: str) -> None:
    if rounding_is_refused():
        raise RoundingError(message)
    warnings.warn(message, EvigradWarning, stacklevel=3)


def log_det_identity_plus(matrix: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Return log|I + matrix| in nats for a sum of outer products, by Cholesky factorization.

    The gradient is (I + matrix)^{-1}. If the factorization fails in float32, it is repeated in
    float64. If it fails again, jitter is added to the diagonal. A warning contains an estimate of
    the error due to jitter or rounding (see ``check_rounding``).

    Raises:
        NotPositiveDefiniteError: If I + matrix is not finite, or not positive definite beyond
            rounding.
    """
    return _LogDetIdentityPlus.apply(matrix)


def log_det_dense(matrix: Float[Tensor, "n n"], precision: Tensor) -> Float[Tensor, ""]:
    """Return log|I + P0^{-1/2} matrix P0^{-1/2}| in nats, for one or n precisions."""
    precision = precision.to(matrix.dtype)
    if precision.ndim == 0:
        return log_det_identity_plus(matrix / precision)
    root = precision.reshape(-1).rsqrt()
    return log_det_identity_plus(root[:, None] * matrix * root)


def log_det_diagonal(diagonal: Tensor, precision: Tensor) -> Float[Tensor, ""]:
    """Return log|I + P0^{-1/2} D P0^{-1/2}| in nats, for diagonal D and one or n precisions.

    Raises:
        NotPositiveDefiniteError: If an element of I + P0^{-1} D is not positive or not finite.
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
    """Return ascending eigenvalues of positive semidefinite matrices, with negative ones set to 0.

    The result is differentiable once. Use it only in symmetric functions of the eigenvalues. Their
    gradient V diag(v̄) Vᵀ is valid even if some eigenvalues are equal. Here, v̄ is the gradient with
    respect to the eigenvalues, and V are the eigenvectors. The gradient ignores that negative
    eigenvalues were set to 0.

    If ``rank`` is given, the matrix must be a sum of at most ``rank`` outer products. If ``rank``
    is small, the range of the matrix is found by multiplying the matrix by a random matrix (Halko,
    Martinsson & Tropp, 2011, section 4). Zero eigenvalues outside the range are omitted, because
    their derivatives with respect to the outer products are zero.

    Raises:
        NotPositiveDefiniteError: If the matrix is not finite.
    """
    return _PsdEigenvalues.apply(matrix, rank)


def log_det_kronecker(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"], factor: Tensor
) -> Float[Tensor, ""]:
    """Return Σ log|I + factor · A ⊗ B| over a batch in nats, from the eigenvalues of A and B."""
    products = (factor.to(left.dtype) * left).unsqueeze(-1) * right.unsqueeze(-2)
    return products.log1p().sum()


def kronecker_rounding(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"], factor: Tensor
) -> Float[Tensor, ""]:
    """Return an estimate, in nats, of how rounding of A and B changes ``log_det_kronecker``.

    Errors have random signs, so their squares add up. Eigenvalues hidden by rounding also have a
    common bias, because none of them is negative.
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
    """Return an upper bound on ``kronecker_rounding`` divided by its ``factor``."""
    unit = EIGENVALUE_ROUNDINGS * torch.finfo(left.dtype).eps
    with torch.no_grad():
        left_rounding = left.shape[-1] * left.amax(-1) * right.sum(-1)
        right_rounding = right.shape[-1] * right.amax(-1) * left.sum(-1)
        return (1 + HIDDEN_BIAS) * unit * float((left_rounding + right_rounding).sum())


def _why_not(finite: bool) -> str:
    if not finite:
        return (
            "the curvature is NaN or infinite. Look for non-finite weights, inputs or outputs of"
            " the network, and for a prior precision or noise that converged to zero. If float32"
            " overflows, use gram_dtype=torch.float64."
        )
    return (
        "I + S is not positive definite, and not only because of rounding: the curvature is not a"
        " sum of outer products of rows. Check that the precisions are positive. In float32, try"
        " gram_dtype=torch.float64."
    )


def _shifted(matrix: Tensor, shift: float) -> Tensor:
    result = matrix.clone()
    result.diagonal().add_(shift)
    return result


def _factor(matrix: Tensor) -> Tensor | None:
    """Return the Cholesky factor, or None if it does not exist or the matrix has NaN entries."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return factor if int(info) == 0 else None


def factor_identity_plus(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return the lower Cholesky factor of I + matrix, in float64 if float32 failed.

    Raises:
        NotPositiveDefiniteError: See ``log_det_identity_plus``.
    """
    sizes = 1 + matrix.detach().diagonal()
    factor, info = torch.linalg.cholesky_ex(_shifted(matrix, 1.0))
    # On a GPU, each read of a number waits for all operations before it, so read both at once.
    failed, total = torch.stack([info.to(sizes), sizes.sum()]).tolist()
    if not failed:
        _check_pivots(sizes, total, factor.detach().diagonal().square(), matrix.dtype)
        return factor
    if not is_finite(matrix):
        raise NotPositiveDefiniteError(_why_not(False))
    precise = _shifted(matrix.to(torch.float64), 1.0)
    if matrix.dtype != torch.float64 and (factor := _factor(precise)) is not None:
        _check_pivots(sizes, total, factor.diagonal().square(), matrix.dtype)
        return factor
    # The matrix has the rounding errors of its original dtype.
    rounding = torch.finfo(matrix.dtype).eps * float(precise.diagonal().mean())
    jitter, limit = rounding, JITTER_LIMIT_IN_ROUNDINGS * rounding * len(matrix)
    while 0 < jitter <= limit:
        if (factor := _factor(_shifted(precise, jitter))) is not None:
            # Exact pivots are at least 1, and smaller than these by at most jitter + limit.
            pivots = factor.diagonal().square()
            excess = float((pivots / (pivots - jitter - limit).clamp(min=1.0)).log().sum())
            _doubt(
                f"I + S was not positive definite because of rounding, so {jitter:.3g} was added to"
                f" its diagonal, whose mean is {float(precise.diagonal().mean()):.3g}. The"
                f" log-determinant may be too large by up to about {excess:.3g} nats. Use"
                " gram_dtype=torch.float64, or weights in float64."
            )
            return factor
        jitter *= JITTER_GROWTH
    raise NotPositiveDefiniteError(_why_not(True))


def _check_pivots(sizes: Tensor, total: float, pivots: Tensor, dtype: torch.dtype) -> None:
    """Call ``check_rounding`` for Σ log pivots, given the ``total`` of their sizes.

    Each pivot is off by some rounding errors of its size. Exact pivots are at least 1. Rounding
    errors have random signs, so their squares add up.

    Raises:
        NotPositiveDefiniteError: If a size is not finite.
    """
    unit = torch.finfo(dtype).eps
    # In most steps a cheap bound makes the estimate of the error unnecessary.
    if PIVOT_ROUNDINGS * unit * total <= TOLERATED_NATS / 2:
        return
    check_finite_curvature(sizes)  # an infinite diagonal element has an infinite pivot
    value = pivots.log().sum()
    errors = (PIVOT_ROUNDINGS * unit * sizes / pivots).log1p()
    check_rounding(errors.square().sum().sqrt() + SUM_ROUNDINGS * unit * value, value, dtype)


class _LogDetIdentityPlus(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        factor = factor_identity_plus(matrix)
        ctx.save_for_backward(factor)
        ctx.dtype = matrix.dtype
        value = 2 * factor.diagonal().log().sum()
        if not math.isfinite(value):
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

    If ``rank`` is given (see ``psd_eigenvalues``), there may be r < n eigenvalues. All omitted
    eigenvalues are zero.

    Raises:
        NotPositiveDefiniteError: If the matrix is not finite.
    """
    check_finite_curvature(matrix)
    if rank is None or not _is_of_low_rank(matrix, rank):
        values, vectors = _eigen(torch.linalg.eigh, matrix)
        return values.clamp(min=0), vectors
    basis = _span(matrix, rank + OVERSAMPLING)
    values, vectors = _eigen(torch.linalg.eigh, basis.mT @ matrix @ basis)
    return values.clamp(min=0), basis @ vectors


def check_finite_curvature(matrix: Tensor) -> None:
    """Raise a NotPositiveDefiniteError for a curvature that is NaN or infinite."""
    if not is_finite(matrix):
        raise NotPositiveDefiniteError(_why_not(False))


def _is_of_low_rank(matrix: Tensor, rank: int | None) -> bool:
    return rank is not None and rank + OVERSAMPLING <= LOW_RANK_SHARE * matrix.shape[-1]


def _span(matrix: Tensor, size: int) -> Tensor:
    """Return an orthonormal basis (n, size) of a space that contains the range of a matrix."""
    generator = torch.Generator().manual_seed(0)
    shape = (*matrix.shape[:-1], size)
    probes = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(matrix)
    return torch.linalg.qr(matrix @ probes).Q


def _eigen(decompose: Callable[[Tensor], Any], matrix: Tensor) -> Sequence[Tensor]:
    """Return a decomposition, eigenvalues first, computed in float64 if float32 fails."""
    # In float32, LAPACK may not converge for repeated eigenvalues, or silently return NaN.
    with suppress(LinAlgError):
        decomposition = decompose(matrix)
        if is_finite(decomposition[0]):
            return decomposition
    try:
        return [part.to(matrix.dtype) for part in decompose(matrix.to(torch.float64))]
    except LinAlgError as error:
        raise NotPositiveDefiniteError(
            f"LAPACK cannot compute the eigenvalues of the curvature, even in float64: {error}. The"
            f" matrix has {matrix.shape[-1]} columns, and its largest absolute entry"
            f" is {float(matrix.abs().max()):.3g}. Look for weights or hyperparameters that have"
            " diverged."
        ) from error


# ------------------------------------------------------------ one matrix, many precisions


@dataclass(frozen=True)
class MatrixSpectrum:
    """The eigenvalues of a symmetric positive semidefinite matrix.

    Attributes:
        values: The eigenvalues in float64, as accurate as the matrix allows. Zeros may be omitted.
        dtype: The type of the matrix.
        largest: The largest diagonal element of the matrix.
    """

    values: Float[Tensor, " n"]
    dtype: torch.dtype
    largest: Tensor

    def log_det(self, precision: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return log|I + matrix / precision| in nats, differentiable in the precision."""
        ratios = self.values / precision.to(self.values.dtype)
        value = ratios.log1p().sum()
        with torch.no_grad():  # the rounding of the matrix, as for Cholesky pivots
            largest = 1 + self.largest.double() / precision.detach().double()
            # An eigenvalue of exactly zero, as from rows of zeros, has no rounding.
            sizes = largest * (self.values > 0)
            _check_pivots(sizes, float(sizes.sum()), 1 + ratios.detach(), self.dtype)
        return value.to(self.dtype)


class Spectra(dict[Hashable, MatrixSpectrum | None]):
    """A cache of the spectra of matrices without a graph."""

    def at_second_use(
        self, key: Hashable, matrix: Callable[[], Tensor], rank: int | None = None
    ) -> MatrixSpectrum | None:
        """Return the spectrum of a matrix, or None on the first call with this ``key``.

        For a single use, a Cholesky factorization is cheaper. ``rank`` is an upper bound on the
        rank of the matrix.
        """
        # Eigenvalues take as long as four to five factorizations, or one and a half steps with
        # their gradients.
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
