"""The diagonal of H. Each weight is a block in the sense of Theorem 1 of the paper."""

from collections.abc import Mapping
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.curvature.base import (
    ROWS_AT_ONCE,
    Cost,
    Curvature,
    by_entry,
    bytes_of_row,
    scaled_rows,
    working_dtype,
)
from evigrad.core.curvature.dense import BlockStatistic
from evigrad.core.curvature.linalg import log_det_diagonal
from evigrad.core.protocols import Linearization, Purpose
from evigrad.core.roots import RootRows

# Vectors of the size of the weights while ℓ is differentiated: the statistic, its ratio to the
# precision, the logarithm, and the cotangents of both.
DIAGONAL_COPIES = 5


class Diagonal(Curvature[BlockStatistic]):
    """One block for each weight, which gives the bound ℓ ≤ Σ_i log(1 + h_i / δ_i).

    h_i is the diagonal entry of H for weight i, and δ_i is the prior precision of this weight.
    """

    name = "diag"
    log_det_is = "bound"
    cheaper = "a smaller micro_batch, or a smaller network"
    rows_at_once = ROWS_AT_ONCE

    def __init__(
        self, weights: Mapping[str, Tensor], gram_dtype: torch.dtype | None = None
    ) -> None:
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._row_bytes = bytes_of_row(weights.values())
        self._itemsize = max((weight.dtype.itemsize for weight in weights.values()), default=4)
        self._gram_dtype = gram_dtype

    def collect(
        self, statistic: BlockStatistic | None, linearization: Linearization, root: RootRows
    ) -> BlockStatistic:
        blocks = {} if statistic is None else dict(statistic.blocks)
        for part in root.parts(self.rows_at_once):
            for name, rows in linearization.rows(part.vectors, list(self._shapes)).items():
                dtype = working_dtype(rows.dtype, self._gram_dtype)
                new = scaled_rows(rows, part.scale, dtype).square().sum(0)
                blocks[name] = blocks[name] + new if name in blocks else new
        return BlockStatistic(blocks)

    def log_det(
        self, statistic: BlockStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        terms = [
            log_det_diagonal(diagonal, by_entry(precisions[name], self._shapes[name]))
            for name, diagonal in statistic.blocks.items()
        ]
        return torch.stack(terms).sum()

    def cost(self, num_rows: int, purpose: Purpose, *, is_whole: bool = False) -> Cost:
        item = self._itemsize if self._gram_dtype is None else self._gram_dtype.itemsize
        total = DIAGONAL_COPIES * item * sum(map(prod, self._shapes.values()))
        return Cost(total, self._row_bytes, self.rows_at_once)

    def describe(self) -> dict[str, str]:
        return dict.fromkeys(self._shapes, "diagonal")
