"""Figures of runs, one or many compared, and what all figures share: colours, axes, labels.

Every function draws on a ``Figure`` of its own, never through pyplot's global state: it works
without a display, in threads, and leaves the user's figures and settings alone.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from evigrad.errors import ConfigurationError, InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, int | float | None]]

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
# Size of letters in points: titles; axes' labels and legends.
_LARGE, _SMALL = 11.0, 9.0
# Inches: height of a row of a legend; width of the line beside its name; width and height that a
# figure needs besides title and axis' label; and the least width of axes beside a legend.
_LINE_HEIGHT = 0.2
_HANDLE = 0.75
_SURROUNDINGS = (1.0, 1.1)
_LEAST_WIDTH = 4.5
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MARKER = 6.0  # points
# Nats per datum: how far below the lowest top a clipped panel goes; more where the tops are further
# apart.
_BELOW = 2.0
# Places for a point's name, the best first: its alignment, and its offset in points right and up.
_FAR = (("left", 8, -22), ("right", -8, 14), ("left", 8, 14), ("right", -8, -22), ("left", 12, -33))
_UNDER = (("right", -3, -11), ("left", 3, -11), ("left", 5, 5), ("right", -5, 5), *_FAR)
_BESIDE = (("left", 5, 4), ("left", 5, -11), ("right", -5, 4), ("right", -5, -11), *_FAR)


@dataclass(frozen=True)
class Palette:
    """Colours of a figure.

    Attributes:
        paper: The background.
        ink: Axes and words.
        muted: Less important words and lines.
        grid: Grid lines.
        lines: Lines of data, distinct with every common colour vision deficiency.
        shades: Name of matplotlib's colour map for ordered lines, as of the layers of a network.
    """

    paper: str
    ink: str
    muted: str
    grid: str
    lines: tuple[str, ...]
    shades: str


# Okabe and Ito's colours; their yellow is left out because it is too light for a line on white.
LIGHT = Palette(
    paper="#ffffff",
    ink="#000000",
    muted="#555555",
    grid="#dddddd",
    lines=("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    shades="viridis_r",
)
# The hues of ``LIGHT``, lighter.
DARK = Palette(
    paper="#16181d",
    ink="#e6e6e6",
    muted="#a3a8b0",
    grid="#363a42",
    lines=("#56B4E9", "#FF9050", "#2FCF9F", "#EBA3CB", "#F0C63C", "#A9B8FF", "#ffffff"),
    shades="viridis",
)


def new_figure(width: float, height: float, palette: Palette = LIGHT) -> "Figure":
    """An empty figure, in inches; ConfigurationError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "Figures need matplotlib: pip install 'evigrad[plots]'."
        ) from error
    return Figure(figsize=(width, height), layout="constrained", facecolor=palette.paper)


def save(figure: "Figure", path: str | Path) -> Path:
    """Write a figure as a PNG for a screen (well below 300 kB), and return its path."""
    figure.savefig(path, dpi=130, format="png")
    return Path(path)


def decorate(axes: "Axes", title: str, label: str, palette: Palette = LIGHT) -> None:
    """Give empty axes over epochs their title, the vertical axis' label, and colours."""
    figure: Any = axes.figure
    grid: Any = axes.get_subplotspec()
    rows, columns = grid.get_gridspec().get_geometry()
    width = figure.get_figwidth() / columns - _SURROUNDINGS[0]
    height = figure.get_figheight() / rows - _SURROUNDINGS[1]
    title, label = words(fitted(title, width, _LARGE)), words(fitted(label, height, _SMALL))
    axes.set_title(title, loc="left", fontsize=_LARGE, color=palette.ink)
    axes.set_xlabel("epoch", color=palette.ink)
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(label, fontsize=_SMALL, color=palette.ink)
    axes.set_facecolor(palette.paper)
    axes.tick_params(which="both", labelsize=_SMALL, color=palette.ink, labelcolor=palette.ink)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.ink)
    axes.grid(axis="y", color=palette.grid, linewidth=0.6)
    axes.set_axisbelow(True)


