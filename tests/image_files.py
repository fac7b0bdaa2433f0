"""Small image sets in tables, in the layout of the `datasets` library."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def pixels(n: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (n, *shape)).astype(np.uint8)


def png(image: np.ndarray, mode: str | None = None) -> bytes:
    import PIL.Image

    buffer = io.BytesIO()
    encoded = PIL.Image.fromarray(image)
    (encoded if mode is None else encoded.convert(mode)).save(buffer, "PNG")
    return buffer.getvalue()


def table(
    images: Sequence[bytes | None],
    labels: Sequence[Any],
    names: Sequence[str] | None = ("cat", "dog", "emu"),
    columns: tuple[str, str] = ("image", "label"),
) -> Any:
    import pyarrow as pa

    cells = [{"bytes": data, "path": None} for data in images]
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrow_table = pa.table({columns[0]: pa.array(cells, image_type), columns[1]: pa.array(labels)})
    if names is None:
        return arrow_table
    label = {"names": list(names), "_type": "ClassLabel"}
    info = {"info": {"features": {columns[0]: {"_type": "Image"}, columns[1]: label}}}
    return arrow_table.replace_schema_metadata({"huggingface": json.dumps(info)})


def write(
    file: Path,
    images: Sequence[bytes | None],
    labels: Sequence[Any],
    names: Sequence[str] | None = ("cat", "dog", "emu"),
    columns: tuple[str, str] = ("image", "label"),
) -> None:
    """A part of a data set, two rows in a row group."""
    import pyarrow.parquet as pq

    pq.write_table(table(images, labels, names, columns), file, row_group_size=2)
