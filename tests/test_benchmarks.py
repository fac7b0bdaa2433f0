"""The scripts in ``benchmarks/`` that learn, in a short form."""

import csv
import importlib.util
import json
import math
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from evigrad import Evidence, Schedule
from evigrad.blocks.anchors import Anchoring
from evigrad.likelihoods import Categorical
from evigrad.measure import evaluate_evidence
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


@pytest.mark.long
def test_invariance_learning(monkeypatch, tmp_path, capsys):
    script = load_script("invariance_learning", monkeypatch)
    estimators = ("ntk-10-1",)
    monkeypatch.setattr(script, "PROBLEMS", {"digits": script.Problem("digitsnet", 30)})
    monkeypatch.setattr(script, "ESTIMATORS", estimators)
    rows = ("map", "fixed", "augerino", *estimators)
    monkeypatch.setattr(script, "ROWS", rows)
    for name in ("SAMPLES", "TEST_SAMPLES"):
        monkeypatch.setattr(script, name, 2)
    schedule = script.SCHEDULE | {"epochs": 2, "burn_in": 1, "batch_size": 10}
    monkeypatch.setattr(script, "SCHEDULE", schedule)
    page = tmp_path / "page.md"
    marker = "invariance_learning digits"
    page.write_text(f"a\n<!-- {marker} -->\nold\n<!-- end {marker} -->\nb\n")
    common = ["--results", str(tmp_path), "--checkpoints", str(tmp_path / "checkpoints")]
    common += ["--pages", str(page), "--threads", str(torch.get_num_threads())]
    script.main([*common, "--seeds", "0", "1"])
    path = tmp_path / "invariance_learning_digits.csv"
    first_runs = runs_of(path)
    assert list(first_runs) == [(row, seed) for seed in (0, 1) for row in rows]
    for (row, seed), run in first_runs.items():
        fixed = {"map": 0.0, "fixed": 3.14159}.get(row)
        if fixed is None:
            assert abs(float(run["rotation"]) - script.START) > 1e-4, (row, seed)
        else:
            assert float(run["rotation"]) == pytest.approx(fixed, abs=1e-3)
        learned = {round(p, 6) for p in json.loads(run["precisions"]).values()}
        assert (learned == {0.015}) == (row not in estimators)  # 5e-4 of 30
        assert float(run["log_evidence"]) < 0
    # What is there is not run again; a run that is missing is.
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("fixed,1,")))
    script.main([*common, "--seeds", "0", "1"])
    again = runs_of(path)
    assert list(again)[-1] == ("fixed", 1) and len(again) == len(first_runs)
    for key, run in again.items():
        for column in script.COLUMNS:
            same = run[column] == first_runs[key][column]
            assert same or (key == ("fixed", 1) and column == "seconds")
    assert not list((tmp_path / "checkpoints" / "digits").iterdir())
    text = page.read_text()
    assert text.startswith("a\n<!--") and text.endswith("-->\nb\n") and "old" not in text
    assert text.count("\n| ") == len(rows) + 1
    assert "| full circle |" in text and "| 3.14 |" in text
    with pytest.raises(SystemExit, match="no runs"):
        script.main(["--results", str(tmp_path / "none"), "--table"])
    path.write_text("row,seed\nfixed,0\n")
    with pytest.raises(SystemExit, match="columns row, seed, but"):
        script.main([*common, "--table"])


def test_prior_learning(monkeypatch, tmp_path, capsys):
    script = load_script("prior_learning", monkeypatch)
    monkeypatch.setattr(script, "PROBLEMS", {"digits": script.Problem("digitsnet", 30, 3)})
    monkeypatch.setattr(script, "DECAYS", (1e-3, 10.0))
    schedule = script.SCHEDULE | {"burn_in": 1, "every": 1, "batch_size": 10}
    monkeypatch.setattr(script, "SCHEDULE", schedule)
    rows = ("map-none", "grid", "ntk-10-1")
    monkeypatch.setattr(script, "ROWS", rows)
    threads = str(torch.get_num_threads())
    script.main(["--results", str(tmp_path), "--seeds", "0", "--threads", threads])
    runs = runs_of(tmp_path / "prior_learning_digits.csv")
    assert list(runs) == [(row, 0) for row in rows]
    none, grid, learned = runs.values()
    assert none["log_evidence"] == "" and none["precisions"] == ""
    scores = json.loads(grid["validation"])
    assert float(grid["decay"]) == max(map(float, scores), key=lambda d: scores[str(d)])
    assert all(p != 1.0 for p in json.loads(learned["precisions"]).values())
    assert float(learned["log_evidence"]) < 0
    table = capsys.readouterr().out
    assert "| no weight decay |" in table and "| – |" in table


