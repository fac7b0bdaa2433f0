"""``evigrad reproduce``, ``pareto`` and ``bounds``."""

import json

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from evigrad.cli import main
from evigrad.experiments import paper_experiments

QUICK = (
    "--subset 40 --test-subset 20 --model mlp --epochs 3 --burn-in 1 --every 1 --steps 1"
    " --batch-size 20 --device cpu --threads 1 --jobs 1"
).split()


def run(*arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code


def test_figure_4_from_nothing(capsys, tmp_path):
    where = ("--results", tmp_path, "--device", "cpu", "--threads", 1)
    run("reproduce", "fig4", "--preset", "tiny", *where)
    captured = capsys.readouterr()
    assert "0 of 8 jobs are done" in captured.err and "[8/8]" in captured.err
    assert "ntk-N-C ≥ ntk-20-C ≥ ntk-10-C: holds at every point of the grid" in captured.err
    assert "| rotation | full |" in captured.out
    folder = tmp_path / "shown" / "fig4" / "tiny"
    assert (folder / "figure.png").stat().st_size > 10_000
    assert json.loads((folder / "summary.json").read_text())["jobs"] == [8, 8]
    run("reproduce", "fig4", "--preset", "tiny", *where)
    again = capsys.readouterr()
    assert "8 of 8 jobs are done" in again.err and "[1/" not in again.err
    assert again.out == captured.out
    run("reproduce", "fig5", "--preset", "tiny", "--dry-run", "--results", tmp_path)
    left = capsys.readouterr()
    # The trainings and the exact curves are those of Figure 4.
    assert left.out.count("curve: ") == 6 and "train: " not in left.out
    run("reproduce", "--list", "--results", tmp_path)
    listed = capsys.readouterr().out
    assert all(name in listed for name in paper_experiments()) and "8/8" in listed


def test_mistakes(capsys, tmp_path):
    for arguments, words in (
        (("reproduce",), "Name what to reproduce"),
        (("reproduce", "fgi4"), "Did you mean 'fig4'"),
        (("reproduce", "fig4", "--jobs", 0), "jobs must be at least 1"),
        (("pareto", "--estimators", "ntk-10-1"), "two estimators or more"),
        (("pareto", "--estimators", "ntk-10-1", "ntk-10"), "OUTPUTS is missing"),
        (("bounds", "--start", 2, "--stop", 1), "no grid"),
    ):
        run(*arguments, *(() if arguments[0] == "reproduce" else ("--results", tmp_path)), code=2)
        assert words in capsys.readouterr().err


def test_a_failed_run_is_told(capsys, tmp_path):
    options = ("--curves", "ntk-50-C", "ntk-10-C", *QUICK, "--estimator", "ntk-20-1")
    run("bounds", *options, "--points", 3, "--results", tmp_path, code=1)
    captured = capsys.readouterr()
    assert "warning: curve ntk-50-C" in captured.err  # larger than the data set
    assert "| precision | ntk-10-C |" in captured.out


def test_pareto_of_ones_own(capsys, tmp_path):
    names = ("ntk-10-1", "ntk-20-rows-anchored")
    run("pareto", "--estimators", *names, "--judge", "ntk-N-C", *QUICK, "--results", tmp_path)
    captured = capsys.readouterr()
    assert "On the frontier" in captured.err
    assert all(f"| {name} |" in captured.out for name in names)
    assert (tmp_path / "shown" / "pareto-digits-mlp" / "figure.png").exists()


def test_bounds_along_a_range(capsys, tmp_path):
    options = ("--invariance", "rotation", "--samples", 2, "--along", "rotation", "--points", 2)
    grid = ("--start", 0, "--stop", 3, "--no-log-grid", "--curves", "ntk-10-1", "ntk-N-1")
    run("bounds", *options, *grid, *QUICK, "--estimator", "ntk-20-1", "--results", tmp_path)
    assert "| rotation | ntk-N-1 |" in capsys.readouterr().out
