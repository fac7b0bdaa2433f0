"""Runs that are taken up from their folders, without their data."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from training.small_runs import CASES, net, train

from evigrad import load
from evigrad.cli import main
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.filterwarnings("ignore:The model has normalization")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["map", "ntk", "anchored", "learned model", "batch normalisation"])
def test_a_run_of_fit_is_filled_into_a_network(case, blobs, tmp_path):
    result = train(case, blobs, tmp_path / "run")
    other = CASES[case][0](5)
    loaded = load(tmp_path / "run", model=other)
    assert loaded.model is other and not other.training
    assert same(other.state_dict(), result.model.state_dict())
    assert same(loaded.evidence.state_dict(), result.evidence.state_dict())
    assert loaded.history == result.history
    assert (loaded.epoch, loaded.settings["epochs"], loaded.settings["batch_size"]) == (5, 5, 20)
    assert list(loaded.evidence.hyperparameters()) == list(result.evidence.hyperparameters())
    assert repr(loaded).startswith("LoadedRun(") and repr(loaded).endswith(", epoch 5 of 5)")
    if case == "anchored":  # what is drawn next is the same
        drawn = [
            next(iter(evidence.blocks(blobs[0]))).indices
            for evidence in (loaded.evidence, result.evidence)
        ]
        assert torch.equal(*drawn)


def test_an_interrupted_run_is_loaded_at_its_checkpoint(blobs, tmp_path):
    def stop(row):
        if row["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("ntk", blobs, tmp_path / "run", callbacks=[stop])
    loaded = load(tmp_path / "run", net(5))
    with pytest.raises(ConfigurationError, match=r"Call describe\(x\) with a few inputs"):
        loaded.evidence.describe()
    assert loaded.epoch == len(loaded.history) == 2


def test_a_run_of_the_command_line_is_loaded_without_its_data(tmp_path, capsys, monkeypatch):
    options = "--model mlp --subset 40 --test-subset 20 --epochs 2 --burn-in 1 --every 1 --steps 1"
    image = "--invariance rotation=0.4,scale_x --flip --samples 2 --estimator kfac-20-1"
    run = ["train", *options.split(), *image.split(), "--run-dir", str(tmp_path / "run")]
    assert main([*run, "--no-progress", "--no-figures", "--compare-map", "--device", "cpu"]) == 0
    monkeypatch.setattr("evigrad.data.load", None)
    loaded = load(tmp_path / "run")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert same(dict(loaded.model.state_dict()), dict(state["model"]))
    x = torch.randn(2, 1, 8, 8)
    assert loaded.model(x).shape == (2, 10)
    assert "model.invariance.rotation" in loaded.evidence.hyperparameters()
    learned = json.loads((tmp_path / "run" / "results.json").read_text())["kfac-20-1"]
    precision = loaded.evidence.prior.precisions()["model.output.weight"]
    named = learned["hyperparameters"]["precision/model.output.weight"]
    assert precision.detach().mean().item() == pytest.approx(named)
    assert load(tmp_path / "run" / "map").settings["estimator"] is None


def test_objects_of_a_run_are_asked_for(blobs, tmp_path):
    prior = GaussianPrior({"first": ["0"], "last": ["3"]})
    run = train("ntk", blobs, tmp_path / "run", likelihood=Categorical(), prior=prior)
    folder = tmp_path / "run"
    with pytest.raises(ConfigurationError, match="used a custom likelihood"):
        load(folder, net(5))
    with pytest.raises(ConfigurationError, match=r"used a custom prior.*prior=\.\.\."):
        load(folder, net(5), likelihood=Categorical())
    fresh_prior = GaussianPrior({"first": ["0"], "last": ["3"]})
    loaded = load(folder, net(5), likelihood=Categorical(), prior=fresh_prior)
    assert same(dict(fresh_prior.state_dict()), dict(prior.state_dict()))
    assert same(loaded.evidence.state_dict(), run.evidence.state_dict())


def test_what_does_not_fit_is_refused_and_nothing_changes(blobs, tmp_path):
    train("ntk", blobs, tmp_path / "run")
    other = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.0), nn.Linear(9, 3))
    before = other.get_parameter("0.weight").clone()
    with pytest.raises(ConfigurationError, match=r"0\.weight is float32 \(9, 4\), not"):
        load(tmp_path / "run", other)
    assert torch.equal(other.get_parameter("0.weight"), before)
    with pytest.raises(ConfigurationError, match="same architecture"):
        load(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="which does not exist"):
        load(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "run" / "checkpoint.pt").unlink()
    with pytest.raises(ConfigurationError, match="must be a folder with a checkpoint"):
        load(tmp_path / "run", net())
