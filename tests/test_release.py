"""A wheel and a source distribution that install without a checkout, of one version."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import evigrad

ROOT = Path(__file__).parent.parent
TEN_LINES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
import evigrad
assert Path(sys.argv[1]) in Path(evigrad.__file__).parents, evigrad.__file__
x = torch.randn(40, 3)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
schedule = evigrad.Schedule(epochs=4, burn_in=1)
result = evigrad.fit(model, (x, (x[:, 0] > 0).long()), schedule=schedule, progress=False)
assert result.evidence.posterior((x, (x[:, 0] > 0).long()))(x).probabilities.shape == (40, 2)
print(evigrad.__version__, result.history[-1]["log_evidence"])
"""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if not name.endswith("RECORD")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "-d", str(folder), "-t", "sdist", "-t", "wheel", cwd=ROOT)
    return {path.suffix: path for path in folder.iterdir()}


def test_the_wheel_runs_ten_lines_from_elsewhere(built: dict[str, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site))
    run(*install, str(built[".whl"]), cwd=tmp_path)
    printed = run("-I", "-c", TEN_LINES, str(site), cwd=tmp_path)
    assert printed.startswith(f"{evigrad.__version__} -")


def test_the_source_distribution_makes_the_same_wheel(
    built: dict[str, Path], tmp_path: Path
) -> None:
    with tarfile.open(built[".gz"]) as file:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        file.extractall(tmp_path, **safely)  # Python 3.11.3 and older have no filters
    (source,) = tmp_path.iterdir()
    assert all((source / name).exists() for name in ("docs/index.md", "mkdocs.yml", "Makefile"))
    run("-m", "hatchling", "build", "-d", str(tmp_path / "again"), "-t", "wheel", cwd=source)
    (again,) = (tmp_path / "again").iterdir()
    assert contents(again) == contents(built[".whl"])
    assert "evigrad/py.typed" in contents(again)


def test_the_citation_has_the_software_and_the_paper() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper = citation["preferred-citation"]
    assert (citation["type"], paper["type"]) == ("software", "conference-paper")
    assert paper["url"] in (ROOT / "README.md").read_text()
    assert paper["identifiers"][0]["value"].removeprefix("arXiv:") in paper["url"]


def test_there_is_one_version(built: dict[str, Path]) -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {evigrad.__version__}\n" in citation
    assert f"-{evigrad.__version__}" in built[".whl"].name
    assert re.search(
        rf"^## \[.*\b{re.escape(evigrad.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
