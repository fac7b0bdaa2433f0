"""Invariances and baselines on the command line."""

import json
import math
from typing import Any

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from evigrad.cli import main
from evigrad.cli.setup import read_invariance, set_up
from evigrad.errors import ConfigurationError
from evigrad.invariances import GENERATORS, Averaged
from evigrad.training import read_metrics

PLAIN = (
    "train --data digits --subset 40 --model digitsnet --epochs 3 --samples 2"
    " --evaluate-with ntk-10-1 --no-figures --no-progress --device cpu"
).split()
ROUNDS = "--burn-in 1 --every 2 --steps 2".split()
QUICK = [*PLAIN, *ROUNDS, "--estimator", "ntk-10-1"]


def run(*arguments: Any, code: int = 0) -> None:
    assert main([str(argument) for argument in arguments]) == code


def read(**changes: Any) -> Any:
    options = {
        "text": None,
        "initial": 0.1,
        "learn": True,
        "flip": False,
        "samples": 2,
        "average": "logits",
    }
    return read_invariance(**options | changes)


def test_names_and_ranges():
    assert read() is None
    everything = read(text="affine")
    assert everything.ranges == dict.fromkeys(GENERATORS, 0.1)
    assert everything.hyperparameters == ("invariance",)
    three_ranges = read(text="rotation=max, shear,scale_x=0.5", initial=0.3)
    assert three_ranges.ranges == {"rotation": math.pi, "shear": 0.3, "scale_x": 0.5}
    assert read(text="affine=0.2,rotation=0").ranges["rotation"] == 0
    assert read(text="affine=0.2,rotation=0").ranges["shear"] == 0.2
    assert read(text="rotation", learn=False).hyperparameters == ()
    flips = read(flip=True)
    assert (flips.ranges, flips.hyperparameters) == ({}, ())
    assert "flips" in flips.describe()
    assert read(text="rotation,shear", flip=True).describe().endswith("rotation, shear and flips")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": "rotatoin"}, "Did you mean 'rotation'"),
        ({"text": "rotation=4"}, "between 0 and 3.142"),
        ({"text": "rotation=wide"}, "numbers or max as ranges, got 'wide'"),
        ({"text": "rotation="}, "numbers or max as ranges, got ''"),
        ({"text": "rotation=nan"}, "between 0 and"),
        ({"text": "rotation", "initial": -1.0}, "between 0 and"),
    ],
)
def test_what_does_not_exist(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        read(**changes)


def test_the_network_is_averaged_with_the_same_initial_weights():
    plain = set_up("digits", subset=20, device="cpu")
    keywords: dict[str, Any] = {"invariance": "rotation=0.4", "flip": True, "samples": 3}
    setup = set_up("digits", subset=20, device="cpu", average="probabilities", **keywords)
    model = setup.make_model()
    assert isinstance(model, Averaged)
    assert (model.num_samples, model.average) == (3, "probabilities")
    assert model.invariance.flip
    weights = dict(plain.make_model().named_parameters())
    assert all((model.get_parameter(f"model.{n}") == w).all() for n, w in weights.items())
    assert (setup.hyperparameters, plain.hyperparameters) == (("invariance",), ())
    fixed = set_up("digits", subset=20, device="cpu", learn_invariance=False, **keywords)
    assert {n for n, _ in fixed.make_model().named_parameters()} == {f"model.{n}" for n in weights}
    assert fixed.hyperparameters == ()


def test_beyond_the_borders_all_is_black():
    keywords: dict[str, Any] = {"subset": 20, "device": "cpu", "invariance": "rotation"}
    raw, scaled = set_up("digits", pixels="raw", **keywords), set_up("digits", **keywords)
    assert raw.data.train[0].min() == 0 and raw.data.train[0].max() == 1
    (fill,) = raw.network["invariance"]["transform"]["fill"]
    assert str(fill) == "0.0"  # not -0.0
    (fill,) = scaled.network["invariance"]["transform"]["fill"]
    assert fill == scaled.data.train[0].min() < 0


def test_the_width_of_a_network():
    narrow = set_up("digits", subset=20, device="cpu", model="resnet18", width=2)
    wide = set_up("digits", subset=20, device="cpu", model="resnet18", width=4)
    sizes = [sum(p.numel() for p in s.make_model().parameters()) for s in (narrow, wide)]
    assert sizes[0] < sizes[1] / 2
    assert narrow.describe_model() == "resnet18 of width 2"
    with pytest.raises(ConfigurationError, match="'mlp' has no setting 'width'"):
        set_up("digits", subset=20, device="cpu", model="mlp", width=4).make_model()


def test_ranges_are_learned_printed_and_recorded(capsys, tmp_path):
    extra = "--invariance rotation=0.4,shear --hyper-every 1 --hyper-steps 3 --hyper-lr 0.1"
    run(*QUICK, *extra.split(), "--compare-map", "--run-dir", tmp_path / "run")
    output = capsys.readouterr()
    assert "averaged over 2 samples of rotation, shear, with" in output.err
    words = " ".join(output.out.split())
    assert "ranges" in words
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    for name, start in (("rotation", 0.4), ("shear", 0.1)):
        fixed, learned = (r["hyperparameters"][f"range/{name}"] for r in results.values())
        assert fixed == pytest.approx(start)
        assert abs(learned - start) > 0.01
        assert f"{name} {learned:.3g}" in words
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["hyper_steps"] for row in rows] == [5, 8, 13]
    assert rows[-1]["range/rotation"] == pytest.approx(learned_of(results, "rotation"), rel=1e-4)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["hyper_every"], config["hyper_steps"]) == (1, 3)
    assert config["learned"][-2:] == ["model.invariance.rotation", "model.invariance.shear"]


def learned_of(results: dict[str, Any], name: str) -> float:
    return list(results.values())[-1]["hyperparameters"][f"range/{name}"]


@pytest.mark.parametrize("estimator", ["none", "kfac-10-1"])
def test_fixed_ranges(tmp_path, estimator):
    arguments = [*PLAIN, "--estimator", estimator, "--invariance", "rotation=max"]
    arguments += ROUNDS if estimator == "kfac-10-1" else []
    run(*arguments, "--run-dir", tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert list(results) == ["MAP" if estimator == "none" else estimator]
    assert (learned_of(results, "rotation") == pytest.approx(math.pi)) == (estimator == "none")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["learned"] == []) == (estimator == "none")
    run(*arguments, "--no-learn-invariance")


def test_the_doctor_examines_invariances(capsys, monkeypatch):
    monkeypatch.setattr("evigrad.measure.judging.SECONDS", 0.01)
    arguments = "doctor --data digits --subset 40 --model digitsnet --samples 2 --device cpu"
    extra = "--estimator ntk-20-1 --invariance rotation"
    run(*arguments.split(), *extra.split())
    captured = capsys.readouterr()
    assert "averaged over 2 samples of rotation" in captured.err
    assert "model.conv1.weight" in captured.out
    assert "invariance.rotation" not in captured.out  # no weight of the prior's
