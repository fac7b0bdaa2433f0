"""The parts that a report is made of, before they become a page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evigrad.plots import Palette, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Stands for a missing value.
NOTHING = "–"


@dataclass(frozen=True)
class Drawing:
    """A figure and its words.

    Attributes:
        name: File name without the ending.
        title: In words, for readers who cannot see the figure.
        sentence: What the figure shows.
        make: Draws it in given colours.
    """

    name: str
    title: str
    sentence: str
    make: "Callable[[Palette], Figure]"


@dataclass(frozen=True)
class Section:
    """A heading with figures, and ``notes``, sentences in place of missing figures."""

    title: str
    drawings: Sequence[Drawing]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """A table: ``head`` above the columns, ``rows`` of as many cells, and a ``note`` below."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def show(value: object, factor: float = 1.0, digits: int = 0) -> str:
    """Any value as a short text.

    Args:
        value: A number, text, or a list of them; None and non-finite numbers give a dash.
        factor: Multiplies a number.
        digits: Decimals; 0 shows three significant digits.

    Returns:
        The text.
    """
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and factor == 1.0:
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, int | float):
        value = factor * value
        if not math.isfinite(value):
            return NOTHING
        text = f"{value:.{digits}f}" if digits else number(value)
        return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {show(part)}" for key, part in value.items()) or NOTHING
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(show, value)) or NOTHING
    return str(value)


def listed(parts: Sequence[str]) -> str:
    """Join one or more parts as ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
