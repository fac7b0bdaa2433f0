import errno
import json
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

import yaml

from evigrad import Schedule
from evigrad.cli import main
from evigrad.cli.setup import Setup, set_up
from evigrad.data import DataSet
from evigrad.errors import EvigradWarning
from evigrad.training import fit, load, read_metrics

QUICK = (
    "--data digits --subset 60 --model mlp --estimator ntk-20-1 --epochs 4 --burn-in 2 --every 2"
    " --steps 2 --evaluate-with ntk-20-C --no-progress --device cpu"
).split()


def run(*arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code


@pytest.mark.converges
def test_train_compares_and_leaves_a_whole_run_directory(capsys, tmp_path):
    same = ("--start-decay", 5e-4)  # the burn-in has the weight decay of MAP
    run("train", *QUICK, *same, "--compare-map", "--eval-every", 2, "--run-dir", tmp_path / "run")
    output = capsys.readouterr().out
    shown = re.search(
        r"the test log likelihood is (\S+) instead of (\S+), ", " ".join(output.split())
    )
    assert "fixed weight decay" in output
    assert "MAP" not in output and "ntk-20-1, learned" not in output
    assert "log evidence" in output
    words = " ".join(output.split())
    assert "The log evidence is a lower bound by ntk-20-C." in words and "With evigrad" in words
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {
        "checkpoint.pt",
        "config.json",
        "config.yaml",
        "figures",
        "map",
        "metrics.csv",
        "results.json",
    }
    assert {p.name for p in (folder / "figures").iterdir()} == {
        "learning_curves.png",
        "precisions.png",
    }
    assert {p.name for p in (folder / "map").iterdir()} == {
        "checkpoint.pt",
        "config.json",
        "metrics.csv",
    }
    learned, fixed = (read_metrics(folder / p / "metrics.csv") for p in (".", "map"))
    assert learned[0]["loss"] == fixed[0]["loss"]  # the same initial weights and order
    assert learned[-1]["hyper_steps"] == 4
    assert fixed[-1]["hyper_steps"] == 0
    results = json.loads((folder / "results.json").read_text())
    assert list(results) == ["MAP", "ntk-20-1"]
    base, learned_score = (results[name]["test"]["log_likelihood"] for name in results)
    assert shown and float(shown[1]) == pytest.approx(learned_score, abs=6e-3)
    assert float(shown[2]) == pytest.approx(base, abs=6e-3)
    assert results["MAP"]["hyperparameters"]["precision/linear1.weight"] == pytest.approx(0.03)
    assert results["MAP"]["evidence"]["estimator"] == "ntk-20-C"
    assert results["MAP"]["mode_gap"] is None and results["ntk-20-1"]["mode_gap"] > 0
    assert f"{results['MAP']['evidence']['per_datum']:.2f}" in output
    assert f"{results['ntk-20-1']['test']['log_likelihood']:.2f}" in output


def test_a_run_can_be_repeated_from_its_own_configuration(tmp_path):
    run("train", *QUICK, "--run-dir", tmp_path / "run", "--no-figures")
    run("train", "--config", tmp_path / "run" / "config.yaml")
    run("train", "--config", tmp_path / "run" / "config.yaml", "--seed", 1)
    rows = [read_metrics(tmp_path / name / "metrics.csv") for name in ("run", "run-2", "run-3")]
    losses = [[row["loss"] for row in history] for history in rows]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert not (tmp_path / "run-2" / "figures").exists()


def test_how_an_estimate_computes_can_be_said_in_words(tmp_path):
    words = "--micro-batch auto --memory-budget 20MB --rows-dtype bfloat16 --gram-dtype float64"
    words += " --prior-update fixed_point --prior-blocks 2 --prior-mean initial"
    run("train", *QUICK, *words.split(), "--no-figures", "--run-dir", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["micro_batch"], config["memory_budget"]) == ("auto", "20MB")
    assert (config["rows_dtype"], config["gram_dtype"]) == ("bfloat16", "float64")
    assert (config["prior_update"], config["prior_blocks"]) == ("fixed_point", 2)
    loaded = load(tmp_path / "run")
    assert list(loaded.evidence.prior.means()) == list(loaded.evidence.weights())
    run("train", "--config", tmp_path / "run" / "config.yaml", "--no-figures")
    rows = [read_metrics(tmp_path / name / "metrics.csv")[-1] for name in ("run", "run-2")]
    assert rows[0]["precision/linear1.weight"] == rows[1]["precision/linear1.weight"] != 1.0


def test_map_alone(capsys, tmp_path):
    plain = "--data digits --subset 60 --model mlp --epochs 4 --no-progress --device cpu".split()
    run("train", *plain, "--estimator", "none", "--run-dir", tmp_path / "run")
    assert "evigrad" not in capsys.readouterr().out
    assert [p.name for p in (tmp_path / "run" / "figures").iterdir()] == ["learning_curves.png"]


def test_the_default_folder_is_named_for_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", *QUICK, "--no-figures")
    assert (tmp_path / "runs" / "digits-mlp-ntk-20-1" / "results.json").is_file()


def test_make_run_shows_real_data_beside_map(capsys):
    # Where learning pays: loose bounds and 8x8 digits show MAP ahead.
    folder = Path(__file__).parent.parent.parent
    shown = {"mnist5k": "mininet", "autompg": None}
    files = " ".join(f"experiments/{name}.yaml" for name in shown)
    assert f"CONFIG ?= {files}\n" in (folder / "Makefile").read_text()
    for data, model in shown.items():
        run("train", "--config", folder / "experiments" / f"{data}.yaml", "--print-config")
        options = yaml.safe_load(capsys.readouterr().out)
        assert options["compare_map"] and options["estimator"] == "ntk-400-rows-anchored"
        assert (options["data"], options["model"]) == (data, model)


def test_the_doctor_lists_every_parameter_and_the_cost(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evigrad.measure.judging.SECONDS", 0.01)
    arguments = "--data digits --subset 60 --model mlp --estimator kfac-20-1 --prior scalar"
    run("doctor", *arguments.split(), "--device", "cpu")
    output = capsys.readouterr().out
    for word in ("linear1.weight", "64x64", "kronecker", "output.bias", "prior group", "all"):
        assert word in output
    for word in ("training step on a batch of 60", "20 examples of a block", "gradient", "ratio"):
        assert word in output
    assert "not a guaranteed lower bound" in " ".join(output.split())
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_shows_the_micro_batches_that_it_chose(capsys, monkeypatch):
    monkeypatch.setattr("evigrad.measure.judging.SECONDS", 0.01)
    arguments = "doctor --data digits --subset 60 --model mlp --estimator kfac-20-1 --device cpu"
    run(*arguments.split(), "--micro-batch", "auto", "--memory-budget", "100kB")
    words = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Micro-batches hold at most: [0-9]+ in the first pass of 64", words)


def test_the_version(capsys):
    run("--version")
    assert capsys.readouterr().out.startswith("evigrad ")


def test_the_precision_beside_the_fixed_point_is_the_baselines(capsys, tmp_path):
    arguments = [*QUICK, "--compare-map", "--precision", 6, "--no-figures"]
    run("train", *arguments, "--epochs", 3, "--run-dir", tmp_path / "run")
    files = (tmp_path / "run" / "map" / "config.json", tmp_path / "run" / "config.json")
    base, learned = (json.loads(file.read_text()) for file in files)
    assert base["precision"] == 6 and base["estimator"] is None
    assert learned["precision"] == 1 and learned["start_decay"] == [0.01]
    run("train", *arguments, "--prior-update", "adam", "--run-dir", tmp_path / "adam")
    assert json.loads((tmp_path / "adam" / "config.json").read_text())["precision"] == 6


def test_held_out_data_choose_the_weight_of_the_log_determinant(capsys, tmp_path):
    arguments = [*QUICK, "--compare-map", "--validation-fraction", 0.2, "--no-figures"]
    run("train", *arguments, "--run-dir", tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    setup = set_up("digits", subset=60, model="mlp", device="cpu")
    keywords: dict[str, Any] = {"estimator": "ntk-20-1", "validation_fraction": 0.2}
    keywords["schedule"] = Schedule(epochs=4, burn_in=2, every=2, steps=2)
    result = fit(setup.make_model(), setup.data.train, **keywords, progress=False)
    assert result.weight_choice is not None
    assert config["log_det_weight"] == result.weight_choice.weight
    folders = [path for path in (tmp_path / "run" / "trials").iterdir() if path.is_dir()]
    assert len(folders) == len(result.weight_choice.trials)
    run("train", "--resume", tmp_path / "run")
    learned = json.loads((tmp_path / "run" / "results.json").read_text())["ntk-20-1"]
    assert learned["train"] == pytest.approx(result.train_metrics)


def test_map_beside_a_regression_learns_its_noise(capsys, tmp_path, monkeypatch):
    x = torch.linspace(-1, 1, 24)[:, None]
    pair = (x, x.sin() + 0.1 * (9 * x).cos())
    units = (torch.zeros(1), torch.ones(1))
    target_units = (torch.zeros(1), torch.full((1,), 3.0))
    data = DataSet("waves", pair, pair, 1, (1,), "gaussian", (), *units, *target_units)
    setup = Setup(data, torch.device("cpu"), "mlp", 0)
    monkeypatch.setattr("evigrad.cli.train.set_up_from", lambda options: setup)
    folder = tmp_path / "run"
    run("train", "--epochs", 5, "--compare-map", "--no-figures", "--run-dir", folder)
    output = " ".join(capsys.readouterr().out.split())
    assert "fixed weight decay" in output and "MAP" not in output
    assert "The log evidence is exact. The RMSE is in the original units." in output
    results = json.loads((folder / "results.json").read_text())
    noise = [results[name]["hyperparameters"]["noise"] for name in results]
    assert list(results) == ["MAP, learned noise", "ntk-400-rows-anchored"]
    assert 1.0 not in noise
    for result in results.values():  # in the units of the targets
        assert result["test_rmse"] == pytest.approx(3 * result["test"]["squared_error"] ** 0.5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("write", ["checkpoint.pt", "metrics.csv", "results.json", "figures"])
def test_a_full_disk_is_one_line(capsys, monkeypatch, tmp_path, write):
    def full(self, *arguments, **keywords):
        if write in str(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return plain(self, *arguments, **keywords)

    changed = "mkdir" if write == "figures" else "open"
    plain = getattr(Path, changed)
    monkeypatch.setattr(Path, changed, full)
    run("train", *QUICK, "--run-dir", tmp_path / "run", code=0 if write == "figures" else 2)
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith(("err", "warn"))]
    (line,) = [x for x in lines if "has not converged" not in x]
    assert write in line and "No space left on device" in line


def test_interruption_is_no_traceback(capsys, monkeypatch):
    def interrupt(setup, options, group, strict):
        raise KeyboardInterrupt

    monkeypatch.setattr("evigrad.cli.train.prepare_runs", interrupt)
    run("train", code=130)
    assert capsys.readouterr().err.startswith("error: Interrupted.")


def test_our_warnings_are_one_line_once_and_others_pass(capsys, monkeypatch):
    def warn(setup, options, group, strict):
        for _ in range(2):
            warnings.warn("The model [has] layers.", EvigradWarning, stacklevel=1)
        raise KeyboardInterrupt

    monkeypatch.setattr("evigrad.cli.train.prepare_runs", warn)
    run("train", code=130)
    assert capsys.readouterr().err.splitlines()[0] == "warning: The model [has] layers."

    def warn_of_points(setup, options, group, strict):
        for value in ("0.1", "2.5e-3", "-1,234"):
            for name in ("ntk-10-C", "ntk-50-C", "block.3.weight"):
                warnings.warn(f"{name} is off by {value} nats.", EvigradWarning, stacklevel=1)
        raise KeyboardInterrupt

    monkeypatch.setattr("evigrad.cli.train.prepare_runs", warn_of_points)
    run("train", code=130)
    assert capsys.readouterr().err.splitlines()[:-1] == [
        "warning: ntk-10-C is off by 0.1 nats.",
        "warning: ntk-50-C is off by 0.1 nats.",
        "warning: block.3.weight is off by 0.1 nats.",
    ]
    shown = warnings.showwarning

    def warn_of_another(setup, options, group, strict):
        warnings.warn("other", UserWarning, stacklevel=1)

    monkeypatch.setattr("evigrad.cli.train.prepare_runs", warn_of_another)
    with pytest.raises(UserWarning, match="other"):
        main(["train"])
    assert warnings.showwarning is shown


def test_without_the_extra_the_command_says_what_to_install(capsys, monkeypatch):
    find = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr("evigrad.cli.find_spec", lambda n: None if n == "rich" else find(n))
    run("train", code=2)
    assert "pip install 'evigrad[all]' (rich missing)" in capsys.readouterr().err


def test_threads_are_only_set_when_asked_for(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    set_up("digits", subset=20, model="mlp", device="cpu")
    assert calls == []
    set_up("digits", subset=20, model="mlp", device="cpu", threads=1)
    assert calls == [1]


def test_an_evaluation_that_fails_loses_nothing_else(capsys, tmp_path):
    arguments = [*QUICK, "--evaluate-with", "ntk-999-1", "--run-dir", tmp_path / "run"]
    run("train", *arguments)
    captured = capsys.readouterr()
    assert "warning: Could not evaluate the log evidence with ntk-999-1" in captured.err
    assert "The log evidence could not be evaluated" in " ".join(captured.out.split())
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert all(result["evidence"] is None for result in results.values())
    assert (tmp_path / "run" / "figures" / "learning_curves.png").exists()


def test_the_package_is_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evigrad", "--version"])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_module("evigrad", run_name="__main__")
    assert capsys.readouterr().out.startswith("evigrad ")
