"""Roots of Λ = −∇²_f log p(y|f), which are matrices R with R Rᵀ = Λ.

Each column of a root gives one row of the Gram matrix. If a block contains all outputs, every root
gives the same log-determinant, and a softmax needs only C − 1 columns. For a block with only some
columns, there are three kinds of roots, named in ``ROOTS``:

- ``"subblock"``: a root of Λ restricted to the listed outputs of an example, as in the paper. If Λ
  couples the outputs, the sum over blocks is not a bound.
- ``"fisher"``: columns of one root of the whole Λ, with column d for output d. For the softmax, the
  root is diag(√p) − p√pᵀ. Its column d is √p_d times the score of label d.
- ``"eigen"``: the Fisher root, rotated so that its columns are orthogonal and the largest come
  first. For many classes, only the columns of the ``TOP_CLASSES`` most likely classes are rotated.
  Derivatives hold the rotation fixed, which is valid because the bound holds for any rotation.

All roots are differentiable in f, and in the likelihood's parameters if Λ depends on them. Values
and gradients stay finite even if probabilities underflow.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore[reportAttributeAccessIssue]

from evigrad.core.algebra import is_finite, widened
from evigrad.errors import (
    ConfigurationError,
    NotFiniteError,
    NotPositiveDefiniteError,
    nearest,
    shape_or_type,
)

ROOTS = ("subblock", "fisher", "eigen")

# With more classes, "eigen" rotates only the columns of the most likely ones. The others hold
# little of an example's curvature, and no matrix of all classes is needed.
TOP_CLASSES = 16

# Eigenvalues below this multiple of C·eps·(largest) count as zero. They are rounding, and their
# inverses in the derivative of the root would be noise.
RANK_TOLERANCE = 1.0
# Second derivatives by autograd are off by a few eps in units of the outputs. A negative eigenvalue
# of at most this many eps (and √eps of the largest) counts as rounding.
NEGATIVE_TOLERANCE = 16.0


@dataclass(frozen=True)
class RootRows:
    """Cotangents of the outputs, one for each row of the Gram matrix.

    Row (n, j) is ``scale[n, j] * vectors[n, j]ᵀ J_n P0^{-1/2}``, with the Jacobian J_n of example
    n and the prior precision P0.

    Attributes:
        vectors: Column j of the root of example n, or zero if the example has no such column.
        scale: Factor of each row, or None for 1. If a likelihood parameter only scales the rows,
            such as the σ of a Gaussian, use it here instead of in ``vectors``. The rows then need
            no graph. Factors may also depend on the outputs.
        present: Which pairs (example, column) exist, or None for all. All other pairs are padding
            with zero vectors, which a curvature may omit.

    See also: docs/theory.md.
    """

    vectors: Float[Tensor, "m k C"]
    scale: Float[Tensor, "m k"] | None = None
    present: Bool[Tensor, "m k"] | None = None

    def parts(self, size: int | None) -> list["RootRows"]:
        """Return parts with at most ``size`` columns each, or a single part if ``size`` is None."""
        count = self.vectors.shape[1]
        if size is None or count <= size:
            return [self]
        slices = [slice(start, start + size) for start in range(0, count, size)]
        return [
            RootRows(
                self.vectors[:, part],
                None if self.scale is None else self.scale[:, part],
                None if self.present is None else self.present[:, part],
            )
            for part in slices
        ]

    @property
    def scaled(self) -> Float[Tensor, "m k C"]:
        """The vectors multiplied by ``scale``."""
        return self.vectors if self.scale is None else self.vectors * self.scale[..., None]

    @property
    def factors(self) -> Float[Tensor, "m k"]:
        """The factor of each row: ``scale``, or ones."""
        return torch.ones_like(self.vectors[:, :, 0]) if self.scale is None else self.scale


def check_root(kind: str) -> None:
    """Raise a ConfigurationError if the kind of root is not in ``ROOTS``."""
    if kind not in ROOTS:
        raise ConfigurationError(
            f"root must be one of {', '.join(ROOTS)}, got {kind!r}.{nearest(str(kind), ROOTS)}"
        )


def checked_rows(
    rows: object, f: Float[Tensor, "m C"], columns: Int[Tensor, "m k"] | None, name: str
) -> RootRows:
    """Return the result of ``root`` of the likelihood called ``name``, for these arguments.

    Raises:
        ConfigurationError: If the result is not RootRows of the right shape.
    """
    received, num_rows = rows, "k" if columns is None else columns.shape[1]
    if isinstance(rows, RootRows):
        shape, scale = rows.vectors.shape, rows.scale
        is_right = len(shape) == 3 and shape[::2] == f.shape and num_rows in ("k", shape[1])
        if is_right and (scale is None or scale.shape == shape[:2]):
            return rows
        received = scale if is_right else rows.vectors
    num_outputs = f.shape[1]
    raise ConfigurationError(
        f"root of {name} must return evigrad.likelihoods.RootRows with vectors of shape"
        f" (m, {num_rows}, {num_outputs}) and a scale of shape (m, {num_rows}) or None, got"
        f" {shape_or_type(received, len(f))}. Or define hessian(f) instead of root."
    )


def one_hot(f: Float[Tensor, "m C"], columns: Int[Tensor, "m k"] | None) -> Float[Tensor, "m k C"]:
    """Return unit vectors of the outputs in ``columns`` (None: all), and zero vectors for −1."""
    num_data, num_outputs = f.shape
    if columns is None:
        eye = torch.eye(num_outputs, dtype=f.dtype, device=f.device)
        return eye.expand(num_data, num_outputs, num_outputs)
    return (columns.unsqueeze(-1) == torch.arange(num_outputs, device=f.device)).to(f.dtype)


def unit_vectors(
    f: Float[Tensor, "m C"], at_once: int
) -> Iterator[tuple[slice | Tensor, Float[Tensor, "m k C"]]]:
    """Yield columns and unit vectors of the outputs, at most ``at_once`` outputs at a time."""
    if f.shape[1] <= at_once:
        yield slice(None), one_hot(f, None)
        return
    for columns in torch.arange(f.shape[1], device=f.device).split(at_once):
        yield columns, one_hot(f, columns.expand(len(f), -1))


def diagonal_rows(
    f: Float[Tensor, "m C"], root: Float[Tensor, "m C"], columns: Int[Tensor, "m k"] | None
) -> Float[Tensor, "m k C"]:
    """Return the rows √λ_d e_d of a root of a diagonal Λ. ``root`` contains the values √λ_d."""
    return one_hot(f, columns) * root.unsqueeze(1)


def scaled_units(
    f: Float[Tensor, "m C"], root: Float[Tensor, "m C"], columns: Int[Tensor, "m k"] | None
) -> RootRows:
    """Return ``diagonal_rows`` as unit vectors with a scale. All columns share their memory."""
    scale = root if columns is None else root.gather(1, columns.clamp(min=0).long())
    return RootRows(one_hot(f, columns), scale)


def softmax_rows(
    f: Float[Tensor, "m C"], columns: Int[Tensor, "m k"] | None, kind: str
) -> Float[Tensor, "m k C"]:
    """Return columns of a root of the softmax's Λ = diag(p) − ppᵀ in closed form, for logits ``f``.

    For a sub-block O, let q be the probability of the outputs outside O and u = √p_O. Then
    R = D^{1/2} (I − u uᵀ/(1+√q)) has R Rᵀ = D − p_O p_Oᵀ with D = diag(p_O). Its column j is
    u_j (e_j − p_O/(1+√q)), which is row (n, j) of the result. If O is a single output j, this is
    √(p_j (1 − p_j)) e_j. If O contains all outputs, q = 0 and R is the Fisher root.

    If ``columns`` is None, the result has C − 1 rows, because Λ has rank C − 1. They correspond to
    the sub-block of all outputs except the last. The entry −u_j √q for the last output makes row j
    sum to zero, as Λ 1 = 0 requires.
    """
    log_p = f.log_softmax(dim=1)
    if columns is None:
        others = one_hot(f, None)[:, :-1]
        rows = _label_rows(log_p, others, others.sum(dim=1) == 0)
        last = -(0.5 * (log_p[:, :-1] + log_p[:, -1:])).exp()
        return torch.cat([rows[..., :-1], last.unsqueeze(-1)], dim=-1)
    if kind == "subblock" and columns.shape[1] == 1 < f.shape[1]:  # √(p_j (1 − p_j)) e_j
        picked = columns == torch.arange(f.shape[1], device=f.device)
        log_q = log_p.masked_fill(picked, -torch.inf).logsumexp(1, keepdim=True)
        return (picked * (0.5 * (log_p + log_q)).exp()).unsqueeze(1)
    pick = one_hot(f, columns)
    if kind == "eigen" and f.shape[1] > TOP_CLASSES:
        return _top_rows(log_p, columns)
    if kind == "eigen":
        # Row d of `fisher` is column d of R, so fisher @ fisherᵀ = RᵀR, and (R Q)ᵀ = Qᵀ fisher.
        fisher = _label_rows(log_p, one_hot(f, None), None)
        frozen = fisher.detach()
        _, rotation = _descending_eigh(frozen @ frozen.mT)
        return pick @ rotation.mT.to(f.dtype) @ fisher
    return _label_rows(log_p, pick, None if kind == "fisher" else pick.sum(dim=1) == 0)


def _top_rows(log_p: Float[Tensor, "m C"], columns: Int[Tensor, "m k"]) -> Float[Tensor, "m k C"]:
    """Return rows of R · diag(Q, I), with orthogonal Fisher rows for the most likely classes.

    ``columns`` count classes by falling probability. The columns after the first
    ``TOP_CLASSES`` are columns of the Fisher root.
    """
    order = log_p.detach().argsort(dim=1, descending=True, stable=True)
    first = _label_rows(log_p, one_hot(log_p, order[:, :TOP_CLASSES]), None)
    frozen = first.detach()
    _, rotation = _descending_eigh(frozen @ frozen.mT)
    turned = rotation.mT.to(log_p.dtype) @ first
    is_turned = columns < TOP_CLASSES
    labels = order.gather(1, columns.clamp(min=0)).masked_fill(is_turned, -1)
    numbers = torch.arange(TOP_CLASSES, device=log_p.device)
    chosen = (columns.unsqueeze(-1) == numbers).to(log_p.dtype)
    return chosen @ turned + _label_rows(log_p, one_hot(log_p, labels), None)


def condensed_logits(f: Float[Tensor, "m C"]) -> Float[Tensor, "m D"]:
    """Return the ``TOP_CLASSES`` largest logits in descending order, and the logsumexp of the rest.

    If there are at most ``TOP_CLASSES`` logits, return them unchanged.
    """
    if f.shape[1] <= TOP_CLASSES:
        return f
    sorted_f = f.sort(dim=1, descending=True).values
    others = sorted_f[:, TOP_CLASSES:].logsumexp(dim=1, keepdim=True)
    return torch.cat([sorted_f[:, :TOP_CLASSES], others], dim=1)


def top_norms(p: Float[Tensor, "m C"]) -> Float[Tensor, "m K"]:
    """Return the squared norms of the rotated columns of the "eigen" root, largest first.

    They are the eigenvalues of the Gram matrix of the Fisher rows for the K = ``TOP_CLASSES`` most
    likely classes. The probabilities ``p`` must be in descending order.
    """
    first = p[:, :TOP_CLASSES]
    between = 0.5 * p.square().sum(dim=1)[:, None] - first
    gram = first.diag_embed() + (
        (first[:, :, None] * first[:, None, :]).sqrt() * (between[:, :, None] + between[:, None, :])
    )
    return _descending_eigh(gram)[0].clamp(min=0.0).to(p.dtype)


def _label_rows(
    log_p: Float[Tensor, "m C"], pick: Float[Tensor, "m k C"], outside: Tensor | None
) -> Float[Tensor, "m k C"]:
    """Return u_j (e_j − p_O/(1+√q)) for outputs j. `outside` marks those not in O. None: q = 0."""
    p = log_p.exp()
    # exp(½ log p) instead of √p, whose derivative is infinite if p underflows.
    u = (pick @ (0.5 * log_p).exp().unsqueeze(-1)).squeeze(-1)
    if outside is None:
        root_q = log_p.new_zeros(())
        shrink = 1.0 + root_q
    else:
        p = p.masked_fill(outside, 0.0)
        # An empty logsumexp has no gradient: use all outputs there, and set q to 0 afterwards.
        none_outside = ~outside.any(dim=1, keepdim=True)
        log_q = log_p.masked_fill(~(outside | none_outside), -torch.inf).logsumexp(1, keepdim=True)
        root_q = (0.5 * log_q).exp().masked_fill(none_outside, 0.0)
        shrink = (1.0 + root_q).unsqueeze(-1)
    others = p.unsqueeze(1) * (1.0 - pick) / shrink
    # 1 − p_j/(1+√q) as a sum of positive terms, which loses no digits if p_j is close to 1.
    label_entries = root_q + others.sum(dim=-1)
    return u.unsqueeze(-1) * (pick * label_entries.unsqueeze(-1) - others)


def hessian_rows(
    curvature: Float[Tensor, "m C C"], columns: Int[Tensor, "m k"] | None, kind: str
) -> Float[Tensor, "m k C"]:
    """Return rows of a root of any positive semidefinite Λ, without derivatives of eigenvectors.

    The ``"fisher"`` root is the symmetric square root of Λ, and the ``"subblock"`` root is the
    symmetric square root of a sub-block. Their columns correspond to outputs. The ``"eigen"`` root
    has orthogonal columns, largest first.

    Args:
        curvature: Λ, with a graph if you need derivatives.
        columns: As in ``Likelihood.root``.
        kind: One of ``ROOTS``.

    Raises:
        NotPositiveDefiniteError: If Λ has a negative eigenvalue.
    """
    if columns is None:
        return differentiable_root(curvature, symmetric=kind != "eigen").mT
    pick = one_hot(curvature[:, 0], columns)
    if kind == "subblock":
        rows = differentiable_root(pick @ curvature @ pick.mT, symmetric=True).mT
        return (rows * pick.sum(dim=-1, keepdim=True)) @ pick
    return pick @ differentiable_root(curvature, symmetric=kind != "eigen").mT


def differentiable_root(
    curvature: Float[Tensor, "m n n"], symmetric: bool
) -> Float[Tensor, "m n n"]:
    """Return a root R of each positive semidefinite matrix Λ, with R Rᵀ = Λ to first order.

    R = R₀ + (I − ½Π)(Λ − Λ₀)R₀⁺ᵀ, where Λ₀ is Λ without its graph, R₀ is a root of Λ₀, and
    Π = R₀R₀⁺ projects onto the range of R₀. The value is R₀. The first derivatives of R Rᵀ and Λ
    agree wherever the rank of Λ is constant, but their second derivatives do not. No eigenvector
    is differentiated, so equal eigenvalues cause no problem. For eigenvalues λ and eigenvectors V
    of Λ₀, R₀ is V√λVᵀ if ``symmetric``. Otherwise, it is V√λ with the largest eigenvalue first.

    Raises:
        NotPositiveDefiniteError: If Λ has a negative eigenvalue.
    """
    frozen = curvature.detach()
    values, vectors = _descending_eigh(0.5 * (frozen + frozen.mT))
    eps = torch.finfo(curvature.dtype).eps
    if values.numel():
        check_not_negative(values)
    keep = values > RANK_TOLERANCE * values.shape[-1] * eps * values[..., :1].clamp(min=0)
    roots = torch.where(keep, values, 0.0).sqrt()
    inverses = torch.where(keep, values, 1.0).rsqrt() * keep
    right = vectors.mT if symmetric else torch.eye(values.shape[-1], device="cpu").to(vectors)
    root = ((vectors * roots.unsqueeze(-2)) @ right).to(curvature.dtype)
    inverse = ((vectors * inverses.unsqueeze(-2)) @ right).to(curvature.dtype)
    projector = ((vectors * keep.unsqueeze(-2)) @ vectors.mT).to(curvature.dtype)
    change = (curvature - frozen) @ inverse
    return root + change - 0.5 * projector @ change


def check_not_negative(eigenvalues: Tensor) -> None:
    """Raise a NotPositiveDefiniteError if an eigenvalue of Λ is negative beyond rounding."""
    eps = torch.finfo(eigenvalues.dtype).eps
    floor = -(eps**0.5) * eigenvalues.abs().max() - NEGATIVE_TOLERANCE * eps
    if bool((eigenvalues < floor).any()):
        raise NotPositiveDefiniteError(
            f"The negative log likelihood is not convex in the outputs. Its Hessian Λ has the"
            f" eigenvalue {eigenvalues.min().item():.3g}, so Λ has no root. Override the"
            " likelihood's hessian(f) to return a positive semidefinite matrix, such as the Fisher"
            " information."
        )


def check_finite_root(matrix: Tensor) -> None:
    """Raise a NotFiniteError if an entry of Λ is NaN or infinite."""
    if not is_finite(matrix):
        raise NotFiniteError(
            "The curvature Λ of the outputs contains NaN or infinite values, because some"
            " outputs are too large or not finite. Look for weights, inputs or hyperparameters that"
            " have diverged. If the likelihood is your own, compute its hessian(f) without"
            " overflow."
        )


def _descending_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, largest first, and eigenvectors, in float32 or wider.

    Raises:
        NotFiniteError: If an entry is not finite, or LAPACK does not converge even in float64.
    """
    check_finite_root(matrix)
    matrix = widened(matrix)
    for dtype in (matrix.dtype, torch.float64):  # in float32 LAPACK may not converge
        with suppress(LinAlgError):
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
            if bool(values.isfinite().all()):
                return values.flip(-1).to(matrix.dtype), vectors.flip(-1).to(matrix.dtype)
    raise NotFiniteError(
        "LAPACK cannot compute the eigenvalues of the curvature Λ, because the model's outputs are"
        " too large."
        " Look for weights, inputs or hyperparameters that have diverged."
    )
