"""Figures of training runs, and what all figures have in common: colours, axes, labels.

Every function draws on a ``Figure`` of its own, never through pyplot's global state: it works
without a display, in threads, and leaves the user's figures and settings alone.
"""

import math
from collections.abc import Mapping, Sequence
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
# Points: letters of titles, and of axes' labels and legends.
_LARGE, _SMALL = 11.0, 9.0
# Inches: a row of a legend; what is beside a name in it; what other things than a title or an
# axis' label take of the width and the height; and axes beside which a legend has a place.
_LINE_HEIGHT = 0.2
_HANDLE = 0.75
_SURROUNDINGS = (1.0, 1.1)
_LEAST_WIDTH = 4.5


@dataclass(frozen=True)
class Palette:
    """Colours of a figure.

    Attributes:
        paper: The background.
        ink: Axes and words.
        muted: What should step back.
        grid: Lines that guide the eye.
        lines: Of the data, told apart with every common colour vision deficiency.
        shades: Name of matplotlib's colour map for an order, as that of the layers of a network.
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
# The same hues, lighter.
DARK = Palette(
    paper="#16181d",
    ink="#e6e6e6",
    muted="#a3a8b0",
    grid="#363a42",
    lines=("#56B4E9", "#FF9050", "#2FCF9F", "#EBA3CB", "#F0C63C", "#A9B8FF", "#ffffff"),
    shades="viridis",
)


def new_figure(width: float, height: float, palette: Palette = LIGHT) -> "Figure":
    """An empty figure.

    Args:
        width: Inches.
        height: Inches.
        palette: Its colours.

    Returns:
        The figure.

    Raises:
        ConfigurationError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "Figures need matplotlib: pip install 'evigrad[plots]'."
        ) from error
    return Figure(figsize=(width, height), layout="constrained", facecolor=palette.paper)


def save(figure: "Figure", path: str | Path) -> Path:
    """Write a figure as a PNG for reading on a screen (well below 300 kB).

    Args:
        figure: Any figure.
        path: The file.

    Returns:
        The file.
    """
    figure.savefig(path, dpi=130, format="png")
    return Path(path)


def decorate(axes: "Axes", title: str, label: str, palette: Palette = LIGHT) -> None:
    """Give axes over epochs their title, labels and colours.

    Args:
        axes: Empty axes.
        title: Above them.
        label: Of the vertical axis.
        palette: Colours.
    """
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
    """Numbers such as 0.02 and 30 on a logarithmic axis, also over less than a decade.

    Args:
        axes: With a logarithmic vertical axis.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    subs = (1.0,) if high / low > 1e3 else (1.0, 3.0) if high / low > 30 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def burst_limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Limits of an axis that leave out the first few values of a run.

    They would squeeze the rest into a line.

    Args:
        values: All that is drawn, in any order.

    Returns:
        The limits, with something below them; None where all values fit.
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
    """Name the lines of a figure, which grows by the room that the names take.

    They are below the axes, in as many columns as fit, and a name that is wider than the figure
    has several rows.

    Args:
        figure: With its axes.
        lines: Of each line its name, colour and style.
        palette: Of the figure.
        beside: Whether they are to be at the right, one under the other, where there is room.
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
    """Break a text into lines that are no wider than a length.

    Args:
        text: Any; its own line breaks stay.
        inches: The length.
        size: Of the letters, in points.

    Returns:
        The lines.
    """
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
    """A line for a legend."""
    from matplotlib.lines import Line2D

    # A label with a leading underscore is left out of a legend.
    name = f" {name}" if name.startswith("_") else name
    return Line2D([], [], color=colour, linestyle=dash, linewidth=2, label=words(name))


def words(text: str) -> str:
    """A text that a figure shows as it is.

    Args:
        text: Of the user's: a dollar sign in it does not start a formula.

    Returns:
        The same for matplotlib.
    """
    return text.replace("$", r"\$")


def number(value: int | float) -> str:
    """A number with three digits, without an exponent over eight decades.

    Args:
        value: Any.

    Returns:
        As ``0.0123``, ``45.6``, ``789``, ``1.2e-07``.
    """
    size = abs(value)
    if size == 0 or 1e-4 <= size < 1e4:
        return f"{value:.0f}" if size >= 100 else f"{value:.3g}"
    return f"{value:.1e}"


def series(history: History, column: str) -> tuple[list[float], list[float]]:
    """Epochs and values of a column, where there is a finite value.

    Args:
        history: One row for each epoch.
        column: Name of the value.

    Returns:
        Epochs and values, of the same length.
    """
    pairs = [
        (float(epoch), float(row[column] or 0))
        for row in history
        if _is_known(row.get(column)) and (epoch := row.get("epoch")) is not None
    ]
    return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def errors(history: History, column: str) -> list[float] | None:
    """Standard errors of the values of a column that ``series`` gives.

    Args:
        history: One row for each epoch, with the errors in ``COLUMN_sem``.
        column: Name of the value.

    Returns:
        One for each value; None if one is not known.
    """
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
        histories: Name of a run to its history (``FitResult.history`` or ``read_metrics``). The
            names become the legend.

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
    """The learned prior precisions over the epochs, the highest one at the end named first.

    More than can be told apart are shaded from the first group to the last.

    Args:
        history: Of a run with a learned prior.
        title: Title of the figure.
        width: Inches.
        palette: Colours.

    Returns:
        A figure with logarithmic precisions.

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
    """Write the figures of a command into a folder.

    Args:
        histories: Name of a run to its history.
        folder: An existing folder.
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
    """An order as colours, without the end of the map that is the background's."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps[palette.shades]
    return [to_hex(shades(0.1 + 0.9 * i / (count - 1))) for i in range(count)]


def _check(histories: Mapping[str, History]) -> None:
    if not histories or not all(histories.values()):
        raise InputError("There is no epoch to draw: the history is empty.")
