"""Figures of training runs.

Every function draws on a ``Figure`` of its own, never through pyplot's global state: it works
without a display, in threads, and leaves the user's figures and settings alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evigrad.errors import ConfigurationError, InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, int | float | None]]

# Okabe and Ito's palette, told apart with every common colour vision deficiency; its yellow is
# left out because it is too light for a line on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_MUTED = "#555555"
# More labels than this at the end of the lines cannot be told apart.
_MAX_LABELS = 24
# Inches: the height that a label needs, and what title and axis take of the figure's.
_LABEL_HEIGHT = 0.17
_SURROUNDINGS = 0.9


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
    panels = [panel for panel in panels if any(_series(h, panel[0])[0] for h in histories.values())]
    figure = _figure(3.6 * len(panels) + 0.4, 3.3)
    for position, (column, title, unit) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        _decorate(axes, title, unit)
        axes.set_xlim(0, max(len(history) for history in histories.values()))
        drawn = []
        for number, (name, history) in enumerate(histories.items()):
            epochs, values = _series(history, column)
            if not epochs:
                continue
            sparse = len(epochs) <= 40 and len(epochs) < len(history)
            (line,) = axes.plot(
                epochs,
                values,
                label=name,
                color=_COLOURS[number % len(_COLOURS)],
                linewidth=1.6,
                marker="o" if sparse else None,
                markersize=3,
            )
            drawn += values
            errors = _errors(history, column)
            if errors is not None:
                lower = [v - e for v, e in zip(values, errors, strict=True)]
                upper = [v + e for v, e in zip(values, errors, strict=True)]
                axes.fill_between(
                    epochs, lower, upper, color=line.get_color(), alpha=0.2, linewidth=0
                )
        if column == "loss" and min(drawn, default=0.0) > 0:  # a density's loss can be negative
            axes.set_yscale("log")
            _plain_ticks(axes)
        else:
            _cut_burst(axes, drawn)
    handles = [
        _handle(name, _COLOURS[number % len(_COLOURS)]) for number, name in enumerate(histories)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def precision_paths(history: History, title: str = "prior precision of each layer") -> "Figure":
    """The learned prior precisions over the epochs, each labelled at the end of its line.

    Args:
        history: Of a run with a learned prior.
        title: Title of the figure.

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
    figure = _figure(7.2, max(3.6, 0.24 * min(len(names), _MAX_LABELS) + 1.2))
    axes = figure.add_subplot()
    _decorate(axes, title, "prior precision (1 / variance of the weights)")
    axes.set_yscale("log")
    lines = {}
    many = len(names) > _MAX_LABELS
    for number, name in enumerate(names):
        epochs, values = _series(history, name)
        colour = _COLOURS[number % len(_COLOURS)]
        dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
        axes.plot(
            epochs,
            values,
            color=_MUTED if many else colour,
            linestyle="-" if many else dash,
            linewidth=0.8 if many else 1.6,
            drawstyle="steps-post",
        )
        lines[name.removeprefix(prefix)] = (epochs[-1], values[-1], colour)
    _plain_ticks(axes)
    if many:
        axes.set_title(f"{title} ({len(names)} groups)", loc="left", fontsize=11)
    else:
        _label_ends(axes, lines, figure.get_figheight())
    return figure


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


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "Figures need matplotlib: pip install 'evigrad[plots]'."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def _decorate(axes: "Axes", title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _plain_ticks(axes: "Axes") -> None:
    """Numbers such as 0.02 and 30 on a logarithmic axis, also over less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    subs = (1.0,) if high / low > 1e3 else (1.0, 3.0) if high / low > 30 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _cut_burst(axes: "Axes", values: list[float]) -> None:
    """Do not let the first few values of a run squeeze the rest into a line."""
    if len(values) < 8:
        return
    ordered = sorted(values)
    typical = ordered[len(ordered) // 4]
    spread = ordered[-1] - typical
    if ordered[0] < typical - 3 * spread:
        axes.set_ylim(typical - 2 * spread, ordered[-1] + 0.15 * spread)


def _label_ends(
    axes: "Axes", lines: Mapping[str, tuple[float, float, str]], figure_height: float
) -> None:
    """Write each name to the right of its line, apart from its neighbours."""
    transform = axes.transData + axes.transAxes.inverted()
    ends = {name: float(transform.transform((x, y))[1]) for name, (x, y, _) in lines.items()}
    order = sorted(ends, key=ends.__getitem__)
    height = min(_LABEL_HEIGHT / (figure_height - _SURROUNDINGS), 1.0 / len(order))
    places = _spread([ends[name] for name in order], height)
    for name, place in zip(order, places, strict=True):
        value, colour = lines[name][1], lines[name][2]
        axes.annotate(
            f"{name}  {_number(value)}",
            xy=(1.0, ends[name]),
            xytext=(1.04, place),
            xycoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 0},
        )
    axes.margins(x=0)


def _number(value: float) -> str:
    """Three digits, without an exponent over eight decades."""
    if 1e-4 <= value < 1e4:
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:.1e}"


def _spread(places: Sequence[float], distance: float) -> list[float]:
    """Move ascending places apart, as little as possible, until neighbours have a distance."""
    groups: list[list[float]] = []  # each (centre, count): labels that touch each other
    for place in places:
        groups.append([place, 1.0])
        while len(groups) > 1:
            (c0, n0), (c1, n1) = groups[-2], groups[-1]
            if c1 - c0 >= distance * (n0 + n1) / 2:
                break
            groups[-2:] = [[(c0 * n0 + c1 * n1) / (n0 + n1), n0 + n1]]
    return [
        centre + distance * (i - (count - 1) / 2)
        for centre, count in groups
        for i in range(int(count))
    ]


def _handle(name: str, colour: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linewidth=2, label=name)


def _series(history: History, column: str) -> tuple[list[float], list[float]]:
    """Epochs and values where there is a value."""
    pairs = [
        (float(epoch), float(value))
        for row in history
        if (value := row.get(column)) is not None and (epoch := row.get("epoch")) is not None
    ]
    return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def _errors(history: History, column: str) -> list[float] | None:
    """Standard errors of the values of a column, where all are known."""
    errors = [row.get(f"{column}_sem") for row in history if row.get(column) is not None]
    known = [error for error in errors if error is not None]
    return known if known and len(known) == len(errors) else None


def _check(histories: Mapping[str, History]) -> None:
    if not histories or not all(histories.values()):
        raise InputError("There is no epoch to draw: the history is empty.")
