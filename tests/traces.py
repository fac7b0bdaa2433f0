"""A curvature from outside the package, as evigrad/network/README.md describes it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from evigrad.core.curvature import Curvature
from evigrad.core.curvature.base import scaled_rows
from evigrad.core.curvature.dense import BlockStatistic


class Traces(Curvature[BlockStatistic]):
    """Σ_b P_b log(1 + tr H_b / (P_b δ_b)) over the weight tensors b."""

    name, log_det_is = "traces", "bound"

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.sizes = {name: w.numel() for name, w in weights.items()}

    def collect(self, statistic: Any, linearization: Any, root: Any) -> BlockStatistic:
        traces = {} if statistic is None else dict(statistic.blocks)
        for name, rows in linearization.rows(root.vectors).items():
            trace = scaled_rows(rows, root.scale, rows.dtype).square().sum()
            traces[name] = traces.get(name, 0) + trace
        return BlockStatistic(traces)

    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        terms = [
            size * (statistic.blocks[name] / (size * precisions[name])).log1p()
            for name, size in self.sizes.items()
        ]
        return torch.stack(terms).sum()
