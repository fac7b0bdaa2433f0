import io
import json
import math
import re

import numpy as np
import pytest
import torch
from run_folders import make_rows, write_run

from evigrad.errors import ConfigurationError

pytest.importorskip("matplotlib")
pytest.importorskip("yaml")

from html_pages import Page
from matplotlib.image import imread, imsave

from evigrad.plots import DARK, LIGHT
from evigrad.report import write_report
from evigrad.report.drawings import NOTHING, show

OPTIONS = {"data": "digits", "model": "digitsnet"}
RANGES = {"rotation": math.pi / 2, "translation_x": 0.5, "scale_x": math.log(2), "shear": 0.1}


@pytest.fixture
def sketched(monkeypatch):
    """Figures are made, but not drawn, which is what takes the time: a white image in place."""
    buffer = io.BytesIO()
    imsave(buffer, np.ones((2, 2)), format="png", cmap="gray")

    def sketch(make, palette):
        assert make(palette).axes
        return buffer.getvalue()

    monkeypatch.setattr("evigrad.report.write._png", sketch)


def report(*folders, **keywords):
    return Page(write_report(*folders, **keywords))


def figures(folder):
    return {file.stem for file in (folder / "figures").iterdir()}


def test_the_figures_of_training_stay(tmp_path, sketched):
    run = write_run(tmp_path / "run", options=OPTIONS)
    (run / "figures").mkdir()
    for name in ("learning_curves.png", "precisions.png"):  # as ``plots.save_all`` calls them
        (run / "figures" / name).write_bytes(b"of training")
    report(run)
    assert (run / "figures" / "precisions.png").read_bytes() == b"of training"
    assert (run / "figures" / "learning_curves.png").read_bytes() == b"of training"


def test_a_learned_run(tmp_path):
    run = write_run(
        tmp_path / "run",
        options=OPTIONS,
        results={"ntk-100-1": {"evidence": {"per_datum": -0.4321, "estimator": "full-N-C"}}},
    )
    page = report(run)
    assert figures(run) == {"loss", "log_likelihood", "accuracy", "log_evidence", "prior_precision"}
    assert len(page.images) == len(page.dark) == len(page.captions) == 5
    assert all(caption.strip().endswith(".") for caption in page.captions)
    assert page.cell("test accuracy (%)") == "80.00"
    assert page.cell("test log likelihood (nats per example)") == "−0.0500"
    assert page.cell("log evidence by full-N-C (nats per example)") == "−0.4321"
    assert (
        page.cell("log evidence during training, last round (nats per example)")
        == "−1.0500 ± 0.1000"
    )
    assert page.cell("training examples") == "12,345"
    assert page.cell("prior precision, layer2", 1) == "1"
    assert page.cell("prior precision, layer2", 2) == "100"
    assert "from 1 (layer0) to 100 (layer2)" in page.text
    assert "is not finished" not in page.text
    assert "digits, digitsnet, ntk-100-1" in page.text


def test_the_page_needs_nothing_else_and_the_files_are_its_figures(tmp_path):
    run = write_run(tmp_path / "run")
    page = report(run)
    assert not re.search(r"https?:|url\(|@import", page.source)
    assert not page.tags & {"script", "link", "iframe"}
    assert "prefers-color-scheme: dark" in page.source
    assert 'name="viewport"' in page.source
    for colours, images in ((LIGHT, page.images), (DARK, page.dark)):
        for pixels in images:
            paper = "#" + "".join(f"{round(255 * c):02x}" for c in pixels[0, 0, :3].tolist())
            assert paper == colours.paper
    files = [imread(file) for file in (run / "figures").glob("*.png")]
    assert sorted(f.mean() for f in files) == sorted(i.mean() for i in page.images)
    assert not list(run.rglob("*.partial"))


@pytest.mark.usefixtures("sketched")
def test_map_alone(tmp_path):
    run = write_run(tmp_path / "run", estimator=None)
    page = report(run)
    assert figures(run) == {"loss", "log_likelihood", "accuracy"}
    assert "MAP kept its prior precision: 1." in page.text
    assert page.cell("hyperparameter steps", 1) == "0"


@pytest.mark.usefixtures("sketched")
def test_augerino(tmp_path):
    rows = make_rows(learned=False, ranges={"rotation": 1.0})
    for row in rows:
        row["range/rotation"] = 0.1 * row["epoch"]
    run = write_run(tmp_path / "run", rows, estimator="augerino", steps=10, every=5)
    page = report(run)
    assert page.cell("estimator") == "Augerino"
    assert "range-rotation" in figures(run)
    assert "Augerino kept its prior precision: 1." in page.text
    assert "rounds of hyperparameter steps" not in page.text


