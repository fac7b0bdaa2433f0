"""Figures of training runs: quantities and hyperparameters over the epochs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from evigrad.errors import InputError
from evigrad.plots.style import (
    DASHES,
    LIGHT,
    SMALL,
    add_legend,
    burst_limits,
    decorate,
    draw_line,
    new_figure,
    number,
    plain_ticks,
    save,
    shades_of,
    with_minus,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, int | float | None]]

PRECISION = "precision/"
# Nobody can tell more lines apart.
_MAX_LABELS = 24
# Up to this many values are also shown as points, because a line with one value is invisible.
_FEW = 40


def series(history: History, column: str) -> tuple[list[float], list[float]]:
    """Return the epochs in which a column has a finite value, and these values."""
    pairs = [
        (float(epoch), float(row[column] or 0))
        for row in history
        if _is_known(row.get(column)) and (epoch := row.get("epoch")) is not None
    ]
    return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def errors(history: History, column: str) -> list[float]:
    """Return the standard errors of a column's values, or an empty list if they are unknown."""
    rows = [row for row in history if _is_known(row.get(column)) and row.get("epoch") is not None]
    _, values = series(rows, f"{column}_sem")
    return values if len(values) == len(rows) else []


def _is_known(value: int | float | None) -> bool:
    return value is not None and math.isfinite(value)


@dataclass(frozen=True)
class Quantity:
    """A quantity that learning curves show."""

    title: str
    unit: str
    column: str  # of the metrics
    logarithmic: bool = False  # whether the axis is logarithmic if all values are positive

    def values(self, histories: Mapping[str, History]) -> list[float]:
        """Return the values of all runs."""
        return [v for history in histories.values() for v in series(history, self.column)[1]]

    def is_logarithmic(self, histories: Mapping[str, History]) -> bool:
        """Return whether the axis is logarithmic. It is linear if any value is 0 or negative."""
        return self.logarithmic and min(self.values(histories), default=0.0) > 0

    def limits(self, histories: Mapping[str, History]) -> tuple[float, float] | None:
        """Return axis limits that omit values far below the rest, or None to show all values.

        Only very low first values of the run with the highest last value may be omitted. Other runs
        may be shown in part, because a diverged run would flatten all curves.
        """
        if self.logarithmic:  # a loss, whose low values matter most
            return None
        runs = [run for h in histories.values() if (run := series(h, self.column)[1])]
        best = max(runs, key=lambda run: run[-1])
        limits = burst_limits(best)
        is_below = [limits is not None and value < limits[0] for value in best]
        if is_below != sorted(is_below, reverse=True):  # the end of a run matters most
            limits = None
        low, high = limits or (min(best), max(best))
        tops = [max(run) for run in runs]
        low, high = min(low, *tops), max(high, *tops)
        lowest = min((min(run) for run in runs if run is not best), default=low)
        span = high - low
        if span and lowest < low - 3 * span:
            return low - 0.5 * span, high + 0.15 * span
        return limits and (min(low, lowest), high)


QUANTITIES = (
    Quantity("training loss", "mean NLL + prior term\n(nats per example)", "loss", True),
    Quantity("log evidence", "estimate during training\n(nats per example)", "log_evidence"),
    Quantity("test log likelihood", "nats per example", "test_log_likelihood"),
)


def learning_curves(histories: Mapping[str, History]) -> "Figure":
    """Return curves of training loss, log evidence and test log likelihood over the epochs.

    Args:
        histories: History of each run (``FitResult.history`` or ``read_metrics``) by its name in
            the legend.

    Returns:
        A figure with one panel for each recorded quantity.

    Raises:
        InputError: If there is no history, or a history is empty.
        ConfigurationError: If matplotlib is not installed.

    Examples:
        >>> from evigrad.plots import learning_curves
        >>> history = [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0}]
        >>> len(learning_curves({"evigrad": history}).axes)
        1

    See also: docs/command_line.md.
    """
    _check(histories)
    panels = [quantity for quantity in QUANTITIES if quantity.values(histories)]
    figure = new_figure(3.6 * len(panels) + 0.4, 3.1)
    for position, quantity in enumerate(panels, start=1):
        _draw(figure.add_subplot(1, len(panels), position), histories, quantity)
    colors = [LIGHT.lines[place % len(LIGHT.lines)] for place in range(len(histories))]
    add_legend(figure, [(*named, "-") for named in zip(histories, colors, strict=True)])
    return figure


