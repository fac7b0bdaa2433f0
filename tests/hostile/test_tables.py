"""Tables and image sets: files with wrong bytes, and files that are whole but hold anything."""

import datetime
import decimal
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

import pyarrow as pa
from hostile.cases import errors_of_ours, hostile, mutated, texts
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from evigrad.data import DataSet, load


def as_parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    with suppress(pa.ArrowNotImplementedError):  # what pyarrow cannot write: the file is cut off
        parquet.write_table(table, file, write_page_checksum=True)
    return file.getvalue()


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4), shade).save(file, "png")
    return file.getvalue()


TABLE = pa.table(
    {
        "a": [0.5 * i for i in range(20)],
        "b": [i % 3 for i in range(20)],
        "c": ["red" if i % 2 else "blue" for i in range(20)],
        "y": [1.5 * i for i in range(20)],
    }
)
IMAGES = pa.table(
    {
        "image": [{"bytes": png(10 * i), "path": None} for i in range(12)],
        "label": [i % 3 for i in range(12)],
    }
)
CSV = b"a,b,y\n" + b"".join(b"%d,%d.5,%d\n" % (i, i % 3, i % 4) for i in range(20))


def check(data: DataSet) -> None:
    """What is read is finite, and its parts fit together."""
    for x, y in (data.train, data.test):
        assert len(x) == len(y) > 0 and bool(x.isfinite().all()) and bool(y.isfinite().all())
        assert x.shape[1:] == data.input_shape


@hostile(mutated(as_parquet(TABLE)), 25, 5_000, 0.04)
def test_bytes_of_a_table(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "table.parquet").write_bytes(content)
    with errors_of_ours():
        check(load(str(tmp_path / "table.parquet"), target="y"))


@hostile(mutated(as_parquet(IMAGES)), 25, 5_000, 0.03)
def test_bytes_of_images(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "shades_train.parquet").write_bytes(content)
    (tmp_path / "shades_test.parquet").write_bytes(as_parquet(IMAGES))
    with errors_of_ours():
        check(load("shades", data_dir=tmp_path))


@hostile(mutated(CSV), 25, 5_000, 0.07)
def test_bytes_of_a_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "table.csv").write_bytes(content)
    with errors_of_ours():
        check(load(str(tmp_path / "table.csv"), target="y"))


_CELLS: dict[str, st.SearchStrategy[Any]] = {
    "float64": st.one_of(st.floats(), st.sampled_from([0.0, 1.0, 1e308, -1e308])),
    "float32": st.floats(width=32),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "int8": st.integers(0, 2),
    "string": st.one_of(texts().filter(lambda text: text.isprintable()), st.sampled_from("ab")),
    "bool": st.booleans(),
    "binary": st.binary(max_size=3),
    "date32": st.dates(),
    "timestamp": st.datetimes(datetime.datetime(1970, 1, 2), datetime.datetime(2200, 1, 1)),
    "decimal": st.decimals(-100, 100, places=2),
    "list": st.lists(st.floats(width=32), max_size=2),
    "struct": st.fixed_dictionaries({"bytes": st.binary(max_size=3), "path": st.none()}),
    "null": st.none(),
    "image": st.sampled_from([{"bytes": png(9), "path": None}, {"bytes": b"", "path": "x.png"}]),
}


@st.composite
def tables(draw: Any, names: list[str]) -> pa.Table:
    """Columns of any type with any values, some missing; a name may be there twice."""
    length = draw(st.sampled_from([0, 1, 2, 5, 12]))
    arrays, columns = [], []
    for name in [*names, *draw(st.lists(st.sampled_from(["a", "split_0", "split_1", "y", ""])))]:
        cells = _CELLS[draw(st.sampled_from(sorted(_CELLS)))]
        if draw(st.booleans()):
            cells = st.one_of(cells, cells, cells, st.none())
        values = draw(st.lists(cells, min_size=length, max_size=length))
        if draw(st.booleans()) and values:
            values = [values[0]] * length
        try:
            array = pa.array(values)
            if draw(st.booleans()) and not pa.types.is_nested(array.type):
                array = array.dictionary_encode()
        except (pa.ArrowException, OverflowError, decimal.InvalidOperation):
            array = pa.array([None] * length, pa.string())
        arrays.append(array)
        columns.append(name)
    table = pa.Table.from_arrays(arrays, columns)
    kinds = [
        {},
        {},
        {b"target": b"y"},
        {b"target": b"q", b"features": b"a,b"},
        {b"target": b"\xff"},
    ]
    kinds += [{b"huggingface": b"{}"}, {b"huggingface": b"[1"}, {b"huggingface": b'{"info": 3}'}]
    kinds += [{b"huggingface": b'{"info": {"features": {"label": {"names": [1, null]}}}}'}]
    return table.replace_schema_metadata(draw(st.sampled_from(kinds)))


@hostile(st.tuples(tables(["a", "y"]), st.sampled_from(["y", None, "a"])), 25, 5_000)
def test_columns_of_any_kind(tmp_path: Path, case: tuple[pa.Table, str | None]) -> None:
    table, target = case
    (tmp_path / "table.parquet").write_bytes(as_parquet(table))
    with errors_of_ours():
        check(load(str(tmp_path / "table.parquet"), target=target))


@hostile(tables(["image", "label"]), 20, 4_000)
def test_image_sets_of_any_kind(tmp_path: Path, table: pa.Table) -> None:
    (tmp_path / "shades_train.parquet").write_bytes(as_parquet(table))
    (tmp_path / "shades_test.parquet").write_bytes(as_parquet(IMAGES))
    with errors_of_ours():
        check(load("shades", data_dir=tmp_path))


@hostile(texts(), 20, 4_000)
def test_names(tmp_path: Path, name: str) -> None:
    before = os.listdir(tmp_path)
    for spelling in (name, f"digits:{name}", f"{name}:rotated90", f"../{name}", f"~{name}.csv"):
        with errors_of_ours():
            load(spelling, data_dir=tmp_path)
    assert os.listdir(tmp_path) == before
