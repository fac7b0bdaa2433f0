import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evigrad import plots
from evigrad.errors import ConfigurationError, InputError

pytest.importorskip("matplotlib")
from figure_geometry import problems


def make_history(epochs=20, groups=3, learned=True):
    rows = []
    for epoch in range(1, epochs + 1):
        due = learned and epoch % 5 == 0
        row = {
            "epoch": epoch,
            "loss": 2.0 * math.exp(-epoch / 5),
            "log_evidence": -1.0 - 1.0 / epoch if due else None,
            "log_evidence_sem": 0.1 if due else None,
            "test_log_likelihood": -1.0 / epoch if epoch % 5 == 0 else None,
        }
        row |= {f"precision/layer{g}": 10.0 ** (g * epoch / epochs - 1) for g in range(groups)}
        rows.append(row)
    return rows


def test_learning_curves_show_what_was_recorded():
    histories = {"MAP": make_history(learned=False), "ntk-100-1": make_history()}
    figure = plots.learning_curves(histories)
    loss, evidence, test = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "training loss",
        "log evidence",
        "test log likelihood",
    ]
    assert all(axes.get_xlabel() == "epoch" for axes in figure.axes)
    assert "nats per datum" in loss.get_ylabel()
    assert loss.get_yscale() == "log"
    assert np.asarray(loss.lines[0].get_xdata()).tolist() == list(range(1, 21))
    assert [len(axes.lines) for axes in (loss, evidence, test)] == [2, 1, 2]
    # The learned run keeps its colour in every panel.
    assert evidence.lines[0].get_color() == loss.lines[1].get_color()
    assert np.asarray(evidence.lines[0].get_xdata()).tolist() == [5, 10, 15, 20]
    assert len(evidence.collections) == 1  # the standard error
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(histories)


def test_a_panel_without_data_is_left_out():
    history = make_history(learned=False)
    for row in history:
        row["test_log_likelihood"] = None
    assert len(plots.learning_curves({"MAP": history}).axes) == 1


LONG = "model.encoder.layers.{}.self_attention.out_projection.weight"


@pytest.mark.parametrize(
    ("groups", "name", "width"),
    [(2, LONG, 7.2), (8, "layer{}", 4.6), (8, LONG, 4.6), (24, "layer{}", 7.2), (24, LONG, 4.6)],
)
def test_every_line_of_the_precisions_is_named_where_it_can_be_read(groups, name, width):
    history = [
        {key.replace("layer", name.format("")): value for key, value in row.items()}
        for row in make_history(4, groups)
    ]
    for row in history:  # many lines end in the same place
        row.update({key: min(value, 1.0) for key, value in row.items() if key[:9] == "precision"})
    figure = plots.precision_paths(history, "prior precision, a run of a long name", width)
    assert problems(figure) == []
    assert len(figure.legends[0].get_texts()) == groups


def test_the_precisions_are_named_from_the_highest_on():
    figure = plots.precision_paths(make_history(groups=3))
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert "1 / variance" in axes.get_ylabel()
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["10  layer2", "1  layer1", "0.1  layer0"]
    colours = [line.get_color() for line in axes.lines]
    assert [line.get_color() for line in figure.legends[0].get_lines()] == colours[::-1]
    assert len(set(colours)) == 3


@pytest.mark.parametrize("count", [1, 2, 5])
def test_runs_of_long_names_are_named_where_they_can_be_read(count):
    name = "digits-mininet-ntk-400-rows-anchored-precision-0.1-seed-{}"
    figure = plots.learning_curves({name.format(i): make_history() for i in range(count)})
    assert problems(figure) == []
    assert plots.learning_curves({name: make_history()}).legends


def test_many_groups_are_drawn_without_labels():
    figure = plots.precision_paths(make_history(groups=40))
    assert not figure.axes[0].texts
    assert len(figure.axes[0].lines) == 40
    assert "40 groups" in figure.axes[0].get_title(loc="left")


