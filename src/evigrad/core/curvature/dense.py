"""Dense curvature: the whole matrix H, or its blocks for a partition of the parameters.

H is the sum of the outer products of the rows. The log-determinants of the blocks sum to at least ℓ
(Theorem 1 of the paper). Finer partitions have larger sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import add_outer_products
from evigrad.core.curvature.base import (
    DENSE_WORKING_COPIES,
    ROWS_AT_ONCE,
    Cost,
    Curvature,
    Statistic,
    by_entry,
    bytes_of_row,
    scaled_rows,
    working_dtype,
)
from evigrad.core.curvature.linalg import Spectra, log_det_dense
from evigrad.core.protocols import Linearization, Purpose
from evigrad.core.roots import RootRows


@dataclass(frozen=True)
class BlockStatistic(Statistic):
    """Blocks (or diagonals) of H by name, and a cache of their eigenvalues."""

    blocks: dict[str, Tensor]
    spectra: Spectra = field(default_factory=Spectra, repr=False, compare=False)

    def tensors(self) -> list[Tensor]:
        return list(self.blocks.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> "BlockStatistic":
        return BlockStatistic(dict(zip(self.blocks, tensors, strict=True)))


class BlockDiagonal(Curvature[BlockStatistic]):
    """One dense block of H for each set of parameters in a partition.

    Args:
        weights: The parameters.
        blocks: The names of the parameters in each block. Default: each parameter is a block.
        gram_dtype: Dtype of the blocks and their Cholesky factors. None: the dtype of the rows.
    """

    name = "blockdiag"
    log_det_is = "bound"
    settings = ("parameter_partition",)
    rows_at_once = ROWS_AT_ONCE
    cheaper = "a finer parameter_partition ('tensor'), 'kfac', 'diag', or 'ntk' on a small subset"

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        blocks: Mapping[str, Sequence[str]] | None = None,
        gram_dtype: torch.dtype | None = None,
    ) -> None:
        self._blocks = {name: [name] for name in weights} if blocks is None else blocks
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._numel = {name: weight.numel() for name, weight in weights.items()}
        self._row_bytes = bytes_of_row(weights.values())
        dtypes = {working_dtype(weight.dtype, gram_dtype) for weight in weights.values()}
        self._itemsize = max((dtype.itemsize for dtype in dtypes), default=4)
        self._gram_dtype = gram_dtype

    @property
    def blocks(self) -> Mapping[str, Sequence[str]]:
        """The names of the parameters in each block."""
        return self._blocks

    @property
    def sizes(self) -> list[int]:
        """The number of weights in each block."""
        return [sum(self._numel[name] for name in names) for names in self._blocks.values()]

    def collect(
        self, statistic: BlockStatistic | None, linearization: Linearization, root: RootRows
    ) -> BlockStatistic:
        blocks = {} if statistic is None else dict(statistic.blocks)
        for part in root.parts(self.rows_at_once):
            rows = linearization.rows(part.vectors, list(self._numel))
            for block, names in self._blocks.items():
                dtype = working_dtype(rows[names[0]].dtype, self._gram_dtype)
                flat = [scaled_rows(rows[name], part.scale, dtype) for name in names]
                matrix = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
                blocks[block] = add_outer_products(blocks.get(block), matrix)
        return BlockStatistic(blocks)

    def log_det(
        self, statistic: BlockStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        terms: list[Tensor] = []
        for name, names in self._blocks.items():
            block, precision = statistic.blocks[name], self._precision(names, precisions)
            spectrum = None
            if precision.ndim == 0 and not block.requires_grad:
                spectrum = statistic.spectra.at_second_use(name, lambda block=block: block)
            if spectrum is None:
                terms.append(log_det_dense(block, precision))
            else:
                terms.append(spectrum.log_det(precision))
        return torch.stack(terms).sum()

    def cost(self, num_rows: int, purpose: Purpose, *, is_whole: bool = False) -> Cost:
        squares = [size**2 for size in self.sizes]
        # The statistic, the scaled copy and the factor of each block stay until the backward pass.
        at_work = (DENSE_WORKING_COPIES - 2) * max(squares, default=0)
        total = self._itemsize * (3 * sum(squares) + at_work)
        return Cost(total, self._row_bytes, self.rows_at_once)

    def describe(self) -> dict[str, str]:
        words = {}
        for block, names in self._blocks.items():
            size = sum(self._numel[name] for name in names)
            shared = f" (block {block!r} of {len(names)} parameters)" if len(names) > 1 else ""
            words.update(dict.fromkeys(names, f"dense {size}x{size}{shared}"))
        return {name: words[name] for name in self._numel}

    def _precision(self, names: Sequence[str], precisions: Mapping[str, Tensor]) -> Tensor:
        first = precisions[names[0]]
        # The parameters of a prior group share one tensor. Equal numbers of several groups do not.
        if len(names) == 1 or (first.ndim == 0 and all(precisions[n] is first for n in names)):
            return by_entry(first, self._shapes[names[0]])
        return torch.cat([precisions[name].expand(self._shapes[name]).flatten() for name in names])


class Full(BlockDiagonal):
    """The exact ℓ from the whole matrix H, for networks of at most a few thousand weights."""

    name = "full"
    log_det_is = "exact"
    settings = ()
    cheaper = "'blockdiag', 'kfac', or 'ntk', whose matrix grows with the subset instead of P"

    def __init__(
        self, weights: Mapping[str, Tensor], gram_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weights, {"all": list(weights)}, gram_dtype)
