"""Data spread over all data: the farthest-first traversal of the inputs.

Where every row has the same score, as in regression, scores do not tell the network's uncertainty,
and anchors should represent as many of the others as they can. The greedy choice, always the datum
farthest from those chosen so far, leaves no datum further from its centre than twice the smallest
possible radius (Gonzalez, 1985).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evigrad.blocks.sources import Source

# Inputs with more numbers are projected at random to so many: this keeps distances to within about
# a tenth, and each centre has to read little.
PROJECTED = 64
_AT_ONCE = 512


class Centres:
    """The traversal of a data set, continued where more centres are wanted."""

    def __init__(self) -> None:
        self._points: Float[Tensor, "N d"] | None = None
        self._order: list[int] = []
        self._distances: Float[Tensor, " N"] | None = None

    def first(self, source: Source, count: int) -> Int[Tensor, " k"] | None:
        """Positions of the first centres; None where inputs have no distances, as tokens."""
        if self._points is None:
            points = _points(source)
            if points is None:
                return None
            self._points = points
            self._order, self._distances = [], None
        while len(self._order) < min(count, len(self._points)):
            self._add(self._points)
        return torch.tensor(self._order[:count], dtype=torch.int64)

    def _add(self, points: Float[Tensor, "N d"]) -> None:
        # The first centre is farthest from the mean of all.
        known = self._distances
        if known is None:
            chosen = int((points - points.mean(0)).square().sum(1).argmax())
        else:
            chosen = int(known.argmax())
        own = (points - points[chosen]).square().sum(1)
        self._distances = own if known is None else torch.minimum(known, own)
        # Among equal data, those already chosen come last.
        self._distances[chosen] = -1.0
        self._order.append(chosen)


def _points(source: Source) -> Float[Tensor, "N d"] | None:
    """The inputs as vectors of few numbers, on the CPU."""
    parts: list[Tensor] = []
    projection: Tensor | None = None
    for indices in torch.arange(len(source)).split(_AT_ONCE):
        x, _ = source.fetch(indices)
        if not x.is_floating_point():
            return None
        flat = x.detach().reshape(len(x), -1).float().cpu()
        if flat.shape[1] > PROJECTED:
            if projection is None:
                own = torch.Generator().manual_seed(0)
                projection = torch.randn(flat.shape[1], PROJECTED, generator=own)
            flat = flat @ projection
        parts.append(flat)
    return torch.cat(parts)
