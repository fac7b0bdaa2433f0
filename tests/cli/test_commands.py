import errno
import inspect
import json
import os
import re
import runpy
import sys
import warnings
from functools import wraps
from pathlib import Path

import pytest
import torch

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

import yaml

from evigrad.cli import COMMANDS, main, module_of
from evigrad.cli.parser import NEEDS, argument_descriptions, check_needs, check_null, with_hyphens
from evigrad.cli.setup import Setup, set_up
from evigrad.data import DataSet
from evigrad.errors import ConfigurationError, EvigradWarning, nearest
from evigrad.training import fit, load, read_metrics
from evigrad.training.settings import GROUPS

QUICK = (
    "--data digits --subset 60 --model mlp --estimator ntk-20-1 --epochs 4 --burn-in 2 --every 2"
    " --steps 2 --evaluate-with ntk-20-C --no-progress --device cpu"
).split()


def run(*arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code


def error_of(capsys, *arguments):
    run(*arguments, code=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1  # one line, no traceback
    return captured.err


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
    assert "The log evidence is a lower bound by ntk-20-C, and the next column shows" in words
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
    for result in results.values():  # what the curve was made by, of both
        value = result["evidence_as_in_training"]
        assert (value["estimator"], value["blocks"]) == ("ntk-20-1", 10)
        assert f"{value['per_datum']:.2f}" in output
    assert results["MAP"]["mode_gap"] is None and results["ntk-20-1"]["mode_gap"] > 0
    assert "as in training" in output
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


def test_options_after_a_file_replace_what_it_says(capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 50\nlr: 0.5\ncompare_map: true\n")
    run("train", "--config", file, "--epochs", 7, "--lr_min=0.1", "--print_config")
    options = yaml.safe_load(capsys.readouterr().out)
    assert (options["epochs"], options["lr"], options["lr_min"]) == (7, 0.5, 0.1)
    assert options["compare_map"] is True
    assert options["estimator"] == "ntk-400-rows-anchored"
    run("train", "--config", file, "--no-compare-map", "--print-config")
    assert yaml.safe_load(capsys.readouterr().out)["compare_map"] is False


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


def test_a_number_of_bytes_in_a_file(capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("micro_batch: 7\nmemory_budget: 1000000\n")
    run("train", "--config", file, "--print-config")
    options = yaml.safe_load(capsys.readouterr().out)
    assert (options["micro_batch"], options["memory_budget"]) == (7, 1000000)


def test_map_alone(capsys, tmp_path):
    plain = "--data digits --subset 60 --model mlp --epochs 4 --no-progress --device cpu".split()
    run("train", *plain, "--estimator", "none", "--run-dir", tmp_path / "run")
    assert "evigrad" not in capsys.readouterr().out
    assert [p.name for p in (tmp_path / "run" / "figures").iterdir()] == ["learning_curves.png"]
    run("train", *plain, "--estimator", "none", "--compare-map", code=2)


def test_the_default_folder_is_named_for_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", *QUICK, "--no-figures")
    assert (tmp_path / "runs" / "digits-mlp-ntk-20-1" / "results.json").is_file()


EXPERIMENTS = sorted((Path(__file__).parent.parent.parent / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_the_shipped_experiments_are_valid(capsys, file):
    run("train", "--config", file, "--print-config")
    options = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load(file.read_text())
    assert {name: options[name] for name in written} == written


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


@pytest.mark.parametrize("command", [[], ["--help"], ["train", "--help"], ["doctor", "-h"]])
def test_help_is_complete_and_narrow(capsys, command):
    run(*command)
    output = capsys.readouterr().out
    assert output.startswith("usage: evigrad")
    assert max(map(len, output.splitlines())) <= 100
    for noise in ("``", "(type:", "None", "{true", "In Python", "%"):
        assert noise not in output
    if command and command[0] == "train":
        assert "--batch-size N" in output
        assert "(default: ntk-400-rows-anchored)" in output
        assert "nats" not in output or "per example" in output


def test_every_option_of_fit_is_on_the_command_line():
    # Those that only Python can give, or that the command gives itself.
    beside = {"model", "train", "test", "seed", "run_dir", "callbacks", "anchoring"}
    beside |= {"hyperparameters", "resume", "process_group", "validation", "validation_fraction"}
    options = set(module_of("train").make_parser().get_defaults().keys())
    assert set(inspect.signature(fit).parameters) - {*GROUPS} <= options | beside
    for source in (*GROUPS.values(), set_up):
        assert set(inspect.signature(source).parameters) <= options
        assert set(inspect.signature(source).parameters) <= set(argument_descriptions(source))


def test_the_version(capsys):
    run("--version")
    assert capsys.readouterr().out.startswith("evigrad ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("trian", "got 'trian'. Did you mean 'train'?"),
        ("train --estimater ntk-10-1", "no option --estimater. Did you mean '--estimator'?"),
        ("train --run_dri x", "no option --run-dri. Did you mean '--run-dir'?"),
        ("train --epochs many", "--epochs: must be a whole number, got 'many'"),
        ("train --lr fast", "--lr: must be a number, got 'fast'"),
        ("train --optimizer sdg", "must be one of adam, sgd, got 'sdg'. Did you mean 'sgd'?"),
        ("train --micro-batch some", "must be a whole number or auto, got 'some'"),
        ("train --micro-batch 0", "micro_batch must be a positive integer"),
        ("train --memory-budget 1GiB", "Set micro_batch='auto'"),
        (
            "train --micro-batch auto --memory-budget lots",
            "an amount such as 8GiB or 500MB, got 'lots'",
        ),
        ("train --autocast float64", "must be one of bfloat16, got 'float64'"),
        ("train --prior-update mackay", "must be one of adam, fixed_point, got 'mackay'"),
        ("train --compare-map perhaps", "--compare-map must be yes or no, got 'perhaps'"),
        ("train --epochs", "--epochs needs a value"),
        ("train digits", "Options start with --, got 'digits'"),
        ("train --config nowhere.yaml", "--config: File does not exist"),
        ("train --data digit", "Did you mean 'digits'?"),
        ("train --model digitnet", "Did you mean 'digitsnet'?"),
        ("train --estimator nkt-100-1", "Did you mean 'ntk-100-1'?"),
        ("train --estimator auto", "Use the default 'ntk-400-rows-anchored'"),
        ("doctor --estimator ntk-auto-1", "Use the default 'ntk-400-rows-anchored'"),
        (
            "train --step-budget 2",
            "option --step-budget no longer exists. It belonged to the estimator",
        ),
        (
            "train --split-blocks yes",
            "option --split-blocks no longer exists. Each process evaluates",
        ),
        ("train --evaluate-with nkt-100-1", "Did you mean 'ntk-100-1'?"),
        ("train --likelihood categoricl", "Did you mean 'categorical'?"),
        ("train --likelihood gaussian", "likelihood is only for tables, got likelihood=gaussian"),
        ("train --subset 50 --estimator ntk-100-1", "num_data is 50"),
        ("train --epochs 3 --burn-in 10", "burn_in must be at most epochs = 3, got 10"),
        ("train --model mininet", "at least 28x28"),
        ("train --device gpu", "'gpu' is not available. A GPU's name is cuda."),
        ("train --threads 0", "threads must be at least 1"),
        ("train --threads 1000000", "threads must be at most 1024, got 1000000"),
        ("train --seed -1", "seed must be at least 0, got -1"),
        (f"train --seed {2**64}", "seed must be at most"),
        *[
            (f"train --flip --model cnn --{name} {10**22}", f"{name} must be at most 1000")
            for name in ("epochs", "steps", "every", "width", "depth", "samples")
        ],
        ("doctor --estimator none", "Use a name such as ntk-100-1"),
        *[
            (
                f"{command} --estimator map",
                "'map' is not an estimator. For plain MAP training, use estimator=None",
            )
            for command in ("train", "doctor")
        ],
        ("train --estimator map-noise", "--estimator none --noise-on-loss"),
        ("train --estimator augerino", "experiments/augerino"),
        ("train --augerino-weight 0.1", "The option --augerino-weight no longer exists"),
        ("doctor --batch-size 0", "batch_size must be at least 1"),
    ],
)
def test_mistakes_are_one_clean_line(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVIGRAD_DATA", raising=False)
    assert words in error_of(capsys, *arguments.split())
    assert list(tmp_path.iterdir()) == []  # and nothing was written


def test_map_beside_a_regression_learns_its_noise(capsys, tmp_path, monkeypatch):
    x = torch.linspace(-1, 1, 24)[:, None]
    pair = (x, x.sin() + 0.1 * (9 * x).cos())
    units = (torch.zeros(1), torch.ones(1))
    target_units = (torch.zeros(1), torch.full((1,), 3.0))
    data = DataSet("waves", pair, pair, 1, (1,), "gaussian", (), *units, *target_units)
    setup = Setup(data, torch.device("cpu"), "mlp", 0)
    monkeypatch.setattr("evigrad.cli.train.set_up", wraps(set_up)(lambda **_: setup))
    folder = tmp_path / "run"
    run("train", "--epochs", 5, "--compare-map", "--no-figures", "--run-dir", folder)
    output = " ".join(capsys.readouterr().out.split())
    assert "fixed weight decay" in output and "MAP" not in output
    assert "The log evidence is exact. The RMSE is in the original units." in output
    assert "as in training" not in output  # equal values
    results = json.loads((folder / "results.json").read_text())
    noise = [results[name]["hyperparameters"]["noise"] for name in results]
    assert list(results) == ["MAP, learned noise", "ntk-400-rows-anchored"]
    assert 1.0 not in noise
    for result in results.values():  # in the units of the targets
        assert result["test_rmse"] == pytest.approx(3 * result["test"]["squared_error"] ** 0.5)


def test_mistakes_in_a_file(capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("epoch: 4\n")
    words = error_of(capsys, "train", "--config", file)
    assert "unknown key 'epoch'. Did you mean 'epochs'?" in words
    file.write_text("estimator: ntk-9-1\nstep_budget: 5.0\n")
    words = error_of(capsys, "train", "--config", file)
    assert "the key 'step_budget', which is no longer an option" in words
    assert "the default ntk-400-rows-anchored" in words
    file.write_text("epochs: four\n")
    assert "--epochs: must be a whole number, got 'four'" in error_of(
        capsys, "train", "--config", file
    )
    file.write_text("a: b: c\n")
    assert "config" in error_of(capsys, "train", "--config", file)


@pytest.mark.parametrize("command", COMMANDS)
def test_null_is_no_value_of_an_option_with_a_default(command):
    parser = module_of(command).make_parser()
    nameless = {"help", "config", "print_config"}
    defaults = {n: v for n, v in parser.get_defaults().items() if n not in nameless}
    options = parser.get_defaults()
    check_null(parser, options)
    for name, default in defaults.items():
        options[name] = None
        if default is None:
            check_null(parser, options)
        else:
            with pytest.raises(ConfigurationError, match=f"^'{name}' must not be null"):
                check_null(parser, options)
        options[name] = default


# What would be ignored, what it is of use with, and the same with that.
IDLE = [
    ("train --initial-range 0.2", "--invariance", "--invariance rotation"),
    ("train --no-learn-invariance", "--invariance", "--invariance rotation"),
    ("doctor --samples 3", "--invariance or --flip", "--flip"),
    ("train --hyper-every 1", "--invariance that is learned", "--invariance rotation"),
    ("train --hyper-lr 0.1", "--invariance that is learned", "--invariance rotation"),
    *[
        (f"train --estimator none --{option}", "estimator", "--estimator kfac-N-C")
        for option in (
            *("burn-in 3", "every 2", "steps=7", "prior-blocks 2", "prior-update fixed_point"),
            *("root fisher", "gram-dtype float64"),
            *("hyper-lr 0.1 --invariance shear", "hyper-every 1 --invariance shear"),
        )
    ],
    ("train --noise-on-loss", "--estimator none", "--estimator none"),
    *[
        (f"train --estimator {name} --{option}", words, mended)
        for option in ("prior-lr 0.3", "prior-lr-min 0")
        for name, words, mended in (
            ("none", "an --estimator of the evidence", "--estimator kfac-N-C --prior-update adam"),
            ("kfac-N-C", "--prior-update adam", "--prior-update adam"),
            ("kfac-N-C", "noise", "--likelihood gaussian"),
        )
    ],
    ("train --prior-update fixed_point --prior-lr 0.3", "noise", "--likelihood gaussian"),
    ("train --sharing reduce", "kfac", "--estimator kfac-N-C"),
    ("train --rows-dtype bfloat16 --estimator kfac-N-C", "ntk", "--estimator ntk-N-C"),
    ("train --estimator full-N-C --rows-device cpu", "ntk", "--estimator ntk-N-C"),
]


@pytest.mark.parametrize(("arguments", "words", "more"), IDLE, ids=[case[0] for case in IDLE])
def test_what_would_be_ignored_is_refused(capsys, tmp_path, monkeypatch, arguments, words, more):
    monkeypatch.chdir(tmp_path)
    name, *typed = arguments.split()
    error = error_of(capsys, name, *typed)
    assert "would have no effect: it only works with" in error and words in error
    assert list(tmp_path.iterdir()) == []
    parser = module_of(name).make_parser()
    typed += more.split()
    check_needs(parser, parser.parse_args(typed))


def test_every_option_that_needs_others_is_one_of_a_command():
    there = {n for c in COMMANDS for n in module_of(c).make_parser().get_defaults().keys()}
    assert {name for names, _, _ in NEEDS for name in names} <= there


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"burn_in": 3, "estimator": "none"}, "burn_in", "an --estimator of the evidence"),
        ({"sharing": "reduce"}, "sharing", "kfac estimators"),
        ({"start_decay": 0.1, "estimator": "none"}, "start_decay", "an --estimator"),
        ({"root": "fisher", "estimator": "kfac-N-C"}, "root", "blocks contain all outputs"),
        ({"start_decay": [0.1, 1.0], "epochs": 3}, "start_decay", "too few rounds"),
        ({"precision": 3.0}, "precision", "Set start_decay"),
    ],
)
def test_a_file_and_the_command_line_refuse_the_same(capsys, tmp_path, options, name, words):
    file = tmp_path / "c.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in options.items()))
    typed = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    folder = ["--run-dir", tmp_path / "run", "--subset", 60, "--test-subset", 9]
    errors = [
        error_of(capsys, "train", *folder, *arguments) for arguments in (["--config", file], typed)
    ]
    assert errors[0] == errors[1] and name in errors[0] and words in errors[0]
    assert not (tmp_path / "run").exists()


def test_files_of_nulls_and_of_other_encodings(capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("batch_size: null\nhyper_every: null\n")
    words = error_of(capsys, "train", "--config", file)
    assert "'batch_size' must not be null. Remove it to use the default, 100." in words
    file.write_bytes("epochs: 4 # caf\xe9\n".encode("latin-1"))
    assert "must be a text file in UTF-8" in error_of(capsys, "train", "--config", file)


# Names that are nothing's misspelling, and such that are.
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *[(name, None) for name in ("dry-run", "learning-rate", "momentous", "hyper-x")],
        *[("epohcs", "epochs"), ("num-epochs", "epochs"), ("batchsize", "batch-size")],
        *[("hyper-stesp", "hyper-steps"), ("run-dri", "run-dir"), ("presicion", "precision")],
    ],
)
def test_hints_are_for_slips_alone(capsys, typed, meant):
    words = error_of(capsys, "train", f"--{typed}")
    assert (f"Did you mean '--{meant}'" in words) if meant else ("Did you mean" not in words)


def test_a_table_is_not_taken_for_another_one_in_its_folder():
    tables = ["uci/wine", "uci/kin8nm", "digits"]
    assert nearest("uci/wnie", tables) == " Did you mean 'uci/wine'?"
    assert nearest("uci/name", tables) == nearest("uci/NAME", tables) == ""


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


def test_options_may_be_typed_with_either_dash():
    typed = ["--run_dir", "a_b", "--lr_min=1e_3", "-h", "x_y"]
    assert with_hyphens(typed) == ["--run-dir", "a_b", "--lr-min=1e_3", "-h", "x_y"]


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
