"""Shared elements of all figures: colors, axes, lines with their errors, legends, and words."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from evigrad.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
# Sizes of letters in points: titles; axes' labels and legends.
_LARGE, SMALL = 11.0, 9.0
# Inches: height of a row of a legend; width of the line next to its name; width and height that a
# figure needs besides title and axis label; and the smallest width of axes next to a legend.
_LINE_HEIGHT = 0.2
_HANDLE = 0.75
_SURROUNDINGS = (1.0, 1.1)
_LEAST_WIDTH = 4.5


@dataclass(frozen=True)
class Palette:
    """Colors of a figure.

    Attributes:
        paper: Background.
        ink: Axes and words.
        muted: Less important words and lines.
        grid: Grid lines.
        lines: Lines of data. People with common color vision deficiencies can distinguish them.
        shades: Name of matplotlib's color map for ordered lines, such as the layers of a network.
    """

    paper: str
    ink: str
    muted: str
    grid: str
    lines: tuple[str, ...]
    shades: str


# Okabe and Ito's colors, with a brown instead of their yellow, which is too light for a line on
# white.
LIGHT = Palette(
    paper="#ffffff",
    ink="#000000",
    muted="#555555",
    grid="#dddddd",
    lines=("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A4B1E", "#000000"),
    shades="viridis_r",
)


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure, with width and height in inches.

    Raises:
        ConfigurationError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "Figures need matplotlib, which is not installed. Run: pip install 'evigrad[plots]'."
        ) from error
    return Figure(figsize=(width, height), layout="constrained", facecolor=LIGHT.paper)


def save(figure: "Figure", path: str | Path) -> Path:
    """Save a figure as a PNG file for a screen (well below 300 kB), and return its path."""
    figure.savefig(path, dpi=130, format="png")
    return Path(path)


def shades_of(count: int) -> list[str]:
    """Return ``count`` ordered colors that differ from the background."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps[LIGHT.shades]
    return [to_hex(shades(0.1 + 0.9 * i / max(count - 1, 1))) for i in range(count)]


def decorate(axes: "Axes", title: str, across: str, along: str, beside: float = 0.0) -> None:
    """Set the title, axis labels (``across``, ``along``) and colors of axes.

    A long title is broken into lines that leave ``beside`` inches to the right of it.
    """
    figure: Any = axes.figure
    grid: Any = axes.get_subplotspec()
    rows, columns = grid.get_gridspec().get_geometry()
    width = (figure.get_figwidth() - beside) / columns - _SURROUNDINGS[0]
    height = figure.get_figheight() / rows - _SURROUNDINGS[1]
    colors: dict[str, Any] = {"fontsize": SMALL, "color": LIGHT.ink}
    axes.set_title(
        words(fitted(title, width, _LARGE)), loc="left", fontsize=_LARGE, color=LIGHT.ink
    )
    axes.set_xlabel(words(across), **colors)
    axes.set_ylabel(words(fitted(along, height, SMALL)), **colors)
    axes.set_facecolor(LIGHT.paper)
    axes.tick_params(which="both", labelsize=SMALL, color=LIGHT.ink, labelcolor=LIGHT.ink)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT.ink)
    axes.grid(color=LIGHT.grid, linewidth=0.6)
    axes.set_axisbelow(True)


def draw_line(
    axes: "Axes",
    x: Sequence[float | int],
    y: Sequence[float | int],
    errors: Sequence[float],
    **look: Any,
) -> Any:
    """Draw and return a line, with a band of its standard errors if they are known."""
    (line,) = axes.plot(x, y, **{"linewidth": 1.6, "markersize": 4.0, **look})
    if any(errors):
        band: Any = (np.subtract(y, errors), np.add(y, errors))
        axes.fill_between(x, *band, color=line.get_color(), alpha=0.2, linewidth=0)
    return line


