import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from run_folders import make_rows

from evigrad.errors import InputError
from evigrad.invariances import AffineInvariance

pytest.importorskip("matplotlib")
from figure_geometry import problems
from matplotlib.backends.backend_agg import FigureCanvasAgg

from evigrad.plots import DARK, LIGHT
from evigrad.report import augmented_images, draw_transforms
from evigrad.report.curves import (
    ACCURACY,
    LOG_EVIDENCE,
    LOG_LIKELIHOOD,
    LOSS,
    quantity_curves,
    rotation_path,
    value_paths,
)


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_one_run_has_a_line_for_train_and_test():
    figure = quantity_curves({"run": make_rows()}, ACCURACY)
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "accuracy"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "percent of the data")
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines] == [
        [80.0] * 4,
        [90.0] * 4,
    ]
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [5, 10, 15, 20]
    assert len({line.get_color() for line in axes.lines}) == 2
    assert legend_of(figure) == ["test", "train"]


def test_several_runs_keep_their_colours_in_every_figure():
    runs = {"MAP": make_rows(learned=False), "$a_b$": make_rows()}
    likelihood = quantity_curves(runs, LOG_LIKELIHOOD)
    colours = [line.get_color() for line in likelihood.axes[0].lines]
    assert colours == [LIGHT.lines[0]] * 2 + [LIGHT.lines[1]] * 2
    assert legend_of(likelihood) == ["MAP", r"\$a_b\$", "test", "train"]
    evidence = quantity_curves(runs, LOG_EVIDENCE)
    (line,) = evidence.axes[0].lines
    assert line.get_color() == LIGHT.lines[1]
    assert len(evidence.axes[0].collections) == 1  # the standard error
    assert legend_of(evidence) == [r"\$a_b\$"]
    FigureCanvasAgg(evidence).draw()  # a dollar in a name starts no formula


@pytest.mark.parametrize("low", [1e-3, -1.0])
def test_a_loss_is_logarithmic_where_it_is_positive(low):
    rows = make_rows()
    rows[-1]["loss"] = low
    axes = quantity_curves({"run": rows}, LOSS).axes[0]
    assert axes.get_yscale() == ("log" if low > 0 else "linear")


def test_what_is_not_finite_is_left_out():
    rows = make_rows()
    rows[3]["loss"] = math.nan
    rows[5]["loss"] = math.inf
    (line,) = quantity_curves({"run": rows}, LOSS).axes[0].lines
    assert set(range(1, 21)) - {*np.asarray(line.get_xdata()).tolist()} == {4, 6}
    for row in rows:
        row["loss"] = math.nan
    with pytest.raises(InputError, match="training loss"):
        quantity_curves({"run": rows}, LOSS)


def test_a_single_value_is_a_point():
    rows = make_rows(4)
    rows[-1]["test_accuracy"] = 0.5
    (line,) = quantity_curves({"run": rows}, ACCURACY).axes[0].lines
    assert line.get_marker() == "o"


def test_paths_are_named_from_the_highest_on():
    rows = make_rows(ranges={"scale_x": 1.0, "scale_y": 0.2})
    columns = {"y": "range/scale_y", "x": "range/scale_x"}
    figure = value_paths(rows, columns, "scaling, a run of a long name", "factor", math.exp, 1.0)
    assert legend_of(figure) == ["2.72  x", "1.22  y"]
    assert figure.axes[0].get_ylim()[0] == 1.0
    assert problems(figure) == []
    with pytest.raises(InputError, match="no value of y"):
        value_paths(make_rows(), columns, "scaling", "factor")


@pytest.mark.parametrize(("count", "quantity"), [(1, LOG_EVIDENCE), (2, LOSS), (5, LOG_LIKELIHOOD)])
def test_runs_of_long_names_are_named_where_they_can_be_read(count, quantity):
    name = "digits-mininet-ntk-400-rows-anchored-precision-0.1-seed-{}, MAP"
    runs = {name.format(i): make_rows() for i in range(count)}
    assert problems(quantity_curves(runs, quantity)) == []


