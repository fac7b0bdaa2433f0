"""The code that the documentation shows runs to its end, and what it promises holds."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

pytest.importorskip("sklearn")


def run_blocks(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page, one after the other, and return their variables."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {"__name__": page}
    exec(compile("\n".join(blocks), page, "exec"), names)
    return names


def test_the_ten_lines_of_the_readme_converge(capsys: pytest.CaptureFixture[str]) -> None:
    test = run_blocks("README.md")["result"].test_metrics
    assert test["accuracy"] >= 0.97
    assert test["log_likelihood"] >= -0.12
    assert "precision" in capsys.readouterr().out


def test_the_blocks_on_python_converge(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks("docs/usage.md")
    assert names["accuracy"] >= 0.95
    assert names["slope"].flatten().tolist() == pytest.approx([1.0, -0.5, 0.0], abs=0.2)
    # Digits rotated by up to 90 degrees, ±1.57 radians: half of that is plainly learned.
    assert 0.8 <= names["angle"] <= 2.4
    assert names["turned"].test_metrics["accuracy"] >= 0.85
    assert capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
