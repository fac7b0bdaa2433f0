"""How far a warm ``backward`` travels through the package: functions, files and frames."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Estimator -> at most so many functions, in so many files, so many frames deep: the numbers of the
# present code. Lower them when the code gets simpler, and never raise them.
LIMITS = {
    "ntk-100-1": (228, 39, 18),
    "kfac-100-1": (222, 37, 16),
}


@pytest.fixture(scope="module")
def counts() -> dict[str, tuple[int, int, int]]:
    script = Path(__file__).parent / "call_path.py"
    done = subprocess.run(
        [sys.executable, script, *LIMITS], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("estimator", LIMITS)
def test_a_warm_backward_visits_no_more(estimator, counts):
    for what, count, limit in zip(
        ("functions", "files", "frames"), counts[estimator], LIMITS[estimator], strict=True
    ):
        assert count <= limit, f"{estimator}: {count} {what}, at most {limit}."
        assert count > limit / 3, f"{estimator}: {count} {what} are too few to be counted rightly."
