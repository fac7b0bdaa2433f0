"""Figures of training runs.

Every function draws on a ``Figure`` of its own, never through pyplot's global state: it works
without a display, in threads, and leaves the user's figures and settings alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from evigrad.drawing import (
    DASHES,
    LIGHT,
    History,
    Palette,
    add_legend,
    burst_limits,
    decorate,
    errors,
    new_figure,
    number,
    plain_ticks,
    save,
    series,
)
from evigrad.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
