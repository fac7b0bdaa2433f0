"""Calling code that the user wrote, so that an error from it says whose it is."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from evigrad.errors import EvigradError, InputError
from evigrad.out_of_memory import is_out_of_memory


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
