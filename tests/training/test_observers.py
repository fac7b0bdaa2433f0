"""The order in which a run notifies observers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainers import trainer_of
from training.small_runs import SMALL

from evigrad.training import trainer as module
from evigrad.training.history import Row
from evigrad.training.observers import Observer

EVENTS: list[str] = []


class Recorder(Observer):
    """In the place of the callbacks."""

    def __init__(self, run: Any, callbacks: Any) -> None:
        super().__init__(run)

    def begin(self) -> None:
        EVENTS.append("begin")

    def epoch(self, row: Row) -> None:
        EVENTS.append(str(row["epoch"]))

    def restart(self, row: Row | None) -> None:
        last = None if row is None else row["epoch"]
        EVENTS.append(f"restart after {last} with {len(self._run.history)} rows")

    def end(self, is_complete: bool) -> None:
        EVENTS.append("complete" if is_complete else "stopped")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("decays", [(1.0, 0.01), (0.01, 1.0)])
def test_observers_hear_of_trials_and_of_the_end(
    decays: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The start with the decay 0.01 is better. A run that is stopped has a checkpoint."""
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(60, 1, generator=generator) - 2
    y = torch.sin(3 * x) + 0.1 * torch.randn(60, 1, generator=generator)
    settings = {"epochs": 12, "burn_in": 2, "every": 1, "checkpoint_every": 100}
    settings |= {"likelihood": "gaussian", "start_decay": decays}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    trainer = trainer_of(net, (x, y), **SMALL | settings)
    monkeypatch.setattr(module, "Callbacks", Recorder)
    EVENTS.clear()
    with pytest.raises(KeyboardInterrupt, match="Stopped after epoch 6 of 12"):
        trainer.train(tmp_path / "run", progress=False, stop=lambda: EVENTS[-1] == "6")
    trials = ["begin", "1", "2", "3", "restart after 4 with 0 rows"]
    trials += ["1", "2", "3", "restart after 4 with 4 rows"]
    assert EVENTS == [*trials, "5", "6", "stopped"]
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["epoch"] == 6
