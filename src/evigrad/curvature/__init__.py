"""The curvature of a block of data: accumulate a statistic of its rows, take its log-determinant.

One file per structure; each computes or approximates ℓ = log|I + P0^{-1/2} H P0^{-1/2}|. To add
one: a subclass of ``Structure`` in a new file here (``base`` says what it writes); a branch of
``make_structure``; and in ``evigrad.estimators`` an entry of ``STRUCTURES``, which says what the
other rooms ask about it.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evigrad.curvature import ntk
from evigrad.curvature.base import Differential, Statistic, Structure, inner_product
from evigrad.curvature.block_diagonal import (
    BlockDiagonal,
    Full,
    ParameterPartition,
    partition_names,
)
from evigrad.curvature.conditional import Conditioning, LogDet
from evigrad.curvature.diagonal import Diagonal
from evigrad.curvature.hessian import exact_hessian
from evigrad.curvature.kernel_rows import Storage, contracted
from evigrad.curvature.kfac import DENSE_LIMIT, Kfac
from evigrad.curvature.linalg import RoundingError, rounding_refused
from evigrad.curvature.ntk import BlockKernel, Ntk
from evigrad.errors import ConfigurationError, nearest
from evigrad.estimators import STRUCTURES
from evigrad.jacobians import JacobianPlan, MatrixUse

__all__ = [
    "STRUCTURES",
    "BlockDiagonal",
    "BlockKernel",
    "Conditioning",
    "Diagonal",
    "Differential",
    "Full",
    "Kfac",
    "LogDet",
    "Ntk",
    "ParameterPartition",
    "RoundingError",
    "Statistic",
    "Storage",
    "Structure",
    "contracted",
    "exact_hessian",
    "inner_product",
    "make_structure",
    "partition_names",
    "rounding_refused",
]


def make_structure(
    structure: str,
    weights: Mapping[str, Tensor],
    plan: JacobianPlan,
    *,
    precision_groups: Mapping[str, Hashable] | None = None,
    parameter_partition: ParameterPartition = "tensor",
    sharing: str = "expand",
    gram_dtype: torch.dtype | None = None,
    dense_limit: int = DENSE_LIMIT,
    contracted: Mapping[str, Sequence[MatrixUse]] | None = None,
    storage: Storage | None = None,
    num_rows: int | None = None,
) -> Structure[Any]:
    """Return the structure of a name, one of ``STRUCTURES``.

    Args:
        structure: Its name.
        weights: The model's weights by name.
        plan: Says which weights have Kronecker factors (kfac).
        precision_groups: For each parameter whose precision is one number, the label of its prior
            group; a missing parameter has a precision that varies inside it. None: every parameter
            has one number of its own.
        parameter_partition: See ``BlockDiagonal`` (blockdiag).
        sharing: ``"expand"`` or ``"reduce"`` (kfac).
        gram_dtype: Dtype of matrices and factorisations; None takes that of the rows.
        contracted: Parameters whose rows are not formed (ntk, and ``BlockKernel``).
        storage: Device and dtype of the kept rows (the same).
        num_rows: Rows of a whole block: full and blockdiag choose by it between H and the Grams of
            the rows (``BlockKernel``), which give the same ℓ to rounding. None: H.
        dense_limit: Largest parameter without Kronecker factors to get a dense block (kfac).

    Raises:
        ConfigurationError: The structure is unknown, or a setting does not fit it.
    """
    labels = {name: name for name in weights} if precision_groups is None else precision_groups
    constant = {name: name in labels for name in weights}
    if structure == "ntk":
        return Ntk(weights, labels, gram_dtype, contracted, storage)
    if structure in ("full", "blockdiag"):
        dense = (
            Full(weights, gram_dtype)
            if structure == "full"
            else BlockDiagonal(weights, parameter_partition, gram_dtype)
        )
        # Compared as if every row were formed, so that the same settings always give the same form,
        # even if a closed form is lost in a later pass.
        kernel = BlockKernel(dense, weights, labels, gram_dtype)
        if num_rows is None or not ntk.is_cheaper(kernel, dense, num_rows):
            return dense
        return BlockKernel(dense, weights, labels, gram_dtype, contracted, storage)
    if structure == "kfac":
        return Kfac(weights, plan, constant, sharing, gram_dtype, dense_limit)
    if structure == "diag":
        return Diagonal(weights, gram_dtype)
    raise ConfigurationError(
        f"structure {structure!r} is unknown: take one of {', '.join(STRUCTURES)}."
        f"{nearest(structure, STRUCTURES)}"
    )
