"""The notebooks of the documentation are whole, keep to the style, and still give their outputs."""

import base64
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from late import needs
from prose import problems

pytestmark = needs("sklearn")

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "tutorials"
# What makes each of them short.
TUTORIALS = {
    "augmentation": {'"epochs": 160': '"epochs": 2', "subset=400": "subset=100"},
    "error_bars": {"epochs=300": "epochs=2", "max_iter=5000": "max_iter=5", "(2300": "(350"},
    "few_images": {"epochs=10)": "epochs=1)", "epochs=120": "epochs=2", "range(3)": "range(1)"},
    "features": {"epochs=300": "epochs=2"},
    "next_experiment": {"14, 20, 4": "4, 2, 4", "range(3)": "range(1)", "range(200)": "range(2)"},
    "weight_decay": {"EPOCHS = 200": "EPOCHS = 2", "subset=500": "subset=50"},
}
every_tutorial = pytest.mark.parametrize("name", TUTORIALS)


def read(name: str) -> list[dict[str, Any]]:
    """Return the cells of a notebook, with their sources as text."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def code_cells(name: str) -> list[dict[str, Any]]:
    return [cell for cell in read(name) if cell["cell_type"] == "code"]


def printed(cells: list[Any]) -> str:
    outputs = [output for cell in cells for output in cell["outputs"]]
    return "".join("".join(output.get("text", "")) for output in outputs)


def shape(text: str) -> str:
    """Return printed text without numbers and widths of columns."""
    return " ".join(re.sub(r"-?\d[\d.,]*(e[-+]\d+)?|nan", "0", text).split())


def test_every_notebook_is_listed() -> None:
    assert sorted(TUTORIALS) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    navigation, gallery = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs/gallery.md").read_text()
    for name in TUTORIALS:
        assert f"- tutorials/{name}.md" in navigation
        assert f"](tutorials/{name}.ipynb)" in gallery


@every_tutorial
def test_a_tutorial_is_short_and_explained(name: str) -> None:
    cells = read(name)
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    assert 5 <= len(code) <= 12
    assert 40 <= sum(bool(line.strip()) for text in code for line in text.split("\n")) <= 120
    assert cells[0]["source"].startswith("# ") and cells[-1]["cell_type"] == "markdown"
    for before, cell in zip(cells, cells[1:], strict=False):
        assert "markdown" in (before["cell_type"], cell["cell_type"]), cell["source"]
    for text in code:
        compile(text, name, "exec")


@every_tutorial
def test_the_outputs_are_of_one_run_without_warnings(name: str) -> None:
    cells = code_cells(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output.get("name") != "stderr" for output in outputs)
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert all("Warning" not in str(output.get("text")) for output in outputs)
    figures = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert 1 <= len(figures) <= 3
    assert all(10_000 < len(base64.b64decode(figure)) < 150_000 for figure in figures)
    for cell in cells:
        assert ("plt.show()" in cell["source"]) == any("data" in o for o in cell["outputs"])


@every_tutorial
def test_the_prose_keeps_to_the_style(name: str, tmp_path: Path) -> None:
    texts = [cell["source"] for cell in read(name) if cell["cell_type"] == "markdown"]
    (page := tmp_path / "page.md").write_text("\n\n".join(texts))
    assert not problems(page)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (FOLDER / target).exists(), target


@every_tutorial
def test_the_cells_run_and_print_the_same_lines(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a few epochs, so that only the numbers differ."""
    pyplot: Any = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    if name == "next_experiment":
        pytest.importorskip("botorch")
        monkeypatch.setattr("evigrad.botorch._EPOCHS", 2)
    cells, names = code_cells(name), {"__name__": name}
    code = "\n".join(cell["source"] for cell in cells)
    for long, short in TUTORIALS[name].items():
        assert code.count(long) == 1, long
        code = code.replace(long, short)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lbfgs failed to converge")
        exec(compile(code, name, "exec"), names)
    assert shape(capsys.readouterr().out) == shape(printed(cells))


@pytest.mark.long
@every_tutorial
def test_the_notebook_runs_without_warnings(name: str) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if name == "next_experiment":
        pytest.importorskip("botorch")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=900).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert shape(printed(cells)) == shape(printed(code_cells(name)))
    assert all(output.get("name") != "stderr" for cell in cells for output in cell.outputs)
