"""Log-determinants: of I + S by one Cholesky, and of I + τ A ⊗ B from eigenvalues.

The cotangents are closed forms, so that one factorisation serves value and gradient. First
derivatives only: ``create_graph=True`` is an error, lest a second derivative lack their part.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.linalg import LinAlgError  # pyright: ignore[reportAttributeAccessIssue]

from evigrad.errors import ConfigurationError, EvigradWarning, NotPositiveDefiniteError

# The elements of a Gram matrix are known to a few units of rounding, relative to the norms of their
# rows; its smallest eigenvalue therefore to a few units of eps * trace. A jitter below that repairs
# rounding, a larger one would hide a matrix that is indefinite in earnest.
JITTER_LIMIT_IN_ROUNDINGS = 10.0
# Tenfold steps: the answer is at most ten times further off than it has to be.
JITTER_GROWTH = 10.0
# A pivot of a Cholesky factor, and an eigenvalue, are off by about as many roundings of the largest
# diagonal element, or eigenvalue: chosen on small networks so that what is estimated is not less
# than the error against float64 (tests/test_precision.py), at the price of being often larger.
PIVOT_ROUNDINGS, EIGENVALUE_ROUNDINGS = 2.0, 4.0
# Rounding is worth a word, and a computation in float64, beyond this many nats and part of ℓ.
TOLERATED_NATS, TOLERATED_SHARE = 0.05, 1e-4
# Random vectors beyond the rank: with ten, missing a direction has a probability below 1e-10.
OVERSAMPLING = 10
# Up to this part of its size a matrix's rank makes the detour by its range the shorter way.
LOW_RANK_SHARE = 0.4

_refused: ContextVar[bool] = ContextVar("refused", default=False)


class RoundingError(Exception):
    """Too much of a log-determinant is lost to rounding; for whoever can take a wider dtype."""


@contextmanager
def rounding_refused() -> Iterator[None]:
    """Within this, rounding that a warning would tell of is a ``RoundingError``."""
    token = _refused.set(True)
    try:
        yield
    finally:
        _refused.reset(token)


def check_rounding(error: Tensor, value: Tensor, dtype: torch.dtype) -> None:
    """Warn, or raise within ``rounding_refused``, where rounding matters.

    Args:
        error: What rounding may have changed, estimated, in nats.
        value: The log-determinant.
        dtype: In which the matrix was made.

    Raises:
        RoundingError: Within ``rounding_refused``.
    """
    nats, size = torch.stack([error.double(), value.double()]).tolist()
    if not is_tolerated(nats, size):
        _doubt(
            f"The log-determinant of a block, {size:.6g}, may be off by up to about {nats:.3g} nats"
            f" by rounding in {str(dtype).removeprefix('torch.')}: the prior precision is very"
            " small beside the curvature. gram_dtype=torch.float64, or weights in float64, avoids"
            " this."
        )


def is_tolerated(nats: float, value: float) -> bool:
    """Whether a log-determinant may be off by so many nats; NaN has errors of its own."""
    return not nats > TOLERATED_NATS + TOLERATED_SHARE * value


def _doubt(message: str) -> None:
    """Warn, or raise within ``rounding_refused``."""
    if _refused.get():
        raise RoundingError(message)
    warnings.warn(message, EvigradWarning, stacklevel=3)


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward pass of an autograd function refuse ``create_graph=True``.

    ``once_differentiable`` would pass it by without a word where no cotangent has a graph.

    Args:
        backward: From the context and the cotangents to those of the arguments.

    Returns:
        The same, which raises a ``ConfigurationError`` in that case.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "the log-determinants of evigrad have first derivatives only: leave out"
                " create_graph=True."
            )
        return backward(ctx, *cotangents)

    return wrapped


def log_det_identity_plus(
    matrix: Float[Tensor, "n n"], *, positive: bool = True
) -> Float[Tensor, ""]:
    """log|I + matrix| in nats, by one Cholesky factorisation.

    Its cotangent is (I + matrix)^{-1}. A factorisation that fails in float32 is repeated in
    float64; if that fails too, a sum of outer products (``positive``) gets the smallest jitter on
    its diagonal that helps. A warning says by how much jitter or rounding may change the value
    (see ``check_rounding``).

    Args:
        matrix: Symmetric.
        positive: Whether the matrix is positive semidefinite but for rounding, as Gram matrices
            are. A Hessian is not, and gets no jitter.

    Returns:
        A scalar of the matrix's dtype.

    Raises:
        NotPositiveDefiniteError: I + matrix is not positive definite, beyond rounding, or not
            finite.
    """
    return _LogDetIdentityPlus.apply(matrix, positive)


def log_det_dense(
    matrix: Float[Tensor, "n n"], precision: Tensor, *, positive: bool = True
) -> Float[Tensor, ""]:
    """log|I + P0^{-1/2} matrix P0^{-1/2}| for a diagonal P0.

    Args:
        matrix: Symmetric.
        precision: The diagonal of P0, 0-dimensional or of shape (n,).
        positive: As in ``log_det_identity_plus``.

    Returns:
        A scalar, in nats.
    """
    precision = precision.to(matrix.dtype)
    if precision.ndim == 0:
        return log_det_identity_plus(matrix / precision, positive=positive)
    root = precision.rsqrt()
    return log_det_identity_plus(root[:, None] * matrix * root, positive=positive)


def log_det_diagonal(
    diagonal: Tensor, precision: Tensor, *, positive: bool = True
) -> Float[Tensor, ""]:
    """log|I + P0^{-1/2} D P0^{-1/2}| for diagonal D and P0.

    Args:
        diagonal: The diagonal of D, of any shape.
        precision: That of P0, 0-dimensional or of the same shape.
        positive: As in ``log_det_identity_plus``.

    Returns:
        A scalar, in nats.

    Raises:
        NotPositiveDefiniteError: An element of I + P0^{-1} D is not positive or not finite.
    """
    ratio = diagonal / precision.to(diagonal.dtype)
    if not bool((ratio > -1).all()) or not bool(ratio.isfinite().all()):
        raise NotPositiveDefiniteError(_why_not(bool(ratio.isfinite().all()), positive))
    return ratio.log1p().sum()


def psd_eigenvalues(
    matrix: Float[Tensor, "*batch n n"], rank: int | None = None
) -> Float[Tensor, "*batch r"]:
    """Eigenvalues of positive semidefinite matrices, those below zero by rounding set to zero.

    Differentiable once, for functions that treat equal eigenvalues equally (spectral functions):
    the cotangent V diag(v̄) Vᵀ needs no gaps between eigenvalues. It passes through the clamp, so
    that null directions keep their one-sided derivative.

    A matrix that is a sum of few outer products has its eigenvectors in the span of those, which
    its product with a random matrix finds (Halko, Martinsson & Tropp, 2011, section 4): the
    eigenvalues outside are zero and left out, as is their derivative, which no change of the
    outer products themselves has a part in.

    Args:
        matrix: Symmetric positive semidefinite.
        rank: What its rank is at most, if anything is known of it.

    Returns:
        In ascending order; n of them, or fewer where the rest are zero by ``rank``.

    Raises:
        NotPositiveDefiniteError: The matrix is not finite.
    """
    return _PsdEigenvalues.apply(matrix, rank)


def log_det_kronecker(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"], factor: Tensor
) -> Float[Tensor, ""]:
    """Σ log|I + factor · A ⊗ B| over a batch, from the eigenvalues of A and B.

    Args:
        left: Eigenvalues of A.
        right: Eigenvalues of B.
        factor: 0-dimensional: one over the count of examples and over the prior precision.

    Returns:
        A scalar, in nats.
    """
    products = (factor.to(left.dtype) * left).unsqueeze(-1) * right.unsqueeze(-2)
    return products.log1p().sum()


def kronecker_rounding(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"], factor: Tensor
) -> Float[Tensor, ""]:
    """By how many nats the rounding of A and B may change ``log_det_kronecker``, estimated.

    An eigenvalue that rounding hides counts whole; the others' errors have any sign, and their
    squares add up.

    Args:
        left: As for ``log_det_kronecker``, as are the others.
        right: Eigenvalues of B.
        factor: 0-dimensional.

    Returns:
        A scalar without a graph.
    """
    unit = EIGENVALUE_ROUNDINGS * torch.finfo(left.dtype).eps
    parts = []
    with torch.no_grad():
        for own, other in ((left, right), (right, left)):
            error = unit * own.amax(-1, keepdim=True)
            hidden = (factor.to(own) * error * other).log1p().sum(-1, keepdim=True)
            seen = other.shape[-1] * error / own
            each = torch.minimum(hidden, seen)
            small = own < PIVOT_ROUNDINGS * error
            parts.append((each * small).sum() + (each * ~small).square().sum().sqrt())
        return parts[0] + parts[1]


def kronecker_rounding_rate(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"]
) -> float:
    """What ``kronecker_rounding`` is at most for a factor of 1; in proportion for others.

    Args:
        left: Eigenvalues of A.
        right: Eigenvalues of B.

    Returns:
        Nats.
    """
    unit = EIGENVALUE_ROUNDINGS * torch.finfo(left.dtype).eps
    with torch.no_grad():
        of_left = left.shape[-1] * left.amax(-1) * right.sum(-1)
        of_right = right.shape[-1] * right.amax(-1) * left.sum(-1)
        return unit * float((of_left + of_right).sum())


def inner_gram(
    rows: Float[Tensor, "*batch R n"], cotangent: Float[Tensor, "*batch n n"]
) -> Float[Tensor, ""]:
    """⟨cotangent, rowsᵀ rows⟩ with its derivative in the rows, both from one product.

    Args:
        rows: Any matrices.
        cotangent: Without a graph.

    Returns:
        A scalar.
    """
    return _InnerGram.apply(rows, cotangent)


def _why_not(finite: bool, positive: bool) -> str:
    """Words for a matrix without a log-determinant, and what to do."""
    if not finite:
        return (
            "the curvature is NaN or infinite. Look for non-finite weights, inputs or outputs of"
            " the network, or a prior precision or noise that has run to zero; in float32 an"
            " overflow can be avoided with gram_dtype=torch.float64."
        )
    if positive:
        return (
            "I + S is not positive definite, and not by rounding alone: the curvature is no sum of"
            " outer products of rows. Check that the precisions are positive; in float32, try"
            " gram_dtype=torch.float64."
        )
    return (
        "I + P0^{-1/2} H P0^{-1/2} is not positive definite for the exact Hessian H: the weights"
        " are at no maximum of the posterior. Raise the prior precision, train longer, or use the"
        " GGN, which is always positive semidefinite (leave out 'hessian')."
    )


def _shifted(matrix: Tensor, shift: float) -> Tensor:
    result = matrix.clone()
    result.diagonal().add_(shift)
    return result


def _factor(matrix: Tensor) -> Tensor | None:
    """The Cholesky factor, or None where there is none (also for NaN)."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return factor if int(info) == 0 else None


