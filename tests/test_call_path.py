"""How far a warm ``backward`` travels: functions, files, frames, and reads of tensors."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Estimator -> at most so many functions, in so many files, so many frames deep, and so many reads
# of tensors by the host, for which a GPU has to finish: the numbers of the present code. Lower them
# when the code gets simpler, and never raise them.
LIMITS = {
    "ntk-100-1": (226, 38, 18, 12),
    "kfac-100-1": (219, 36, 16, 25),
}


@pytest.fixture(scope="module")
def paths() -> dict[str, Any]:
    script = Path(__file__).parent / "call_path.py"
    done = subprocess.run(
        [sys.executable, script, *LIMITS], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("estimator", LIMITS)
def test_a_warm_backward_visits_no_more(estimator, paths):
    for what, count, limit in zip(
        ("functions", "files", "frames", "reads"),
        paths[estimator]["counts"],
        LIMITS[estimator],
        strict=True,
    ):
        assert count <= limit, f"{estimator}: {count} {what}, at most {limit}."
        assert count > limit / 3, f"{estimator}: {count} {what} are too few to be counted rightly."


def test_the_walk_on_the_page_is_the_way_that_a_gradient_takes(paths) -> None:
    tests = Path(__file__).parent
    page = (tests.parent / "docs/architecture.md").read_text()
    steps = re.findall(r"^\| .* \| `([a-z_/]+\.py)` \| `(\w+)` \|$", page, re.MULTILINE)
    assert len(steps) > 15
    visited = [tuple(pair) for pair in paths["ntk-100-1"]["names"]]
    missing = [step for step in steps if step not in visited]
    assert not missing
    order = [visited.index(step) for step in steps]
    assert order == sorted(order), [step for _, step in sorted(zip(order, steps, strict=True))]
    for folder in re.findall(r"`([a-z_/]+/)`", page):
        assert (tests.parent / "src/evigrad" / folder).is_dir(), folder
