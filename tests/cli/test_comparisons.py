"""``evigrad pareto`` and ``bounds``, and where ``reproduce`` went."""

import csv
import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from evigrad import Evidence
from evigrad.cli import main
from evigrad.cli.setup import set_up
from evigrad.cli.train import _gain, _judge
from evigrad.cli.trainings import kept, resolved
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

QUICK = (
    "--subset 40 --test-subset 20 --model mlp --epochs 3 --burn-in 1 --every 1 --steps 1"
    " --batch-size 20 --device cpu --threads 1"
).split()


@pytest.fixture(autouse=True)
def quick_times(monkeypatch):
    monkeypatch.setattr("evigrad.training.evaluation.SECONDS", 0.01)


def run(*arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code


def test_reproduce_says_where_it_went(capsys):
    run("reproduce", "fig4", code=2)
    assert "python -m experiments fig4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pareto", "--estimators", "ntk-10-1"), "two estimators or more"),
        (("pareto", "--estimators", "ntk-10-1", "ntk-10"), "OUTPUTS is missing"),
        (("bounds", "--start", 2, "--stop", 1), "A grid goes up, not from 2 to 1"),
        (("bounds", "--points", 1), "2 points or more"),
        (("bounds", "--jobs", 0), "jobs must be at least 1"),
        (("bounds", "--curves", "ntk-50-C", *QUICK), "'ntk-50-C' asks for"),
    ],
)
def test_mistakes(arguments, words, capsys, tmp_path):
    run(*arguments, "--results", tmp_path / "r", code=2)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_bounds_of_two_seeds(capsys, tmp_path):
    options = ("--curves", "ntk-50-C", "ntk-10-C", "ntk-N-C", *QUICK, "--estimator", "ntk-20-1")
    options = (*options, "--points", 3, "--results", tmp_path, "--jobs", 1)
    run("bounds", *options, "--seeds", 0, 1, code=1)
    captured = capsys.readouterr()
    # Larger than the data set, which is known before anything runs.
    assert "A curve is left out: 'ntk-50-C' asks for blocks of 50 data" in captured.err
    assert "[2/2] ntk-20-1, seed 1" in captured.err
    (table,) = (tmp_path / "shown").rglob("table.csv")
    head, *rows = csv.reader(table.read_text().splitlines())
    assert head[0] == "estimator" and [row[0] for row in rows] == ["ntk-10-C", "ntk-N-C"]
    assert float(rows[0][1]) < float(rows[1][1]) and float(rows[0][2]) > 0
    assert table.with_name("figure.png").stat().st_size > 10_000
    kinds = [path.name.partition("-")[0] for path in tmp_path.glob("train/*/*.json")]
    assert kinds.count("curves") == 4
    # Nothing is done again, and other curves do not take the place of these.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("train/**/*")}
    run("bounds", "--curves", "ntk-N-C", *options[4:])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list((tmp_path / "shown").rglob("figure.pdf"))) == 2


def test_bounds_along_a_range(capsys, tmp_path):
    options = ("--invariance", "rotation", "--samples", 2, "--along", "rotation", "--points", 2)
    curves = ("--curves", "ntk-10-C", "ntk-N-C", "kfac-10-1")
    run("bounds", *options, *curves, *QUICK, "--estimator", "ntk-20-1", "--results", tmp_path)
    assert "ntk-N-C" in capsys.readouterr().out
    files = [json.loads(file.read_text()) for file in tmp_path.glob("train/*/curves-*.json")]
    assert sorted(map(list, files)) == [["kfac-10-1"], ["ntk-10-C", "ntk-N-C"]]
    found = files[0] | files[1]
    assert [each["grid"] for each in found.values()] == [[0.0, 3.14159]] * 3
    pairs = zip(found["ntk-10-C"]["mean"], found["ntk-N-C"]["mean"], strict=True)
    assert all(lower < upper for lower, upper in pairs)


