"""``evigrad train --resume``: from the command line, and after a real ``kill -9``."""

import errno
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

import yaml
from training.interrupted import assert_same_runs, dying_at_call, killed

from evigrad.cli import main, report
from evigrad.evidence import Evidence
from evigrad.training import Trainer

QUICK = (
    "--data digits --subset 60 --model mlp --estimator ntk-20-1 --epochs 4 --burn-in 2 --every 2"
    " --steps 2 --evaluate-with ntk-20-C --no-progress --device cpu --compare-map"
).split()


def run(*arguments: Any, code: int = 0) -> None:
    assert main([str(argument) for argument in arguments]) == code


def assert_same_folders(one: Path, other: Path) -> None:
    assert_same_runs(one, other)
    assert_same_runs(one / "map", other / "map")


def resume(folder: Path, *arguments: Any, code: int = 0) -> None:
    run("train", "--resume", folder, *arguments, code=code)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run without any interruption and without figures."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("train", *QUICK, "--no-figures", "--run-dir", folder)
    return folder


# Each epoch is one batch: the first four are those of MAP.
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "before the first epoch": (Evidence, "map_loss", 1),
    "in the MAP baseline": (Evidence, "map_loss", 3),
    "between the two runs": (Trainer, "train", 2),
    "after the baseline": (Evidence, "map_loss", 5),
    "in a round": (Evidence, "_add_gradients", 3),
    "in the last evaluation": (report, "evaluate_evidence", 2),
    "before the results": (report, "comparison", 1),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_part_of_a_command_can_be_killed(moment, tmp_path, whole):
    folder = tmp_path / "run"
    with dying_at_call(*MOMENTS[moment]):
        assert killed(lambda: run("train", *QUICK, "--no-figures", "--run-dir", folder))
    assert not (folder / "results.json").exists()
    resume(folder)
    assert_same_folders(folder, whole)


def test_a_run_that_is_complete_says_so(capsys, tmp_path):
    folder = tmp_path / "run"
    run("train", *QUICK, "--no-compare-map", "--run-dir", folder)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    capsys.readouterr()
    resume(folder)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is complete. Nothing is left to do" in " ".join(captured.err.split())
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before
    # Only what is missing.
    (folder / "results.json").unlink()
    resume(folder, "--no-figures")
    again = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    assert {p.name for p in before if before[p] != again[p]} == {"results.json"}
    for figure in (folder / "figures").iterdir():
        figure.unlink()
    (folder / "figures").rmdir()
    resume(folder)
    assert (folder / "figures" / "learning_curves.png").is_file()
    assert again[folder / "results.json"] == (folder / "results.json").stat().st_mtime_ns


def test_options_that_contradict_the_run_are_refused_by_name(capsys, tmp_path, whole):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}

    def error_of(*arguments: Any) -> str:
        capsys.readouterr()
        resume(whole, *arguments, code=2)
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ")
        return captured.err

    words = error_of("--epochs", 8, "--lr=0.5", "--no-compare-map")
    assert "has --schedule.epochs 4, not 8; --optimization.lr left at its default, not" in words
    assert "--compare-map True, not False" in words
    assert "start a new run, use --config" in words
    file = tmp_path / "other.yaml"
    file.write_text("subset: 50\n")
    assert "--subset 60, not 50" in error_of("--config", file)
    assert "its folder" in error_of("--run-dir", tmp_path / "elsewhere")
    assert "--memory.micro-batch left at its default, not 7" in error_of("--micro-batch", 7)
    # What is said again, and what changes no result, contradicts nothing.
    resume(whole, "--epochs", 4, "--run-dir", whole, "--progress", "--checkpoint-every", 3)
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before


