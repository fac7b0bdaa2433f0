"""Figures that compare: panels of curves, and points with two coordinates."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evigrad.plots.style import (
    DASHES,
    LIGHT,
    SMALL,
    decorate,
    draw_line,
    name_points,
    new_figure,
    plain_ticks,
    shades_of,
    words,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MARKER = 6.0  # points
# Look and name in the legend of published curves.
_PUBLISHED: dict[str, Any] = {"linestyle": (0, (4, 3)), "linewidth": 0.8, "alpha": 0.9}
_PUBLISHED_NAME = "dashed: the paper"
# Nats per example that a clipped panel extends below its lowest maximum. It extends further if the
# maxima are further apart.
_BELOW = 2.0
# Places for a point's name, the best first: alignment, and offset in points right and up.
_FAR = (("left", 8, -22), ("right", -8, 14), ("left", 8, 14), ("right", -8, -22), ("left", 12, -33))
_UNDER = (("right", -3, -11), ("left", 3, -11), ("left", 5, 5), ("right", -5, 5), *_FAR)
_BESIDE = (("left", 5, 4), ("left", 5, -11), ("right", -5, 4), ("right", -5, -11), *_FAR)


@dataclass(frozen=True)
class Curve:
    """A line of a panel.

    Attributes:
        label: Name in the legend. A name has one look in all panels.
        x: Positions.
        y: Values. Values that are not finite are omitted.
        error: Standard errors of the values, drawn as a band. Empty for none.
        published: Whether the curve is the paper's. It is a thin dashed line in the color of the
            label, and all other lines are then solid.
    """

    label: str
    x: Sequence[float | int]
    y: Sequence[float | int]
    error: Sequence[float | int] = ()
    published: bool = False


@dataclass(frozen=True)
class Panel:
    """Axes with curves.

    Attributes:
        title: Title of the axes.
        across: Label of the horizontal axis.
        along: Label of the vertical axis, with its unit.
        curves: Curves.
        log: Whether the horizontal axis is logarithmic.
        clipped: Whether to omit values so far below the maxima that they flatten the rest.
    """

    title: str
    across: str
    along: str
    curves: Sequence[Curve]
    log: bool = False
    clipped: bool = False


@dataclass(frozen=True)
class Point:
    """A point of a figure with two quantities.

    Attributes:
        group: Group. Its points look alike.
        name: Name within the group.
        x: First coordinate.
        y: Second coordinate.
        x_error: Standard error of the first coordinate. NaN if unknown.
        y_error: Standard error of the second coordinate.
        hollow: Whether its marker is hollow, which marks other settings.
    """

    group: str
    name: str
    x: float
    y: float
    x_error: float = math.nan
    y_error: float = math.nan
    hollow: bool = False


def legend_order(
    labels: Iterable[str], reference: Sequence[str] = (), ordered: bool = False
) -> list[str]:
    """Return labels, each once, in the order of a legend.

    Args:
        labels: Labels, possibly repeated.
        reference: Labels for comparison, which come last.
        ordered: Whether to sort the other labels by their numbers. A label without a number comes
            last.
    """
    unique_labels = list(dict.fromkeys(labels))
    others = [label for label in unique_labels if label not in reference]
    if ordered:
        others.sort(key=lambda label: [*map(int, re.findall(r"\d+", label)), math.inf])
    return others + [label for label in unique_labels if label in reference]


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
    """Return a grid of panels with one legend.

    Args:
        rows: Panels of each row, from the top.
        reference: Labels in black.
        ordered: Whether the other labels have an order, such as sizes. They get shades instead of
            colors.
        size: Width and height of a panel, in inches.
        shared: Whether all panels share the horizontal scale, and the panels of a row the vertical
            one.
        markers: Whether the values have markers.
        mark_tops: Whether the maximum of each curve has a dot.
    """
    columns = max(map(len, rows))
    figure = new_figure(size[0] * columns + 1.4, size[1] * len(rows))
    curves = [curve for row in rows for panel in row for curve in panel.curves]
    labels = legend_order((curve.label for curve in curves), reference, ordered)
    looks = _styles(labels, reference, ordered)
    if has_published := any(curve.published for curve in curves):
        looks = {label: {**look, "linestyle": DASHES[0]} for label, look in looks.items()}
    handles: dict[str, Any] = {}
    first: Axes | None = None
    for down, row in enumerate(rows):
        beside: Axes | None = None
        for place, panel in enumerate(row, start=down * columns + 1):
            axes = figure.add_subplot(len(rows), columns, place, sharex=first, sharey=beside)
            if shared:
                first, beside = first or axes, beside or axes
            decorate(axes, panel.title, panel.across, panel.along)
            if panel.log:
                axes.set_xscale("log")
            far = _far_below(panel.curves) if panel.clipped and not shared else []
            inset = _inset(axes, far) if far else axes
            for curve in panel.curves:
                look = {**looks[curve.label], **({} if markers else {"marker": ""})}
                on = inset if curve.label in far else axes
                handle = _draw_curve(on, curve, look, mark_tops)
                if not curve.published:
                    handles.setdefault(curve.label, handle)
            axes.margins(x=0.02 if shared else 0)
            if panel.clipped:
                all_curves = [c for p in row for c in p.curves] if shared else panel.curves
                _leave_out_depths(axes, [c for c in all_curves if c.label not in far])
    shown = [label for label in labels if label in handles]
    if has_published:
        handles[_PUBLISHED_NAME] = _published_entry()
        shown.append(_PUBLISHED_NAME)
    figure.legend(
        handles=[handles[label] for label in shown],
        labels=[words(label) for label in shown],
        loc="outside right upper",
        frameon=False,
        fontsize=SMALL,
    )
    return figure


def points(
    data_points: Sequence[Point],
    title: str,
    across: str,
    along: str,
    *,
    reference: Sequence[str] = (),
    frontier: bool = False,
) -> "Figure":
    """Return a figure of points with two quantities and their errors.

    Args:
        data_points: Points. With ``frontier``, a line joins the points of a group in their order.
        title: Title of the figure.
        across: Label of the horizontal axis.
        along: Label of the vertical axis.
        reference: Groups in black.
        frontier: Whether small values are better for both quantities. Then the horizontal axis is
            logarithmic, and the figure shows the frontier and the names of its points only.
    """
    figure = new_figure(7.2, 4.4)
    axes = figure.add_subplot()
    decorate(axes, title, across, along)
    groups = list(dict.fromkeys(point.group for point in data_points))
    looks = _styles(groups, reference, False)
    for group in groups:
        group_points = [point for point in data_points if point.group == group]
        joined = frontier and len(group_points) > 1
        axes.errorbar(
            [point.x for point in group_points],
            [point.y for point in group_points],
            xerr=[_known(point.x_error) for point in group_points],
            yerr=[_known(point.y_error) for point in group_points],
            label=words(group),
            markersize=_MARKER,
            linewidth=0.9,
            elinewidth=0.9,
            **{**looks[group], "linestyle": ":" if joined else ""},
        )
        if hollow := [point for point in group_points if point.hollow]:
            x, y = [point.x for point in hollow], [point.y for point in hollow]
            look = {**looks[group], "linestyle": "", "markerfacecolor": LIGHT.paper}
            axes.plot(x, y, markersize=_MARKER, zorder=3, **look)
    named = list(data_points)
    if frontier:
        axes.set_xscale("log")
        named = [
            data_points[i] for i in pareto_front([(point.x, point.y) for point in data_points])
        ]
        x, y = [point.x for point in named], [point.y for point in named]
        look = {"color": LIGHT.muted, "linewidth": 3.5, "alpha": 0.25, "zorder": 0}
        axes.step(x, y, where="post", label="frontier", **look)
    axes.margins(0.1)
    times = {point.x for point in data_points}
    if frontier and len(times) == 1:  # some of matplotlib's limits would be equal
        axes.set_autoscalex_on(False)
        axes.set_xlim(min(times) / 2, min(times) * 2)
    if frontier:
        plain_ticks(axes.xaxis)
        _point_to_the_best(axes)
    if any(point.hollow for point in data_points):
        entry: dict[str, Any] = {"marker": "o", "linestyle": "", "color": LIGHT.muted}
        entry["markerfacecolor"] = LIGHT.paper
        axes.plot([], [], label="hollow: other settings", **entry)
    if len(groups) > 1 or frontier:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=SMALL)
    figure.draw_without_rendering()  # now all positions are known
    labels = [(words(point.name), point.x, point.y, LIGHT.muted) for point in named]
    places, half = _UNDER if frontier else _BESIDE, _MARKER / 2 * figure.dpi / 72
    name_points(axes, labels, places, half)
    return figure


def _point_to_the_best(axes: "Axes") -> None:
    """Draw an arrow to the lower left corner, where both quantities are best."""
    style = {"arrowstyle": "-|>", "color": LIGHT.muted, "linewidth": 1.2}
    axes.annotate(
        "better",
        xy=(0.015, 0.02),
        xytext=(0.06, 0.08),
        xycoords="axes fraction",
        textcoords="axes fraction",
        fontsize=SMALL,
        color=LIGHT.muted,
        ha="left",
        va="bottom",
        arrowprops=style,
    )


def pareto_front(coordinates: Sequence[tuple[float, float]]) -> list[int]:
    """Return positions of points that no other point beats in both coordinates, by the first."""
    front: list[int] = []
    for i in sorted(range(len(coordinates)), key=lambda i: coordinates[i]):
        if not front or coordinates[i][1] < coordinates[front[-1]][1]:
            front.append(i)
    return front


def _styles(
    names: Sequence[str], reference: Sequence[str], ordered: bool
) -> dict[str, dict[str, Any]]:
    """Return color, dash and marker of each name, distinct in print and for the color-blind."""
    others = [name for name in names if name not in reference]
    # Numbers of examples have an order. Only reference names are drawn in ink.
    sizes = [name for name in others if ordered and re.search(r"\d|^all data$", name)]
    plain = [color for color in LIGHT.lines if color != LIGHT.ink]
    styles: dict[str, dict[str, Any]] = {}
    for place, (name, color) in enumerate(zip(sizes, shades_of(len(sizes)), strict=True)):
        styles[name] = {"color": color, "linestyle": 0, "marker": place}
    for place, name in enumerate(name for name in others if name not in sizes):
        color = plain[place % len(plain)]
        styles[name] = {"color": color, "linestyle": place, "marker": place}
    for place, name in enumerate(name for name in names if name in reference):
        styles[name] = {"color": LIGHT.ink, "linestyle": place, "marker": place}
    for look in styles.values():
        look["linestyle"] = DASHES[look["linestyle"] % len(DASHES)]
        look["marker"] = _MARKERS[look["marker"] % len(_MARKERS)]
    return styles


def _draw_curve(axes: "Axes", curve: Curve, look: dict[str, Any], mark_top: bool) -> Any:
    kept = [i for i, value in enumerate(curve.y) if math.isfinite(value)]
    x, y = [curve.x[i] for i in kept], [curve.y[i] for i in kept]
    errors = [_known(curve.error[i]) for i in kept] if curve.error else []
    if curve.published:
        return draw_line(axes, x, y, errors, **{**look, **_PUBLISHED, "marker": ""})
    line = draw_line(axes, x, y, errors, **look)
    if mark_top and y:
        top = max(range(len(y)), key=y.__getitem__)
        dot = {"color": line.get_color(), "marker": "o", "markersize": 4.5}
        axes.plot(x[top], y[top], clip_on=False, **dot)
    return line


def _published_entry() -> Any:
    """Return the line that stands for all published curves in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=LIGHT.muted, **_PUBLISHED)


