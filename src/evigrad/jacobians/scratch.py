"""One piece of memory for rows that are read one parameter after the other.

Fresh memory of the size of a layer's rows costs as much time as writing them: the system hands it
out page by page, and clears it. A caller that reads one parameter's rows at a time lends memory.
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
    """Let one tensor that is made inside lie in this memory, a vector of any length."""
    token = _lent.set(memory)
    try:
        yield
    finally:
        _lent.reset(token)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised tensor like the other; the first that fits takes the lent memory."""
    memory, size = _lent.get(), prod(shape)
    unlike = memory is None or (memory.dtype, memory.device) != (like.dtype, like.device)
    if memory is None or unlike or memory.numel() < size:
        return torch.empty(*shape, dtype=like.dtype, device=like.device)
    _lent.set(None)
    return memory[:size].view(*shape)
