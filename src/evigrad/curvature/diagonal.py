"""The diagonal of H: Theorem 1 of the paper for the finest partition of the parameters."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.curvature.base import Structure, scaled_rows, working_dtype
from evigrad.curvature.block_diagonal import BlockStatistic
from evigrad.curvature.hessian import ExactHessian
from evigrad.curvature.linalg import log_det_diagonal
from evigrad.jacobians import Linearization
from evigrad.likelihoods import RootRows

# Vectors as long as the weights while ℓ is differentiated: the statistic, its ratio to the
# precision, the logarithm, and the cotangents of both.
DIAGONAL_COPIES = 5


class Diagonal(Structure[BlockStatistic]):
    """Each weight its own block: ℓ ≤ Σ log(1 + h_i / δ_i)."""

    name = "diag"
    cheaper = "a smaller micro_batch, or a smaller network"

    def __init__(
        self, weights: Mapping[str, Tensor], gram_dtype: torch.dtype | None = None
    ) -> None:
        self._numel = {name: weight.numel() for name, weight in weights.items()}
        self.formed = list(weights)
        self._itemsize = max((weight.dtype.itemsize for weight in weights.values()), default=4)
        self._gram_dtype = gram_dtype

    def accumulate(
        self, statistic: BlockStatistic | None, linearization: Linearization, root: RootRows
    ) -> BlockStatistic:
        """See ``Structure.accumulate``."""
        rows = linearization.rows(root.vectors, list(self._numel))
        blocks = {}
        for name in self._numel:
            dtype = working_dtype(rows[name].dtype, self._gram_dtype)
            new = scaled_rows(rows[name], root.scale, dtype).square().sum(0)
            blocks[name] = new if statistic is None else statistic.blocks[name] + new
        return BlockStatistic(blocks)

    def accumulate_hessian(
        self, statistic: BlockStatistic | None, hessian: ExactHessian
    ) -> BlockStatistic:
        """See ``Structure.accumulate_hessian``."""
        blocks = {}
        for name in self._numel:
            new = hessian.diagonal(name)
            new = new.to(working_dtype(new.dtype, self._gram_dtype))
            blocks[name] = new if statistic is None else statistic.blocks[name] + new
        return BlockStatistic(blocks, positive=False)

    def log_det(
        self, statistic: BlockStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """See ``Structure.log_det``."""
        terms = [
            log_det_diagonal(diagonal, precisions[name], positive=statistic.positive)
            for name, diagonal in statistic.blocks.items()
        ]
        return torch.stack(terms).sum()

    def predicted_bytes(self, num_rows: int) -> int:
        """See ``Structure.predicted_bytes``."""
        item = self._itemsize if self._gram_dtype is None else self._gram_dtype.itemsize
        return DIAGONAL_COPIES * item * sum(self._numel.values())

    def describe(self) -> dict[str, str]:
        """See ``Structure.describe``."""
        return dict.fromkeys(self._numel, "diagonal")