def test_pareto(capsys, tmp_path):
    names = ("ntk-10-1", "ntk-20-rows-anchored")
    run("pareto", "--estimators", *names, "--judge", "ntk-N-C", *QUICK, "--results", tmp_path)
    captured = capsys.readouterr()
    assert "On the frontier" in captured.err and all(name in captured.out for name in names)
    assert "…" not in captured.out and "frontier" in captured.out  # nothing is cut
    (figure,) = (tmp_path / "shown" / "pareto-digits-mlp").glob("*/figure.png")
    # Another choice of estimators does not take its place; one that fails leaves the other.
    run("pareto", "--estimators", "ntk-10-1", "ntk-90-1", *QUICK, "--results", tmp_path, code=1)
    assert "ntk-90-1, seed 0 failed: " in (said := capsys.readouterr()).err
    assert "ntk-10-1" in said.out and "ntk-90-1" not in said.out
    assert figure in (both := set(figure.parents[1].glob("*/figure.png"))) and len(both) == 2


def test_what_is_kept_is_not_computed_again(tmp_path):
    file = tmp_path / "value.json"
    assert kept(file, lambda: {"a": 1.5}) == kept(file, dict) == {"a": 1.5}
    file.write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read .* Remove it"):
        kept(file, dict)


def test_an_option_that_is_younger_than_results_names_no_other_folder_at_its_default() -> None:
    assert resolved({"prior-mean": "zero", "seed": 3}) == resolved({"seed": 3})
    assert "prior_mean" not in resolved({})
    assert resolved({"prior_mean": "initial"})["prior_mean"] == "initial"


@pytest.mark.parametrize(
    ("base", "learned", "words"),
    [
        (
            {"log_likelihood": -0.3, "accuracy": 0.94},
            {"log_likelihood": -0.2, "accuracy": 0.95},
            "raised the test log likelihood by 0.100 nats per datum: a test target is 11 % more"
            " probable (geometric mean) than under MAP, for 2.0 times its training time.",
        ),
        (
            {"log_likelihood": -9.0, "accuracy": 0.4},
            {"log_likelihood": -2.0, "accuracy": 0.4},
            "raised the test log likelihood by 7.000 nats per datum against MAP, for 2.0",
        ),
        (
            {"log_likelihood": -500.0, "squared_error": 1.0},
            {"log_likelihood": -1.0, "squared_error": 0.81},
            "by 499.000 nats per datum and lowered the test RMSE by 10 % against MAP, for 2.0",
        ),
        ({"log_likelihood": -math.inf}, {"log_likelihood": -1.0}, ""),
    ],
)
def test_what_learning_won_in_a_sentence(base, learned, words):
    results = {
        "MAP": SimpleNamespace(test_metrics=base, seconds=5.0),
        "ntk-10-1": SimpleNamespace(test_metrics=learned, seconds=10.0),
    }
    sentence = _gain(results)  # pyright: ignore[reportArgumentType]
    assert words in sentence and bool(words) == bool(sentence)


@pytest.mark.parametrize(
    ("subset", "own", "name"),
    [
        (60, "ntk-400-rows-anchored", "ntk-N-C"),  # exact, where that is quick
        (1000, "ntk-400-rows-anchored", "ntk-1000-C"),  # of 1000
        (1400, "ntk-400-rows-anchored", "ntk-400-rows-anchored"),
        (1400, "kfac-N-C", "kfac-N-C"),
        (1400, "ntk-100-1", "ntk-700-C"),
        (1400, None, "ntk-700-C"),
    ],
)
def test_the_final_table_is_judged_by_sizes_and_not_by_times(subset, own, name):
    """It is no looser than the curve, as subsets of data beside anchors would be."""
    setup = set_up("digits", subset=subset, model="digitsnet", device="cpu")
    evidence = Evidence(
        setup.make_model(),
        Categorical(),
        GaussianPrior(),
        estimator="ntk-50-1",
        num_data=subset,
        generator=0,
    )
    for seconds in (0.1, 1000.0):
        result = SimpleNamespace(evidence=evidence, seconds=seconds)
        assert _judge({"run": cast("Any", result)}, setup, own) == name
