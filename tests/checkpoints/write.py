"""Writes the checkpoints of this folder, and the numbers that a run of them must arrive at.

    PYTHONPATH=src:tests python tests/checkpoints/write.py

They were written before the code was restructured, so that the test shows that files of users
still load. Never run it again, unless the format of checkpoints changes on purpose.
"""

import json
import shutil
from contextlib import chdir, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from checkpoints.cases import (
    COMMAND,
    EVIDENCES,
    RUNS,
    STOPPED,
    Stopped,
    evidence_of,
    run,
    steps,
    values_of,
)

from evigrad import Evidence
from evigrad.cli import main

STORED, NUMBERS = (Path(__file__).parent / name for name in ("stored.zip", "numbers.json"))


def write_evidences() -> dict[str, list[list[float]]]:
    """States after three steps; the numbers are those of two more."""
    numbers = {}
    for name, options in EVIDENCES.items():
        evidence, (x, y) = evidence_of(name, seed=0), options["data"]()
        steps(evidence, x, y, 3)
        state = {"model": evidence.model.state_dict(), "evidence": evidence.state_dict()}
        torch.save(state, f"evidence-{name}.pt")
        numbers[name] = steps(evidence, x, y, 2)
    return numbers


def write_runs() -> dict[str, list[list[float]]]:
    """Runs that stopped; the numbers are those of whole ones."""
    numbers = {}
    for name in RUNS:
        with suppress(Stopped):
            run(name, f"run-{name}", seed=0, stop_in=STOPPED)
        with TemporaryDirectory() as whole:
            numbers[name] = values_of(run(name, f"{whole}/run", seed=0).evidence)
    return numbers


def write_command() -> dict[str, Any]:
    """A run of the command line that stopped; the numbers are the results of a whole one."""
    calls, map_loss = 0, Evidence.map_loss

    def stop(evidence: Evidence, *arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == STOPPED:  # an epoch is one batch
            raise Stopped
        return map_loss(evidence, *arguments, **options)

    with suppress(Stopped), patch.object(Evidence, "map_loss", stop):
        main([*COMMAND, "--run-dir", "run-command"])
    with TemporaryDirectory() as whole:
        main([*COMMAND, "--run-dir", f"{whole}/run"])
        return json.loads(Path(whole, "run", "results.json").read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, chdir(folder):
        numbers = {"evidences": write_evidences(), "runs": write_runs(), "command": write_command()}
        for path in Path().glob("*/checkpoint_before.pt"):  # only read if the last one is damaged
            path.unlink()
        shutil.make_archive(str(STORED.with_suffix("")), "zip", folder)
    NUMBERS.write_text(json.dumps(numbers, indent=0) + "\n")
