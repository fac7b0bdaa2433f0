"""Checkpoints of an earlier revision load, go on, and arrive at the numbers of that revision.

`write.py` wrote ``stored.zip`` and ``numbers.json``.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.cases import EPOCHS, EVIDENCES, RUNS, STOPPED, evidence_of, run, steps, values_of
from checkpoints.cases import scaled as network

import evigrad

pytestmark = pytest.mark.filterwarnings("ignore:Resumed the run in .* on another machine")
FOLDER = Path(__file__).parent
NUMBERS = json.loads((FOLDER / "numbers.json").read_text())


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    shutil.unpack_archive(FOLDER / "stored.zip", folder)
    return folder


def assert_numbers(name: str, actual: list[list[float]], expected: list[list[float]]) -> None:
    # Anchors are chosen by predictions in float32, which depend on the type of the processor.
    tolerance = 1e-5 if name == "anchored" else 1e-10
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", EVIDENCES)
def test_the_state_of_an_evidence(name, stored):
    state = torch.load(stored / f"evidence-{name}.pt", weights_only=True)
    evidence, (x, y) = evidence_of(name, seed=5), EVIDENCES[name]["data"]()
    evidence.model.load_state_dict(state["model"])
    # Older states name outputs that shared backward passes, which no version reads now.
    owners = {"0.weight/0": torch.zeros(1, 2, dtype=torch.int32)}
    reach = {"num_records": 1, "is_local": True, "num_outputs": 2, "owners": owners}
    evidence.load_state_dict({**state["evidence"], "reaches": {"(3,) 2": reach}})
    assert ("anchors" in state["evidence"]) == (name == "anchored")
    assert state["evidence"]["preparation"]["plans"]
    if "memory" in EVIDENCES[name]:
        assert state["evidence"]["micro_batches"]
        kept = evidence.state_dict()["micro_batches"]
        assert kept == state["evidence"]["micro_batches"]
    assert_numbers(name, steps(evidence, x, y, 2), NUMBERS["evidences"][name])


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_stopped(name, stored):
    folder = stored / f"run-{name}"
    loaded = evigrad.load(folder, network().double())
    assert (loaded.epoch, len(loaded.history)) == (STOPPED - 1, STOPPED - 1)
    result = run(name, folder, seed=9, resume=True)
    assert len(result.history) == EPOCHS
    assert_numbers(name, values_of(result.evidence), NUMBERS["runs"][name])


def test_a_run_of_the_command_line(stored, capsys):
    for package in ("jsonargparse", "rich", "sklearn"):
        pytest.importorskip(package)
    from evigrad.cli import main

    folder = stored / "run-command"
    assert evigrad.load(folder).epoch == STOPPED - 1
    assert main(["train", "--resume", str(folder)]) == 0
    results = json.loads((folder / "results.json").read_text())
    compared = flat(NUMBERS["command"])
    assert compared
    # In float32, of which Adam takes small differences for large ones.
    assert {name: value for name, value in flat(results).items() if name in compared} == (
        pytest.approx(compared, rel=1e-4)
    )


def flat(results: dict[str, Any], front: str = "") -> dict[str, float]:
    """The numbers of nested results by name, without times."""
    values = dict[str, float]()
    for name, value in results.items():
        if isinstance(value, dict):
            values |= flat(value, f"{front}{name}/")
        elif isinstance(value, int | float) and "seconds" not in name:
            values[front + name] = float(value)
    return values