def short_rivals(monkeypatch):
    """The script with few data and epochs, and its small set of digits."""
    script = load_script("rivals", monkeypatch)
    data = script.load("digits", subset=60).with_test_subset(50)
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    monkeypatch.setattr(script, "SCHEDULE", Schedule(epochs=2, eval_every=0))
    monkeypatch.setattr(script, "DECAYS", (1e-3, 10.0))
    monkeypatch.setattr(script, "TRIALS", {"tpe-12": 2, "tpe-36": 3})
    return script


def test_rivals(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    script = short_rivals(monkeypatch)
    rows = ["map-5e-4", "grid", "grid-5fold", "temperature", "early stopping", "ensemble-3"]
    rows += ["default"]
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- rivals digits -->\nold\n<!-- end rivals digits -->\nb\n")
    common = ["--sets", "digits", "--results", str(tmp_path), "--pages", str(page)]
    common += ["--threads", str(torch.get_num_threads())]
    script.main([*common, "--seeds", "0", "--rows", *rows])
    path = tmp_path / "rivals_digits.csv"
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
    assert "digits: 7 rows, about" in capsys.readouterr().out
    # What is there is not run again.
    whole = path.read_text()
    script.main([*common, "--seeds", "0", "--rows", *rows])
    assert path.read_text() == whole
    with pytest.raises(SystemExit, match="no runs"):
        script.main(["--results", str(tmp_path / "none"), "--table"])


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


def test_noise_steps(monkeypatch, tmp_path):
    rivals = short_rivals(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x[:, :1] + 0.1 * torch.randn(60, 1, generator=generator)
    line = rivals.DataSet(
        "line", (x[:40], y[:40]), (x[40:], y[40:]), 1, (3,), "gaussian", (), x[0], x[0]
    )
    monkeypatch.setattr(rivals, "load", lambda *_, **__: line)
    script = load_script("noise_steps", monkeypatch)
    monkeypatch.setattr(script, "make_task", rivals.make_task)
    monkeypatch.setattr(script, "run_default_posterior", rivals.run_default_posterior)
    (page := tmp_path / "page.md").write_text("<!-- noise_steps -->\n<!-- end noise_steps -->\n")
    script.main(
        ["--sets", "yacht", "--seeds", "0", "--results", str(tmp_path), "--pages", str(page)]
    )
    scaled, plain = runs_of(tmp_path / "noise_steps.csv").values()
    assert scaled["rmse"] != plain["rmse"]  # the loss is another one
    assert page.read_text().count("\n| yacht |") == 3


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


def test_noise_models(monkeypatch, tmp_path, capsys):
    script = load_script("noise_models", monkeypatch)
    monkeypatch.setattr(script, "SIZES", (20,))
    monkeypatch.setattr(script, "NUM_TEST", 10)
    fit = partial(script.evigrad.fit, estimator=None, schedule=Schedule(epochs=1))
    monkeypatch.setattr(script, "evigrad", SimpleNamespace(fit=fit))
    script.main(["--seeds", "0", "1", "--results", str(tmp_path)])
    runs = runs_of(tmp_path / "noise_models.csv")
    assert len(runs) == 4
    assert all(float(run["low_sigma"]) > 0 for run in runs.values())
    assert "| 20 | natural-gaussian |" in capsys.readouterr().out


@pytest.fixture
def multi_task(monkeypatch):
    """The script with short trainings on synthetic data with a class and a number."""
    script = load_script("multi_task", monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=generator)
    y = {"kind": (x[:, 0] > 0).long() + (x[:, 1] > 0), "size": x[:, :1].sin()}
    test_y = {name: targets[30:] for name, targets in y.items()}
    train_y = {name: targets[:30] for name, targets in y.items()}
    problem = script.Problem({"kind": 3, "size": 0}, x[:30], train_y, x[30:], test_y)
    monkeypatch.setattr(script, "make_problem", lambda *_: problem)
    monkeypatch.setattr(script, "SETS", ("wine_red",))
    monkeypatch.setattr(script, "WEIGHTS", (1.0, 10.0))
    monkeypatch.setattr(script, "SCHEDULE", Schedule(epochs=3, eval_every=0))
    return script


def test_multi_task(multi_task, tmp_path):
    (page := tmp_path / "page.md").write_text("<!-- multi_task -->\n<!-- end multi_task -->\n")
    options = ["--results", str(tmp_path), "--pages", str(page), "--sets", "wine_red"]
    multi_task.main([*options, "--seeds", "0", "1"])
    runs = runs_of(tmp_path / "multi_task.csv")
    assert set(runs) == {(f"wine_red: {m}", s) for m in multi_task.METHODS for s in (0, 1)}
    for seed in (0, 1):
        of = {name: runs[f"wine_red: {name}", seed] for name in multi_task.METHODS}
        # A network chosen by validation is at most as good as the best on test, which it was
        # chosen from, and the final one has the same weights and noise.
        first, best = of["grid, 80 %"], of["best on test, 80 %"]
        sums = [float(run["first"]) + float(run["second"]) for run in (first, best)]
        assert sums[0] <= sums[1]
        assert (of["grid"]["weights"], of["grid"]["noise"]) == (first["weights"], first["noise"])
        assert of["grid"]["num_data"] == "30" and first["num_data"] == "24"
        assert of["equal weights"]["weights"] == "[1.0, 1.0]"
        noises = {json.loads(of[name]["noise"])["size"] for name in multi_task.LEARNED}
        assert 1.0 not in noises and len(noises) >= 3
        assert of["evidence"]["noise"] == of[multi_task.BY_POSTERIOR]["noise"]
        assert of["evidence"]["first"] != of[multi_task.BY_POSTERIOR]["first"]
    assert page.read_text().count("\n| wine_red |") == len(multi_task.METHODS)


def test_weights_of_multi_task_are_those_of_the_loss(multi_task):
    """Fixed noises and weighted classes multiply the gradients of the heads' losses."""
    problem = multi_task.make_problem()
    gradients = {}
    for weights in ((1.0, 1.0), (3.0, 0.2)):
        likelihood, y = multi_task.joined(problem, weights)
        f = torch.linspace(-1, 1, 30 * 4).view(30, 4).requires_grad_()
        (gradients[weights],) = torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)
    equal, weighted = gradients.values()
    torch.testing.assert_close(weighted, equal * torch.tensor([3.0, 3.0, 3.0, 0.2]))


def test_scores_of_multi_task(multi_task):
    problem = multi_task.make_problem()
    model = torch.nn.Linear(3, 4)
    f, y, noise = model(problem.x).detach(), problem.y, {"size": 0.7}
    first, second = multi_task.scores(problem, model, problem.x, y, noise).values()
    log_prob = Categorical().log_prob(f[:, :3], y["kind"]).mean()
    assert first[0] == pytest.approx(float(log_prob), rel=1e-5)
    density = torch.distributions.Normal(f[:, 3:], 0.7).log_prob(y["size"]).mean()
    assert second[0] == pytest.approx(float(density), rel=1e-5)
    # The noise that is missing is the one with the highest likelihood.
    fitted: dict[str, float] = {}
    second = multi_task.scores(problem, model, problem.x, y, fitted)["size"]
    assert fitted["size"] == second[1]
    for factor in (0.9, 1.1):
        other = {"size": factor * fitted["size"]}
        assert multi_task.scores(problem, model, problem.x, y, other)["size"][0] < second[0]


def test_rotations_of_multi_task(multi_task):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 1, 28, 28, generator=generator)
    inner = torch.zeros_like(images)
    inner[..., 4:24, 4:24] = images[..., 4:24, 4:24]
    for degrees, turns in ((0.0, 0), (90.0, 1), (-90.0, -1)):
        small = multi_task.rotated(inner, torch.full((2, 1), degrees))
        expected = torch.nn.functional.avg_pool2d(torch.rot90(inner, turns, (2, 3)), 2)
        torch.testing.assert_close(small, expected.flatten(1), atol=1e-5, rtol=0)


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


