"""Kill a run at random moments, resume it, and compare it with an uninterrupted run.

Each trial starts ``evigrad train`` in a process and kills it with SIGKILL at a random moment
between its first file and its last. It resumes the run in another process. Then it compares
weights, hyperparameters, states of optimizers and generators, metrics and results with an
uninterrupted run. Everything except times must be equal to the last bit. The moments lie in the MAP
baseline, in the run that learns, in the evaluation of both and in the writing of files. The runs
use one CPU thread.

    python benchmarks/kill_and_resume.py
    python benchmarks/kill_and_resume.py --trials 5 --kills 3 --options="--invariance rotation"

With --minutes it is a soak test. Each trial has random kills until its run is done. A ballast file
fills the file system at random moments, except for a random number of bytes, until the run has
ended with a message. Between any two processes, the last checkpoint must be readable and no epoch
may be lost. --folder names the file system, preferably a small one:

    mount -t tmpfs -o size=1m tmpfs /mnt/small
    python benchmarks/kill_and_resume.py --minutes 30 --folder /mnt/small
"""

import argparse
import csv
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from evigrad.training import RunDirectory

COMMAND = [sys.executable, "-c", "from evigrad.cli import main; raise SystemExit(main())", "train"]
RUN = (
    "--data digits --subset 200 --model digitsnet --estimator ntk-50-1 --epochs 20 --batch-size 50"
    " --burn-in 4 --every 2 --steps 5 --compare-map --evaluate-with ntk-100-C --no-figures"
    " --no-progress --device cpu --threads 1"
)
TIMES = "seconds"
POLL = 0.005
BLOCK = 4096
MOST_LEFT = 150_000  # free bytes of a full file system


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until a file exists or the process has ended."""
    while not path.exists() and process.poll() is None:
        time.sleep(POLL)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"evigrad failed:\n{errors.decode()}")


def kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Kill a process with SIGKILL after a time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()


class Ballast:
    """A file that fills a file system except for a few bytes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ballast"

    def fill(self, left: int) -> None:
        with self.path.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(BLOCK)) == BLOCK:
                pass
        os.truncate(self.path, max(0, self.path.stat().st_size - left))

    def empty(self) -> None:
        self.path.unlink(missing_ok=True)


def soak(arguments: argparse.Namespace, options: Sequence[str], scratch: Path) -> int:
    """Run trials with many kills for some minutes, and return the exit code."""
    whole = scratch / "whole"
    began = time.monotonic()
    process = start([*options, "--run-dir", str(whole)])
    wait_for(whole / "config.yaml", process)
    starting = time.monotonic() - began
    finish(process)
    # The first process starts slowly. The fastest one shows when there is work to kill.
    fastest = time.monotonic() - began
    start_of_work = starting / fastest
    expected, generator = contents(whole), random.Random(arguments.seed)
    folder = Path(arguments.folder) / "run"
    ballast, end = Ballast(folder.parent), began + 60 * arguments.minutes
    names = ("processes", "killed", "ended by a full disk", "finished", "identical", "epochs lost")
    seen = dict.fromkeys(names, 0)
    while time.monotonic() < end:
        again, saved = [*options, "--run-dir", str(folder)], (0, 0)
        while not (folder / "results.json").exists():
            seen["processes"] += 1
            process, started = start(again), time.monotonic()
            kills, is_fresh = generator.random() < 0.5, "--resume" not in again
            try:
                process.wait(fastest * generator.uniform(start_of_work, 1))
            except subprocess.TimeoutExpired:
                if kills:
                    process.kill()
                else:
                    ballast.fill(generator.randrange(MOST_LEFT))
            _, errors = process.communicate()
            ballast.empty()
            if process.returncode == 0 and is_fresh:
                fastest = min(fastest, time.monotonic() - started)
            code, words = process.returncode, errors.decode()
            is_full = code == 2 and "No space left on device" in words
            if code not in (0, -signal.SIGKILL) and not is_full:
                raise SystemExit(f"evigrad ended with {code}:\n{words}")
            seen["killed"] += code == -signal.SIGKILL
            seen["ended by a full disk"] += is_full
            before, saved = saved, (saved_epoch(folder / "map"), saved_epoch(folder))
            seen["epochs lost"] += sum(max(0, b - s) for b, s in zip(before, saved, strict=True))
            if (folder / "config.yaml").exists():
                again = ["--resume", str(folder)]
        seen["finished"] += 1
        places = list(differences(expected, contents(folder), ""))
        seen["identical"] += not places
        words = f" DIFFERENT in {', '.join(places[:5])}" if places else ""
        print(", ".join(f"{count} {name}" for name, count in seen.items()) + words, flush=True)
        shutil.rmtree(folder)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    return 0 if seen["identical"] == seen["finished"] and not seen["epochs lost"] else 1


