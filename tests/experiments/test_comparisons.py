"""``python -m experiments pareto`` and ``bounds``, on one's own data and network."""

import csv
import json

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from evigrad.errors import ConfigurationError
from experiments.__main__ import main
from experiments.trainings import kept, resolved

QUICK = (
    "--subset 40 --test-subset 20 --model mlp --epochs 3 --burn-in 1 --every 1 --steps 1"
    " --batch-size 20 --device cpu --threads 1"
).split()


def run(*arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pareto", "--estimators", "ntk-10-1"), "at least two estimators"),
        (("pareto", "--estimators", "ntk-10-1", "ntk-10"), "OUTPUTS is missing"),
        (("bounds", "--start", 2, "--stop", 1), "A grid must increase, got start=2 and stop=1"),
        (("bounds", "--points", 1), "at least 2 points"),
        (("bounds", "--threads", 0), "threads must be at least 1"),
        (("bounds", "--threads", 1000000), "threads must be at most 1024, got 1000000"),
        (("bounds", "--curves", "ntk-50-C", *QUICK), "'ntk-50-C' needs"),
    ],
)
def test_mistakes(arguments, words, capsys, tmp_path):
    run(*arguments, "--results", tmp_path / "r", code=2)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_bounds_of_two_seeds(capsys, tmp_path):
    options = ("--curves", "ntk-50-C", "ntk-10-C", "ntk-N-C", *QUICK, "--estimator", "ntk-20-1")
    options = (*options, "--points", 3, "--results", tmp_path)
    run("bounds", *options, "--seeds", 0, 1, code=1)
    captured = capsys.readouterr()
    # Larger than the data set, which is known before anything runs.
    assert "A curve is omitted: 'ntk-50-C' needs blocks of 50 examples" in captured.err
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
    by_estimator = files[0] | files[1]
    assert [curve["grid"] for curve in by_estimator.values()] == [[0.0, 3.14159]] * 3
    pairs = zip(by_estimator["ntk-10-C"]["mean"], by_estimator["ntk-N-C"]["mean"], strict=True)
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
