"""Training that continues until it has settled, and no longer."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.interrupted import Killed, assert_same_runs, killed
from training.small_runs import SMALL

from evigrad import FitResult, Schedule
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Gaussian
from evigrad.training import cycles, fit
from evigrad.training.cycles import Cycles, has_settled
from evigrad.training.plan import plan
from evigrad.training.settings import Settings, grouped

SETTINGS: dict[str, Any] = SMALL | {
    "epochs": 4,
    "burn_in": 1,
    "every": 1,
    "lr": 0.01,
    "likelihood": "gaussian",
    "start_decay": 0.01,
}


def data() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, 60)[:, None]
    return x, torch.sin(3 * x) + 0.1 * torch.randn(
        60, 1, generator=torch.Generator().manual_seed(0)
    )


def train(folder: Path | None = None, callbacks: Any = (), **changes: Any) -> FitResult:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    settings = grouped(SETTINGS | changes)
    return fit(net, data(), run_dir=folder, resume=bool(folder), callbacks=callbacks, **settings)


def row(
    evidence: float | None = -1.0, gap: float | None = 0.1, noise: float = 0.5
) -> dict[str, Any]:
    return {"log_evidence": evidence, "mode_gap": gap, "noise": noise, "precision/w": 3.0}


def test_a_run_has_settled_if_nothing_moves() -> None:
    for change, settled in [
        ({}, True),
        ({"evidence": -1.02}, False),
        ({"evidence": None}, True),
        ({"gap": 0.12}, False),
        ({"gap": None}, False),
        ({"noise": 0.51}, True),
        ({"noise": 0.48}, False),
    ]:
        before = [row()] * 3
        assert has_settled(before, before + [row(**change)] * 3) == settled


def test_log_evidence_is_averaged_over_three_rounds() -> None:
    before = [row(-1.0), row(None)] * 3
    noisy = [row(-1.09), row(None), row(-0.91), row(None), row(-1.0), row()]
    assert has_settled(before, [*before, *noisy[:-1]]) is True
    assert has_settled(before, [*before, row(-1.09)]) is False


def test_cycles_are_half_as_long_and_end_at_the_most() -> None:
    moving = [row(0.1 * epoch) for epoch in range(100)]
    run_cycles = Cycles(Schedule(epochs=10, max_epochs=22))
    ends = [run_cycles.end(moving[:count]) for count in range(23)]
    assert ends == [10] * 10 + [15] * 5 + [20] * 5 + [22] * 3
    starts = [epoch for epoch in range(1, 23) if run_cycles.progress(epoch) == 0]
    assert starts == [1, 11, 16, 21]
    assert run_cycles.progress(22) == 0.5
    assert run_cycles.progress(15) == 0.8
    still = [row()] * 100
    assert [run_cycles.end(still[:count]) for count in (9, 10, 14, 15, 16)] == [10, 15, 15, 15, 15]


def test_without_a_maximum_nothing_changes() -> None:
    run_cycles = Cycles(Schedule(epochs=10))
    assert run_cycles.end([row(0.1 * epoch) for epoch in range(10)]) == 10


@pytest.mark.parametrize(
    ("settings", "num_data", "most"),
    [
        ({}, 100, 8000),
        ({}, 2000, 400),
        ({}, 2001, None),
        ({"likelihood": "categorical"}, 100, None),
        ({"likelihood": Gaussian(learnable=False)}, 100, None),
        ({"estimator": None}, 100, None),
        ({"schedule": Schedule(epochs=50)}, 100, None),
        ({"schedule": Schedule(max_epochs=3000)}, 100, 3000),
    ],
)
def test_few_data_with_a_learned_noise_train_until_they_have_settled(
    settings: dict[str, Any], num_data: int, most: int | None
) -> None:
    options: dict[str, Any] = {"likelihood": "gaussian"}
    chosen = plan(Settings(**options | settings), num_data)
    assert chosen.schedule.max_epochs == most


@pytest.mark.converges
def test_a_run_continues_where_the_shorter_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "NATS", 0.0)  # never settled
    short, long = train(), train(max_epochs=8)
    assert len(short.history) == 4 and len(long.history) == 8
    columns = short.history[0].keys() - {"seconds"}
    for one, other in zip(short.history, long.history, strict=False):
        assert {name: one[name] for name in columns} == {name: other[name] for name in columns}
    later = [r["lr"] for r in long.history[4:]]
    assert later[:2] == later[2:] == pytest.approx([0.003, (0.003 + 1e-6) / 2])
    gap_epochs = [r["epoch"] for r in long.history if r["mode_gap"] is not None]
    assert gap_epochs == [4, 6, 8]  # the ends of cycles
    assert long.mode_gap == long.history[-1]["mode_gap"]


@pytest.mark.converges
def test_a_run_ends_when_it_has_settled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cycles, "NATS", math.inf)
    monkeypatch.setattr(cycles, "NOISE", math.inf)
    assert len(train(max_epochs=40, progress=True).history) == 6
    assert "Training has settled after epoch 6 of at most 40." in capsys.readouterr().err


@pytest.mark.one_in(4)
@pytest.mark.parametrize("last", [2, 4, 5, 6])
def test_a_run_resumes_in_any_cycle(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycles, "NATS", 0.0)
    changes: dict[str, Any] = {"max_epochs": 8, "checkpoint_every": 1}
    train(tmp_path / "whole", **changes)

    def stop(row: Any) -> None:
        if row["epoch"] == last:
            raise Killed

    assert killed(lambda: train(tmp_path / "cut", callbacks=[stop], **changes))
    train(tmp_path / "cut", **changes)
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_a_finished_run_stays_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "NATS", 0.0)
    first = train(tmp_path, max_epochs=8)
    again = train(tmp_path, max_epochs=8)
    assert [r["loss"] for r in again.history] == [r["loss"] for r in first.history]


def test_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_epochs must be at least epochs = 4, got 3"):
        train(max_epochs=3)
    with pytest.raises(ConfigurationError, match="max_epochs requires an estimator"):
        train(max_epochs=8, estimator=None)