def saved_epoch(folder: Path) -> int:
    """Return the epoch of the checkpoint to resume from, or 0 without one."""
    if not folder.is_dir():
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is damaged
        state = RunDirectory(folder, resume=True).read_checkpoint()
    return 0 if state is None else int(state["epoch"])


def progress(folder: Path) -> str:
    """Return how far a run came, by its files."""
    for name, part in (("learning", folder), ("MAP", folder / "map")):
        if (part / "checkpoint.pt").exists():
            rows = 0
            if (part / "metrics.csv").exists():
                rows = len((part / "metrics.csv").read_bytes().splitlines()) - 1
            saved = torch.load(part / "checkpoint.pt", weights_only=True)["epoch"]
            return f"{name}, {rows} epochs, {saved} saved"
    return "before the first epoch"


def differences(one: Any, other: Any, where: str) -> Iterator[str]:
    """Return where two states, tables or results differ, except times."""
    if type(one) is not type(other):
        yield where
    elif isinstance(one, torch.Tensor):
        # Compare bits and not numbers: NaN equals NaN here, and 0 differs from -0.
        same = one.shape == other.shape and one.dtype == other.dtype
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (one, other)]
        if not (same and torch.equal(*bits)):
            yield where
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield where
        for key in one.keys() & other.keys() - {TIMES}:
            yield from differences(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield where
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{where}/{index}")
    elif one != other and (one == one or other == other):
        yield where


def contents(folder: Path) -> dict[str, Any]:
    """Return all results of a run, except times."""
    by_file: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if path.name == "checkpoint_before.pt":  # which one is the last depends on times
            continue
        name = str(path.relative_to(folder))
        if path.suffix == ".pt":
            state = torch.load(path, weights_only=True)
            column = state["history"]["columns"].index(TIMES)
            for row in state["history"]["rows"]:
                row[column] = None
            by_file[name] = state
        elif path.suffix == ".csv":
            with path.open(newline="") as file:
                by_file[name] = [{**row, TIMES: ""} for row in csv.DictReader(file)]
        elif path.suffix == ".json":
            by_file[name] = json.loads(path.read_text())
        else:
            by_file[name] = path.read_text().replace(str(folder), "RUN")
    return by_file


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--kills", type=int, default=1, help="kills in each trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="of a soak")
    parser.add_argument("--folder", help="file system of the soak test, which fills it")
    parser.add_argument("--options", default="", help="more options of evigrad train")
    arguments = parser.parse_args()
    options = [*shlex.split(RUN), *shlex.split(arguments.options)]
    generator = random.Random(arguments.seed)

    if bool(arguments.minutes) != bool(arguments.folder):
        parser.error("--minutes requires --folder, and --folder requires --minutes")
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.minutes:
            return soak(arguments, [*options, "--checkpoint-every", "1"], Path(scratch))
        whole = Path(scratch) / "whole"
        process = start([*options, "--run-dir", str(whole)])
        wait_for(whole / "config.yaml", process)
        began = time.monotonic()
        wait_for(whole / "results.json", process)
        duration = time.monotonic() - began
        finish(process)
        expected = contents(whole)
        print(f"evigrad train {shlex.join(options)}")
        print(f"{duration:.1f} s from its first file to its last", flush=True)

        same = 0
        for trial in range(1, arguments.trials + 1):
            folder = Path(scratch) / str(trial)
            moments: list[str] = []
            again = [*options, "--run-dir", str(folder)]
            while len(moments) < arguments.kills:
                process = start(again)
                wait_for(folder / "config.yaml", process)
                moment = duration * generator.random()
                kill(process, moment)
                if (folder / "results.json").exists():
                    if moments:  # little of the run was left
                        break
                    # The machine has become faster. Try again, and earlier.
                    duration = min(duration, moment)
                    shutil.rmtree(folder)
                    continue
                moments.append(f"{moment:.2f} s ({progress(folder)})")
                again = ["--resume", str(folder)]
            finish(start(["--resume", str(folder)]))
            places = list(differences(expected, contents(folder), ""))
            same += not places
            verdict = "identical" if not places else f"DIFFERENT in {', '.join(places[:5])}"
            print(f"{trial:3d}  killed after {', '.join(moments)}: {verdict}", flush=True)
    print(f"{same} of {arguments.trials} identical")
    return 0 if same == arguments.trials else 1


if __name__ == "__main__":
    raise SystemExit(main())
