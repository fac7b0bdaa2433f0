"""``python -m experiments``."""

import json

import pytest
import yaml
from small_experiments import BOUNDS, TRAINING

from experiments.__main__ import main
from experiments.definition import paper_experiments, read_experiment
from experiments.jobs import Store


def run(*arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code


@pytest.fixture
def small_figure_4(monkeypatch):
    """Trainings of Figure 4 that take a second."""
    real = read_experiment.__globals__["_content"]

    def smaller(path, above=()):
        content = real(path, above)
        if path.stem in ("fig4", "fig5"):
            shorter = {"epochs": 2, "burn_in": 1, "subset": 40, "model": "mlp"}
            content["presets"]["tiny"]["training"] |= shorter
        return content

    monkeypatch.setitem(read_experiment.__globals__, "_content", smaller)


def test_figure_4_from_nothing(capsys, tmp_path, small_figure_4):
    where = ("--results", tmp_path, "--device", "cpu", "--threads", 1)
    run("fig4", "--preset", "tiny", *where)
    captured = capsys.readouterr()
    assert "0 of 6 jobs are done" in captured.err and "[6/6]" in captured.err
    assert "All orderings of the theory hold at every point" in captured.err
    assert "| rotation | full |" in captured.out
    folder = tmp_path / "shown" / "fig4" / "tiny"
    assert (folder / "figure.png").stat().st_size > 10_000
    assert json.loads((folder / "summary.json").read_text())["jobs"] == [6, 6]
    run("fig4", "--preset", "tiny", *where)
    again = capsys.readouterr()
    assert "6 of 6 jobs are done" in again.err and "[1/" not in again.err
    assert again.out == captured.out
    # On another machine the results alone draw the same.
    run("--export", tmp_path / "r.jsonl.gz", "--results", tmp_path)
    assert "holds 6 results" in capsys.readouterr().err
    other = ("--results", tmp_path / "other", *where[2:])
    run("fig4", "--preset", "tiny", "--import", tmp_path / "r.jsonl.gz", *other)
    there = capsys.readouterr()
    assert "6 results of" in there.err and "[1/" not in there.err and there.out == captured.out
    run("fig5", "--preset", "tiny", "--dry-run", *other)
    left = capsys.readouterr()
    assert left.out.count(", again: its network was not imported") == 2
    # What is done can be drawn without what is missing.
    run("fig5", "--preset", "tiny", "--no-run", *other)
    drawn = capsys.readouterr()
    assert "Not run: " in drawn.err and "[1/" not in drawn.err and "| rotation |" in drawn.out
    run("fig1", "--preset", "tiny", "--no-run", *other, code=1)
    assert "Nothing of fig1 (tiny) is done." in capsys.readouterr().err
    run("fig5", "--preset", "tiny", "--dry-run", "--results", tmp_path)
    left = capsys.readouterr()
    # The trainings and the exact curves are those of Figure 4, whose kernels served both figures.
    assert left.out.count("curve ") == 4 and "train " not in left.out


def test_the_list_says_what_was_and_predicts_nothing(capsys, tmp_path):
    store = Store(tmp_path)
    for job in read_experiment("fig4", "tiny").jobs()[:2]:
        store.finish(job, {"job_seconds": 40.0})
    run("fig4", "--list", "--results", tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fig4", "Figure", "4", "0/30", "0/26", "0/36", "2/6,", "80", "s"] in rows
    run("fig4", "--list", "--preset", "tiny", "--results", tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fig4", "Figure", "4", "2/6,", "80", "s"] in rows


def test_the_list_names_all_there_is(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.__main__.state_of", lambda *_: (0, 1, 0.0))
    run("--list", "--results", tmp_path / "r")
    listed = capsys.readouterr().out
    assert all(name in listed for name in paper_experiments())
    assert not (tmp_path / "r").exists()


def test_mistakes(capsys, tmp_path):
    for arguments, words in (
        ((), "Name an experiment, for example"),
        (("fgi4",), "Did you mean 'fig4'"),
        (("fig4", "--threads", 0), "threads must be at least 1"),
        (("fig4", "--seeds", -1), "integer seeds of 0 or more"),
        ((tmp_path / "none.yaml",), "There is no file"),
        (("--import", tmp_path / "none.gz", "--results", tmp_path / "r"), "There is no file"),
        (
            ("mine.yaml", "--page", tmp_path / "page.md"),
            "only shows experiments of the paper, got 'mine.yaml'",
        ),
    ):
        run(*arguments, code=2)
        assert words in capsys.readouterr().err


def test_what_is_missing_is_said_once(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("EVIGRAD_DATA", raising=False)
    run("table1", "--results", tmp_path / "r", code=2)
    error = capsys.readouterr().err
    assert error.count("The data set 'cifar10' was not found") == 1 and "--data-dir" in error
    run("fig4", "--device", "gpu", "--results", tmp_path / "r", code=2)
    assert capsys.readouterr().err.count("Device 'gpu' is not available") == 1
    assert not (tmp_path / "r").exists()
    run("table1", "--dry-run", "--results", tmp_path / "r")
    error = capsys.readouterr().err
    assert error.count("jobs cannot run: The data set 'cifar10' was not found") == 1


def test_a_file_of_ones_own(capsys, tmp_path):
    content = {"kind": "pareto", "title": "Mine", "seeds": [0], "training": TRAINING}
    content |= {"estimators": ["ntk-10-1", "ntk-20-rows-anchored"], "judge": "ntk-N-C"}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    where = ("--results", tmp_path / "r", "--device", "cpu", "--threads", 1)
    run(file, "--list", *where)
    assert "0/8" in capsys.readouterr().out
    run(file, *where)  # without any presets
    captured = capsys.readouterr()
    assert "mine, paper: Mine" in captured.err and "On the frontier" in captured.err
    assert "| ntk-10-1 |" in captured.out and "| ntk-20-rows-anchored |" in captured.out
    clashing = tmp_path / "fig4.yaml"
    clashing.write_text(file.read_text())
    run(clashing, *where, code=2)
    assert "has the name of an experiment of the paper" in capsys.readouterr().err


def test_a_failed_run_is_told(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(BOUNDS | {"curves": {"ntk-50-C": None, "ntk-10-C": None}}))
    where = ("--results", tmp_path / "r", "--device", "cpu", "--threads", 1)
    run(file, *where, code=1)
    captured = capsys.readouterr()
    # Larger than the data set, which is known before anything runs.
    assert "warning: 1 of 3 jobs cannot run: 'ntk-50-C' needs" in captured.err
    assert "Not run: prior ntk-50-C." in captured.err
    assert "Failed, 1 job: 'ntk-50-C' needs blocks of 50 examples" in captured.err
    assert "| prior | ntk-10-C |" in captured.out


def test_a_page_that_is_not_utf_8_is_one_line(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_bytes(b"caf\xe9\n")
    run("--page", page, "--results", tmp_path / "r", code=2)
    error = capsys.readouterr().err
    assert "is not UTF-8 text" in error and error.count("\n") == 1
    assert page.read_bytes() == b"caf\xe9\n"
