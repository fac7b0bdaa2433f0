"""Image sets in Parquet files, in the layout of the Hugging Face `datasets` library."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from evigrad.data.dataset import DataSet
from evigrad.data.images import image_data_set
from evigrad.data.optional import require
from evigrad.data.splits import draw_subset
from evigrad.errors import InputError

# Modes that Pillow converts without loss of meaning. Not among them: transparency and 16 bits, of
# which a conversion would drop a part without a word.
GREY_MODES = frozenset({"1", "L"})
COLOUR_MODES = frozenset({"RGB", "P", "CMYK", "YCbCr", "HSV", "LAB"})


def load_image_set(
    name: str, train_file: Path, test_file: Path, subset: int | None, seed: int
) -> DataSet:
    """Read an image set: columns ``image`` (struct of bytes and path) and ``label`` (integers).

    Only the drawn train rows are decoded. Images are RGB as soon as one of them is: grey ones among
    them are converted. Pixels are scaled to [0, 1] and standardised per channel with the mean and
    deviation of the drawn train images.

    Args:
        name: Name of the data set.
        train_file: Parquet file of the train split.
        test_file: Parquet file of the test split.
        subset: Number of train data to draw; None takes all.
        seed: Seed of that draw.

    Returns:
        The data set; class names come from the file's metadata where it has them.

    Raises:
        InputError: If columns are missing, an image cannot be decoded or has another size than
            the rest, or a label is out of range.
    """
    parquet: Any = require("pyarrow.parquet", f"The data set '{name}'")
    train_labels, class_names = _labels(parquet, train_file)
    test_labels, _ = _labels(parquet, test_file)
    if not class_names:
        class_names = tuple(str(label) for label in range(int(train_labels.max()) + 1))
    for file, labels in ((train_file, train_labels), (test_file, test_labels)):
        if labels.min() < 0 or labels.max() >= len(class_names):
            raise InputError(
                f"{file}: labels run from {labels.min()} to {labels.max()}, but there are "
                f"{len(class_names)} classes, 0 to {len(class_names) - 1}"
            )
    rows = draw_subset(len(train_labels), subset, seed)
    train_images = _decode(parquet, train_file, rows)
    test_images = _decode(parquet, test_file, np.arange(len(test_labels)))
    colour = any(image.ndim == 3 for image in (*train_images, *test_images))
    train_pixels = _stack(train_file, train_images, colour)
    test_pixels = _stack(test_file, test_images, colour)
    if train_pixels.shape[1:] != test_pixels.shape[1:]:
        raise InputError(
            f"{test_file}: images of (channels, height, width) {test_pixels.shape[1:]}, but "
            f"{train_file.name} has {train_pixels.shape[1:]}"
        )
    return image_data_set(
        name, (train_pixels, train_labels[rows]), (test_pixels, test_labels), class_names
    )


def _labels(parquet: Any, file: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """All labels of a split, and the class names of its metadata (none: empty)."""
    opened = open_parquet(parquet, file)
    columns = opened.schema_arrow.names
    for column in ("image", "label"):
        if column not in columns:
            raise InputError(
                f"{file}: no column '{column}' (it has {', '.join(columns)}); an image set needs "
                "'image', a struct of bytes and path, and 'label', integers"
            )
    values = opened.read(columns=["label"]).column("label")
    if len(values) == 0 or values.null_count:
        raise InputError(f"{file}: {'no rows' if len(values) == 0 else 'rows without a label'}")
    labels = values.to_numpy()
    if labels.dtype.kind not in "iu":
        raise InputError(f"{file}: column 'label' holds {values.type}, not integers")
    metadata = json.loads((opened.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
    feature = metadata.get("info", {}).get("features", {}).get("label", {})
    return labels.astype(np.int64), tuple(feature.get("names", ()))


def open_parquet(parquet: Any, file: Path) -> Any:
    """Open a Parquet file.

    Args:
        parquet: The module ``pyarrow.parquet``.
        file: The file.

    Returns:
        A ``pyarrow.parquet.ParquetFile``.

    Raises:
        InputError: If it is not one.
    """
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise InputError(f"{file}: cannot be read as Parquet ({error})") from error


def _decode(parquet: Any, file: Path, rows: np.ndarray) -> list[np.ndarray]:
    """The images of some rows, in that order: (h, w) grey or (h, w, 3) colour, uint8."""
    opened = open_parquet(parquet, file)
    images: list[np.ndarray | None] = [None] * len(rows)
    start = 0
    for group in range(opened.num_row_groups):
        stop = start + opened.metadata.row_group(group).num_rows
        wanted = np.flatnonzero((rows >= start) & (rows < stop))
        if len(wanted):
            table = opened.read_row_group(group, columns=["image"])
            column = table.column("image").take(rows[wanted] - start)
            for position, cell in zip(wanted, column.to_pylist(), strict=True):
                images[position] = _decode_one(cell, f"{file}, row {rows[position]}")
        start = stop
    return [image for image in images if image is not None]


def _decode_one(cell: Any, where: str) -> np.ndarray:
    pillow: Any = require("PIL.Image", "Decoding images")
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not data:
        raise InputError(f"{where}: the image holds no bytes")
    try:
        with pillow.open(io.BytesIO(data)) as image:
            if image.mode in GREY_MODES:
                return np.asarray(image.convert("L"))
            if image.mode in COLOUR_MODES:
                return np.asarray(image.convert("RGB"))
            mode = image.mode
    except OSError as error:  # Pillow's UnidentifiedImageError is one
        raise InputError(f"{where}: the image cannot be decoded ({error})") from error
    raise InputError(
        f"{where}: an image of mode '{mode}', which evigrad does not convert; "
        "store it as grey (L) or RGB"
    )


def _stack(file: Path, images: list[np.ndarray], colour: bool) -> np.ndarray:
    """Images of one size as (n, channels, h, w)."""
    sizes = {image.shape[:2] for image in images}
    if len(sizes) > 1:
        first, second = sorted(sizes)[:2]
        raise InputError(
            f"{file}: images of different sizes (height, width), {first} and {second} among them; "
            "resize them to one size first"
        )
    if not colour:
        return np.stack(images)[:, None]
    pixels = np.empty((len(images), 3, *images[0].shape[:2]), dtype=np.uint8)
    for target, image in zip(pixels, images, strict=True):
        # A grey image has no channel axis and fills all three alike.
        target[:] = image.transpose(2, 0, 1) if image.ndim == 3 else image
    return pixels