@pytest.mark.usefixtures("sketched")
def test_a_run_beside_its_map(tmp_path):
    run = write_run(tmp_path / "run")
    write_run(run / "map", estimator=None)
    page = report(run)
    assert page.tables[0][0] == ["metric", "MAP", "ntk-100-1"]
    assert page.cell("hyperparameter steps", 1) == "0"
    assert page.cell("hyperparameter steps", 2) == "40"
    # The run's own figures need no name, and MAP learned nothing to draw.
    assert "prior_precision" in figures(run)
    assert not (run / "map" / "figures").exists()


@pytest.mark.usefixtures("sketched")
def test_a_run_that_is_still_in_its_map_part(tmp_path):
    run = tmp_path / "run"
    write_run(run / "map", make_rows(7, learned=False), estimator=None, epochs=40)
    (run / "config.yaml").write_text(json.dumps(OPTIONS))
    page = report(run)
    assert (
        "MAP is not finished, or was stopped early. It is shown up to epoch 7 of 40." in page.text
    )
    assert (run / "report.html").is_file()


@pytest.mark.usefixtures("sketched")
def test_an_unfinished_run_before_its_first_round(tmp_path):
    run = write_run(tmp_path / "run", make_rows(3), epochs=100)
    page = report(run)
    assert figures(run) == {"loss"}
    assert page.cell("epochs") == "3 of 100"
    assert "ntk-100-1 has not changed its prior precision so far: 1." in page.text


@pytest.mark.usefixtures("sketched")
def test_regression(tmp_path):
    run = write_run(tmp_path / "run", make_rows(regression=True))
    page = report(run)
    assert figures(run) >= {"squared_error", "noise", "prior_precision"}
    assert "accuracy" not in figures(run)
    assert page.cell("test squared error") == "0.8"
    assert page.cell("noise", 2) == f"{math.exp(-1):.3f}"
    assert "Changes: noise from 1 to 0.368." in page.text


@pytest.mark.usefixtures("sketched")
def test_noise_of_several_outputs(tmp_path):
    rows = make_rows(regression=True)
    for row in rows:
        noise = row.pop("noise")
        row |= {"noise/0": noise, "noise/1": 2 * noise}
    page = report(write_run(tmp_path / "run", rows))
    assert "noise of output 0 from 1 to 0.368 and noise of output 1 from 2 to 0.736" in page.text


@pytest.mark.usefixtures("sketched")
def test_parameters_of_a_likelihood_of_ones_own(tmp_path):
    rows = make_rows()
    for row in rows:
        row["likelihood/log_ratio"] = 1.0 + row["epoch"]
    run = write_run(tmp_path / "run", rows)
    page = report(run)
    assert "likelihood" in figures(run)
    assert page.cell("log_ratio", 1) == "2"
    assert "Changes: log_ratio from 2 to" in page.text


@pytest.mark.usefixtures("sketched")
def test_ranges_have_units_that_a_reader_knows(tmp_path):
    run = write_run(tmp_path / "run", make_rows(ranges=RANGES))
    page = report(run)
    assert figures(run) >= {"range-rotation", "range-translation", "range-scale"}
    assert page.cell("rotation", 2) == "±1.57 rad (±90°)"
    assert page.cell("translation_x", 2) == "±0.5 of half the side"
    assert page.cell("scale_x", 2) == "factor up to 2"
    caption = next(c for c in page.captions if "rotated" in c)
    assert "Changes: rotation from ±0.1 rad (±5.73°) to ±1.57 rad (±90°)." in caption
    assert "no images can be shown. The run has no config.yaml" in page.text


@pytest.mark.usefixtures("sketched")
def test_ranges_that_are_not_used_or_not_learned(tmp_path):
    rows = make_rows(ranges={"rotation": 1.0})
    for row in rows:
        row |= {"range/shear": 0.0, "range/scale_x": 0.0, "range/translation_y": 0.25}
    run = write_run(tmp_path / "run", rows)
    page = report(run)
    assert {f for f in figures(run) if f.startswith("range")} == {"range-rotation"}
    assert "kept its translation: translation_y ±0.25 of half the side." in page.text
    assert not any("shear" in cells[0] for table in page.tables for cells in table)


