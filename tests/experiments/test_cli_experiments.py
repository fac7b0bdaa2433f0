"""``evigrad reproduce``, ``pareto`` and ``bounds``."""

import json

import pytest
import yaml

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from evigrad.cli import main
from evigrad.cli.experiments import place_of
from evigrad.experiments import Store, jobs_of, paper_experiments, read_experiment

QUICK = (
    "--subset 40 --test-subset 20 --model mlp --epochs 3 --burn-in 1 --every 1 --steps 1"
    " --batch-size 20 --device cpu --threads 1 --jobs 1"
).split()


def run(*arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code


def test_figure_4_from_nothing(capsys, tmp_path):
    where = ("--results", tmp_path, "--device", "cpu", "--threads", 1, "--jobs", 1)
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
    assert all(name in listed for name in paper_experiments()) and "8/8, " in listed


def test_the_list_says_what_was_and_predicts_nothing(capsys, tmp_path):
    store = Store(tmp_path)
    for job in jobs_of(read_experiment("fig4", "tiny"))[:2]:
        store.begin(job)
        store.finish(job, {"job_seconds": 40.0})
    run("reproduce", "fig4", "--list", "--results", tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fig4", "Figure", "4", "0/48", "0/36", "2/8,", "80", "s"] in rows


def test_jobs_run_side_by_side_where_nothing_is_said(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert (place := place_of(device="cpu")).jobs == 4 and place.threads == 2
    assert (place := place_of(device="cpu", threads=4)).jobs == 2 and place.threads == 4
    assert (place := place_of(device="cpu", jobs=8)).jobs == 8 and place.threads == 1
    assert (place := place_of(device="cuda")).jobs == 1 and place.threads == 8
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert (place := place_of(device="cpu")).jobs == 1 and place.threads == 1


def test_mistakes(capsys, tmp_path):
    for arguments, words in (
        (("reproduce",), "Name what to reproduce"),
        (("reproduce", "fgi4"), "Did you mean 'fig4'"),
        (("reproduce", "fig4", "--jobs", 0), "jobs must be at least 1"),
        (("pareto", "--estimators", "ntk-10-1"), "two estimators or more"),
        (("pareto", "--estimators", "ntk-10-1", "ntk-10"), "OUTPUTS is missing"),
        (("bounds", "--start", 2, "--stop", 1), "A grid goes up, not from 2 to 1"),
    ):
        run(*arguments, *(() if arguments[0] == "reproduce" else ("--results", tmp_path)), code=2)
        assert words in capsys.readouterr().err


def test_a_failed_run_is_told(capsys, tmp_path):
    options = ("--curves", "ntk-50-C", "ntk-10-C", *QUICK, "--estimator", "ntk-20-1")
    run("bounds", *options, "--points", 3, "--results", tmp_path, code=1)
    captured = capsys.readouterr()
    # Larger than the data set, which is known before anything runs.
    assert "warning: 1 of 3 jobs are left out: 'ntk-50-C' asks for" in captured.err
    assert "Not run: precision ntk-50-C." in captured.err
    assert "Failed, 1 job: 'ntk-50-C' asks for blocks of 50 data" in captured.err
    assert "| precision | ntk-10-C |" in captured.out
    run("bounds", "--curves", "ntk-50-C", *options[3:], "--results", tmp_path / "n", code=2)
    assert "error: 'ntk-50-C' asks for" in capsys.readouterr().err
    assert not (tmp_path / "n").exists()


def test_what_is_missing_is_said_once(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("EVIGRAD_DATA", raising=False)
    run("reproduce", "table1", "--results", tmp_path / "r", code=2)
    error = capsys.readouterr().err
    assert error.count("There is no data set 'cifar10' here") == 1 and "--data-dir" in error
    run("reproduce", "fig4", "--device", "gpu", "--results", tmp_path / "r", code=2)
    assert capsys.readouterr().err.count("The device 'gpu' cannot be used here") == 1
    assert not (tmp_path / "r").exists()


def test_a_file_of_ones_own(capsys, tmp_path):
    content = {"kind": "pareto", "title": "Mine", "seeds": [0], "estimators": ["ntk-10-1"]}
    training = {"data": "digits", "subset": 40, "test_subset": 20, "model": "mlp", "epochs": 3}
    training |= {"burn_in": 1, "every": 1, "steps": 1, "batch_size": 20}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content | {"training": training}))
    where = ("--results", tmp_path / "r", "--device", "cpu", "--threads", 1, "--jobs", 1)
    run("reproduce", file, "--list", *where)
    assert "0/3" in capsys.readouterr().out
    run("reproduce", file, *where)  # without any presets
    captured = capsys.readouterr()
    assert "mine, paper: Mine" in captured.err and "| ntk-10-1 |" in captured.out
    own = tmp_path / "fig4.yaml"
    own.write_text(file.read_text())
    run("reproduce", own, *where, code=2)
    assert "has the name of an experiment of the paper" in capsys.readouterr().err
    run("reproduce", tmp_path / "none.yaml", code=2)
    assert "There is no file" in capsys.readouterr().err


def test_a_page_that_is_not_utf_8_is_one_line(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_bytes(b"caf\xe9\n")
    run("reproduce", "--page", page, "--results", tmp_path / "r", code=2)
    error = capsys.readouterr().err
    assert "is no text in UTF-8" in error and error.count("\n") == 1
    assert page.read_bytes() == b"caf\xe9\n"


def test_pareto_of_ones_own(capsys, tmp_path):
    names = ("ntk-10-1", "ntk-20-rows-anchored")
    run("pareto", "--estimators", *names, "--judge", "ntk-N-C", *QUICK, "--results", tmp_path)
    captured = capsys.readouterr()
    assert "On the frontier" in captured.err
    assert all(f"| {name} |" in captured.out for name in names)
    (figure,) = (tmp_path / "shown" / "pareto-digits-mlp").glob("*/figure.png")
    # Another choice of estimators does not take its place.
    names = ("ntk-10-1", "ntk-20-1")
    run("pareto", "--estimators", *names, *QUICK, "--results", tmp_path)
    assert figure in (both := set(figure.parents[1].glob("*/figure.png"))) and len(both) == 2


def test_bounds_along_a_range(capsys, tmp_path):
    options = ("--invariance", "rotation", "--samples", 2, "--along", "rotation", "--points", 2)
    curves = ("--curves", "ntk-10-1", "ntk-N-1")
    run("bounds", *options, *curves, *QUICK, "--estimator", "ntk-20-1", "--results", tmp_path)
    assert "| rotation | ntk-N-1 |" in capsys.readouterr().out
    results = [json.loads(file.read_text()) for file in tmp_path.glob("curve/*/result.json")]
    assert [result["grid"] for result in results] == [[0.0, 3.14159]] * 2