def factor_identity_plus(
    matrix: Float[Tensor, "n n"], positive: bool = True
) -> Float[Tensor, "n n"]:
    """The lower Cholesky factor of I + matrix, in float64 or with a jitter where it must be.

    Args:
        matrix: Symmetric.
        positive: As in ``log_det_identity_plus``.

    Returns:
        The factor, maybe of a wider dtype.

    Raises:
        NotPositiveDefiniteError: As ``log_det_identity_plus``.
    """
    factor = _factor(_shifted(matrix, 1.0))
    if factor is not None:
        if positive and len(matrix):
            _check_pivots(matrix, factor)
        return factor
    if not bool(matrix.isfinite().all()):
        raise NotPositiveDefiniteError(_why_not(False, positive))
    precise = _shifted(matrix.to(torch.float64), 1.0)
    if matrix.dtype != torch.float64 and (factor := _factor(precise)) is not None:
        if positive:
            _check_pivots(matrix, factor)
        return factor
    if not positive:
        raise NotPositiveDefiniteError(_why_not(True, positive))
    # Rounding is that of the dtype in which the matrix was made, whatever it is factored in.
    rounding = torch.finfo(matrix.dtype).eps * float(precise.diagonal().mean())
    jitter, limit = rounding, JITTER_LIMIT_IN_ROUNDINGS * rounding * len(matrix)
    while 0 < jitter <= limit:
        if (factor := _factor(_shifted(precise, jitter))) is not None:
            # Exact pivots are 1 or more, and less than these by rounding at its limit at most.
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
    raise NotPositiveDefiniteError(_why_not(True, positive))