@pytest.mark.usefixtures("sketched")
def test_ranges_of_several_transforms_and_of_unknown_ones(tmp_path):
    ranges = {"first.rotation": 0.5, "second.rotation": 1.0, "second.warp": 3.0}
    run = write_run(tmp_path / "run", make_rows(ranges=ranges))
    page = report(run)
    assert figures(run) >= {"range-rotation", "range-other"}
    assert "first.rotation from ±0.1 rad (±5.73°) to ±0.5 rad (±28.6°) and second" in page.text
    assert page.cell("second.warp", 2) == "3"


@pytest.mark.usefixtures("sketched")
def test_other_hyperparameters_of_the_network(tmp_path):
    rows = make_rows()
    for row in rows:
        row["model/attention.range"] = 0.1 * row["epoch"]
    run = write_run(tmp_path / "run", rows)
    page = report(run)
    assert "model" in figures(run)
    assert "attention.range from 0.1 to 2" in page.text


@pytest.mark.usefixtures("sketched")
def test_many_groups(tmp_path):
    run = write_run(tmp_path / "run", make_rows(10, groups=70))
    page = report(run)
    assert "(layer69)" in page.text
    assert page.cell("prior precision of 70 groups", 2) == "in metrics.csv"


@pytest.mark.usefixtures("sketched")
def test_several_runs_beside_each_other(tmp_path):
    first = write_run(tmp_path / "a" / "run", make_rows(ranges=RANGES))
    second = write_run(tmp_path / "b" / "run", estimator="kfac-N-C")
    third = write_run(tmp_path / "third", make_rows(regression=True))
    page = report(first, second, third)
    assert page.tables[0][0] == ["metric", str(first), str(second), "third"]
    assert not (second / "report.html").exists()
    shown = figures(first / "comparison")
    assert len([name for name in shown if name.startswith("prior_precision-")]) == 3
    assert page.cell("test squared error", 1) == NOTHING
    assert page.cell("test squared error", 3) == "0.8"
    # Different runs, though their names become the same in a file's name.
    twins = [
        write_run(tmp_path / name, make_rows(groups=g)) for name, g in (("x y", 2), ("x-y", 3))
    ]
    captions = [c for c in report(*twins).captions if "pulls the weights" in c]
    assert [re.findall(r"\d+ \(layer\d\)", c)[-1] for c in captions] == [
        "10 (layer1)",
        "100 (layer2)",
    ]
    assert figures(twins[0] / "comparison") >= {"prior_precision-x-y", "prior_precision-x-y-2"}
    with pytest.raises(ConfigurationError, match="one of them was given twice"):
        write_report(first, tmp_path / "b" / ".." / "a" / "run")


@pytest.mark.usefixtures("sketched")
def test_the_page_of_several_runs_leaves_that_of_the_first_one(tmp_path):
    first, second = (write_run(tmp_path / name) for name in "ab")
    page = write_report(first)
    content = page.read_text()
    assert write_report(first, second) == first / "comparison" / "report.html"
    assert page.read_text() == content
    elsewhere = write_report(first, second, out=tmp_path / "pages" / "both")
    assert elsewhere == tmp_path / "pages" / "both" / "report.html"
    assert figures(elsewhere.parent) == figures(first / "comparison")


@pytest.mark.usefixtures("sketched")
def test_values_below_the_axes_are_the_first_ones(tmp_path):
    values = {
        "first": [-90.0, *[-1.0] * 19],
        "last": [*[-1.0] * 19, -90.0],
        "middle": [*[-1.0] * 9, -90.0, *[-1.0] * 10],
    }
    said = {}
    for name, likelihoods in values.items():
        rows = make_rows()
        for row, value in zip(rows, likelihoods, strict=True):
            value += 0.01 * row["epoch"]
            row["test_log_likelihood"] = row["train_log_likelihood"] = value
        page = report(write_run(tmp_path / name, rows))
        said[name] = "The first values lie below the axes" in page.text
    assert said == {"first": True, "last": False, "middle": False}


@pytest.mark.usefixtures("sketched")
def test_the_precision_at_the_start_is_that_of_the_burn_in(tmp_path):
    learned = {"prior_update": "fixed_point", "burn_in": 3, "learned": ["prior.log_precision"]}
    cases = [
        ({"num_data": 1440} | learned, "14.4 (set by the burn-in)"),
        ({"num_data": 10**5} | learned, "15 (set by the burn-in)"),
        ({"prior_mean": "initial"} | learned, "set by the burn-in"),
        (learned | {"burn_in": 0}, "1"),
        (learned | {"learned": ["likelihood.log_noise"]}, "1"),
    ]
    for number, (settings, words) in enumerate(cases):
        run = write_run(tmp_path / str(number), precision=1.0, **settings)
        assert report(run).cell("prior precision at the start") == words


