"""Random permutations that are computed on demand instead of stored."""

from typing import overload

import torch
from jaxtyping import Int
from torch import Tensor

# Permutations of at most this length are tensors.
WRITTEN = 2**24
_ROUNDS = 6
# Odd multipliers with irregular bits (SplitMix64's, as signed integers).
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


class Permutation:
    """A random permutation of 0 … n − 1, which computes its entries on demand.

    A Feistel network permutes the numbers below 4^b ≥ n. A result of n or more is permuted again
    until it is below n (Black and Rogaway, 2002). Index the permutation like a tensor, with
    integers and slices.

    Args:
        n: Length, below 2^62.
        generator: Source of randomness, used only by the constructor.
    """

    def __init__(self, n: int, generator: torch.Generator) -> None:
        self._n = n
        self._bits = max(1, (n - 1).bit_length() + 1 >> 1)
        keys = torch.randint(2**62, (_ROUNDS,), generator=generator, device="cpu")
        self._keys: list[int] = keys.tolist()

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Int[Tensor, " m"]: ...
    def __getitem__(self, index: int | slice) -> "int | Int[Tensor, ' m']":
        if isinstance(index, int):
            if not 0 <= index < self._n:
                raise IndexError(index)
            return int(self[index : index + 1])
        return self.at(torch.arange(*index.indices(self._n), device="cpu"))

    def at(self, places: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
        """Return the entries at ``places``, which are indices from 0 to n − 1."""
        numbers = self._network(places)
        while bool((outside := numbers >= self._n).any()):
            numbers[outside] = self._network(numbers[outside])
        return numbers

    def _network(self, numbers: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
        mask = (1 << self._bits) - 1
        left, right = numbers >> self._bits, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right, key) & mask)
        return (left << self._bits) | right


def _mixed(numbers: Int[Tensor, " m"], key: int) -> Int[Tensor, " m"]:
    """Return numbers whose low bits depend on all bits of the input, with wraparound."""
    for factor in _MIX:
        numbers = (numbers ^ key) * factor
        numbers = numbers ^ (numbers >> 31)
    return numbers


def permutation(n: int, generator: torch.Generator) -> "Permutation | Int[Tensor, ' n']":
    """Return a random permutation of 0 … n − 1, as a tensor or, for large n, a ``Permutation``."""
    return (
        torch.randperm(n, generator=generator, device="cpu")
        if n <= WRITTEN
        else Permutation(n, generator)
    )
