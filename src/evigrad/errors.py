"""The exceptions and the warning of evigrad, and the wording of a near miss."""

from collections.abc import Iterable
from difflib import get_close_matches


class EvigradError(Exception):
    """Base of every error that evigrad raises on purpose; its text says how to mend the cause."""


class InputError(EvigradError, ValueError):
    """Data that cannot be used: wrong shapes, labels out of range, NaN, too few or too many."""


class ConfigurationError(EvigradError, ValueError):
    """A setting that does not exist or does not fit the others."""


class MemoryBudgetError(EvigradError, MemoryError):
    """A structure whose predicted memory exceeds what is free."""


class NotPositiveDefiniteError(EvigradError, ArithmeticError):
    """A matrix whose log-determinant was asked for is not positive definite."""


class EvigradWarning(UserWarning):
    """Something that the user should know, but that does not stop the computation."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Words for the closest valid spelling of a name.

    Args:
        name: What was asked for.
        candidates: What exists.

    Returns:
        ``" Did you mean 'x'?"``, or an empty string where nothing is close.
    """
    close = get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
