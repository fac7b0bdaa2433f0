"""Combine the results of several processes: sums of statistics, and means of estimates."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evigrad.core.algorithm import TERMS, mean_estimate
from evigrad.core.block import Block
from evigrad.core.curvature import Conditioning, Curvature, Differential, LogDet
from evigrad.core.roots import RootRows
from evigrad.core.types import Estimate, Linearization
from evigrad.distributed import Ranks
from evigrad.passes.problem import Problem


class ReducedCurvature(Curvature[Any]):
    """A curvature whose statistic for all examples is the sum of the ranks' statistics.

    Each rank collects the statistic of its examples. The statistics are summed before a
    log-determinant is computed.

    Args:
        curvature: A curvature with an additive statistic.
        ranks: The processes that share the examples.
    """

    def __init__(self, curvature: Curvature[Any], ranks: Ranks) -> None:
        self._curvature, self._ranks = curvature, ranks
        self.name, self.formed = curvature.name, curvature.formed

    def collect(
        self,
        statistic: Any,
        linearization: Linearization,
        root: RootRows,
        *,
        alone: bool = False,
    ) -> Any:
        # Not ``alone``, because condensed statistics cannot be summed over ranks.
        return self._curvature.collect(statistic, linearization, root)

    def total(self, statistic: Any) -> Any:
        """Return the sum of the ranks' statistics."""
        with self._ranks.together() as alike:
            alike["form of the curvature"] = [tensor.shape for tensor in statistic.tensors()]
        return statistic.reduced(self._ranks.sum)

    def condense(self, statistic: Any) -> Any:
        return self._curvature.condense(self.total(statistic))

    def differentiate(
        self,
        statistic: Any,
        precisions: Mapping[str, Tensor],
        arguments: Sequence[Tensor],
        conditioning: Conditioning | None = None,
    ) -> Differential[Any]:
        whole = self.total(statistic)
        return self._curvature.differentiate(whole, precisions, arguments, conditioning)

    def log_det(self, statistic: Any, precisions: Mapping[str, Tensor]) -> Tensor:
        return self._curvature.log_det(statistic, precisions)

    def evaluate(
        self,
        statistic: Any,
        precisions: Mapping[str, Tensor],
        conditioning: Conditioning | None = None,
    ) -> LogDet:
        return self._curvature.evaluate(statistic, precisions, conditioning)

    def inner(
        self, cotangent: Any, data: slice, linearization: Linearization, root: RootRows
    ) -> Tensor:
        return self._curvature.inner(cotangent, data, linearization, root)

    def predicted_bytes(self, num_rows: int, condensed: bool = False) -> int:
        return self._curvature.predicted_bytes(num_rows)


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
        num_data=problem.num_data,
        estimator=problem.estimator.name,
    )
    return mean, [(s / count).to(g) for s, g in zip(sums[1:], gradients, strict=True)]