def test_anchor_choice(monkeypatch, tmp_path, capsys):
    script = load_script("anchor_choice", monkeypatch)
    monkeypatch.setattr(script, "PROBLEMS", {"digits": "mlp"})
    monkeypatch.setattr(script, "SUBSET", {"digits": 30})
    training = script.TRAINING | {"estimator": "ntk-10-1", "epochs": 2, "burn_in": 1}
    monkeypatch.setattr(script, "TRAINING", training)
    page = tmp_path / "page.md"
    page.write_text("<!-- anchor_choice -->\nold\n<!-- end anchor_choice -->\n")
    options = "--data digits --seeds 0 --rows 20 --draws 2 --threads"
    threads = str(torch.get_num_threads())
    script.main([*options.split(), threads, "--tables", str(tmp_path), "--page", str(page)])
    assert "| random | k-center | score | greedy, last layer | greedy, all |" in page.read_text()
    assert (tmp_path / "anchor_choice.csv").read_text().count("\n") == 1 + 7


def test_anchored_parametric(monkeypatch, tmp_path, capsys):
    script = load_script("anchored_parametric", monkeypatch)
    data = script.load("digits", subset=20, seed=0)
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    tightness = load_script("tightness", monkeypatch)
    monkeypatch.setattr(tightness, "MODEL", "digitsnet")
    schedule = tightness.SCHEDULE | {"estimator": "ntk-10-rows-anchored", "burn_in": 1}
    monkeypatch.setattr(tightness, "SCHEDULE", schedule | {"every": 1, "steps": 1})
    for name in ("trained", "evidence_at"):
        monkeypatch.setattr(script, name, getattr(tightness, name))
    page = tmp_path / "page.md"
    page.write_text("<!-- anchored_parametric -->\nold\n<!-- end anchored_parametric -->\n")
    folders = ["--networks", str(tmp_path / "n"), "--results", str(tmp_path / "r")]
    common = [*folders, "--tables", str(tmp_path), "--page", str(page)]
    common += ["--threads", str(torch.get_num_threads())]
    script.main(
        [*common, "--seeds", "0", "--rows", "10", "40", "--num-data", "20", "--epochs", "2"]
    )
    rows = json.loads((tmp_path / "r" / "case-0.json").read_text())
    for row in rows:
        # Anchors never make a bound looser on average; none goes below the exact value.
        assert row["exact"] * (1 - 1e-6) <= row["anchored"]
        assert 1 - 1e-6 <= row["exact"] <= row["plain"]
    few, many = rows[0], rows[3]
    assert few["structure"] == "ntk" and few["exact"] == pytest.approx(1.0)
    assert many["anchored"] < few["anchored"]
    assert "| diag |" in page.read_text()


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
    methods = ["evidence", "MLP, grid", "gradient boosting"]
    script.main([*common, "--methods", *methods])
    path = tmp_path / "sklearn_tables.csv"
    whole = path.read_text()
    runs = runs_of(path)
    assert list(runs) == [(f"wine: {method}", 0) for method in methods]
    assert all(float(run["log_likelihood"]) < 0 < float(run["score"]) for run in runs.values())
    assert json.loads(runs["wine: MLP, grid", 0]["settings"])["alpha"] in script.ALPHAS
    text = page.read_text()
    assert "\nold\n" not in text and text.count("\n| ") == len(methods) + 1
    capsys.readouterr()
    script.main([*common, "--methods", *methods])  # what is there is not run again
    assert path.read_text() == whole


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


