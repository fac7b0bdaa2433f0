"""Greedy choice of anchors: always the row with the largest conditional entropy."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def pivots(kernel: Float[Tensor, "m m"], count: int) -> Int[Tensor, " k"]:
    """The first ``count`` pivots of a Cholesky factorisation of I + S, for positive semidefinite S.

    Given those before, each has the largest variance S_rr|Z, and so the largest entropy
    ½ log(1 + S_rr|Z); with the greedy choice ℓ(Z) is at least 1 − 1/e of the largest of so many
    rows, since it is submodular (Nemhauser et al., 1978).

    Returns:
        Their numbers, in the order of the choice.
    """
    left = kernel.diagonal().clone()
    factor = kernel.new_zeros(count, len(kernel))
    chosen = torch.zeros(count, dtype=torch.int64, device=kernel.device)
    for step in range(count):
        row = left.argmax().reshape(1)
        chosen[step] = row[0]
        before = factor[:step]
        column = kernel.index_select(0, row)[0] - before.index_select(1, row)[:, 0] @ before
        own = left.index_select(0, row).clamp(min=0.0)
        factor[step] = column / (1.0 + own).sqrt()
        left = left - factor[step].square()
        left[row] = -torch.inf
    return chosen
