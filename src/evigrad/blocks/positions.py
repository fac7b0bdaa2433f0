"""Outputs at several positions of an example, such as tokens or pixels."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from evigrad.blocks.sources import AT_ONCE, Source
from evigrad.errors import InputError
from evigrad.inputs import AtPositions
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.positions import NO_TARGET, counted, targets_at


class PositionSource(Source):
    """A source in which each position that has a target counts as one example.

    The positions are in the order of the data. The constructor reads all targets once.

    Args:
        source: Source of the original examples.
        likelihood: Likelihood, which determines which positions have a target.
        shape: Shape of the outputs for one original example, (…, C).

    Raises:
        InputError: If a target does not match the likelihood, or no position has a target.
    """

    def __init__(self, source: Source, likelihood: Likelihood, shape: Sequence[int]) -> None:
        self._source, self._likelihood = source, likelihood
        self._shape, self._dims = tuple(shape[:-1]), len(shape) - 1
        self.is_held = source.is_held
        data, positions = [], []
        for indices in torch.arange(len(source), device="cpu").split(AT_ONCE):
            y = source.fetch(indices)[1]
            batch_shape, first = (*self._positions_of(y), shape[-1]), int(indices[0])
            _, counts = targets_at(likelihood, batch_shape, y, y.device, first)
            owner, position = counts.cpu().nonzero(as_tuple=True)
            data.append(indices[owner])
            positions.append(position)
        self._data, self._positions = torch.cat(data), torch.cat(positions)
        if not len(self._data):
            raise InputError(NO_TARGET)

    def __len__(self) -> int:
        return len(self._data)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        """See ``Source.fetch``. An example with several positions is read only once."""
        chosen, data = self._data[indices].unique(return_inverse=True)
        positions = self._positions[indices]
        x, y = self._source.fetch(chosen)
        counts = counted(self._likelihood, self._positions_of(y), y).cpu()
        if int(positions.max()) >= counts.shape[1] or not bool(counts[data, positions].all()):
            raise InputError(
                "A position had a target when the data were first read, but has none now. Pad"
                " sequences on the right, and do not use random transforms that move targets."
            )
        data, positions = data.to(y.device), positions.to(y.device)
        return AtPositions(x, data, positions), y.flatten(1, self._dims)[data, positions]

    def _positions_of(self, y: Tensor) -> tuple[int, ...]:
        """Return the shape of the positions, because the length of a sequence may vary by batch."""
        return tuple(y.shape[1:2]) if self._dims == 1 and y.ndim > 1 else self._shape

    def has_the_places_of(self, other: "PositionSource") -> bool:
        """Return whether both sources have targets at the same positions of the same examples."""
        return self is other or (
            torch.equal(self._data, other._data) and torch.equal(self._positions, other._positions)
        )

    def of_data(self, indices: Int[Tensor, " m"]) -> Int[Tensor, " n"]:
        """Return the indices in this source of all positions of the given examples, in order."""
        indices = indices.cpu()
        first = torch.searchsorted(self._data, indices)
        count = torch.searchsorted(self._data, indices, right=True) - first
        start = (first - count.cumsum(0) + count).repeat_interleave(count)
        return start + torch.arange(len(start), device="cpu")


def by_target(source: Source, likelihood: Likelihood, shape: Sequence[int]) -> Source:
    """Return the source itself for outputs (C,), or its ``PositionSource`` for outputs (…, C)."""
    if len(shape) == 1:
        return source
    if source.by_target is None:
        source.by_target = PositionSource(source, likelihood, shape)
    return source.by_target
