"""One piece of memory for rows that are looked at one parameter after the other.

Fresh memory of the size of a layer's rows costs as much time as writing them: the system hands it
out page by page, and clears it. Who needs one parameter's rows at a time lends memory for them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

import torch
from torch import Tensor

_lent: ContextVar[Tensor | None] = ContextVar("lent", default=None)


@contextmanager
def lent(memory: Tensor) -> Iterator[None]:
    """Say that one tensor that is made inside may lie in this memory.

    Args:
        memory: A vector of any length.
    """
    token = _lent.set(memory)
    try:
        yield
    finally:
        _lent.reset(token)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised tensor; the first that fits takes the memory that was lent.

    Args:
        shape: Of the tensor.
        like: Gives type and device.

    Returns:
        The tensor.
    """
    memory, size = _lent.get(), prod(shape)
    unlike = memory is None or (memory.dtype, memory.device) != (like.dtype, like.device)
    if memory is None or unlike or memory.numel() < size:
        return torch.empty(*shape, dtype=like.dtype, device=like.device)
    _lent.set(None)
    return memory[:size].view(*shape)
