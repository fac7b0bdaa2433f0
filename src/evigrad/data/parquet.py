"""Image sets in Parquet files, in the layout of the Hugging Face `datasets` library."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evigrad.data.dataset import DataSet
from evigrad.data.image_table import (
    ImageTable,
    decode,
    find_columns,
    integer_labels,
    load_tables,
)
from evigrad.data.optional import require
from evigrad.errors import InputError


def load_image_set(
    name: str,
    train_file: Path,
    test_file: Path,
    subset: int | None,
    seed: int,
    variant: str | None = None,
) -> DataSet:
    """Read an image set: columns ``image`` (struct of bytes and path) and ``label`` (integers).

    ``img`` and ``fine_label``, the names in the hub's CIFAR sets, work too. Class names come from
    the train file's metadata where it has them. Arguments are those of ``load_tables``.

    Returns:
        The data set.

    Raises:
        InputError: If columns are missing, an image cannot be decoded or has another size than
            the rest, or a label is out of range.
    """
    parquet: Any = require("pyarrow.parquet", f"The data set '{name}'")
    train, test = (_table(parquet, file) for file in (train_file, test_file))
    return load_tables(name, train, test, subset, seed, variant)


def _table(parquet: Any, file: Path) -> ImageTable:
    opened = open_parquet(parquet, file)
    image, label = find_columns(str(file), opened.schema_arrow.names)
    with reading(file):
        values = opened.read(columns=[label]).column(label)
        metadata = json.loads((opened.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
    feature = metadata.get("info", {}).get("features", {}).get(label, {})
    return ImageTable(
        where=str(file),
        labels=integer_labels(str(file), label, values),
        class_names=tuple(feature.get("names", ())),
        read=lambda rows: _decode(parquet, file, image, rows),
    )


def open_parquet(parquet: Any, file: Path) -> Any:
    """A ``pyarrow.parquet.ParquetFile``; InputError if the file is not one."""
    with reading(file):
        return parquet.ParquetFile(file, page_checksum_verification=True)


@contextmanager
def reading(file: Path, kind: str = "Parquet") -> Iterator[None]:
    """Turn errors of reading into an InputError that names the file and its kind."""
    try:
        yield
    # The bases of pyarrow's own errors; a damaged length may ask for any amount of memory.
    except (OSError, ValueError, NotImplementedError, LookupError, MemoryError) as error:
        raise InputError(f"{file}: cannot be read as {kind} ({error})") from error


def _decode(parquet: Any, file: Path, image: str, rows: np.ndarray) -> list[np.ndarray]:
    """The images of some rows, in that order: (h, w) grey or (h, w, 3) colour, uint8."""
    opened = open_parquet(parquet, file)
    images: list[np.ndarray | None] = [None] * len(rows)
    start = 0
    for group in range(opened.num_row_groups):
        stop = start + opened.metadata.row_group(group).num_rows
        wanted = np.flatnonzero((rows >= start) & (rows < stop))
        if len(wanted):
            with reading(file):
                table = opened.read_row_group(group, columns=[image])
                column = table.column(image).take(rows[wanted] - start)
            for position, cell in zip(wanted, column.to_pylist(), strict=True):
                images[position] = decode(cell, f"{file}, row {rows[position]}")
        start = stop
    return [decoded for decoded in images if decoded is not None]
