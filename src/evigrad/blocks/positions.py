"""Data whose outputs have several positions, counted by their targets."""

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
    """The positions of data that have a target, each as a datum of its own, datum by datum.

    All targets are read once, to find them.

    Args:
        source: The data.
        likelihood: Says which targets count.
        shape: Shape of a datum's outputs, (…, C), for some data.

    Raises:
        InputError: If targets do not fit, no position has one, or later another one has.
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
            of_datum, position = counts.cpu().nonzero(as_tuple=True)
            data.append(indices[of_datum])
            positions.append(position)
        self._data, self._positions = torch.cat(data), torch.cat(positions)
        if not len(self._data):
            raise InputError(NO_TARGET)

    def __len__(self) -> int:
        return len(self._data)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        """See ``Source.fetch``; whole data are read once for all of their positions."""
        chosen, data = self._data[indices].unique(return_inverse=True)
        positions = self._positions[indices]
        x, y = self._source.fetch(chosen)
        counts = counted(self._likelihood, self._positions_of(y), y).cpu()
        if int(positions.max()) >= counts.shape[1] or not bool(counts[data, positions].all()):
            raise InputError(
                "A position that had a target has none when the datum is read again: pad on the"
                " right, and draw nothing that moves targets."
            )
        data, positions = data.to(y.device), positions.to(y.device)
        return AtPositions(x, data, positions), y.flatten(1, self._dims)[data, positions]

    def _positions_of(self, y: Tensor) -> tuple[int, ...]:
        """The shape of positions: sequences may have another length in every batch."""
        return tuple(y.shape[1:2]) if self._dims == 1 and y.ndim > 1 else self._shape

    def has_the_places_of(self, other: "PositionSource") -> bool:
        """Whether both have targets at the same positions of the same examples."""
        return self is other or (
            torch.equal(self._data, other._data) and torch.equal(self._positions, other._positions)
        )

    def of_data(self, indices: Int[Tensor, " m"]) -> Int[Tensor, " n"]:
        """The numbers of the positions of whole data, datum by datum."""
        indices = indices.cpu()
        first = torch.searchsorted(self._data, indices)
        count = torch.searchsorted(self._data, indices, right=True) - first
        start = (first - count.cumsum(0) + count).repeat_interleave(count)
        return start + torch.arange(len(start), device="cpu")


def by_target(source: Source, likelihood: Likelihood, shape: Sequence[int]) -> Source:
    """The data, or each position with a target, where outputs have the shape (…, C)."""
    if len(shape) == 1:
        return source
    if source.by_target is None:
        source.by_target = PositionSource(source, likelihood, shape)
    return source.by_target
