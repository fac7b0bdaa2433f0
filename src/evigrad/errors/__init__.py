"""The exceptions and the warning of evigrad, and the wording of a near miss."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from os.path import commonprefix

# Names less alike than this are other names, and a hint to one of them misleads. A slip in one of
# few letters weighs more.
_ALIKE, _ALIKE_IF_SHORT, _SHORT = 0.7, 0.65, 4
# A shorter part is in many names.
_LEAST_PART = 3


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
    best = max(candidates, key=lambda each: _likeness(name, each), default="")
    return f" Did you mean '{best}'?" if _likeness(name, best) else ""


def _likeness(name: str, other: str) -> float:
    """How alike two names are, from 0 to 1; 0 where a slip does not lead from one to the other."""
    # What is in front in both, as the hyphens of options or a folder, says nothing.
    shared = max(commonprefix([name, other]).rfind(mark) for mark in "-/") + 1
    one, two = name[shared:].lower(), other[shared:].lower()
    short, long = sorted((one, two), key=len)
    if sorted(one) == sorted(two):
        return 1.0
    ratio = SequenceMatcher(None, one, two).ratio()
    is_part = len(short) >= _LEAST_PART and short in long
    least = _ALIKE_IF_SHORT if len(long) <= _SHORT else _ALIKE
    return ratio if is_part or (ratio >= least and one[:1] == two[:1]) else 0.0


def listed(names: Sequence[str]) -> str:
    """Names in words, the first five of many.

    Args:
        names: Any number of them.

    Returns:
        As ``'a', 'b'``.
    """
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
