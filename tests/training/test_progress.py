"""The plan, the announcements and the times that a run shows."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import evigrad
from evigrad import Optimization, Schedule
from evigrad.training import progress
from evigrad.training.progress import Pace, PlainDisplay, RichDisplay, clock, make_display, summary


def lines_of(capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    """Train a network on 40 examples in 4 steps per epoch, and return the lines of progress."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 40)[:, None]
    schedule = {"epochs": 20, "batch_size": 10} | options.pop("schedule", {})
    evigrad.fit(
        nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)),
        (x, x.sin()),
        **{"likelihood": "gaussian", "schedule": Schedule(**schedule)} | options,
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    return [line for line in captured.err.splitlines() if "Estimated time" not in line]


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Return a list whose entry is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    yield now


def test_the_summary_shows_what_is_known():
    row = {
        "epoch": 3.0,
        "loss": 0.51234,
        "log_evidence": -1.2345,
        "precision/a": 0.5,
        "precision/b": 20.0,
        "test_log_likelihood": None,
    }
    words = "loss 0.512  log evidence -1.23  weight decay 0.005 to 0.2"
    assert summary(row, 0.01) == words
    assert summary({"loss": 1.0, "precision/a": 2.0}, 0.01) == "loss 1.00  weight decay 0.02"


def test_a_plan_comes_first_and_each_start_is_announced(capsys):
    schedule = {"epochs": 9, "burn_in": 1, "every": 1, "steps": 1}
    starts = Optimization(start_decay=[0.01, 0.001])
    lines = lines_of(capsys, schedule=schedule, optimization=starts)
    assert lines[:3] == [
        "evigrad: 9 epochs of 4 steps, with 2 start decays in epochs 1 to 3, so 48 steps in"
        " total. Loss and log evidence are in nats per example.",
        "evigrad: 12 rounds of hyperparameter steps with ntk-400-rows-anchored, the first after"
        " epoch 1.",
        "evigrad: Trying start decay 0.01 (epochs 1 to 3).",
    ]
    said = " ".join(line for line in lines[3:] if ": epoch " not in line)
    assert re.fullmatch(
        r"evigrad: Start decay 0\.01 has log evidence (\S+) \(mean of 3 rounds\)\."
        r" evigrad: Trying start decay 0\.001 \(epochs 1 to 3\)\."
        r" evigrad: Start decay 0\.001 has log evidence (\S+) \(mean of 3 rounds\)\."
        r" evigrad: Continuing from start decay (0\.01 \(log evidence \1 instead of \2|0\.001"
        r" \(log evidence \2 instead of \1)\), epochs 4 to 9\.",
        said,
    )


def test_fixed_weight_decay_has_no_rounds_and_shows_its_decay(capsys):
    lines = lines_of(capsys, estimator=None)
    assert lines[0] == (
        "fixed weight decay: 20 epochs of 4 steps, so 80 steps in total. Loss and log evidence"
        " are in nats per example."
    )
    assert lines[1].startswith("fixed weight decay: epoch  2/20  0:0")
    assert lines[-1].startswith("fixed weight decay: epoch 20/20  0:0")
    assert len(lines) == 11
    assert all("weight decay 0.0005" in line for line in lines[1:])


def test_epochs_that_are_added_are_announced(capsys, monkeypatch):
    monkeypatch.setattr("evigrad.training.cycles.NATS", 0.0)
    schedule = {"epochs": 4, "burn_in": 1, "every": 1, "steps": 1, "max_epochs": 6}
    lines = lines_of(capsys, schedule=schedule, optimization=Optimization(start_decay=0.01))
    assert "and up to 6 epochs if training has not settled" in lines[0]
    assert "evigrad: Training has not settled. Continuing with epochs 5 to 6." in lines
    assert "epoch 6/6" in lines[-2] and "  noise 0." in lines[-2]
    assert lines[-1] == (
        "evigrad: Training has reached the maximum of 6 epochs. If there is no warning, you can use"
        " the result."
    )


