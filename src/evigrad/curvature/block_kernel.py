"""The ℓ of dense blocks of H from the Gram matrices of their rows, without H.

For a block of n weights and R rows, log|I + P0^{-1/2} H_b P0^{-1/2}| = log|I + S_b|, with S_b the
R x R Gram matrix of the rows' entries in that block (Theorem 3 of the paper). With few rows and
many weights it is far cheaper: ten data with ten outputs against a tensor of 12,800 weights need
matrices of 100 x 100 instead of 12,800 x 12,800.
"""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from evigrad.curvature.block_diagonal import BlockDiagonal
from evigrad.curvature.kernel_rows import Storage
from evigrad.curvature.ntk import Ntk
from evigrad.jacobians import MatrixUse

# The Grams are taken below this multiple of the dense form's multiplications. At R = n they were
# still 1.5 times faster for precisions and 1.9 times in two passes (the second holds no n x n
# products in a graph), but larger in memory.
KERNEL_SHARE = 1.0


class BlockKernel(Ntk):
    """What a dense structure computes, from the Gram matrices of the rows of each of its blocks.

    Args:
        dense: The structure that it replaces, and whose name it takes.
        weights: The parameters.
        precision_groups: As for ``Ntk``; a group may span several blocks.
        gram_dtype: As for ``Ntk``.
        contracted: As for ``Ntk``.
        storage: As for ``Ntk``.
    """

    def __init__(
        self,
        dense: BlockDiagonal,
        weights: Mapping[str, Tensor],
        precision_groups: Mapping[str, Hashable],
        gram_dtype: torch.dtype | None = None,
        contracted: Mapping[str, MatrixUse] | None = None,
        storage: Storage | None = None,
    ) -> None:
        block_of = {name: block for block, names in dense.blocks.items() for name in names}
        groups = {name: (label, block_of[name]) for name, label in precision_groups.items()}
        super().__init__(weights, groups, gram_dtype, contracted, storage, dense.blocks.values())
        self.name = dense.name
        self._words = dense.describe()

    def describe(self) -> dict[str, str]:
        """See ``Structure.describe``."""
        words = {name: f"{dense}, by the Gram of its rows" for name, dense in self._words.items()}
        return words | {name: f"{words[name]}, contracted" for name in self.contracted}


def is_cheaper(kernel: BlockKernel, dense: BlockDiagonal, num_rows: int) -> bool:
    """Return whether the Grams take fewer multiplications than H does, and no more memory.

    R rows, n weights in a block: 2 R n² for H and n³/3 for its factor; 2 R² n for the Gram and R³/3
    for its factor. Only sizes count, so that the same settings choose alike on every machine.
    """
    rows = num_rows
    by_grams = sum(6 * rows**2 * size + rows**3 for size in dense.sizes)
    by_blocks = sum(6 * rows * size**2 + size**3 for size in dense.sizes)
    fewer = by_grams < KERNEL_SHARE * by_blocks
    return fewer and kernel.predicted_bytes(rows) <= dense.predicted_bytes(rows)