def _draw(axes: "Axes", histories: Mapping[str, History], quantity: Quantity) -> None:
    """Draw the lines of a quantity, with shaded standard errors if known."""
    decorate(axes, quantity.title, "epoch", quantity.unit)
    axes.locator_params(axis="x", integer=True)
    for place, history in enumerate(histories.values()):
        epochs, values = series(history, quantity.column)
        if not epochs:
            continue
        few = len(epochs) == 1 or (len(epochs) <= _FEW and len(epochs) < len(history))
        draw_line(
            axes,
            epochs,
            values,
            errors(history, quantity.column),
            # A run has the same color in every panel, even if other runs have no line.
            color=LIGHT.lines[place % len(LIGHT.lines)],
            marker="o" if few else None,
            markersize=3.5,
        )
    last = max((series(history, "epoch")[0] or [1.0])[-1] for history in histories.values())
    axes.set_xlim(0, 1.02 * last)
    if quantity.is_logarithmic(histories):
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
    elif limits := quantity.limits(histories):
        axes.set_ylim(*limits)
        _name_omitted(axes, histories, quantity, limits[0])


def _name_omitted(
    axes: "Axes", histories: Mapping[str, History], quantity: Quantity, low: float
) -> None:
    """Write the last value of each run that ends below the axes."""
    place = 0
    for color, history in zip(cycle(LIGHT.lines), histories.values(), strict=False):
        _, values = series(history, quantity.column)
        if values and values[-1] < low:
            axes.annotate(
                f"ends at {with_minus(number(values[-1]))}",
                (0.98, 0.03),
                (0, 12 * place),
                "axes fraction",
                textcoords="offset points",
                ha="right",
                fontsize=SMALL,
                color=color,
            )
            place += 1


def precision_paths(
    history: History, title: str = "prior precision of each layer", width: float = 7.2
) -> "Figure":
    """Return a figure of learned prior precisions over the epochs, on a logarithmic axis.

    The legend is sorted by the final values.

    Args:
        history: History of a run (``FitResult.history`` or ``read_metrics``).
        title: Title of the figure.
        width: Width of the figure in inches.

    Returns:
        A figure with a line for each group of weights.

    Raises:
        InputError: If the history is empty or has no precisions.

    Examples:
        >>> from evigrad.plots import precision_paths
        >>> history = [{"epoch": 1, "precision/weight": 2.0}, {"epoch": 2, "precision/weight": 5.0}]
        >>> len(precision_paths(history).axes)
        1

    See also: docs/command_line.md.
    """
    _check({"": history})
    columns = {
        name.removeprefix(PRECISION): name for name in history[0] if name.startswith(PRECISION)
    }
    if not columns:
        raise InputError(
            "The history must have columns precision/..., got none. Use the history of a run."
        )
    figure = new_figure(width, 4.0)
    axes = figure.add_subplot()
    many = len(columns) > _MAX_LABELS
    title = f"{title} ({len(columns)} groups)" if many else title
    colors = shades_of(len(columns)) if many else LIGHT.lines
    lines = []
    for place, (name, column) in enumerate(columns.items()):
        epochs, values = series(history, column)
        if not epochs:
            continue
        color = colors[place % len(colors)]
        dash = DASHES[place // len(colors) % len(DASHES)]
        look = {"color": color, "linestyle": dash, "linewidth": 0.8 if many else 1.6}
        marker = "o" if len(epochs) == 1 else None
        draw_line(axes, epochs, values, [], drawstyle="steps-post", marker=marker, **look)
        lines.append((values[-1], name, color, dash))
    if not lines:
        raise InputError(
            f"The history has no values in the columns {', '.join(columns.values())}. Use the"
            " history of a run that records one of them."
        )
    # Too many lines to tell apart are shaded in order, and only the first and last are named.
    if many:
        ends = (("first", *lines[0]), ("last", *lines[-1]))
        named = [(f"{end}: {name}", color, dash) for end, _, name, color, dash in ends]
    else:
        lines.sort(key=lambda line: line[0], reverse=True)
        named = [(f"{number(value)}  {name}", *look) for value, name, *look in lines]
    beside = add_legend(figure, named, beside=not many)
    decorate(axes, title, "epoch", "prior precision (1 / variance of the weights)", beside)
    axes.locator_params(axis="x", integer=True)
    axes.margins(x=0)
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    return figure


def save_all(
    histories: Mapping[str, History], folder: str | Path, learned: str | None = None
) -> list[Path]:
    """Save the figures of a command as PNG files.

    Args:
        histories: History of each run by its name.
        folder: Existing folder for the files.
        learned: Name of the run whose precisions are drawn. Default: no precisions.

    Returns:
        Paths of the files.
    """
    folder = Path(folder)
    files = [save(learning_curves(histories), folder / "learning_curves.png")]
    if learned is not None:
        title = f"prior precision of each layer, learned by {learned}"
        paths = precision_paths(histories[learned], title)
        files.append(save(paths, folder / "precisions.png"))
    return files


def _check(histories: Mapping[str, History]) -> None:
    if not histories or not all(histories.values()):
        raise InputError("The history must have at least one epoch, got none. Train for an epoch.")
