"""Figures of training runs."""

import math
import sys

import numpy as np
import pytest

from evigrad import plots
from evigrad.errors import ConfigurationError, InputError

pytest.importorskip("matplotlib")
from figure_geometry import problems
from matplotlib.backends.backend_agg import FigureCanvasAgg

from evigrad.plots import LIGHT


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
    assert "nats per example" in loss.get_ylabel()
    assert loss.get_yscale() == "log"
    assert np.asarray(loss.lines[0].get_xdata()).tolist() == list(range(1, 21))
    assert [len(axes.lines) for axes in (loss, evidence, test)] == [2, 1, 2]
    # The learned run keeps its colour in every panel.
    assert evidence.lines[0].get_color() == loss.lines[1].get_color()
    assert np.asarray(evidence.lines[0].get_xdata()).tolist() == [5, 10, 15, 20]
    assert len(evidence.collections) == 1  # the standard error
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(histories)


def limits_of_test(*runs):
    histories = {
        f"run {place}": [
            {"epoch": epoch, "loss": 1.0, "test_log_likelihood": value}
            for epoch, value in enumerate(values, start=1)
        ]
        for place, values in enumerate(runs)
    }
    axes = plots.learning_curves(histories).axes[1]
    return axes.get_ylim(), {text.get_text(): text.get_color() for text in axes.texts}


def test_a_diverged_run_does_not_flatten_the_others():
    learned = [-0.5, -0.4, -0.32, -0.31, -0.3]
    (low, high), named = limits_of_test([-0.6, -0.7, -3.0, -12.0, -21.38], learned)
    assert -1.0 < low < -0.6 and -0.3 < high < -0.2  # the highest value of each run is shown
    assert named == {"ends at −21.4": LIGHT.lines[0]}
    (low, _), named = limits_of_test([-0.6, -0.7, -0.8, -0.9, -1.0], learned)
    assert low < -1.0 and not named  # the run is worse, but both curves can be read


def test_only_the_start_of_the_best_run_is_omitted():
    good = [-0.4, -0.35, -0.32, -0.31, -0.3, -0.3, -0.29, -0.28]
    (low, _), named = limits_of_test([-0.9, *good])
    assert -0.9 < low < -0.4 and not named
    (low, _), named = limits_of_test([-30.0, *good], [-0.4, -0.5, -0.45, -0.42])
    assert -1.0 < low <= -0.5 and not named
    (low, _), _ = limits_of_test([*good, -30.0])
    assert low < -30.0
    (low, _), _ = limits_of_test([*good[:4], -30.0, *good[4:]])
    assert low < -30.0


def test_a_panel_without_data_is_left_out():
    history = make_history(learned=False)
    for row in history:
        row["test_log_likelihood"] = None
    assert len(plots.learning_curves({"MAP": history}).axes) == 1


LONG = "model.encoder.layers.{}.self_attention.out_projection.weight"


@pytest.mark.each(1)
@pytest.mark.parametrize("title", ["prior precision", "prior precision, " + "a long name " * 5])
@pytest.mark.parametrize(
    ("groups", "name", "width"),
    [(2, LONG, 7.2), (8, "layer{}", 4.6), (8, LONG, 4.6), (24, "layer{}", 7.2), (24, LONG, 4.6)],
)
def test_every_line_of_the_precisions_is_named_where_it_can_be_read(groups, name, width, title):
    history = [
        {key.replace("layer", name.format("")): value for key, value in row.items()}
        for row in make_history(4, groups)
    ]
    for row in history:  # many lines end in the same place
        row.update({key: min(value, 1.0) for key, value in row.items() if key[:9] == "precision"})
    figure = plots.precision_paths(history, title, width)
    assert problems(figure) == []
    legend, title_text = figure.legends[0], vars(figure.axes[0])["_left_title"]
    assert not title_text.get_window_extent().overlaps(legend.get_window_extent())
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
    with pytest.raises(InputError, match="must have at least one epoch"):
        plots.learning_curves({})
    with pytest.raises(InputError, match="must have at least one epoch"):
        plots.precision_paths([])
    with pytest.raises(InputError, match="precision"):
        plots.precision_paths([{"epoch": 1, "loss": 1.0}])


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'evigrad\[plots\]'"):
        plots.learning_curves({"MAP": make_history()})


def test_several_runs_keep_their_colours_in_every_panel():
    figure = plots.learning_curves({"MAP": make_history(learned=False), "$a_b$": make_history()})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["MAP", r"\$a_b\$"]
    for axes in (figure.axes[0], figure.axes[2]):
        assert [line.get_color() for line in axes.lines] == list(LIGHT.lines[:2])
    (line,) = figure.axes[1].lines
    assert line.get_color() == LIGHT.lines[1]
    FigureCanvasAgg(figure).draw()  # a dollar in a name starts no formula


@pytest.mark.parametrize("low", [1e-3, -1.0])
def test_a_loss_is_logarithmic_where_it_is_positive(low):
    rows = make_history()
    rows[-1]["loss"] = low
    axes = plots.learning_curves({"run": rows}).axes[0]
    assert axes.get_yscale() == ("log" if low > 0 else "linear")


def test_what_is_not_finite_is_left_out():
    rows = make_history()
    rows[3]["loss"] = math.nan
    rows[5]["loss"] = math.inf
    (line,) = plots.learning_curves({"run": rows}).axes[0].lines
    assert set(range(1, 21)) - {*np.asarray(line.get_xdata()).tolist()} == {4, 6}


def test_a_single_value_is_a_point():
    rows = make_history()[:6]
    (line,) = plots.learning_curves({"run": rows}).axes[1].lines
    assert line.get_marker() == "o"


def test_precisions_without_a_value_are_an_error():
    with pytest.raises(InputError, match="no values in the columns precision/a"):
        plots.precision_paths([{"epoch": 1, "precision/a": None}])
