"""Subsets as large as the memory holds."""

import json
from typing import Any

import pytest
import torch
from loops import loop_of
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.errors import ConfigurationError, EvigradError, MemoryBudgetError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior
from evigrad.training import automatic, fit, is_automatic

N = 60
SMALL: dict[str, Any] = {"epochs": 3, "burn_in": 1, "every": 1, "steps": 1}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.gate = nn.Parameter(torch.ones(4))
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.gate * x)


def kept_bytes(estimator: str, x: Tensor) -> int:
    """By an evidence of that very estimator."""
    model = Gated()
    model.gate.requires_grad_(False)
    evidence = Evidence(model, Categorical(), GaussianPrior(), estimator=estimator, num_data=N)
    return evidence.predicted_bytes(x)


def chosen(data: tuple[Tensor, Tensor], estimator: str, **changes: Any) -> str:
    model = Gated()
    if not changes.get("hyperparameters"):
        model.gate.requires_grad_(False)
    return loop_of(model, data, **SMALL, estimator=estimator, **changes).evidence.spec.name


@pytest.mark.parametrize("choice", ["1", "C", "1-iid", "rows"])
def test_the_largest_that_fits(blobs, choice):
    """What is kept alone, as micro-batches adapt to the rest."""
    data = blobs[0]
    for wanted in (1, 7, 23):
        budget = kept_bytes(f"ntk-{wanted}-{choice}", data[0])
        settings: dict[str, Any] = {"micro_batch": "auto", "memory_budget": budget}
        assert chosen(data, f"ntk-auto-{choice}", **settings) == f"ntk-{wanted}-{choice}"
    assert chosen(data, f"ntk-auto-{choice}") == f"ntk-{N}-{choice}"
    with pytest.raises(MemoryBudgetError, match=f"ntk-auto-{choice}: a subset of one needs"):
        chosen(data, f"ntk-auto-{choice}", micro_batch="auto", memory_budget=100)


def test_passes_count_where_they_hold_the_whole_block(blobs):
    """Factors do not grow with the subset, but what a pass over it holds does."""
    data = blobs[0]
    kept = kept_bytes("kfac-7-1", data[0])
    found = [chosen(data, "kfac-auto-1", memory_budget=kept + n) for n in (8000, 16000)]
    sizes = [int(name.split("-")[1]) for name in found]
    assert 1 < sizes[0] < sizes[1] < N
    assert sizes[1] == pytest.approx(2 * sizes[0], abs=1)
    second = chosen(data, "kfac-auto-1", memory_budget=kept + 16000, hyperparameters=["gate"])
    assert 1 < int(second.split("-")[1]) < sizes[1]  # the gradient in the gate holds more
    small = chosen(data, "kfac-auto-1", memory_budget=kept + 8000, micro_batch=3)
    assert small == f"kfac-{N}-1"
    assert chosen(data, "kfac-auto-1", memory_budget=kept, micro_batch="auto") == f"kfac-{N}-1"


def test_free_memory_is_the_budget_where_none_is_given(blobs, monkeypatch):
    data, free = blobs[0], 10**5
    monkeypatch.setattr(automatic, "available_bytes", lambda device: free)
    for share, micro_batch in ((0.7, None), (0.35, "auto")):
        found = chosen(data, "ntk-auto-1", micro_batch=micro_batch)
        size = int(found.split("-")[1])
        assert kept_bytes(found, data[0]) <= share * free
        if micro_batch == "auto":
            assert kept_bytes(f"ntk-{size + 1}-1", data[0]) > share * free
    monkeypatch.setattr(automatic, "available_bytes", lambda device: None)
    with pytest.raises(ConfigurationError, match="memory_budget=..., or name a number"):
        chosen(data, "ntk-auto-1")


def test_the_number_is_recorded_and_a_resumed_run_keeps_it(blobs, monkeypatch, tmp_path):
    data, settings = blobs[0], SMALL | {"estimator": "ntk-auto-1", "progress": False}
    budget = kept_bytes("ntk-23-1", data[0])
    folder = tmp_path / "run"

    def model() -> nn.Module:
        net = Gated()
        net.gate.requires_grad_(False)
        return net

    calls: list[int] = []

    def stop(row: Any) -> None:
        calls.append(row["epoch"])
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    settings |= {"micro_batch": "auto", "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        fit(model(), data, run_dir=folder, memory_budget=budget, callbacks=[stop], **settings)
    assert json.loads((folder / "config.json").read_text())["estimator"] == "ntk-23-1"
    # Whatever memory there is now.
    monkeypatch.setattr(automatic, "available_bytes", lambda device: 1)
    result = fit(model(), data, run_dir=folder, memory_budget=budget, resume=True, **settings)
    whole = fit(model(), data, memory_budget=budget, **settings)
    assert result.estimator == whole.estimator == "ntk-23-1"
    assert [row["log_evidence"] for row in result.history] == [
        row["log_evidence"] for row in whole.history
    ]
    with pytest.raises(EvigradError):  # another structure is another run
        changed: dict[str, Any] = settings | {"estimator": "kfac-auto-1", "memory_budget": "1MB"}
        fit(model(), data, run_dir=folder, resume=True, **changed)


def test_a_budget_for_the_subset_alone_is_used_up(blobs, tmp_path):
    data = blobs[0]
    model = Gated()
    model.gate.requires_grad_(False)
    settings = SMALL | {"estimator": "ntk-auto-1", "memory_budget": "60kB", "progress": False}
    fit(model, data, run_dir=tmp_path / "run", **settings)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["memory_budget"] is None
    assert 1 < int(config["estimator"].split("-")[1]) < N


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ntk-auto", "OUTPUTS is missing"),
        ("nkt-auto-1", "unknown structure"),
        ("ntk-auto-1-1", "modifier"),
        ("ntk-1-auto", "OUTPUTS must be"),
    ],
)
def test_names_that_do_not_exist(blobs, name, words):
    with pytest.raises(ConfigurationError, match=words):
        chosen(blobs[0], name)


def test_what_is_automatic():
    assert is_automatic("ntk-auto-1")
    assert not any(is_automatic(name) for name in ("ntk-100-1", "map", "ntk-1-auto", None))
