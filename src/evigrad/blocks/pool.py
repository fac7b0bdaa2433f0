"""The pool, which contains the examples that training evaluates repeatedly.

The pool of a small data set contains all examples, and the pool of a large one contains a random
subset. Anchors are chosen from the pool, and training metrics are computed on the pool.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from evigrad.blocks.sources import Source, Subset
from evigrad.core.permutation import Permutation
from evigrad.errors import InputError

# Data sets of more than MANY examples use a pool of POOL examples. To evaluate all of them would
# take as long as an epoch, and their scores would need more memory than the network.
MANY, POOL = 2**16, 2**14


class Pool:
    """A fixed subset of the N examples in a data set.

    Each member has a place 0, 1, ... in the pool and a position in the data set. If N is small, the
    pool contains all examples. Otherwise it contains a random subset, which depends only on N.

    Args:
        num_data: Number of examples in the data set, N.

    Attributes:
        num_data: Number of examples in the data set, N.
        is_all: Whether the pool contains all examples. If so, places and positions are equal.
    """

    def __init__(self, num_data: int) -> None:
        self.num_data = num_data
        self.is_all = num_data <= MANY
        if not self.is_all:
            self._order = Permutation(num_data, torch.Generator().manual_seed(0))
            self._data = self._order[:POOL]
            self._sorted, self._places = self._data.sort()

    def __len__(self) -> int:
        return self.num_data if self.is_all else POOL

    def data(self, places: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
        """Return the positions in the data set of the members at these places."""
        return places if self.is_all else self._data[places]

    def others(self, places: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
        """Return the positions in the data set of examples outside the pool.

        These examples are numbered 0, 1, ..., and ``places`` contains the numbers of some of them.
        """
        return self._order.at(POOL + places)

    def find(self, data: Int[Tensor, " m"]) -> tuple[Bool[Tensor, " m"], Int[Tensor, " k"]]:
        """Return a mask of the examples that are in the pool, and the places of these examples.

        ``data`` contains the positions of the examples in the data set.

        Raises:
            InputError: If a position is negative, or N or more.
        """
        if len(data) and not 0 <= int(data.min()) <= int(data.max()) < self.num_data:
            raise InputError(
                f"Positions must be between 0 and {self.num_data - 1}, got {int(data.min())} to"
                f" {int(data.max())}. Pass the positions of the examples in the data set."
            )
        if self.is_all:
            return torch.ones(len(data), dtype=torch.bool, device="cpu"), data
        near = torch.searchsorted(self._sorted, data).clamp(max=POOL - 1)
        is_member = self._sorted[near] == data
        return is_member, self._places[near[is_member]]

    def restrict(self, data: Int[Tensor, " m"], values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places and the ``values`` of the given examples that are in the pool."""
        is_member, places = self.find(data)
        return places, values if self.is_all else values[is_member.to(values.device)]

    def of(self, source: Source) -> Source:
        """Return a source of the examples in the pool, which are read by place."""
        return source if self.is_all else Subset(source, self._data)
