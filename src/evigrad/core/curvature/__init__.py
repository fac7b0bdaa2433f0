"""Curvatures, which collect a statistic of a block's rows and compute a log-determinant.

Each structure, such as ``ntk`` or ``kfac``, has a module that computes or approximates
ℓ = log|I + P0^{-1/2} H P0^{-1/2}|. H is the sum of the outer products of the rows, and P0 is the
diagonal prior precision.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evigrad.core.block import Conditioning
from evigrad.core.curvature import ntk
from evigrad.core.curvature.anchored import LogDet
from evigrad.core.curvature.base import (
    Cost,
    Curvature,
    Differential,
    Statistic,
    check_log_det,
    inner_product,
)
from evigrad.core.curvature.dense import BlockDiagonal, Full
from evigrad.core.curvature.diagonal import Diagonal
from evigrad.core.curvature.kfac import DENSE_LIMIT, Kfac
from evigrad.core.curvature.linalg import RoundingError, rounding_refused
from evigrad.core.curvature.ntk import BlockKernel, Ntk
from evigrad.errors import ConfigurationError, nearest

__all__ = [
    "BlockDiagonal",
    "BlockKernel",
    "Conditioning",
    "Cost",
    "Curvature",
    "Diagonal",
    "Differential",
    "Full",
    "Kfac",
    "LogDet",
    "Ntk",
    "RoundingError",
    "Statistic",
    "check_log_det",
    "inner_product",
    "make_curvature",
    "rounding_refused",
]


def make_curvature(
    structure: str,
    weights: Mapping[str, Tensor],
    *,
    kronecker: Collection[str] = (),
    precision_groups: Mapping[str, Hashable] | None = None,
    precision_axes: Mapping[str, Sequence[int]] | None = None,
    blocks: Mapping[str, Sequence[str]] | None = None,
    sharing: str = "expand",
    gram_dtype: torch.dtype | None = None,
    dense_limit: int = DENSE_LIMIT,
    contracted: Mapping[str, int] | None = None,
    store: Callable[[Tensor], Tensor] | None = None,
    itemsize: int | None = None,
    num_rows: int | None = None,
) -> Curvature[Any]:
    """Return the curvature for a structure.

    Args:
        structure: One of ``names.STRUCTURES``.
        weights: The model's weights by name.
        kronecker: The weights that have Kronecker factors, for ``kfac``.
        precision_groups: The label of each parameter's prior group. The precisions of parameters
            without a label vary along all axes. None: each parameter has its own precision.
        precision_axes: The axes along which the precisions of parameters with a label vary. The
            precisions of others are one number.
        blocks: The parameters of each block, for ``blockdiag``. None: each parameter is a block.
        sharing: ``"expand"`` or ``"reduce"``, for ``kfac``.
        gram_dtype: Dtype of matrices and factorizations. None: the dtype of the rows.
        dense_limit: Size of the largest parameter without Kronecker factors that gets a dense
            block, for ``kfac``.
        contracted: See ``Ntk``.
        store: See ``Ntk``.
        itemsize: See ``Ntk``.
        num_rows: Number of rows of a whole block. It determines whether ``full`` and ``blockdiag``
            use H or Gram matrices (``BlockKernel``), which give the same ℓ up to rounding. None:
            use H.

    Raises:
        ConfigurationError: If the structure is unknown, or a setting is invalid for the structure.
    """
    labels = {name: name for name in weights} if precision_groups is None else precision_groups
    constant: Mapping[str, Sequence[int]] = dict.fromkeys(labels, ())
    axes = {n: range(w.ndim) for n, w in weights.items()} | {**constant, **(precision_axes or {})}
    labels = {name: labels[name] for name in weights if name in labels and len(axes[name]) <= 1}
    axis = {name: axes[name][0] for name in labels if axes[name]}
    if structure == "ntk":
        return Ntk(weights, labels, gram_dtype, contracted, store, itemsize, precision_axes=axis)
    if structure in ("full", "blockdiag"):
        dense = (
            Full(weights, gram_dtype)
            if structure == "full"
            else BlockDiagonal(weights, blocks, gram_dtype)
        )
        # Compare as if every row were dense, so that the same settings always give the same form,
        # even if a later pass has no closed form.
        kernel = BlockKernel(dense, weights, labels, gram_dtype, precision_axes=axis)
        if num_rows is None or not ntk.is_cheaper(kernel, dense, num_rows):
            return dense
        return BlockKernel(dense, weights, labels, gram_dtype, contracted, store, itemsize, axis)
    if structure == "kfac":
        return Kfac(weights, kronecker, axes, sharing, gram_dtype, dense_limit)
    if structure == "diag":
        return Diagonal(weights, gram_dtype)
    names = ("ntk", "full", "blockdiag", "kfac", "diag")
    raise ConfigurationError(
        f"structure {structure!r} is unknown. Use one of {', '.join(names)}."
        f"{nearest(structure, names)}"
    )
