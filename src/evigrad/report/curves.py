"""Figures of a report: one quantity each, small enough for a phone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evigrad.errors import InputError
from evigrad.plots import (
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
    series,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: letters of 9 points are legible at the width of a phone.
WIDTH, HEIGHT = 4.6, 3.1
# The most lines that have labels.
_MOST_NAMES = 16
# Up to this many values are shown as points too: a line with one value would be invisible.
_FEW = 40


@dataclass(frozen=True)
class Quantity:
    """A quantity that learning curves show.

    Attributes:
        title: Title of the figure.
        unit: Label of the vertical axis.
        columns: From the name of each kind of line to its column of the metrics.
        factor: From the column's values to those in the figure.
        logarithmic: Whether to use a logarithmic axis where all values are positive.
    """

    title: str
    unit: str
    columns: Mapping[str, str]
    factor: float = 1.0
    logarithmic: bool = False


LOSS = Quantity(
    "training loss", "mean NLL + prior term\n(nats per datum)", {"train": "loss"}, logarithmic=True
)
LOG_LIKELIHOOD = Quantity(
    "log likelihood",
    "nats per datum",
    {"test": "test_log_likelihood", "train": "train_log_likelihood"},
)
ACCURACY = Quantity(
    "accuracy", "percent of the data", {"test": "test_accuracy", "train": "train_accuracy"}, 100.0
)
SQUARED_ERROR = Quantity(
    "squared error",
    "mean over the data,\nstandardised targets",
    {"test": "test_squared_error", "train": "train_squared_error"},
    logarithmic=True,
)
LOG_EVIDENCE = Quantity(
    "log evidence", "estimate while training\n(nats per datum)", {"train": "log_evidence"}
)

BRACKET = Quantity(
    "bounds on the log evidence",
    "exact value between them\n(nats per datum)",
    {"lower": "bracket_lower", "upper": "bracket_upper"},
)


def quantity_curves(
    histories: Mapping[str, History], quantity: Quantity, palette: Palette = LIGHT
) -> "Figure":
    """A quantity over the epochs, with standard errors shaded where the metrics have them.

    Each run has a colour; where there is one run, each kind of line.

    Returns:
        The figure.

    Raises:
        InputError: If no run has a value of it.
        ConfigurationError: If matplotlib is not installed.
    """
    if not _values(histories, quantity):
        raise InputError(f"No run has a value of the {quantity.title}.")
    figure, axes = _axes(quantity.title, quantity.unit, palette)
    alone = len(histories) == 1
    runs: dict[str, tuple[str, Any]] = {}
    kinds: dict[str, tuple[str, Any]] = {}
    for place, (name, history) in enumerate(histories.items()):
        for kind, (label, column) in enumerate(quantity.columns.items()):
            # A run has the same colour in every figure, also where other runs have no line.
            colour = palette.lines[(kind if alone else place) % len(palette.lines)]
            if _curve(axes, history, column, quantity.factor, colour, DASHES[kind]):
                runs.setdefault(name, (colour, "-"))
                shade = colour if alone else palette.muted
                kinds.setdefault(label, (shade, DASHES[kind]))
    last = max((series(history, "epoch")[0] or [1.0])[-1] for history in histories.values())
    axes.set_xlim(0, 1.02 * last)
    if _is_logarithmic(histories, quantity):
        axes.set_yscale("log")
        plain_ticks(axes)
    elif limits := burst_limits(_values(histories, quantity)):
        axes.set_ylim(*limits)
    named = [] if alone else [*runs.items()]
    named += [*kinds.items()] if len(kinds) > 1 else []
    if named:
        add_legend(figure, [(name, *style) for name, style in named], palette)
    return figure


def is_cut(histories: Mapping[str, History], quantity: Quantity) -> bool:
    """Whether the first values of a quantity lie below the axes of its figure."""
    values = _values(histories, quantity)
    return not _is_logarithmic(histories, quantity) and burst_limits(values) is not None


def value_paths(
    history: History,
    columns: Mapping[str, str],
    title: str,
    unit: str,
    change: Callable[[float], float] = float,
    floor: float | None = None,
    palette: Palette = LIGHT,
) -> "Figure":
    """Hyperparameters over the epochs; the legend begins with the highest one at the end.

    Args:
        history: History of one run.
        columns: From the name of each line to its column of the metrics.
        title: Title of the figure.
        unit: Label of the vertical axis.
        change: From the column's values to those in the figure.
        floor: Start of the vertical axis; None fits it to the values.
        palette: Colours.

    Returns:
        The figure, without lines that have no value, and without labels where they are too many.

    Raises:
        InputError: If there is no value.
        ConfigurationError: If matplotlib is not installed.
    """
    figure, axes = _axes(title, unit, palette)
    lines = []
    for place, (name, column) in enumerate(columns.items()):
        epochs, values = series(history, column)
        if not epochs:
            continue
        values = [change(value) for value in values]
        colour = palette.lines[place % len(palette.lines)]
        dash = DASHES[place // len(palette.lines) % len(DASHES)]
        few = len(epochs) == 1
        axes.plot(
            epochs,
            values,
            color=colour,
            linestyle=dash,
            linewidth=1.6,
            marker="o" if few else None,
            markersize=4,
            drawstyle="steps-post",
        )
        lines.append((values[-1], name, colour, dash))
    if not lines:
        raise InputError(f"The history has no value of {', '.join(columns)}.")
    if floor is not None:
        axes.set_ylim(bottom=floor)
    axes.margins(x=0)
    if len(lines) <= _MOST_NAMES:
        lines.sort(key=lambda line: line[0], reverse=True)
        named = [(f"{number(value)}  {name}", *style) for value, name, *style in lines]
        add_legend(figure, named, palette)
    return figure


def rotation_path(
    history: History, column: str, title: str = "rotation", palette: Palette = LIGHT
) -> "Figure":
    """The largest angle of a random rotation over the epochs.

    Args:
        history: History of one run.
        column: Column of the metrics, in radians.
        title: Title of the figure.
        palette: Colours.

    Returns:
        The figure: radians at the left, degrees at the right.

    Raises:
        InputError: If there is no value.
        ConfigurationError: If matplotlib is not installed.
    """
    epochs, angles = series(history, column)
    if not epochs:
        raise InputError(f"The history has no value of {column}.")
    figure, axes = _axes(title, "largest angle (radians)", palette)
    axes.plot(
        epochs,
        angles,
        color=palette.lines[0],
        linewidth=1.6,
        marker="o" if len(epochs) == 1 else None,
        drawstyle="steps-post",
    )
    axes.margins(x=0)
    axes.set_ylim(0, 1.1 * max(angles) or 1.0)
    right = axes.secondary_yaxis("right", functions=(np.degrees, np.radians))
    right.set_ylabel("degrees", fontsize=9, color=palette.ink)
    right.tick_params(labelsize=9, color=palette.ink, labelcolor=palette.ink)
    right.spines["right"].set_color(palette.ink)
    return figure


def _axes(title: str, unit: str, palette: Palette) -> "tuple[Figure, Axes]":
    figure = new_figure(WIDTH, HEIGHT, palette)
    axes = figure.add_subplot()
    decorate(axes, title, unit, palette)
    return figure, axes


def _values(histories: Mapping[str, History], quantity: Quantity) -> list[float]:
    return [
        quantity.factor * value
        for history in histories.values()
        for column in quantity.columns.values()
        for value in series(history, column)[1]
    ]


def _is_logarithmic(histories: Mapping[str, History], quantity: Quantity) -> bool:
    # The loss of a density can be negative.
    return quantity.logarithmic and min(_values(histories, quantity), default=0.0) > 0


def _curve(
    axes: "Axes", history: History, column: str, factor: float, colour: str, dash: Any
) -> bool:
    """Draw a line and its standard error; returns whether it has values."""
    epochs, values = series(history, column)
    values = [factor * value for value in values]
    if not epochs:
        return False
    few = len(epochs) <= _FEW and len(epochs) < len(history)
    axes.plot(
        epochs,
        values,
        color=colour,
        linestyle=dash,
        linewidth=1.6,
        marker="o" if few or len(epochs) == 1 else None,
        markersize=3.5,
    )
    sems = errors(history, column)
    if sems is not None:
        lower = [v - factor * e for v, e in zip(values, sems, strict=True)]
        upper = [v + factor * e for v, e in zip(values, sems, strict=True)]
        axes.fill_between(epochs, lower, upper, color=colour, alpha=0.2, linewidth=0)
    return True