def _check_pivots(matrix: Tensor, factor: Tensor) -> None:
    """``check_rounding`` of a factor of I + matrix: its pivots are 1 or more, but for rounding."""
    pivots = factor.detach().diagonal().square()
    unit = PIVOT_ROUNDINGS * torch.finfo(matrix.dtype).eps
    error = unit * (1 + matrix.detach().diagonal().amax())
    check_rounding((error / pivots).log1p().sum(), pivots.log().sum(), matrix.dtype)


class _LogDetIdentityPlus(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, positive: bool) -> Tensor:
        factor = factor_identity_plus(matrix, positive)
        ctx.save_for_backward(factor)
        ctx.dtype = matrix.dtype
        value = 2 * factor.diagonal().log().sum()
        if not bool(value.isfinite()):
            raise NotPositiveDefiniteError(_why_not(False, positive))
        return value.to(matrix.dtype)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        inverse = torch.cholesky_inverse(factor)
        return inverse.mul_(cotangent).to(ctx.dtype), None


class _PsdEigenvalues(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rank: int | None) -> Tensor:
        if not bool(matrix.isfinite().all()):
            raise NotPositiveDefiniteError(_why_not(False, True))
        if rank is not None and rank + OVERSAMPLING <= LOW_RANK_SHARE * matrix.shape[-1]:
            basis = _span(matrix, rank + OVERSAMPLING)
            values, vectors = _eigh(basis.mT @ matrix @ basis)
            ctx.save_for_backward(basis @ vectors)
        elif ctx.needs_input_grad[0]:
            values, vectors = _eigh(matrix)
            ctx.save_for_backward(vectors)
        else:
            values = _eigvalsh(matrix)
        return values.clamp(min=0)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (vectors,) = ctx.saved_tensors
        return (vectors * cotangent.unsqueeze(-2)) @ vectors.mT, None


