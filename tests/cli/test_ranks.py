"""``torchrun -m evigrad train``: several processes, one run, and some of them are killed."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from training.interrupted import assert_same_runs

from evigrad.cli import main

QUICK = (
    "--data digits --subset 60 --model mlp --estimator ntk-20-1 --epochs 6 --burn-in 2 --every 1"
    " --steps 2 --evaluate-with ntk-20-C --device cpu --checkpoint-every 1 --no-figures"
).split()
# Seconds in which a rank ends after another one was killed; and those of a whole run.
SOON, LONG = 60, 300
# Seconds that a killed rank lives on after a row of metrics: about an epoch, of four that are left.
WITHIN = 0.1


def _rank(rank: int, count: int, port: int, folder: Path, arguments: Sequence[str]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    code = main([*arguments])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def started(
    folder: Path, arguments: Sequence[str], count: int = 2, command: str = "train"
) -> list[ForkProcess]:
    """The ranks of a run, as ``torchrun`` starts them, but without the time of imports."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    ranks = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks
        for rank in range(count):
            rank_arguments = (rank, count, port, folder, [command, *arguments])
            ranks.append(context.Process(target=_rank, args=rank_arguments))
            ranks[-1].start()
    return ranks


def ended(ranks: Sequence[ForkProcess], seconds: float) -> list[int | None]:
    """Their exit codes; None for those that go on after so many seconds, which are killed."""
    end = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def resumed(run: Path, texts: Path, count: int = 2) -> list[int | None]:
    return ended(started(texts, ["--resume", str(run)], count), LONG)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks without any interruption, beside what they wrote to the terminal."""
    folder = tmp_path_factory.mktemp("whole")
    ranks = started(folder, [*QUICK, "--run-dir", str(folder / "run")])
    assert ended(ranks, LONG) == [0, 0], (folder / "err0").read_text()
    return folder


def test_the_first_rank_alone_writes_and_tells(whole: Path) -> None:
    assert {path.name for path in whole.iterdir()} == {"run", "out0", "out1", "err0", "err1"}
    names = {"checkpoint.pt", "config.json", "config.yaml", "metrics.csv", "results.json"}
    assert {path.name for path in (whole / "run").iterdir()} == names
    assert "log evidence" in (whole / "out0").read_text()
    progress = (whole / "err0").read_text()
    assert "2 processes together" in progress and "epoch 6/6" in progress
    assert not (whole / "out1").read_text() and not (whole / "err1").read_text()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_others_and_the_run_goes_on(
    whole: Path, tmp_path: Path, victim: int
) -> None:
    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.csv"
    ranks = started(tmp_path, [*QUICK, "--run-dir", str(run)])
    # Another moment in every run, inside an epoch or between two.
    seed = random.SystemRandom().randrange(2**32)
    moment = random.Random(seed)
    epoch, later = moment.randrange(1, 3), moment.uniform(0, WITHIN)
    when = f"seed {seed}: {later:.4f} s after epoch {epoch}"
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= epoch:
        time.sleep(0.01)
        assert all(rank.is_alive() for rank in ranks), when
    time.sleep(later)
    ranks[victim].kill()
    codes = ended(ranks, SOON)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 2, when
    message = (tmp_path / f"err{1 - victim}").read_text()
    # In a round its epoch is said first.
    assert "error: " in message and f"Rank {1 - victim} of 2 has lost contact" in message, when
    assert "--resume" in message
    shutil.copytree(run, tmp_path / "again" / "run")
    assert resumed(run, tmp_path) == [0, 0]
    assert_same_runs(run, whole / "run")
    # And with another number of ranks.
    count = 1 if victim == 0 else 3
    assert resumed(tmp_path / "again" / "run", tmp_path, count) == [0] * count
    rows = (tmp_path / "again" / "run" / "metrics.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows[1:]] == [str(e) for e in range(1, 7)]


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_of_four_ranks_three_end_where_one_is_killed(tmp_path: Path, victim: int) -> None:
    """Before the first epoch is over, or in a later one; a run of half as many ranks goes on."""
    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.csv"
    ranks = started(tmp_path, [*QUICK, "--run-dir", str(run)], 4)
    seed = random.SystemRandom().randrange(2**32)
    moment = random.Random(seed)
    lines, later = moment.randrange(1, 4), moment.uniform(0, WITHIN)
    when = f"seed {seed}: {later:.4f} s after line {lines}"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < lines:
        time.sleep(0.01)
        assert all(rank.is_alive() for rank in ranks), when
    time.sleep(later)
    ranks[victim].kill()
    codes = ended(ranks, SOON)
    assert codes.pop(victim) == -signal.SIGKILL and codes == [2, 2, 2], when
    for number in {0, 1, 2, 3} - {victim}:
        message = (tmp_path / f"err{number}").read_text()
        # The next one to end may have been lost, or the killed one.
        assert "has lost contact" in message or "failed with" in message, when
        assert "--resume" in message, when
    assert resumed(run, tmp_path, 2) == [0, 0], when
    rows = metrics.read_text().splitlines()
    assert [row.partition(",")[0] for row in rows[1:]] == [str(e) for e in range(1, 7)], when


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_after_their_epoch(whole: Path, tmp_path: Path) -> None:
    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.csv"
    ranks = started(tmp_path, [*QUICK, "--run-dir", str(run)])
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        time.sleep(0.01)
        assert all(rank.is_alive() for rank in ranks)
    assert ranks[1].pid is not None
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert ended(ranks, SOON) == [128 + signal.SIGINT, 128 + signal.SIGTERM]
    assert "Stopped after epoch" in (tmp_path / "err0").read_text()
    assert resumed(run, tmp_path) == [0, 0]
    assert_same_runs(run, whole / "run")


def test_the_doctor_counts_processes_and_connects_them(tmp_path: Path) -> None:
    arguments = "--data digits --subset 20 --model mlp --estimator ntk-3-1 --device cpu"
    ranks = started(tmp_path, arguments.split(), command="doctor")
    assert ended(ranks, LONG) == [0, 0], (tmp_path / "err0").read_text()
    assert "Processes: 2, connected by gloo" in (tmp_path / "err0").read_text()
    assert "Cost of ntk-3-1" in (tmp_path / "out0").read_text()
    assert not (tmp_path / "out1").read_text() and not (tmp_path / "err1").read_text()


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    ranks = started(tmp_path, [*QUICK, "--estimator", "ntk-999-1"])
    assert ended(ranks, LONG) == [2, 2]
    assert "error: " in (tmp_path / "err0").read_text()
    assert not (tmp_path / "err1").read_text()


@pytest.mark.long
def test_torchrun(tmp_path: Path, whole: Path) -> None:
    arguments = ["--nproc_per_node", "2", "-m", "evigrad", "train", *QUICK]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    run = tmp_path / "run"
    done = subprocess.run([*command, "--run-dir", str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("epoch 6/6") == 1
    assert_same_runs(run, whole / "run")