def plain_ticks(axis: "Axis") -> None:
    """Label a logarithmic axis with numbers such as 0.02 and 30, even over less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs_by_span = (
        (1e3, (1.0,)),
        (30, (1.0, 3.0)),
        (10, (1.0, 2.0, 5.0)),
        (0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)),
    )
    subs = next(subs for least, subs in subs_by_span if high / low > least)
    axis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def burst_limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Return axis limits that omit a few values far below the rest, or None to show all values."""
    if len(values) < 8:
        return None
    ordered = sorted(values)
    typical = ordered[len(ordered) // 4]
    spread = ordered[-1] - typical
    if not spread or ordered[0] >= typical - 3 * spread:
        return None
    return typical - 2 * spread, ordered[-1] + 0.15 * spread


def add_legend(
    figure: "Figure",
    lines: Sequence[tuple[str, str, Any]],
    beside: bool = False,
) -> float:
    """Add a legend of the lines (name, color, style) below the axes, and enlarge the figure for it.

    The legend has as many columns as fit. A name wider than the figure is broken into several
    lines. If ``beside`` is set and there is room, the legend is a single column to the right of the
    axes.

    Returns:
        Width in inches of a legend to the right of the axes, or 0.
    """
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches()
    longest = max(_inches(name, SMALL) for name, _, _ in lines) + _HANDLE
    beside = beside and width - longest >= _LEAST_WIDTH
    columns = 1 if beside else max(1, min(4, int(width / longest)))
    handles, rows = [], 0
    for name, color, dash in lines:
        label = words(fitted(name, width - _HANDLE, SMALL))
        rows += 1 + label.count("\n")
        # matplotlib omits labels with a leading underscore from a legend.
        label = f" {label}" if label.startswith("_") else label
        handles.append(Line2D([], [], color=color, linestyle=dash, linewidth=2, label=label))
    room = _LINE_HEIGHT * rows / columns
    figure.set_figheight(max(height, room + 0.3) if beside else height + room + 0.2)
    figure.legend(
        handles=handles,
        loc="outside right upper" if beside else "outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=SMALL,
        labelcolor=LIGHT.ink,
    )
    return longest if beside else 0.0


def name_points(
    axes: "Axes",
    points: Sequence[tuple[str, float, float, str]],
    places: Sequence[tuple[str, int, int]],
    half: float,
    *,
    occupied: Iterable["Bbox"] = (),
    fits: Callable[["Bbox"], bool] = lambda box: True,
    **look: Any,
) -> None:
    """Write the name of each point in the first free place, or in the last place if none is free.

    Args:
        axes: Axes with a final layout. Call ``figure.draw_without_rendering()`` first.
        points: Name, x, y and color of the name of each point.
        places: Horizontal alignment of a name, and its offsets to the right and up in points (1/72
            inch), for each place next to a point.
        half: Half of the size of a point, in pixels. Names do not overlap the points.
        occupied: Other boxes, in pixels, that names must not overlap.
        fits: Function that returns whether a name may be placed in a box.
        look: Other keyword arguments of ``Axes.annotate``.
    """
    from matplotlib.transforms import Bbox

    centers = axes.transData.transform([(x, y) for _, x, y, _ in points])
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in centers]
    taken += occupied
    for name, x, y, color in points:
        for attempt, (side, right, up) in enumerate(places, start=1):
            text = axes.annotate(
                name,
                (x, y),
                (right, up),
                textcoords="offset points",
                fontsize=8,
                ha=side,
                color=color,
                **look,
            )
            box = text.get_window_extent()
            is_free = not any(box.overlaps(other) for other in taken)
            if attempt == len(places) or (is_free and fits(box)):
                taken.append(box)
                break
            text.remove()


def fitted(text: str, inches: float, size: float) -> str:
    """Return a text broken into lines no wider than ``inches``, in letters of ``size`` points."""
    all_lines: list[str] = []
    for part in text.split("\n"):
        lines, columns = [part], len(part)
        while columns > 1 and any(_inches(line, size) > inches for line in lines):
            columns -= 1
            lines = wrap(part, columns)
        all_lines += lines
    return "\n".join(all_lines)


def _inches(text: str, size: float) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72


def words(text: str) -> str:
    """Return a user's text escaped for matplotlib, so that dollar signs do not start a formula."""
    return text.replace("$", r"\$")


def with_minus(text: str) -> str:
    """Return a text with minus signs instead of hyphens before negative numbers."""
    return re.sub(r"(?<![\w.)−-])-(?=\d)", "−", text)


def number(value: int | float) -> str:
    """Return a number as text of about three digits, such as ``0.0123``, ``789`` or ``1.2e-07``."""
    size = abs(value)
    if size == 0 or 1e-4 <= size < 1e4:
        return f"{value:.0f}" if size >= 100 else f"{value:.3g}"
    return f"{value:.1e}"