def test_files_are_small_and_pyplot_is_not_used(tmp_path):
    loaded = "matplotlib.pyplot" in sys.modules
    histories = {"MAP": make_history(200, 6, learned=False), "ntk-100-1": make_history(200, 6)}
    files = plots.save_all(histories, tmp_path, "ntk-100-1")
    assert [file.name for file in files] == ["learning_curves.png", "precisions.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert 10_000 < file.stat().st_size < 300_000
    assert ("matplotlib.pyplot" in sys.modules) == loaded
    assert len(plots.save_all(histories, tmp_path)) == 1


def test_nothing_to_draw():
    with pytest.raises(InputError, match="no epoch"):
        plots.learning_curves({})
    with pytest.raises(InputError, match="no epoch"):
        plots.precision_paths([])
    with pytest.raises(InputError, match="precision"):
        plots.precision_paths([{"epoch": 1, "loss": 1.0}])


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'evigrad\[plots\]'"):
        plots.learning_curves({"MAP": make_history()})


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=30))
def test_the_frontier_is_what_nothing_beats(pairs):
    front = plots.pareto_front([(float(x), float(y)) for x, y in pairs])
    chosen = [pairs[i] for i in front]
    assert chosen == sorted(chosen)
    for x, y in chosen:
        assert not any((a <= x and b < y) or (a < x and b <= y) for a, b in pairs)
    for x, y in pairs:
        assert any(a <= x and b <= y for a, b in chosen)


@pytest.mark.parametrize("seconds", [0.1, 0.0123, 0.01, 0.001, 3e-4, 2.0])
def test_a_frontier_of_one_point(seconds):
    """Whatever its time, and no word of matplotlib about limits."""
    figure = plots.points(
        [plots.Point("ntk-1", "10", seconds, 1.0)], "One", "s", "n", frontier=True
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
    found = [plots.Point(*each) for each in places]
    (axes,) = plots.points(found, "All", "x", "y").axes
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "4"]
    (axes,) = plots.points(found, "Best", "x", "y", frontier=True, reference=["b"]).axes
    assert [text.get_text() for text in axes.texts] == ["1", "2", "4"]
    assert axes.get_xscale() == "log"


def test_a_legend_is_in_the_order_of_the_sizes():
    labels = ["full", "m = 100", "m = 20", "other", "m = 20"]
    ordered = plots.legend_order(labels, ["full"], ordered=True)
    assert ordered == ["m = 20", "m = 100", "other", "full"]
    assert plots.legend_order(labels, ["full"]) == ["m = 100", "m = 20", "other", "full"]


def test_panels_draw_a_name_alike_everywhere_and_leave_out_the_depths():
    grid = [0.1, 1.0, 10.0]
    one = plots.Curve("m = 10", grid, [-3.0, -2.0, -50.0], [0.1, 0.1, 0.1])
    full = plots.Curve("full", grid, [-2.5, -1.5, -4.0])
    first = plots.Panel("a", "x", "nats", [one, full], log=True, clipped=True)
    second = plots.Panel("b", "x", "", [full])
    figure = plots.panels([[first, second]], reference=["full"], ordered=True, mark_tops=True)
    left, right = figure.axes
    assert left.get_xscale() == "log" and left.get_ylim()[0] > -5
    assert {line.get_linestyle() for line in left.lines} <= {"-", "None"}  # shades tell sizes apart
    assert left.lines[2].get_color() == right.lines[0].get_color() == "#000000"
    (dot,) = (line for line in right.lines if line.get_marker() == "o")
    assert np.asarray(dot.get_xydata()).tolist() == [[1.0, -1.5]]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["m = 10", "full"]


def test_what_is_not_known_of_a_curve_is_left_out():
    curve = plots.Curve("a", [1, 2, 3], [1.0, math.nan, 3.0], [math.nan] * 3)
    (axes,) = plots.panels([[plots.Panel("", "x", "y", [curve])]], shared=True).axes
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[1.0, 1.0], [3.0, 3.0]]
    assert not axes.collections
