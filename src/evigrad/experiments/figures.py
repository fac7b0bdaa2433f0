"""The figures of experiments: readable in print, and by the colour-blind."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evigrad.experiments.cases import Mean, Row
from evigrad.experiments.definition import Experiment
from evigrad.experiments.plan import grid_of
from evigrad.experiments.styles import Styles, labels_and_styles
from evigrad.plots import LIGHT, new_figure, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Panels of curves: inches, and how far below the lowest top a panel goes, nats per datum; more
# where the tops are further apart.
_PANEL = (4.0, 3.1)
_BELOW = 2.0
_MARKER = 6.0  # points
# Where a point's name may stand, the best place first: how it is aligned, and points right and up.
_FAR = (("left", 8, -22), ("right", -8, 14), ("left", 8, 14), ("right", -8, -22), ("left", 12, -33))
_UNDER = (("right", -3, -11), ("left", 3, -11), ("left", 5, 5), ("right", -5, 5), *_FAR)
_BESIDE = (("left", 5, 4), ("left", 5, -11), ("right", -5, 4), ("right", -5, -11), *_FAR)


def frame(axes: "Axes", title: str, across: str, along: str) -> None:
    """Give axes their words and lines.

    Args:
        axes: Empty axes.
        title: Above them.
        across: Label of the horizontal axis, with its unit.
        along: Label of the vertical one.
    """
    axes.set_title(words(title), loc="left", fontsize=11)
    axes.set_xlabel(words(across), fontsize=9)
    axes.set_ylabel(words(along), fontsize=9)
    axes.tick_params(which="both", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=LIGHT.grid, linewidth=0.6)
    axes.set_axisbelow(True)


def bound_curves(experiment: Experiment, rows: list[Row]) -> "Figure":
    """Bounds along hyperparameters: a panel each, a line for each estimator.

    Args:
        experiment: Of the kind ``bounds``.
        rows: Its results.

    Returns:
        The figure.
    """
    panels = [name for name in experiment.take("panels") if _of(rows, "panel", name)]
    figure = new_figure(_PANEL[0] * len(panels) + 1.2, _PANEL[1])
    labels, styles = labels_and_styles(experiment, rows)
    handles: dict[str, Any] = {}
    for place, name in enumerate(panels, start=1):
        panel = experiment.take("panels")[name]
        axes = figure.add_subplot(1, len(panels), place)
        unit = "log marginal likelihood bound\n(nats per datum)" if place == 1 else ""
        frame(axes, panel.get("title", name), panel["axis"], unit)
        grid = grid_of(panel["grid"])
        if panel["grid"].get("log"):
            axes.set_xscale("log")
        drawn = _of(rows, "panel", name)
        for row in drawn:
            curve, spread = row["log_evidence"], row["draw_error"].mean
            (line,) = axes.plot(
                grid, curve.mean, label=row["label"], linewidth=1.6, **styles.line(row["label"])
            )
            handles.setdefault(row["label"], line)
            _band(axes, grid, curve.mean, spread, line.get_color())
            best = max(range(len(grid)), key=curve.mean.__getitem__)
            axes.plot(
                grid[best],
                curve.mean[best],
                marker="o",
                markersize=4.5,
                color=line.get_color(),
                clip_on=False,
            )
        axes.set_xlim(grid[0], grid[-1])
        _limit(axes, [row["log_evidence"].mean for row in drawn])
    _legend(figure, labels, handles)
    return figure


def _limit(axes: "Axes", curves: Sequence[Sequence[float]]) -> None:
    """Leave out where bad hyperparameters take the bounds, which would flatten the rest."""
    tops = [max(curve) for curve in curves]
    lowest = min(min(curve) for curve in curves)
    bottom = max(lowest, min(tops) - max(_BELOW, max(tops) - min(tops)))
    margin = 0.05 * (max(tops) - bottom)
    axes.set_ylim(bottom - margin, max(tops) + margin)


def pareto(experiment: Experiment, rows: list[Row]) -> "Figure":
    """Tightness over time: a point for each estimator, and the frontier.

    Args:
        experiment: Of the kind ``pareto``.
        rows: Its results.

    Returns:
        The figure.
    """
    figure = new_figure(7.2, 4.4)
    axes = figure.add_subplot()
    frame(
        axes,
        experiment.title,
        "seconds of an estimate and its gradient",
        "− log marginal likelihood estimate\n(nats per datum)",
    )
    axes.set_xscale("log")
    families = list(dict.fromkeys(row["family"] for row in rows))
    reference = [row["family"] for row in rows if row["is_full_batch"]]
    styles = Styles(families, reference)
    for family in families:
        of_family = _of(rows, "family", family)  # by their sizes, as the file has them
        style: dict[str, Any] = styles.all(family)
        style["linestyle"] = ":" if len(of_family) > 1 else ""
        axes.errorbar(
            [row["seconds"].mean for row in of_family],
            [row["value"].mean for row in of_family],
            yerr=[_finite(row["value"].error) for row in of_family],
            label=words(family),
            markersize=_MARKER,
            linewidth=0.9,
            elinewidth=0.9,
            **style,
        )
    frontier = pareto_front([(row["seconds"].mean, row["value"].mean) for row in rows])
    corners = [rows[i] for i in frontier]
    axes.step(
        [row["seconds"].mean for row in corners],
        [row["value"].mean for row in corners],
        where="post",
        color=LIGHT.muted,
        linewidth=3.5,
        alpha=0.25,
        zorder=0,
        label="frontier",
    )
    axes.margins(x=0.08, y=0.12)
    times = [row["seconds"].mean for row in rows]
    if min(times) == max(times):  # one point, for which some limits of matplotlib's own are equal
        axes.set_autoscalex_on(False)
        axes.set_xlim(times[0] / 2, times[0] * 2)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    points = [(row["seconds"].mean, row["value"].mean) for row in corners]
    _name_points(figure, axes, points, [row["size"] for row in corners], _UNDER)
    return figure


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other one beats in both coordinates, small being good.

    Args:
        points: Pairs.

    Returns:
        Positions, by the first coordinate.
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    front: list[int] = []
    for i in order:
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


def lines(
    experiment: Experiment,
    rows: list[Row],
    columns: Mapping[str, list[Row]],
    quantities: Mapping[str, str],
    across: str,
    *,
    over: str,
    log: bool = False,
) -> "Figure":
    """A grid of panels: quantities one below the other, parts of the rows side by side.

    Args:
        experiment: Says which labels are black and whether the others are in an order.
        rows: All, for one style for each label.
        columns: Title of a column to its rows, of which each is a line.
        quantities: Key of a row to the words of its axis.
        across: Label of the horizontal axis.
        over: Key of a row to its positions on it; behind that of the quantity and a space, where
            each has its own.
        log: Whether that axis is logarithmic.

    Returns:
        The figure.
    """
    figure = new_figure(3.6 * len(columns) + 1.6, 2.5 * len(quantities) + 0.3)
    labels, styles = labels_and_styles(experiment, rows)
    handles: dict[str, Any] = {}
    first: Any = None
    for down, (quantity, unit) in enumerate(quantities.items()):
        shared: Any = None
        for place, (title, of_column) in enumerate(columns.items()):
            position = down * len(columns) + place + 1
            axes = figure.add_subplot(
                len(quantities), len(columns), position, sharex=first, sharey=shared
            )
            first, shared = first or axes, shared or axes
            is_last = down == len(quantities) - 1
            frame(axes, title if not down else "", across if is_last else "", "" if place else unit)
            if log:
                axes.set_xscale("log")
            for row in of_column:
                value = row.get(quantity)
                if value is None:
                    continue
                at = row.get(f"{quantity} {over}", row.get(over))
                line = _draw_line(axes, at, value, row["label"], styles, points=log)
                handles.setdefault(row["label"], line)
            axes.margins(x=0.02)
        curves = [row[quantity].mean for row in rows if row.get(quantity) is not None]
        if quantity == "log_evidence" and curves and not log:
            _limit(shared, [[v for v in curve if math.isfinite(v)] for curve in curves])
    _legend(figure, labels, handles)
    return figure


def _draw_line(
    axes: "Axes", at: Any, value: Mean, label: str, styles: Styles, *, points: bool
) -> Any:
    where = at.mean if isinstance(at, Mean) else at
    kept = [i for i, mean in enumerate(value.mean) if math.isfinite(mean)]
    x, y = [float(where[i]) for i in kept], [value.mean[i] for i in kept]
    style = styles.all(label) if points else styles.line(label)
    (line,) = axes.plot(x, y, linewidth=1.5, markersize=4.5, **style)
    errors = [_finite(value.error[i]) for i in kept]
    if any(errors):
        _band(axes, x, y, errors, line.get_color())
    return line


def _band(
    axes: "Axes", x: Sequence[float], y: Sequence[float], errors: Sequence[float], colour: Any
) -> None:
    low = [m - e for m, e in zip(y, errors, strict=True)]
    high = [m + e for m, e in zip(y, errors, strict=True)]
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def _legend(figure: "Figure", labels: Sequence[str], handles: Mapping[str, Any]) -> None:
    """Beside the panels, of the labels that were drawn."""
    drawn = [label for label in labels if label in handles]
    figure.legend(
        handles=[handles[label] for label in drawn],
        labels=[words(label) for label in drawn],
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )


def scatter(experiment: Experiment, rows: list[Row], across: str, along: str) -> "Figure":
    """A point for each row, labelled, with errors both ways.

    Args:
        experiment: For the title and the names of the keys.
        rows: With ``x``, ``y``, ``label`` and ``family``.
        across: Label of the horizontal axis.
        along: Label of the vertical one.

    Returns:
        The figure.
    """
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    frame(axes, experiment.title, across, along)
    families = list(dict.fromkeys(row["family"] for row in rows))
    styles = Styles(families)
    for family in families:
        of_family = _of(rows, "family", family)
        style: dict[str, Any] = styles.all(family)
        style["linestyle"] = ""
        axes.errorbar(
            [row["x"].mean for row in of_family],
            [row["y"].mean for row in of_family],
            xerr=[_finite(row["x"].error) for row in of_family],
            yerr=[_finite(row["y"].error) for row in of_family],
            label=words(family),
            elinewidth=0.8,
            **style,
        )
    axes.margins(0.12)
    if len(families) > 1:
        axes.legend(frameon=False, fontsize=9)
    points = [(row["x"].mean, row["y"].mean) for row in rows]
    _name_points(figure, axes, points, [row["label"] for row in rows], _BESIDE)
    return figure


def _name_points(
    figure: "Figure",
    axes: "Axes",
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    places: Sequence[tuple[str, int, int]],
) -> None:
    """Names beside points, each in the first place where it lies on no other and no point."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # now it is known where everything lies
    half = _MARKER / 2 * figure.dpi / 72
    taken = [
        Bbox.from_extents(x - half, y - half, x + half, y + half)
        for x, y in axes.transData.transform(points)
    ]
    for point, name in zip(points, names, strict=True):
        for number, (side, right, up) in enumerate(places, start=1):
            text = axes.annotate(
                words(name), point, (right, up), textcoords="offset points", fontsize=8, ha=side,
                color=LIGHT.muted,
            )  # fmt: skip
            box = text.get_window_extent()
            if number == len(places) or not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _of(rows: Sequence[Row], key: str, value: object) -> list[Row]:
    return [row for row in rows if row[key] == value]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