def _far_below(curves: Sequence[Curve]) -> list[str]:
    """Return the label whose maximum is so far below the others that it would flatten them."""
    tops: dict[str, float] = {}
    for curve in curves:
        finite = [value for value in curve.y if math.isfinite(value)]
        tops[curve.label] = max([*finite, tops.get(curve.label, -math.inf)])
    lowest, *others = sorted(tops, key=tops.__getitem__)
    if len(others) < 2:
        return []
    spread = tops[others[-1]] - tops[others[0]]
    return [lowest] if tops[others[0]] - tops[lowest] > _BELOW + 3 * spread else []


def _inset(axes: "Axes", labels: Sequence[str]) -> "Axes":
    """Return small axes in the lower right corner, for curves with a scale of their own."""
    inset = axes.inset_axes((0.5, 0.1, 0.46, 0.38))
    inset.set_title(words(", ".join(labels)), fontsize=SMALL, color=LIGHT.ink)
    inset.tick_params(labelsize=SMALL, color=LIGHT.ink, labelcolor=LIGHT.ink)
    return inset


def _leave_out_depths(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Cut the axis above the bounds of bad hyperparameters, which would flatten the rest."""
    finite = [[value for value in curve.y if math.isfinite(value)] for curve in curves]
    tops = [max(values) for values in finite if values]
    if not tops:
        return
    lowest = min(value for values in finite for value in values)
    bottom = max(lowest, min(tops) - max(_BELOW, max(tops) - min(tops)))
    margin = 0.05 * (max(tops) - bottom)
    if margin > 0:
        axes.set_ylim(bottom - margin, max(tops) + margin)


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