@pytest.mark.long
def test_first_run(monkeypatch, tmp_path):
    pytest.importorskip("jsonargparse")
    pytest.importorskip("mlxtend")
    script = load_script("first_run", monkeypatch)
    short = "epochs: 3\ncompare_map: true\nestimator: ntk-20-1\nevaluate_with: ntk-20-1\n"
    for name, subsets in {"mnist5k": "subset: 60\ntest_subset: 50\n", "autompg": ""}.items():
        text = f"data: {name}\nmodel: mlp\n{subsets}{short}"
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(script, "CONFIGURATIONS", tmp_path)
    (page := tmp_path / "page.md").write_text("<!-- first_run -->\n<!-- end first_run -->\n")
    arguments = ["--seeds", "0", "1", "--results", str(tmp_path), "--pages", str(page)]
    errors, real = [], json.loads

    def read(text):
        run_results = real(text)
        learned = list(run_results.values())[-1]["test"]
        errors.extend([learned["squared_error"] ** 0.5] if "squared_error" in learned else [])
        return run_results

    monkeypatch.setattr(script, "json", SimpleNamespace(loads=read))
    script.main(arguments)
    runs = runs_of(tmp_path / "first_run.csv")
    assert len(runs) == 2 * 2 * 2
    for seed in (0, 1):  # which has a split of its own, and so another standard deviation
        std = script.load("autompg", seed=seed).target_std.item()
        assert float(runs["autompg: learned", seed]["rmse"]) == pytest.approx(std * errors[seed])
    assert 0 <= float(runs["mnist5k: MAP", 1]["accuracy"]) <= 1
    assert page.read_text().count("| 0-1 |") == 4
    before = (tmp_path / "first_run.csv").read_text()
    script.main(arguments)  # all is there
    assert (tmp_path / "first_run.csv").read_text() == before