def test_what_cannot_be_resumed(capsys, tmp_path):
    def error_of(folder: Path) -> str:
        capsys.readouterr()
        resume(folder, code=2)
        return capsys.readouterr().err

    assert "does not exist" in error_of(tmp_path / "nowhere")
    assert "no config.yaml" in error_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "was started from Python" in error_of(tmp_path)
    (tmp_path / "config.yaml").write_text("epoch: 7\n")
    assert "unknown key 'epoch'. Did you mean 'epochs'?" in error_of(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(capsys, monkeypatch, tmp_path, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "results.json").unlink()

    def read_only(self: Path, mode: str = "r", *options: Any, **keywords: Any) -> Any:
        if folder in self.parents and not set(mode) <= set("rbt"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return plain(self, mode, *options, **keywords)

    plain = Path.open
    monkeypatch.setattr(Path, "open", read_only)
    capsys.readouterr()
    resume(folder, code=2)
    errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(errors) == 1 and "Cannot write" in errors[0] and "Read-only file system" in errors[0]


def test_the_configuration_has_the_threads_and_not_the_folder_to_resume(whole):
    options = yaml.safe_load((whole / "config.yaml").read_text())
    assert options["threads"] == torch.get_num_threads() == 1
    assert not {"resume", "config"} & set(options)
    assert json.loads((whole / "config.json").read_text())["threads"] == 1


def send(number: signal.Signals, epoch: int, times: int = 1) -> Callable[..., Any]:
    """An epoch in the middle of which a signal arrives."""
    one_epoch = Trainer.epoch

    def interrupted(self: Trainer, number_of_epoch: int) -> Any:
        if number_of_epoch == epoch:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return one_epoch(self, number_of_epoch)

    return interrupted


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_epoch_and_says_how_to_go_on(
    number, code, capfd, monkeypatch, tmp_path, whole
):
    folder, before = tmp_path / "a run", signal.getsignal(number)
    monkeypatch.setattr(Trainer, "epoch", send(number, 3))
    run("train", *QUICK, "--no-figures", "--run-dir", folder, code=code)
    words = capfd.readouterr().err
    assert "Stopping after this epoch. Press Ctrl-C again to stop now." in words
    assert "error: Interrupted. Stopped after epoch 3 of 4. To resume: evigrad train" in words
    assert f"--resume '{folder}'" in " ".join(words.split())
    assert signal.getsignal(number) == before
    monkeypatch.undo()
    resume(folder)
    assert (
        "fixed weight decay: resuming after epoch 3 of 4" not in capfd.readouterr().err
    )  # without progress
    assert_same_folders(folder, whole)


def test_a_second_signal_ends_it_at_once(capfd, monkeypatch, tmp_path, whole):
    monkeypatch.setattr(Trainer, "epoch", send(signal.SIGINT, 3, times=2))
    options = ("--no-figures", "--checkpoint-every", 1, "--run-dir", tmp_path / "run")
    run("train", *QUICK, *options, code=130)
    assert "error: Interrupted. To resume: evigrad train" in " ".join(
        capfd.readouterr().err.split()
    )
    monkeypatch.undo()
    resume(tmp_path / "run", "--progress")
    assert "fixed weight decay: resuming after epoch 2 of 4" in capfd.readouterr().err
    assert_same_folders(tmp_path / "run", whole)


def test_a_signal_in_the_last_epoch_keeps_the_run_that_it_ended(monkeypatch, tmp_path, whole):
    monkeypatch.setattr(Trainer, "epoch", send(signal.SIGINT, 4))
    run("train", *QUICK, "--no-figures", "--run-dir", tmp_path / "run", code=130)
    assert (tmp_path / "run" / "map" / "checkpoint.pt").exists()
    monkeypatch.undo()
    resume(tmp_path / "run")
    assert_same_folders(tmp_path / "run", whole)


def _command(log: Path, arguments: list[str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os._exit(main(["train", *arguments]))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("deaths", [1, pytest.param(3, marks=pytest.mark.long)])
def test_kill_9(deaths, tmp_path, whole):
    """Processes killed at random moments, and one more that goes on.

    They are forked, which saves the time of imports.
    """
    folder, log, generator = tmp_path / "run", tmp_path / "log", random.Random(0)
    arguments = [*QUICK, "--no-figures", "--run-dir", str(folder), "--threads", "1"]
    for _ in range(deaths):
        process = get_context("fork").Process(target=_command, args=(log, arguments))
        process.start()
        seen = time.monotonic() + 60
        while time.monotonic() < seen and process.is_alive():
            if (folder / "config.yaml").exists():
                break
            time.sleep(0.005)
        # As long as such a run takes once it has begun, or a little less.
        time.sleep(generator.random())
        process.kill()
        process.join()
        if (folder / "config.yaml").exists():
            arguments = ["--resume", str(folder)]
    process = get_context("fork").Process(target=_command, args=(log, arguments))
    process.start()
    process.join()
    assert process.exitcode == 0, log.read_text()
    assert_same_folders(folder, whole)