@pytest.mark.usefixtures("sketched")
def test_values_of_different_estimators_name_them(tmp_path):
    runs = [
        write_run(
            tmp_path / name.lower(),
            results={"ntk-100-1": {"evidence": {"per_datum": -0.5, "estimator": name}}},
        )
        for name in ("full-N-C", "ntk-400-C")
    ]
    row = "log evidence after training (nats per example)"
    page = report(*runs)
    assert page.cell(row, 1) == "−0.5000 by full-N-C"
    assert page.cell(row, 2) == "−0.5000 by ntk-400-C"


@pytest.mark.usefixtures("sketched")
def test_the_error_in_the_units_of_the_targets(tmp_path):
    run = write_run(
        tmp_path / "run", make_rows(regression=True), results={"ntk-100-1": {"test_rmse": 2.538}}
    )
    assert report(run).cell("test RMSE (units of the targets)") == "2.54"


def test_values_that_are_not_finite_and_names_that_are_markup(tmp_path):
    rows = make_rows()
    for row in rows:
        row["<b>&\"'"] = 1.0
        row["precision/<i>$x$</i>"] = 2.0 * row["epoch"]
        row["seconds"] = None
    rows[-1] |= {"loss": math.nan, "log_evidence": math.inf, "test_accuracy": math.nan}
    rows[-1] |= {"precision/layer1": math.nan}
    run = write_run(tmp_path / "run <1>", rows, note="<script>alert(1)</script>", odd=None)
    other = write_run(tmp_path / "_other")
    page = report(run, other)
    assert "<script>" not in page.source
    assert "<script>alert(1)</script>" in page.text
    assert "prior precision, <i>$x$</i>" in page.text
    assert "nan" not in page.text.lower().split()
    # The last value that is known.
    assert page.cell("training loss (nats per example)", 1) == f"{2 * math.exp(-19 / 5):.4f}"
    assert page.cell("training time (seconds)", 1) == NOTHING


@pytest.mark.parametrize("column", ["epoch", "loss"])
def test_a_table_without_a_column_is_refused(tmp_path, column):
    rows = make_rows()
    for row in rows:
        del row[column]
    run = write_run(tmp_path / "run", rows)
    with pytest.raises(ConfigurationError, match=rf"metrics.csv has no column {column}"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="needs the folder of a run, got"):
        write_report(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match=r"has no metrics.csv.*--run-dir"):
        write_report(tmp_path)
    run = write_run(tmp_path / "run")
    (run / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"no file .*config.json"):
        write_report(run)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.csv", "epoch,loss\n1,much\n", "could not convert string to float"),
        ("metrics.csv", "epoch,loss\n", "no finished epoch yet"),
        ("metrics.csv", "", "no finished epoch yet"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "must map names to values, got a list"),
        ("config.yaml", "a: [", "config.yaml cannot be read"),
        ("results.json", "3", "results.json must map names to values, got a number"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, words):
    run = write_run(tmp_path / "run")
    (run / name).write_text(content)
    with pytest.raises(ConfigurationError, match=words):
        write_report(run)


def test_a_folder_that_cannot_be_written_into(tmp_path):
    run = write_run(tmp_path / "run", make_rows(3))
    (run / "figures").write_text("in the way")
    with pytest.raises(ConfigurationError, match="Cannot write"):
        write_report(run)


def test_a_negative_number_of_examples(tmp_path):
    with pytest.raises(ConfigurationError, match="examples must be at least 0, got -1"):
        write_report(write_run(tmp_path / "run"), examples=-1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, NOTHING),
        ("", NOTHING),
        (math.nan, NOTHING),
        (-math.inf, NOTHING),
        (True, "yes"),
        (0, "0"),
        (-1234.5, "−1234"),
        (50000, "50,000"),
        (1e-8, "1.0e-08"),
        (0.0, "0"),
        (["a", 1.5], "a, 1.5"),
        ([], NOTHING),
        ({"a": 1}, "a: 1"),
    ],
)
def test_how_values_are_shown(value, text):
    assert show(value) == text


@pytest.mark.usefixtures("sketched")
def test_no_global_state_is_touched(tmp_path):
    run = write_run(tmp_path / "run")
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    write_report(run)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
