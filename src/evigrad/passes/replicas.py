"""Combine the results of several processes: sums of statistics, and means of estimates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evigrad.core.algorithm import TERMS, mean_estimate
from evigrad.core.block import Block
from evigrad.core.model import Estimate
from evigrad.distributed import Ranks
from evigrad.passes.problem import Problem


def total_over_ranks(ranks: Ranks, statistic: Any) -> Any:
    """Return the sum of the ranks' statistics, each of which is for the rank's examples."""
    with ranks.together() as alike:
        alike["form of the curvature"] = [tensor.shape for tensor in statistic.tensors()]
    return statistic.reduced(ranks.sum)


def mean_over_ranks(
    problem: Problem,
    blocks: Sequence[Block],
    estimates: Sequence[Estimate],
    gradients: Sequence[Tensor] = (),
) -> tuple[Estimate, list[Tensor]]:
    """Return the mean of the estimates of all ranks, and the mean of their gradients.

    Each estimate corresponds to one of the ``blocks``. A rank's weight in the mean is its number of
    blocks, where an anchored block counts once per draw. Any rank except the first may have no
    blocks. Its gradients are then zero. With R ranks and H numbers in the gradients, each rank
    sends 2 (R − 1)/R · 8 (H + 7) bytes.
    """
    ranks = problem.ranks
    if ranks.count == 1:
        return mean_estimate(estimates), list(gradients)
    count = sum(max(1, block.num_draws) for block in blocks)
    unbound = sum(not e.is_bound for e in estimates)
    draws_per_estimate = count / max(1, len(estimates))
    terms = [draws_per_estimate * sum(getattr(e, name) for e in estimates) for name in TERMS]
    scalars = torch.tensor([count, unbound, *terms], dtype=torch.float64, device="cpu")
    sums = ranks.sum([scalars, *(count * g.to(scalars) for g in gradients)])
    count, unbound, *terms = sums[0].tolist()
    mean = Estimate(
        **{name: term / count for name, term in zip(TERMS, terms, strict=True)},
        is_bound=unbound == 0,
        num_data=problem.model.num_data,
        estimator=problem.model.estimator.name,
    )
    return mean, [(s / count).to(g) for s, g in zip(sums[1:], gradients, strict=True)]