def test_a_resumed_run_does_not_repeat_its_plan(capsys, tmp_path):
    class Stop(Exception):
        pass

    def stop(row: Any) -> None:
        if row["epoch"] == 3:
            raise Stop

    options: dict[str, Any] = {"run_dir": tmp_path / "run", "estimator": None}
    schedule = {"checkpoint_every": 1}
    with pytest.raises(Stop):
        lines_of(capsys, callbacks=[stop], schedule=schedule, **options)
    capsys.readouterr()
    lines = lines_of(capsys, resume=True, schedule=schedule, **options)
    assert lines[0] == "fixed weight decay: resuming after epoch 2 of 20"
    assert lines[1].startswith("fixed weight decay: epoch  4/20")


def test_the_time_left_counts_epochs_with_and_without_rounds(time):
    pace = Pace(before=50.0)
    assert pace.left(10, 4) is None
    time[0] += 5  # the first step loads libraries
    pace.step(0.1)
    assert pace.left(10, 4) is None
    time[0] += 0.9
    pace.step(0.4)
    # 0.3 of an epoch took 0.9 s, so 10 epochs take 30 s, of which 0.4 epochs are done.
    assert pace.left(10, 4) == pytest.approx(28.8)
    time[0] += 1.8
    pace.epoch(has_round=False)
    assert pace.left(9, 4) == pytest.approx(27.0)
    time[0] += 8
    pace.epoch(has_round=True)
    assert pace.left(8, 3) == pytest.approx(5 * 3 + 3 * 8)
    assert pace.elapsed == pytest.approx(50 + 15.7)
    time[0] += 3
    pace.step(0.5)
    assert pace.left(8, 3) == pytest.approx(5 * 3 + 3 * 8 - 1.5)


def test_the_time_is_estimated_within_the_first_epoch(time, capsys):
    learner = SimpleNamespace(is_due=lambda epoch: epoch in (2, 4))
    starts = SimpleNamespace(
        are_tried=False, scores={}, epochs_left=lambda done, last: [range(done + 1, last + 1)]
    )
    trainer: Any = SimpleNamespace(
        **{"epochs": 4, "steps": 1600, "seconds": 0.0},
        settings=SimpleNamespace(estimator="ntk-400-1"),
        **{"history": [], "learner": learner, "starts": starts, "cycles": SimpleNamespace(most=4)},
        evidence=SimpleNamespace(temperature=1.0, num_data=100),
    )
    shown = progress.Progress(trainer)
    shown.begin()
    for step in range(1, 1600):
        time[0] += 0.4
        shown.step(step / 1600)
    trainer.history.append({})
    time[0] += 0.4
    shown.epoch({"epoch": 1, "loss": 0.5, "precision/w": 2.0})
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "evigrad: 4 epochs of 1,600 steps, so 6,400 steps in total. Loss and log evidence are"
        " in nats per example.",
        "evigrad: 2 rounds of hyperparameter steps with ntk-400-1, the first after epoch 2.",
    ]
    assert lines[2] == "evigrad: Estimated time: about 43 min, not counting the rounds."
    # A line follows after five minutes within an epoch.
    assert lines[3].startswith("evigrad: epoch 0.47/4  5:02 elapsed, over 37:38 left")
    assert lines[5] == (
        "evigrad: epoch 1/4  10:40 elapsed, over 32:00 left  loss 0.500  weight decay 0.02"
    )


def test_times_as_text():
    assert [clock(s) for s in (0.2, 59.7, 245, 3845)] == ["0:00", "1:00", "4:05", "1:04:05"]


def test_without_a_terminal_the_display_is_plain(capsys):
    assert isinstance(make_display("evigrad"), PlainDisplay)
    make_display("evigrad").show("epoch 1/2", 0.5)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "evigrad: epoch 1/2\n")


def test_the_live_line_in_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    display = make_display("evigrad")
    try:
        assert isinstance(display, RichDisplay)
        display.say("[the] plan")
        display.show("epoch 1/4  0:05 elapsed, 0:15 left", 0.25)
        (task,) = cast("Any", display)._progress.tasks
        assert task.completed == 0.25
        assert task.description == "evigrad: epoch 1/4  0:05 elapsed, 0:15 left"
    finally:
        display.close()
    assert "evigrad: [the] plan" in capsys.readouterr().err


def test_without_rich_the_display_is_plain(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(make_display("evigrad"), PlainDisplay)
