"""Rows of training, written for TensorBoard and read back by its own reader."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import evigrad
from evigrad.errors import EvigradError
from evigrad.trackers import TensorBoard, numbers


def test_what_is_written_is_the_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)
    with TensorBoard(tmp_path) as board:
        result = evigrad.fit(
            net,
            (x, x[:, :3].argmax(1)),
            estimator="ntk-20-1",
            schedule=evigrad.Schedule(epochs=4, burn_in=2, every=2, steps=1),
            callbacks=[board],
            progress=False,
        )
    reader: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(tmp_path)).Reload()
    rows = result.history
    assert set(found.Tags()["scalars"]) == {n for row in rows for n in numbers(row)}
    for name in ("loss", "log_evidence", "precision/weight"):
        events = [(event.step, event.value) for event in found.Scalars(name)]
        wanted = [(row["epoch"], row[name]) for row in rows if row[name] is not None]
        assert [step for step, _ in events] == [epoch for epoch, _ in wanted]
        assert [v for _, v in events] == pytest.approx([v for _, v in wanted], rel=1e-6)


def test_numbers_leave_out_what_was_not_computed() -> None:
    row = {"epoch": 3, "loss": 0.5, "log_evidence": None, "hyper_steps": 2}
    assert numbers(row) == {"loss": 0.5, "hyper_steps": 2.0}


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("evigrad.errors.import_module", absent)
    with pytest.raises(EvigradError, match=r"evigrad\[tensorboard\]"):
        TensorBoard(tmp_path)
