"""The exact ℓ from one dense P x P matrix H."""

from collections.abc import Mapping

import torch
from torch import Tensor

from evigrad.curvature.block_diagonal import BlockDiagonal


class Full(BlockDiagonal):
    """The exact ℓ of a block from H, for networks of a few thousand weights.

    Args:
        weights: The parameters.
        gram_dtype: Dtype of H and its factor; None takes that of the rows.
    """

    name = "full"
    cheaper = "'blockdiag', 'kfac', or 'ntk', whose matrix is as large as the subset and not as P"

    def __init__(
        self, weights: Mapping[str, Tensor], gram_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weights, {"all": list(weights)}, gram_dtype)
