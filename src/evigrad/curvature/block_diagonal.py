"""Dense blocks of H over a partition of the parameters (Theorem 1 of the paper), or H whole.

The blocks' log-determinants add up to ℓ or more; the finer the partition, the larger the sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.curvature.base import (
    DENSE_WORKING_COPIES,
    Statistic,
    Structure,
    scaled_rows,
    working_dtype,
)
from evigrad.curvature.hessian import ExactHessian
from evigrad.curvature.linalg import Spectra, log_det_dense
from evigrad.errors import ConfigurationError, nearest
from evigrad.jacobians import Linearization
from evigrad.likelihoods import RootRows
from evigrad.priors import assign, checked_groups

# "tensor", "module", or groups of name prefixes or patterns, with or without names of their own.
ParameterPartition = str | Mapping[str, Sequence[str]] | Sequence[Sequence[str]]

# torch.nn.utils.parametrize keeps the tensors behind ``layer.weight`` under this name.
PARAMETRIZATIONS = ".parametrizations."


@dataclass(frozen=True)
class BlockStatistic(Statistic):
    """The blocks (or diagonals) of H, by the name of the block.

    Attributes:
        blocks: The part of H that belongs to each block.
        positive: Whether H is a sum of outer products, and not an exact Hessian.
        spectra: A cache of their eigenvalues.
    """

    blocks: dict[str, Tensor]
    positive: bool = True
    spectra: Spectra = field(default_factory=Spectra, repr=False, compare=False)

    def tensors(self) -> list[Tensor]:
        """The blocks."""
        return list(self.blocks.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> "BlockStatistic":
        """The same statistic with other blocks."""
        return BlockStatistic(dict(zip(self.blocks, tensors, strict=True)), self.positive)


class BlockDiagonal(Structure[BlockStatistic]):
    """One dense block of H for each block of a partition of the parameters.

    Args:
        weights: The parameters.
        parameter_partition: ``"tensor"``: each parameter its own block; ``"module"``: those of a
            module together; or groups of names, prefixes or patterns, which must hold every
            parameter exactly once.
        gram_dtype: Dtype of the blocks and their factors; None takes that of the rows.
    """

    name = "blockdiag"
    cheaper = "a finer parameter_partition ('tensor'), 'kfac', 'diag', or 'ntk' on a small subset"

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        parameter_partition: ParameterPartition = "tensor",
        gram_dtype: torch.dtype | None = None,
    ) -> None:
        self._blocks = partition_names(list(weights), parameter_partition)
        self._numel = {name: weight.numel() for name, weight in weights.items()}
        self.formed = list(weights)
        dtypes = {working_dtype(weight.dtype, gram_dtype) for weight in weights.values()}
        self._itemsize = max((dtype.itemsize for dtype in dtypes), default=4)
        self._gram_dtype = gram_dtype

    @property
    def blocks(self) -> Mapping[str, Sequence[str]]:
        """The parameters of each block."""
        return self._blocks

    @property
    def sizes(self) -> list[int]:
        """The weights in each block."""
        return [sum(self._numel[name] for name in names) for names in self._blocks.values()]

    def accumulate(
        self, statistic: BlockStatistic | None, linearization: Linearization, root: RootRows
    ) -> BlockStatistic:
        """See ``Structure.accumulate``."""
        rows = linearization.rows(root.vectors, list(self._numel))
        blocks = {}
        for block, names in self._blocks.items():
            dtype = working_dtype(rows[names[0]].dtype, self._gram_dtype)
            flat = [scaled_rows(rows[name], root.scale, dtype) for name in names]
            matrix = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
            blocks[block] = add_outer_products(
                None if statistic is None else statistic.blocks[block], matrix
            )
        return BlockStatistic(blocks)

    def accumulate_hessian(
        self, statistic: BlockStatistic | None, hessian: ExactHessian
    ) -> BlockStatistic:
        """See ``Structure.accumulate_hessian``."""
        blocks = {}
        for block, names in self._blocks.items():
            matrix = hessian.block(names)
            matrix = matrix.to(working_dtype(matrix.dtype, self._gram_dtype))
            blocks[block] = matrix if statistic is None else statistic.blocks[block] + matrix
        return BlockStatistic(blocks, positive=False)

    def log_det(
        self, statistic: BlockStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """See ``Structure.log_det``."""
        terms: list[Tensor] = []
        for name, names in self._blocks.items():
            block, precision = statistic.blocks[name], self._precision(names, precisions)
            spectrum = None
            if precision.ndim == 0 and statistic.positive and not block.requires_grad:
                spectrum = statistic.spectra.at_second_use(name, lambda block=block: block)
            if spectrum is None:
                terms.append(log_det_dense(block, precision, positive=statistic.positive))
            else:
                terms.append(spectrum.log_det(precision))
        return torch.stack(terms).sum()

    def predicted_bytes(self, num_rows: int) -> int:
        """See ``Structure.predicted_bytes``: the blocks, their scaled copies, and their factors."""
        squares = [size**2 for size in self.sizes]
        # The statistic, the scaled copy and the factor of each block stay until the backward pass.
        at_work = (DENSE_WORKING_COPIES - 2) * max(squares, default=0)
        return self._itemsize * (3 * sum(squares) + at_work)

    def describe(self) -> dict[str, str]:
        """See ``Structure.describe``."""
        words = {}
        for block, names in self._blocks.items():
            size = sum(self._numel[name] for name in names)
            shared = f" (block {block!r} of {len(names)} parameters)" if len(names) > 1 else ""
            words.update(dict.fromkeys(names, f"dense {size}x{size}{shared}"))
        return {name: words[name] for name in self._numel}

    def _precision(self, names: Sequence[str], precisions: Mapping[str, Tensor]) -> Tensor:
        if len(names) == 1:
            return precisions[names[0]]
        flat = [precisions[name].reshape(-1).expand(self._numel[name]) for name in names]
        return torch.cat(flat)


class Full(BlockDiagonal):
    """The exact ℓ of a block from H, for networks of a few thousand weights."""

    name = "full"
    cheaper = "'blockdiag', 'kfac', or 'ntk', whose matrix is as large as the subset and not as P"

    def __init__(
        self, weights: Mapping[str, Tensor], gram_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weights, {"all": list(weights)}, gram_dtype)


def add_outer_products(
    matrix: Float[Tensor, "n n"] | None, rows: Float[Tensor, "R n"]
) -> Float[Tensor, "n n"]:
    """A new tensor, matrix + rowsᵀ rows."""
    return rows.mT @ rows if matrix is None else torch.addmm(matrix, rows.mT, rows)


def partition_names(names: Sequence[str], partition: ParameterPartition) -> dict[str, list[str]]:
    """The names in each block, in the parameters' order; refuses one that is missing or double."""
    if isinstance(partition, str):
        if partition == "tensor":
            return {name: [name] for name in names}
        if partition == "module":
            blocks: dict[str, list[str]] = {}
            for name in names:
                owner = name.split(PARAMETRIZATIONS)[0] if PARAMETRIZATIONS in name else None
                blocks.setdefault(owner or name.rpartition(".")[0], []).append(name)
            return blocks
        raise ConfigurationError(
            f"parameter_partition={partition!r} is unknown: take 'tensor', 'module', or groups of"
            f" parameter names.{nearest(partition, ['tensor', 'module'])}"
        )
    if not isinstance(partition, Mapping | Sequence):
        raise ConfigurationError(
            "parameter_partition is 'tensor', 'module', or groups of parameter names, not"
            f" {partition!r}."
        )
    if not isinstance(partition, Mapping):
        partition = {str(index): group for index, group in enumerate(partition)}
    what = "parameter_partition"
    block_of = assign(names, checked_groups(partition, what), what)
    grouped: dict[str, list[str]] = {}
    for name, block in block_of.items():
        grouped.setdefault(block, []).append(name)
    return grouped
