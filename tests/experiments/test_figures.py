"""Figures that compare: panels of curves and points of two quantities."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from evigrad.plots import LIGHT
from evigrad.plots.style import shades_of
from experiments import figures

pytest.importorskip("matplotlib")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=30))
def test_the_frontier_is_what_nothing_beats(pairs):
    front = figures.pareto_front([(float(x), float(y)) for x, y in pairs])
    chosen = [pairs[i] for i in front]
    assert chosen == sorted(chosen)
    for x, y in chosen:
        assert not any((a <= x and b < y) or (a < x and b <= y) for a, b in pairs)
    for x, y in pairs:
        assert any(a <= x and b <= y for a, b in chosen)


@pytest.mark.parametrize("seconds", [0.1, 0.0123, 0.01, 0.001, 3e-4, 2.0])
def test_a_frontier_of_one_point(seconds):
    """Whatever its time, and no word of matplotlib about limits."""
    figure = figures.points(
        [figures.Point("ntk-1", "10", seconds, 1.0)], "One", "s", "n", frontier=True
    )
    (axes,) = figure.axes
    assert axes.get_xlim() == pytest.approx((seconds / 2, 2 * seconds))


def test_points_are_named_and_those_behind_the_frontier_are_not():
    places = [
        ("a", "1", 1.0, 3.0),
        ("a", "2", 2.0, 2.0),
        ("b", "3", 3.0, 2.5),
        ("b", "4", 4.0, 1.0),
    ]
    points = [figures.Point(*place) for place in places]
    (axes,) = figures.points(points, "All", "x", "y").axes
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "4"]
    (axes,) = figures.points(points, "Best", "x", "y", frontier=True, reference=["b"]).axes
    assert [text.get_text() for text in axes.texts] == ["better", "1", "2", "4"]
    assert axes.get_xscale() == "log"


def test_a_point_that_came_about_otherwise_is_hollow():
    points = [figures.Point("a", "1", 1.0, 3.0), figures.Point("a", "2", 2.0, 2.0, hollow=True)]
    (axes,) = figures.points(points, "All", "x", "y").axes
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == LIGHT.paper]
    drawn = [np.asarray(line.get_xydata()).tolist() for line in hollow]
    assert drawn == [[[2.0, 2.0]], []]  # and the entry of the legend


def test_a_curve_far_below_the_others_has_axes_of_its_own():
    curves = [figures.Curve(name, [0, 1], [y - 1, y]) for name, y in (("a", -1.0), ("b", -1.2))]
    curves += [figures.Curve("low", [0, 1], [-12.0, -10.0])]
    curves += [figures.Curve("low", [0, 1], [-13.0, -11.0], published=True)]
    (axes,) = figures.panels([[figures.Panel("", "", "", curves, clipped=True)]]).axes
    (inset,) = axes.child_axes
    assert isinstance(inset, Axes) and inset.get_title() == "low"
    assert len(axes.lines) == len(inset.lines) == 2
    assert axes.get_ylim()[0] > -3
    (axes,) = figures.panels([[figures.Panel("", "", "", curves[:2], clipped=True)]]).axes
    assert not axes.child_axes


def test_sizes_have_shades_and_other_names_have_colors():
    curves = [figures.Curve(name, [0, 1], [0, 1]) for name in ("m = 5", "KFAC", "m = 9", "full")]
    (axes,) = figures.panels(
        [[figures.Panel("", "", "", curves)]], ordered=True, reference=["full"]
    ).axes
    colors = [line.get_color() for line in axes.lines]
    assert [colors[0], colors[2]] == shades_of(2)
    assert colors[1] == LIGHT.lines[0] and colors[3] == LIGHT.ink


def test_times_differ_by_less_than_a_decade():
    points = [figures.Point("a", "1", 0.022, 0.7), figures.Point("a", "2", 0.094, 0.5)]
    figure = figures.points(points, "", "seconds", "nats", frontier=True)
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].xaxis.get_ticklabels(which="both")]
    assert {"0.03", "0.05", "0.07"} <= set(labels)


def test_a_legend_is_in_the_order_of_the_sizes():
    labels = ["full", "m = 100", "m = 20", "other", "m = 20"]
    ordered = figures.legend_order(labels, ["full"], ordered=True)
    assert ordered == ["m = 20", "m = 100", "other", "full"]
    assert figures.legend_order(labels, ["full"]) == ["m = 100", "m = 20", "other", "full"]


def test_panels_draw_a_name_alike_everywhere_and_leave_out_the_depths():
    grid = [0.1, 1.0, 10.0]
    one = figures.Curve("m = 10", grid, [-3.0, -2.0, -50.0], [0.1, 0.1, 0.1])
    full = figures.Curve("full", grid, [-2.5, -1.5, -4.0])
    first = figures.Panel("a", "x", "nats", [one, full], log=True, clipped=True)
    second = figures.Panel("b", "x", "", [full])
    figure = figures.panels([[first, second]], reference=["full"], ordered=True, mark_tops=True)
    left, right = figure.axes
    assert left.get_xscale() == "log" and left.get_ylim()[0] > -5
    assert {line.get_linestyle() for line in left.lines} <= {"-", "None"}  # shades tell sizes apart
    assert left.lines[2].get_color() == right.lines[0].get_color() == "#000000"
    (dot,) = (line for line in right.lines if line.get_marker() == "o")
    assert np.asarray(dot.get_xydata()).tolist() == [[1.0, -1.5]]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["m = 10", "full"]


def test_published_curves_are_thin_and_dashed_and_all_others_solid():
    grid = [0.1, 1.0, 10.0]
    ours = [figures.Curve(name, grid, [-3.0, -2.0, -2.5]) for name in ("a", "b", "c", "d")]
    theirs = [figures.Curve("b", [0.5, 2.0], [-2.5, -2.4], published=True)]
    # A curve of which only the paper's is there has no name in the legend.
    theirs.append(figures.Curve("e", [0.5, 2.0], [-2.6, -2.7], published=True))
    panel = figures.Panel("", "x", "nats", [*ours, *theirs], log=True)
    figure = figures.panels([[panel]], mark_tops=True)
    lines = [line for line in figure.axes[0].lines if line.get_marker() != "o"]
    assert [line.get_linestyle() for line in lines] == ["-"] * 4 + ["--"] * 2
    assert lines[4].get_color() == lines[1].get_color()
    assert lines[4].get_linewidth() < lines[1].get_linewidth()
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert len(dots) == 4
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["a", "b", "c", "d", "dashed: the paper"]
    plain = figures.panels([[figures.Panel("", "x", "nats", ours)]])
    assert len({line.get_linestyle() for line in plain.axes[0].lines}) > 1


def test_what_is_not_known_of_a_curve_is_left_out():
    curve = figures.Curve("a", [1, 2, 3], [1.0, math.nan, 3.0], [math.nan] * 3)
    (axes,) = figures.panels([[figures.Panel("", "x", "y", [curve])]], shared=True).axes
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[1.0, 1.0], [3.0, 3.0]]
    assert not axes.collections


def test_times_have_plain_numbers_that_do_not_overlap():
    points = [figures.Point("a", "1", 0.014, 0.7), figures.Point("a", "2", 0.34, 0.5)]
    figure = figures.points(points, "", "seconds", "nats", frontier=True)
    figure.canvas.draw()
    axis = figure.axes[0].xaxis
    labels = [label.get_text() for label in axis.get_ticklabels(which="both") if label.get_text()]
    assert {"0.03", "0.1", "0.3"} <= set(labels) and not any("10" in text for text in labels)
