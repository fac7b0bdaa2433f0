"""The parts that a report is made of, before they become a page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evigrad.plots import Palette, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# For a value that is not there.
NOTHING = "–"


@dataclass(frozen=True)
class Drawing:
    """A figure and what it says.

    Attributes:
        name: Of its file, without the ending.
        title: In words, for whoever cannot see it.
        sentence: What one sees.
        make: Draws it in given colours.
    """

    name: str
    title: str
    sentence: str
    make: "Callable[[Palette], Figure]"


@dataclass(frozen=True)
class Section:
    """A heading with figures.

    Attributes:
        title: The heading.
        drawings: The figures.
        notes: Sentences in place of figures that there are not.
    """

    title: str
    drawings: Sequence[Drawing]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """Words and numbers in rows.

    Attributes:
        title: The heading.
        head: Above the columns.
        rows: Of as many cells.
        note: A sentence below.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def show(value: object, factor: float = 1.0, digits: int = 0) -> str:
    """Any value as a reader wants it.

    Args:
        value: A number, text, or a list of them; None and numbers that are not finite are nothing.
        factor: Of a number.
        digits: Behind the point; 0 shows three significant ones.

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
    """Parts of a sentence, one after the other.

    Args:
        parts: One at least.

    Returns:
        As ``a, b and c``.
    """
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
