"""Blocks of rows that have much in common given the anchors.

The joint entropy of similar rows is hardly more than that of one; in separate blocks it would be
counted again and again. The last layer's kernel (``last_layer``) tells which rows are similar, as
it does for the choice of anchors, and predicts the entropy of each block.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.blocks.anchors.choice import Kernel
from evigrad.blocks.anchors.scores import guessed, ranked, unit_score

# Rows considered for each row of a block, those of the largest scores, but no more than MOST_ROWS:
# their kernel has the square of it.
ROWS_PER_ROW = 16
MOST_ROWS = 2048
# Where those hold a smaller share of all curvature than this, grouping them does not pay.
LEAST_SHARE = 0.1


@dataclass(frozen=True, eq=False)
class Groups:
    """Blocks that all partitions have.

    Attributes:
        parts: The rows of each, as n K + d.
        shares: The share of each in ℓ(B|Z) of all of them, by the last layer's kernel; by their
            numbers of rows where all scores are the same.
    """

    parts: list[Int[Tensor, " _"]] = field(default_factory=list)
    shares: Float[Tensor, " G"] = field(default_factory=lambda: torch.zeros(0).double())


def form_groups(
    scores: Float[Tensor, "N K"],
    anchors: Int[Tensor, " Z"],
    num_rows: int,
    kernel: Kernel,
    generator: torch.Generator,
) -> Groups:
    """Blocks of the rows with the largest scores but for the anchors.

    Args:
        scores: |R_n[:, d]|² of every row (n, d).
        anchors: Rows as n K + d.
        num_rows: Rows of a block, its anchors included.
        kernel: From rows to their inner products, or to None where unknown.
        generator: A CPU generator, for rows of equal scores.

    Returns:
        The blocks; none where the kernel is unknown, or where so many rows are left that these
        blocks would make no difference.
    """
    size = num_rows - len(anchors)
    flat = scores.flatten()
    rest = torch.ones(len(flat), dtype=torch.bool)
    rest[anchors] = False
    rows = rest.nonzero().squeeze(1)
    if size < 2 or len(rows) < 2:
        return Groups()
    chosen = ranked(rows, flat, generator)[: min(ROWS_PER_ROW * num_rows, MOST_ROWS)]
    held = guessed(flat, unit_score(flat, anchors))
    if not float(held[chosen].sum()) > LEAST_SHARE * float(held[rows].sum()):
        return Groups()
    known = kernel(torch.cat([anchors, chosen]))
    left = None if known is None else conditional(known, len(anchors))
    if left is None or not bool(left.diagonal().isfinite().all()):
        return Groups()
    parts, entropies = grouped(left, size)
    if bool((flat == flat[0]).all()):
        # As in regression: the last layer tells which rows are alike, but not their entropy.
        entropies = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    total = float(entropies.sum())
    return Groups([chosen[part] for part in parts], entropies / total) if total > 0 else Groups()


def conditional(kernel: Float[Tensor, "m m"], given: int) -> Float[Tensor, "r r"] | None:
    """S_rr − S_rz (I + S_zz)⁻¹ S_zr for the first rows z; None where rounding spoils I + S_zz."""
    own = kernel[:given, :given].double()
    factor, failed = torch.linalg.cholesky_ex(own + torch.eye(given, dtype=own.dtype))
    if int(failed):
        return None
    cross = kernel[:given, given:].double()
    half = torch.linalg.solve_triangular(factor, cross, upper=False).to(kernel.dtype)
    return torch.addmm(kernel[given:, given:], half.mT, half, alpha=-1.0)


def grouped(
    kernel: Float[Tensor, "r r"], size: int
) -> tuple[list[Int[Tensor, " _"]], Float[Tensor, " G"]]:
    """Repeatedly the row of largest variance, with those most correlated with it.

    Args:
        kernel: Of the rows, symmetric positive semidefinite; observed with noise of variance one.
        size: Rows in a group; the last one may have fewer.

    Returns:
        Groups of row numbers, and the entropy log det(1 + S_gg) of each, float64.
    """
    variance = kernel.diagonal().clamp(min=0.0)
    shrunk = (1.0 + variance).rsqrt()
    left = variance.clone()
    parts: list[Tensor] = []
    for remaining in range(len(kernel), 0, -size):
        first = int(left.argmax())
        alike = (kernel[first] * shrunk).square()
        alike[first] = torch.inf
        alike[left < 0] = -1.0
        parts.append(alike.topk(min(size, remaining)).indices)
        left[parts[-1]] = -1.0
    whole = torch.stack(parts[:-1]) if len(parts) > 1 else torch.zeros(0, size, dtype=torch.int64)
    return parts, torch.cat([_entropies(kernel, whole), _entropies(kernel, parts[-1][None])])


def _entropies(kernel: Float[Tensor, "r r"], parts: Int[Tensor, "G b"]) -> Float[Tensor, " G"]:
    own = kernel[parts[:, :, None], parts[:, None, :]].double()
    # Rounding may have made tiny eigenvalues negative.
    return torch.linalg.eigvalsh(own).clamp(min=0.0).log1p().sum(-1)
