"""``evigrad train --estimator auto``, its resumption and its report."""

import io
import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from html_pages import Page
from matplotlib.image import imsave
from training.interrupted import assert_same_runs, dying_at_call, killed
from training.test_auto import MADE_UP

from evigrad.cli import main
from evigrad.evidence import Evidence
from evigrad.training import measuring

QUICK = (
    "--data digits --subset 60 --model mlp --estimator auto --epochs 4 --burn-in 2 --every 2"
    " --steps 2 --evaluate-with ntk-20-C --no-progress --device cpu --no-figures"
).split()


def run(*arguments: Any, code: int = 0) -> None:
    assert main([str(argument) for argument in arguments]) == code


def test_from_the_command_to_the_report(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", *QUICK, "--compare-map", "--step-budget", 20)
    folder = tmp_path / "runs" / "digits-mlp-auto"
    choice = json.loads((folder / "estimator.json").read_text())
    captured = capsys.readouterr()
    assert " ".join(captured.err.split()).count(choice["reason"]) == 1
    assert choice["name"] in captured.out
    assert not (folder / "map" / "estimator.json").exists()
    config = json.loads((folder / "config.json").read_text())
    assert (config["estimator"], config["step_budget"]) == ("auto", 20.0)
    assert list(json.loads((folder / "results.json").read_text())) == ["MAP", choice["name"]]
    white = io.BytesIO()
    imsave(white, np.ones((2, 2)), format="png", cmap="gray")
    monkeypatch.setattr("evigrad.report.write._png", lambda make, palette: white.getvalue())
    run("report", folder)
    page = Page(folder / "report.html")
    assert choice["reason"] in page.text
    assert page.text.count("chosen") == 1
    assert f"Choice of the estimator, {choice['name']}" in page.text


@pytest.mark.parametrize("moment", [("map_loss", 6), ("backward", 1), ("map_loss", 7)])
def test_a_resumed_command(moment, tmp_path, monkeypatch):
    """Each epoch is one batch, of the MAP run first: in epochs 2 and 3, and in the first round."""
    choices: list[int] = []

    def choose(*arguments: Any) -> Any:
        choices.append(1)
        return MADE_UP

    monkeypatch.setattr(measuring, "choose_estimator", choose)
    arguments = ("train", *QUICK, "--compare-map", "--checkpoint-every", 1, "--run-dir")
    run(*arguments, tmp_path / "whole")
    with dying_at_call(Evidence, *moment):
        assert killed(lambda: run(*arguments, tmp_path / "run"))
    choices.clear()
    run("train", "--resume", tmp_path / "run")
    assert len(choices) == (0 if moment == ("map_loss", 7) else 1)
    assert_same_runs(tmp_path / "run", tmp_path / "whole")
    assert_same_runs(tmp_path / "run" / "map", tmp_path / "whole" / "map")


def test_the_doctor_examines_an_estimator_with_a_name(capsys):
    run("doctor", "--estimator", "auto", code=2)
    assert "name one" in capsys.readouterr().err


def test_a_budget_that_is_none(capsys):
    run("train", *QUICK, "--step-budget", 0, code=2)
    assert "step_budget must be a positive number" in capsys.readouterr().err