def test_a_rotation_has_radians_and_degrees():
    figure = rotation_path(make_rows(ranges={"rotation": math.pi / 2}), "range/rotation")
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    (right,) = axes.child_axes
    assert "radians" in axes.get_ylabel()
    assert right.get_ylabel() == "degrees"
    assert right.get_ylim() == pytest.approx(np.degrees(axes.get_ylim()))
    assert float(np.asarray(axes.lines[0].get_ydata())[-1]) == pytest.approx(math.pi / 2)
    with pytest.raises(InputError, match="range/shear"):
        rotation_path(make_rows(), "range/shear")


def test_dark_figures_are_dark():
    figure = quantity_curves({"run": make_rows()}, LOSS, DARK)
    FigureCanvasAgg(figure).draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3] / 255  # pyright: ignore[reportAttributeAccessIssue]
    assert pixels.mean() < 0.2
    assert pixels[0, 0].mean() < 0.15
    # Nothing is drawn in black on it.
    assert pixels.min() > 0.05


def images_of(figure):
    return [np.asarray(image.get_array()) for image in figure.axes[0].images]


def test_the_grid_has_each_image_before_its_transforms():
    generator = torch.Generator().manual_seed(0)
    originals = torch.rand(2, 3, 5, 7, generator=generator)
    transformed = 3 * torch.rand(2, 4, 3, 5, 7, generator=generator) - 1
    figure = augmented_images(originals, transformed, ["cat", "tabby, tabby cat and so on"])
    images = images_of(figure)
    assert len(images) == 2 * 5
    np.testing.assert_array_equal(images[5], originals[1].permute(1, 2, 0))
    np.testing.assert_array_equal(images[7], transformed[1, 1].clamp(0, 1).permute(1, 2, 0))
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["cat", "tabby, tabby ca…", "original", "under the transform"]
    # Rows below each other, columns beside each other, and none on top of another.
    boxes = [image.get_extent() for image in figure.axes[0].images]
    for (left, right, bottom, top), (other, *_) in pairwise(boxes[:5]):
        assert other > right > left
        assert (right - left) / (bottom - top) == pytest.approx(7 / 5)
    assert boxes[5][3] > boxes[0][2]


def test_grey_images_are_grey():
    images = torch.full((1, 1, 4, 4), 0.25)
    (original, drawn) = images_of(augmented_images(images, images[:, None]))
    assert original.shape == (4, 4)
    assert original[0, 0] == drawn[0, 0] == 0.25


def test_what_is_no_grid_is_refused():
    images = torch.zeros(2, 1, 4, 4)
    with pytest.raises(InputError, match="height, width"):
        augmented_images(images, images)
    with pytest.raises(InputError, match="same number"):
        augmented_images(images, torch.zeros(3, 5, 1, 4, 4))
    with pytest.raises(InputError, match="same number"):
        augmented_images(images, images[:, None], ["one"])


def test_draws_are_the_transform_of_each_image_and_repeat():
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    fixed = draw_transforms(images, AffineInvariance(0.0), 4)
    assert fixed.shape == (3, 4, 1, 8, 8)
    torch.testing.assert_close(fixed, images[:, None].expand_as(fixed), atol=1e-5, rtol=0)
    moving = AffineInvariance(1.0)
    state = torch.get_rng_state()
    first, second = draw_transforms(images, moving, 4), draw_transforms(images, moving, 4)
    assert torch.equal(first, second)
    assert not torch.allclose(first[:, 0], first[:, 1])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_palette_says_every_colour():
    odd = replace(LIGHT, lines=("#123456",))
    axes = quantity_curves({"a": make_rows(), "b": make_rows()}, LOSS, odd).axes[0]
    assert {line.get_color() for line in axes.lines} == {"#123456"}