@pytest.mark.filterwarnings("ignore::evigrad.EvigradWarning")  # three epochs
def test_structures(monkeypatch, tmp_path):
    pytest.importorskip("mlxtend")
    script = load_script("structures", monkeypatch)
    monkeypatch.setattr(script, "SCHEDULE", Schedule(epochs=3, eval_every=0))
    (page := tmp_path / "page.md").write_text("<!-- structures -->\n<!-- end structures -->\n")
    arguments = ["--sets", "autompg", "--seeds", "0", "1", "--results", str(tmp_path)]
    script.main([*arguments, "--pages", str(page)])
    runs = runs_of(tmp_path / "structures.csv")
    by_way = {
        way: [float(runs[f"autompg: {way}", seed]["log_likelihood"]) for seed in (0, 1)]
        for way in script.WAYS
    }
    assert len(runs) == 3 * 2 and len({values[0] for values in by_way.values()}) == 3
    lines = page.read_text().splitlines()
    line = next(line for line in lines if "| evigrad, one precision |" in line)
    gain = (sum(by_way["layerwise"]) - sum(by_way["scalar"])) / 2
    shown = float(line.split("|")[4].split("±")[0].replace("−", "-"))
    assert shown == pytest.approx(gain, abs=1e-3)
    for name in ("mnist500", "digits"):  # the networks of the pages
        model, _, data = script.problem(name, 0, None)
        assert model(data.test[0][:2]).shape == (2, 10)


@pytest.mark.long
def test_start(monkeypatch, tmp_path):
    script = load_script("start", monkeypatch)
    monkeypatch.setattr(script, "SCHEDULE", Schedule(epochs=3, eval_every=0))
    arguments = ["--sets", "noisy table", "--seeds", "0", "1", "--results", str(tmp_path)]
    markers = "\n".join(f"<!-- {n} -->\n<!-- end {n} -->" for n in ("start", "start precisions"))
    (page := tmp_path / "page.md").write_text(f"{markers}\n")
    script.main([*arguments, "--pages", str(page)])
    runs = runs_of(tmp_path / "start.csv")
    assert len(runs) == 2 * (3 + 4)
    log_evidences = {key: float(run["log_evidence"]) for key, run in runs.items()}
    decays = [
        log_evidences["noisy table: fixed point from " + d, 1] for d in ("0.003", "0.01", "0.03")
    ]
    assert len(set(decays)) == 3  # the burn-in's decay is taken
    lines = page.read_text().splitlines()
    spread = next(line for line in lines if "| fixed point | *spread* |" in line)
    both = [
        max(v) - min(v)
        for v in (decays, [log_evidences[k, 0] for k, s in log_evidences if s and "fixed" in k])
    ]
    assert float(spread.split("|")[4].split("±")[0]) == pytest.approx(sum(both) / 2, abs=1e-3)
    (precisions,) = [line for line in lines if "| fixed point | 0.003 | linear1 " in line]
    precisions_of_seeds = [
        json.loads(runs[k]["precisions"])["linear1.weight"] for k in runs if "0.003" in k[0]
    ]
    rounded = float(f"{(precisions_of_seeds[0] * precisions_of_seeds[1]) ** 0.5:.2g}")
    assert f"linear1 {rounded:g}, " in precisions and "0-1" in page.read_text()


