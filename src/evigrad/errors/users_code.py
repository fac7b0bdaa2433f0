"""Calling code that the user wrote, so that an error from it says whose it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from evigrad.errors import EvigradError, InputError

# Of the CPU's allocator, and of libraries that allocate past PyTorch's.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory did not suffice, on whatever device.

    Args:
        error: Any exception.

    Returns:
        True for those of PyTorch's allocators, of Python and of CUDA's libraries.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def raised_in(whose: str) -> Iterator[None]:
    """Make an exception of the user's own code an error that says whose it is.

    Those of evigrad, and those that say that memory did not suffice, pass as they are.

    Args:
        whose: The code and what it was given, the subject of the error's sentence.

    Raises:
        InputError: From any other exception.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, EvigradError) or is_out_of_memory(error):
            raise
        raise InputError(f"{whose} raised {type(error).__name__}: {error}") from error


def called(model: nn.Module, x: Tensor) -> object:
    """What the model returns for a copy of the inputs, which it may change in place.

    Args:
        model: Any module.
        x: Inputs; dim 0 counts the data.

    Returns:
        Whatever it is.

    Raises:
        InputError: If the model raises an exception.
    """
    with raised_in(f"The model, given inputs of shape {tuple(x.shape)} and type {x.dtype},"):
        return model(x.clone())
