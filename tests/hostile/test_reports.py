"""Reports of folders that hold anything: a page without a line of anybody's code, or an error."""

import json
import shutil
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from hostile.cases import errors_of_ours, hostile, mutated, texts, values
from hypothesis import strategies as st
from run_folders import make_rows, write_run

from evigrad.report import write, write_report

CODE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"
FILES = ("config.json", "config.yaml", "metrics.csv", "results.json")


class Elements(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(f"{tag} {name}" for name, _ in attrs)}


@pytest.fixture(scope="module", autouse=True)
def no_drawing() -> Any:
    """The figures take a second, and are tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_png", lambda make, palette: b"")
        yield


def known(folder: Path, name: str = "run") -> Path:
    return write_run(
        folder / name,
        make_rows(3, ranges={"rotation": 1.0}),
        options={"data": "digits", "model": "mlp", "seed": 0},
        results={"ntk-100-1": {"evidence": {"per_datum": -1.0, "estimator": "ntk-100-C"}}},
        prior="layerwise",
    )


def known_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        run = known(Path(folder))
        return {name: (run / name).read_bytes() for name in FILES}


def test_names_are_shown_and_never_run(tmp_path: Path) -> None:
    plain = Elements(write_report(known(tmp_path), known(tmp_path, "b")).read_text()).found
    rows = [
        {**row, f"precision/{CODE}": 2.0 * row["epoch"], f"range/{CODE}": 1.0 * row["epoch"]}
        for row in make_rows(3)
    ]
    folders = [
        write_run(
            tmp_path / name / CODE.replace("/", "_"),
            rows,
            estimator=CODE,
            options={"data": CODE, "model": CODE, "invariance": CODE, CODE: CODE},
            results={CODE: {"evidence": {"per_datum": CODE, "estimator": CODE}, CODE: [CODE]}},
            likelihood=CODE,
            network={CODE: CODE},
            learned=[CODE],
            device=CODE,
            **{CODE: CODE},
        )
        for name in ("one", "two")
    ]
    page = write_report(*folders).read_text()
    assert Elements(page).found <= plain | {"code", "li", "ul"}
    assert "<script>alert" not in page and "49" not in page.split("{{ 7 * 7 }}", 1)[0][-3:]
    assert "{{ 7 * 7 }}" in page


@hostile(
    st.one_of(
        st.sampled_from(FILES).flatmap(
            lambda name: st.tuples(st.just(name), mutated(known_files()[name]))
        ),
        st.tuples(
            st.sampled_from(["config.json", "config.yaml", "results.json"]),
            st.dictionaries(
                st.one_of(
                    texts(),
                    st.sampled_from(
                        "data model seed epochs estimator lr steps every hyper_every hyper_steps"
                        " learned evidence network num_data ntk-100-1 invariance subset".split()
                    ),
                ),
                st.one_of(values(), st.dictionaries(texts(), values(), max_size=2)),
                max_size=4,
            ).map(lambda options: json.dumps(options).encode()),
        ),
    ),
    60,
    4_000,
    0.2,
)
def test_files_of_a_run(tmp_path: Path, case: tuple[str, bytes]) -> None:
    name, content = case
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    known(tmp_path)
    (folder / name).write_bytes(content)
    with errors_of_ours():
        page = write_report(folder, examples=0).read_text(encoding="utf-8")
        assert "script" not in Elements(page).found