class Logistic:
    """Multinomial logistic regressions, trained to the optimum."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(40, 5, generator=generator).double()
        noise = 0.8 * torch.randn(40, 3, generator=generator)
        self.y = (self.x[:, :3] + noise).argmax(1)

    def trained(self, precision: float, kept: torch.Tensor | None = None) -> torch.nn.Module:
        model = torch.nn.Linear(5, 3).double()
        for w in model.parameters():
            torch.nn.init.zeros_(w)
        x, y = (self.x, self.y) if kept is None else (self.x[kept], self.y[kept])
        optimizer = torch.optim.LBFGS(
            model.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure() -> float:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
            loss = loss + 0.5 * precision * sum(w.square().sum() for w in model.parameters())
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        return model


def test_criteria_of_a_linear_model(monkeypatch):
    """The slopes against retrained models, leave-one-out against models without the datum."""
    script, data, precision, step = load_script("criteria", monkeypatch), Logistic(), 0.7, 1e-4

    def linearised(value: float) -> Any:
        precisions = {"weight": value, "bias": value}
        return script.Linearised(data.trained(value), precisions, (data.x, data.y))

    net = linearised(precision)
    scores = script.criteria(net)
    evidence = Evidence(
        net.model,
        Categorical(),
        GaussianPrior("scalar", precision=precision),
        estimator="full-N-C",
        num_data=40,
    )
    exact = evaluate_evidence(evidence, (data.x, data.y), "full-N-C").per_datum
    assert scores["evidence"] == pytest.approx(exact, abs=1e-6)
    ends = [script.criteria(linearised(precision * math.exp(s)))["evidence"] for s in (step, -step)]
    slopes = script.slopes(net)
    total = (ends[0] - ends[1]) / (2 * step)
    assert slopes["partial"] + slopes["implicit"] == pytest.approx(total, rel=1e-3)
    assert slopes["partial"] != pytest.approx(total, rel=0.05)
    every, left_out = torch.arange(40), 0.0
    for n in range(40):
        f = data.trained(precision, every[every != n])(data.x[n : n + 1])
        left_out += float(f.detach().log_softmax(1)[0, data.y[n]]) / 40
    assert scores["leave-one-out"] == pytest.approx(left_out, abs=0.05)
    assert exact < scores["averaged"] < scores["leave-one-out"]


def test_criteria_is_a_table_of_its_runs(monkeypatch, tmp_path, capsys):
    script = load_script("criteria", monkeypatch)
    monkeypatch.setattr(script, "SCHEDULE", Schedule(epochs=3, eval_every=0))
    monkeypatch.setattr(script, "TEST", 20)
    settings = ["decay 0.01", "decay 0.1", "fixed point", "adam"]
    arguments = ["--sets", "digits", "--seeds", "0", "--subset", "30"]
    script.main([*arguments, "--settings", *settings, "--results", str(tmp_path)])
    runs = runs_of(tmp_path / "criteria.csv")
    assert {row for row, _ in runs} == {f"digits: {s}" for s in settings}
    assert len({run["evidence"] for run in runs.values()}) == 4
    printed = capsys.readouterr().out
    assert "| leave-one-out |" in printed and "| digits: fixed point |" in printed


@pytest.mark.long
def test_rotated(monkeypatch, tmp_path):
    script = load_script("rotated", monkeypatch)
    data = script.load("digits:rotated180", subset=30, seed=0).with_test_subset(20)
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    monkeypatch.setattr(script, "MODEL", "digitsnet")
    monkeypatch.setattr("invariance_learning.SAMPLES", 2)
    monkeypatch.setattr(script, "DECAYS", (1e-3, 1.0))
    monkeypatch.setattr(script, "SCHEDULE", Schedule(epochs=2, eval_every=0, burn_in=1, steps=1))
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
    short = Schedule(epochs=2, batch_size=20, eval_every=0, burn_in=1, steps=1)
    monkeypatch.setattr(script, "SIZES", (20,))
    monkeypatch.setattr(script, "SCHEDULES", {20: short})
    monkeypatch.setattr(script, "DECAYS", (1e-3, 1.0))
    (page := tmp_path / "page.md").write_text("<!-- transfer 20 -->\n<!-- end transfer 20 -->\n")
    rows = ["usual", "last layer", "grid", "diag-ef", "default-2", "default"]
    backbone = tmp_path / "backbone.pt"
    common = ["--seeds", "0", "--results", str(tmp_path), "--backbone", str(backbone)]
    drawn, real = [], script.draw

    def draw(runs_drawn, *arguments):
        drawn.append(runs_drawn)
        real(runs_drawn, *arguments)

    monkeypatch.setattr(script, "draw", draw)
    script.main([*common, "--sizes", "20", "--rows", *rows, "--pages", str(page)])
    assert list(drawn[0]) == ["20 images"]
    runs = runs_of(tmp_path / "transfer_20.csv")
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


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_large_data_have_a_known_truth(monkeypatch, kind):
    """No network is better on many test data than the distribution that they come from."""
    script = load_script("large_data", monkeypatch)
    row = script.measured(f"{kind}-200", 2, None)
    assert (row["steps"], row["rounds"]) == (4, 2)
    assert 0 < row["below_the_truth"] < 2