def plain_ticks(axes: "Axes") -> None:
    """Numbers such as 0.02 and 30 on a logarithmic vertical axis, also over less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    subs = (1.0,) if high / low > 1e3 else (1.0, 3.0) if high / low > 30 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def burst_limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Limits of an axis that leave out the first few values of a run, far below all others.

    Args:
        values: All values of the figure, in any order.

    Returns:
        The limits; None where all values fit.
    """
    if len(values) < 8:
        return None
    ordered = sorted(values)
    typical = ordered[len(ordered) // 4]
    spread = ordered[-1] - typical
    if ordered[0] >= typical - 3 * spread:
        return None
    return typical - 2 * spread, ordered[-1] + 0.15 * spread


def add_legend(
    figure: "Figure",
    lines: Sequence[tuple[str, str, Any]],
    palette: Palette = LIGHT,
    beside: bool = False,
) -> None:
    """Name the lines of a figure below its axes, and make the figure as much higher.

    Names are in as many columns as fit; one wider than the figure has several rows.

    Args:
        figure: A figure with its axes.
        lines: Name, colour and style of each line.
        palette: Colours of the figure.
        beside: Whether to put the names at the right, one below the other, if there is room.
    """
    width, height = figure.get_size_inches()
    longest = max(_inches(name, _SMALL) for name, _, _ in lines) + _HANDLE
    beside = beside and width - longest >= _LEAST_WIDTH
    columns = 1 if beside else max(1, min(4, int(width / longest)))
    names = [fitted(name, width - _HANDLE, _SMALL) for name, _, _ in lines]
    room = _LINE_HEIGHT * sum(1 + name.count("\n") for name in names) / columns
    figure.set_figheight(max(height, room + 0.3) if beside else height + room + 0.2)
    figure.legend(
        handles=[
            _handle(name, colour, dash)
            for name, (_, colour, dash) in zip(names, lines, strict=True)
        ],
        loc="outside right upper" if beside else "outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=_SMALL,
        labelcolor=palette.ink,
    )


def fitted(text: str, inches: float, size: float) -> str:
    """Break a text, in letters of ``size`` points, into lines no wider than ``inches``."""
    found: list[str] = []
    for part in text.split("\n"):
        lines, columns = [part], len(part)
        while columns > 1 and any(_inches(line, size) > inches for line in lines):
            columns -= 1
            lines = wrap(part, columns)
        found += lines
    return "\n".join(found)


def _inches(text: str, size: float) -> float:
    """The width of a line of text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72


def _handle(name: str, colour: str, dash: Any) -> Any:
    from matplotlib.lines import Line2D

    # matplotlib leaves labels with a leading underscore out of a legend.
    name = f" {name}" if name.startswith("_") else name
    return Line2D([], [], color=colour, linestyle=dash, linewidth=2, label=words(name))


def words(text: str) -> str:
    """A user's text escaped for matplotlib: a dollar sign in it does not start a formula."""
    return text.replace("$", r"\$")


def number(value: int | float) -> str:
    """A number with three digits, as ``0.0123``, ``45.6``, ``789`` or ``1.2e-07``."""
    size = abs(value)
    if size == 0 or 1e-4 <= size < 1e4:
        return f"{value:.0f}" if size >= 100 else f"{value:.3g}"
    return f"{value:.1e}"


def series(history: History, column: str) -> tuple[list[float], list[float]]:
    """Epochs and values of a column, both only where its value is finite."""
    pairs = [
        (float(epoch), float(row[column] or 0))
        for row in history
        if _is_known(row.get(column)) and (epoch := row.get("epoch")) is not None
    ]
    return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def errors(history: History, column: str) -> list[float] | None:
    """Standard errors ``COLUMN_sem`` of the values of ``series``; None if one is unknown."""
    found = [
        row.get(f"{column}_sem")
        for row in history
        if _is_known(row.get(column)) and row.get("epoch") is not None
    ]
    known = [float(error) for error in found if error is not None and math.isfinite(error)]
    return known if known and len(known) == len(found) else None


def _is_known(value: int | float | None) -> bool:
    return value is not None and math.isfinite(value)


# ------------------------------------------------------------ figures of a training run

# More lines than this cannot be told apart.
_MAX_LABELS = 24


def learning_curves(histories: Mapping[str, History]) -> "Figure":
    """Training loss, log evidence and test log likelihood over the epochs.

    Args:
        histories: Name of a run, for the legend, to its history (``FitResult.history`` or
            ``read_metrics``).

    Returns:
        A figure with one panel for each quantity that was recorded.

    Raises:
        InputError: If there is no history, or one is empty.
        ConfigurationError: If matplotlib is not installed.
    """
    _check(histories)
    panels = [
        ("loss", "training loss", "mean NLL + prior term\n(nats per datum)"),
        ("log_evidence", "log evidence", "estimate while training\n(nats per datum)"),
        ("test_log_likelihood", "test log likelihood", "nats per datum"),
    ]
    panels = [panel for panel in panels if any(series(h, panel[0])[0] for h in histories.values())]
    figure = new_figure(3.6 * len(panels) + 0.4, 3.1)
    for position, (column, title, unit) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        decorate(axes, title, unit)
        axes.set_xlim(0, max(len(history) for history in histories.values()))
        drawn = []
        for place, (name, history) in enumerate(histories.items()):
            epochs, values = series(history, column)
            if not epochs:
                continue
            sparse = len(epochs) <= 40 and len(epochs) < len(history)
            (line,) = axes.plot(
                epochs,
                values,
                label=name,
                color=LIGHT.lines[place % len(LIGHT.lines)],
                linewidth=1.6,
                marker="o" if sparse else None,
                markersize=3,
            )
            drawn += values
            sems = errors(history, column)
            if sems is not None:
                lower = [v - e for v, e in zip(values, sems, strict=True)]
                upper = [v + e for v, e in zip(values, sems, strict=True)]
                axes.fill_between(
                    epochs, lower, upper, color=line.get_color(), alpha=0.2, linewidth=0
                )
        if column == "loss" and min(drawn, default=0.0) > 0:  # a density's loss can be negative
            axes.set_yscale("log")
            plain_ticks(axes)
        elif limits := burst_limits(drawn):
            axes.set_ylim(*limits)
    colours = [LIGHT.lines[place % len(LIGHT.lines)] for place in range(len(histories))]
    add_legend(figure, [(*named, "-") for named in zip(histories, colours, strict=True)])
    return figure


def precision_paths(
    history: History,
    title: str = "prior precision of each layer",
    width: float = 7.2,
    palette: Palette = LIGHT,
) -> "Figure":
    """Learned prior precisions over the epochs; the legend begins with the highest one at the end.

    More lines than can be told apart have shades in the order of the groups.

    Args:
        history: History of a run with a learned prior.
        title: Title of the figure.
        width: Inches.
        palette: Colours.

    Returns:
        A figure with a logarithmic axis of precisions.

    Raises:
        InputError: If the history is empty or has no precisions.
        ConfigurationError: If matplotlib is not installed.
    """
    _check({"": history})
    prefix = "precision/"
    names = [name for name in history[0] if name.startswith(prefix)]
    if not names:
        raise InputError("The history has no column precision/...: it is not one of a run.")
    many = len(names) > _MAX_LABELS
    figure = new_figure(width, 4.0, palette)
    axes = figure.add_subplot()
    title = f"{title} ({len(names)} groups)" if many else title
    decorate(axes, title, "prior precision (1 / variance of the weights)", palette)
    axes.set_yscale("log")
    lines = []
    shades = _shades(len(names), palette) if many else palette.lines
    for position, name in enumerate(names):
        epochs, values = series(history, name)
        if not epochs:
            continue
        colour = shades[position % len(shades)]
        dash = DASHES[position // len(shades) % len(DASHES)]
        axes.plot(
            epochs,
            values,
            color=colour,
            linestyle=dash,
            linewidth=0.8 if many else 1.6,
            drawstyle="steps-post",
        )
        lines.append((values[-1], name.removeprefix(prefix), colour, dash))
    axes.margins(x=0)
    plain_ticks(axes)
    if many:
        ends = (("first", *lines[0]), ("last", *lines[-1]))
        named = [(f"{end}: {name}", colour, dash) for end, _, name, colour, dash in ends]
    else:
        lines.sort(key=lambda line: line[0], reverse=True)
        named = [(f"{number(value)}  {name}", *style) for value, name, *style in lines]
    if named:
        add_legend(figure, named, palette, beside=not many)
    return figure


def save_all(
    histories: Mapping[str, History], folder: str | Path, learned: str | None = None
) -> list[Path]:
    """Write the figures of a command into an existing folder.

    Args:
        histories: Name of a run to its history.
        folder: The folder.
        learned: Name of the run whose precisions are shown; None shows none.

    Returns:
        The files.
    """
    folder = Path(folder)
    files = [save(learning_curves(histories), folder / "learning_curves.png")]
    if learned is not None:
        title = f"prior precision of each layer, learned by {learned}"
        paths = precision_paths(histories[learned], title)
        files.append(save(paths, folder / "precisions.png"))
    return files


def _shades(count: int, palette: Palette) -> list[str]:
    """Colours for an order, without the end of the map that resembles the background."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps[palette.shades]
    return [to_hex(shades(0.1 + 0.9 * i / max(count - 1, 1))) for i in range(count)]


def _check(histories: Mapping[str, History]) -> None:
    if not histories or not all(histories.values()):
        raise InputError("There is no epoch to draw: the history is empty.")


@dataclass(frozen=True)
class Curve:
    """A line of a panel.

    Attributes:
        label: Its name in the legend; a name has the same look in all panels.
        x: Positions.
        y: Values there; non-finite ones are left out.
        error: Standard errors of the values, drawn as a band; empty for none.
    """

    label: str
    x: Sequence[float | int]
    y: Sequence[float | int]
    error: Sequence[float | int] = ()


@dataclass(frozen=True)
class Panel:
    """Axes with curves.

    Attributes:
        title: Title of the axes.
        across: Label of the horizontal axis.
        along: Label of the vertical axis, with its unit.
        curves: The curves.
        log: Whether the horizontal axis is logarithmic.
        clipped: Whether to leave out what lies so far below the tops that it flattens the rest.
    """

    title: str
    across: str
    along: str
    curves: Sequence[Curve]
    log: bool = False
    clipped: bool = False


@dataclass(frozen=True)
class Point:
    """A point of a figure of two quantities.

    Attributes:
        group: Points of a group look alike.
        name: Its name within the group.
        x: First coordinate.
        y: Second coordinate.
        x_error: Standard error of the first; NaN where it is not known.
        y_error: Standard error of the second.
    """

    group: str
    name: str
    x: float
    y: float
    x_error: float = math.nan
    y_error: float = math.nan


def legend_order(
    labels: Iterable[str], reference: Sequence[str] = (), ordered: bool = False
) -> list[str]:
    """Labels, each once, in the order of a legend.

    Args:
        labels: Labels as they come, maybe repeated.
        reference: Labels that the others are compared with, which come last.
        ordered: Whether to sort the others by the numbers in them; one without comes last.

    Returns:
        The labels.
    """
    found = list(dict.fromkeys(labels))
    others = [label for label in found if label not in reference]
    if ordered:
        others.sort(key=lambda label: [*map(int, re.findall(r"\d+", label)), math.inf])
    return others + [label for label in found if label in reference]


def panels(
    rows: Sequence[Sequence[Panel]],
    *,
    reference: Sequence[str] = (),
    ordered: bool = False,
    size: tuple[float, float] = (4.0, 3.1),
    shared: bool = False,
    markers: bool = False,
    mark_tops: bool = False,
) -> "Figure":
    """A grid of panels with one legend.

    Args:
        rows: The panels of each row, from the top.
        reference: Labels in black.
        ordered: Whether the others are in an order, as sizes are, and get shades instead of
            colours.
        size: Width and height of a panel, inches.
        shared: Whether all panels have one horizontal scale, and those of a row one vertical.
        markers: Whether the values have markers.
        mark_tops: Whether the highest value of each curve has a dot.

    Returns:
        The figure.

    Raises:
        ConfigurationError: If matplotlib is not installed.
    """
    columns = max(map(len, rows))
    figure = new_figure(size[0] * columns + 1.4, size[1] * len(rows))
    drawn = [curve.label for row in rows for panel in row for curve in panel.curves]
    labels = legend_order(drawn, reference, ordered)
    looks = _styles(labels, reference, ordered)
    handles: dict[str, Any] = {}
    first: Axes | None = None
    for down, row in enumerate(rows):
        beside: Axes | None = None
        for place, panel in enumerate(row, start=down * columns + 1):
            axes = figure.add_subplot(len(rows), columns, place, sharex=first, sharey=beside)
            if shared:
                first, beside = first or axes, beside or axes
            _frame(axes, panel.title, panel.across, panel.along)
            if panel.log:
                axes.set_xscale("log")
            for curve in panel.curves:
                look = {**looks[curve.label], **({} if markers else {"marker": ""})}
                line = _draw_curve(axes, curve, look, mark_tops)
                handles.setdefault(curve.label, line)
            axes.margins(x=0.02 if shared else 0)
            if panel.clipped:
                _leave_out_depths(
                    axes, [c for p in row for c in p.curves] if shared else panel.curves
                )
    figure.legend(
        handles=[handles[label] for label in labels],
        labels=[words(label) for label in labels],
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    return figure


def points(
    found: Sequence[Point],
    title: str,
    across: str,
    along: str,
    *,
    reference: Sequence[str] = (),
    frontier: bool = False,
) -> "Figure":
    """Points of two quantities with errors both ways.

    Args:
        found: The points; a line joins those of a group in their order.
        title: Title of the figure.
        across: Label of the horizontal axis.
        along: Label of the vertical axis.
        reference: Groups in black.
        frontier: Whether small is good both ways, as of times and gaps. Then the horizontal axis
            is logarithmic, points of a group are joined, and the frontier is drawn, whose points
            alone are named.

    Returns:
        The figure.

    Raises:
        ConfigurationError: If matplotlib is not installed.
    """
    figure = new_figure(7.2, 4.4)
    axes = figure.add_subplot()
    _frame(axes, title, across, along)
    groups = list(dict.fromkeys(point.group for point in found))
    looks = _styles(groups, reference, False)
    for group in groups:
        of_group = [point for point in found if point.group == group]
        joined = frontier and len(of_group) > 1
        axes.errorbar(
            [point.x for point in of_group],
            [point.y for point in of_group],
            xerr=[_finite(point.x_error) for point in of_group],
            yerr=[_finite(point.y_error) for point in of_group],
            label=words(group),
            markersize=_MARKER,
            linewidth=0.9,
            elinewidth=0.9,
            **{**looks[group], "linestyle": ":" if joined else ""},
        )
    named = list(found)
    if frontier:
        axes.set_xscale("log")
        named = [found[i] for i in pareto_front([(point.x, point.y) for point in found])]
        x, y = [point.x for point in named], [point.y for point in named]
        look: dict[str, Any] = {"color": LIGHT.muted, "linewidth": 3.5, "alpha": 0.25, "zorder": 0}
        axes.step(x, y, where="post", label="frontier", **look)
    axes.margins(0.1)
    times = {point.x for point in found}
    if frontier and len(times) == 1:  # some limits of matplotlib's own would be equal
        axes.set_autoscalex_on(False)
        axes.set_xlim(min(times) / 2, min(times) * 2)
    if len(groups) > 1 or frontier:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    _name_points(figure, axes, named, _UNDER if frontier else _BESIDE)
    return figure


def pareto_front(coordinates: Sequence[tuple[float, float]]) -> list[int]:
    """Positions, by first coordinate, of points that no other beats in both (small is good)."""
    front: list[int] = []
    for i in sorted(range(len(coordinates)), key=lambda i: coordinates[i]):
        if not front or coordinates[i][1] < coordinates[front[-1]][1]:
            front.append(i)
    return front


def _styles(
    names: Sequence[str], reference: Sequence[str], ordered: bool
) -> dict[str, dict[str, Any]]:
    """Colour, dash and marker of each name, distinct in print and for the colour-blind."""
    others = [name for name in names if name not in reference]
    # Only the names that others are compared with are drawn in ink.
    plain = [colour for colour in LIGHT.lines if colour != LIGHT.ink]
    colours = _shades(len(others), LIGHT) if ordered else plain
    found: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(others):
        turn = place // len(colours) if ordered else place
        found[name] = {"color": colours[place % len(colours)], "linestyle": turn, "marker": place}
    for place, name in enumerate(name for name in names if name in reference):
        found[name] = {"color": LIGHT.ink, "linestyle": place, "marker": place}
    for look in found.values():
        look["linestyle"] = DASHES[look["linestyle"] % len(DASHES)]
        look["marker"] = _MARKERS[look["marker"] % len(_MARKERS)]
    return found


def _frame(axes: "Axes", title: str, across: str, along: str) -> None:
    axes.set_title(words(title), loc="left", fontsize=11)
    axes.set_xlabel(words(across), fontsize=9)
    axes.set_ylabel(words(along), fontsize=9)
    axes.tick_params(which="both", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=LIGHT.grid, linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_curve(axes: "Axes", curve: Curve, look: dict[str, Any], mark_top: bool) -> Any:
    kept = [i for i, value in enumerate(curve.y) if math.isfinite(value)]
    x, y = [curve.x[i] for i in kept], [curve.y[i] for i in kept]
    (line,) = axes.plot(x, y, linewidth=1.6, markersize=4.5, **look)
    errors = [_finite(curve.error[i]) for i in kept] if curve.error else []
    if any(errors):
        low = [value - error for value, error in zip(y, errors, strict=True)]
        high = [value + error for value, error in zip(y, errors, strict=True)]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
    if mark_top and y:
        top = max(range(len(y)), key=y.__getitem__)
        dot = {"color": line.get_color(), "marker": "o", "markersize": 4.5}
        axes.plot(x[top], y[top], clip_on=False, **dot)
    return line


def _leave_out_depths(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Cut the axis above bounds of bad hyperparameters, which would flatten the rest."""
    finite = [[value for value in curve.y if math.isfinite(value)] for curve in curves]
    tops = [max(values) for values in finite if values]
    if not tops:
        return
    lowest = min(value for values in finite for value in values)
    bottom = max(lowest, min(tops) - max(_BELOW, max(tops) - min(tops)))
    margin = 0.05 * (max(tops) - bottom)
    if margin > 0:
        axes.set_ylim(bottom - margin, max(tops) + margin)


def _name_points(
    figure: "Figure", axes: "Axes", named: Sequence[Point], places: Sequence[tuple[str, int, int]]
) -> None:
    """Name points, each in the first place where the name covers no other name and no point."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # now it is known where everything lies
    half = _MARKER / 2 * figure.dpi / 72
    at = axes.transData.transform([(point.x, point.y) for point in named])
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in at]
    for point in named:
        for attempt, (side, right, up) in enumerate(places, start=1):
            text = axes.annotate(
                words(point.name),
                (point.x, point.y),
                (right, up),
                textcoords="offset points",
                fontsize=8,
                ha=side,
                color=LIGHT.muted,
            )
            box = text.get_window_extent()
            if attempt == len(places) or not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