def _span(matrix: Tensor, size: int) -> Tensor:
    """An orthonormal basis (n, size) of a space that holds the range of a matrix of lower rank."""
    generator = torch.Generator().manual_seed(0)
    shape = (*matrix.shape[:-1], size)
    probes = torch.randn(shape, generator=generator, dtype=torch.float64).to(matrix)
    return torch.linalg.qr(matrix @ probes).Q


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    # In float32 LAPACK may not converge (seen with repeated eigenvalues), or return NaN for a
    # finite matrix without a word.
    found = _if_finite(torch.linalg.eigh, matrix)
    values, vectors = torch.linalg.eigh(matrix.to(torch.float64)) if found is None else found
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def _eigvalsh(matrix: Tensor) -> Tensor:
    found = _if_finite(lambda a: (torch.linalg.eigvalsh(a),), matrix)
    values = torch.linalg.eigvalsh(matrix.to(torch.float64)) if found is None else found[0]
    return values.to(matrix.dtype)


def _if_finite(decompose: Callable[[Tensor], Any], matrix: Tensor) -> Any:
    """What a decomposition returns, eigenvalues first, or None where it fails."""
    try:
        found = decompose(matrix)
    except LinAlgError:
        return None
    return found if bool(found[0].isfinite().all()) else None


class _InnerGram(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, cotangent: Tensor) -> Tensor:
        product = rows @ (cotangent + cotangent.mT).to(rows.dtype)
        ctx.save_for_backward(product)
        return 0.5 * (product * rows).sum()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (product,) = ctx.saved_tensors
        return cotangent * product, None
