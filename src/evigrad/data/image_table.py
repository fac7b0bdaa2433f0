"""Image sets in tables, of files or the hub, with a column of encoded images and one of labels."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from evigrad.data.dataset import DataSet
from evigrad.data.images import image_data_set
from evigrad.data.optional import require
from evigrad.data.splits import draw_subset
from evigrad.errors import InputError

# Possible names of the two columns, in order of preference. CIFAR sets have ``img``, and CIFAR-100
# has ``fine_label`` (its 100 classes) beside ``coarse_label``.
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")

# A larger label is no class, and would need as many outputs.
MOST_CLASSES = 100_000

# Modes that Pillow converts without loss of meaning. A conversion of transparency or 16 bits would
# silently drop a part.
GREY_MODES = frozenset({"1", "L"})
COLOUR_MODES = frozenset({"RGB", "P", "CMYK", "YCbCr", "HSV", "LAB"})


@dataclass(frozen=True)
class ImageTable:
    """The train or the test part of an image set.

    Attributes:
        where: Its name in errors: its file, for example.
        labels: All labels, (n,) int64.
        class_names: Words for the classes; empty where the table has none.
        read: From positions to the images there, in that order: (h, w) grey or (h, w, 3) colour,
            uint8.
    """

    where: str
    labels: np.ndarray
    class_names: tuple[str, ...]
    read: Callable[[np.ndarray], list[np.ndarray]]


def load_tables(
    name: str,
    train: ImageTable,
    test: ImageTable,
    subset: int | None,
    seed: int,
    variant: str | None = None,
) -> DataSet:
    """Make a data set of two tables; the name is the one without the variant's.

    Only the drawn train rows are decoded. If one image is RGB, grey ones are converted to RGB.
    Pixels are scaled to [0, 1] and standardised per channel with the mean and deviation of the
    drawn train images. Class names come from the train table where it has them.

    Returns:
        The data set.

    Raises:
        InputError: If an image cannot be decoded or has another size than the rest, or a label is
            out of range.
    """
    class_names = train.class_names
    if not class_names:
        if train.labels.max() >= MOST_CLASSES:
            raise InputError(
                f"{train.where}: a label is {train.labels.max()}, and {MOST_CLASSES:,} classes are"
                " the most: number them 0, 1, 2, ..."
            )
        class_names = tuple(str(label) for label in range(int(train.labels.max()) + 1))
    for table in (train, test):
        labels = table.labels
        if labels.min() < 0 or labels.max() >= len(class_names):
            raise InputError(
                f"{table.where}: labels run from {labels.min()} to {labels.max()}, but there are "
                f"{len(class_names)} classes, 0 to {len(class_names) - 1}"
            )
    rows = draw_subset(len(train.labels), subset, seed)
    train_images = train.read(rows)
    test_images = test.read(np.arange(len(test.labels)))
    colour = any(image.ndim == 3 for image in (*train_images, *test_images))
    train_pixels = _stack(train.where, train_images, colour)
    test_pixels = _stack(test.where, test_images, colour)
    del train_images, test_images  # before there are real numbers, which take four times as much
    if train_pixels.shape[1:] != test_pixels.shape[1:]:
        raise InputError(
            f"{test.where}: images of (channels, height, width) {test_pixels.shape[1:]}, but "
            f"{train.where} has {train_pixels.shape[1:]}"
        )
    return image_data_set(
        name,
        (train_pixels, train.labels[rows]),
        (test_pixels, test.labels),
        class_names,
        rows,
        variant,
    )


def find_columns(where: str, columns: Iterable[str]) -> tuple[str, str]:
    """Names of the image and the label column; ``where`` names the table in an error.

    Returns:
        The two names.

    Raises:
        InputError: If one of them is missing.
    """
    present = list(columns)
    found = []
    for candidates in (IMAGE_COLUMNS, LABEL_COLUMNS):
        matching = [name for name in candidates if name in present]
        if not matching:
            raise InputError(
                f"{where}: no column '{candidates[0]}' (it has {', '.join(present)}); an image set "
                "needs 'image' (or 'img'), a struct of bytes and path, and 'label' (or "
                "'fine_label'), integers"
            )
        found.append(matching[0])
    return found[0], found[1]


def integer_labels(where: str, column: str, values: Any) -> np.ndarray:
    """Labels (n,) int64 from a ``pyarrow.ChunkedArray``; InputError if empty or not integers."""
    if len(values) == 0 or values.null_count:
        raise InputError(f"{where}: {'no rows' if len(values) == 0 else 'rows without a label'}")
    labels = values.to_numpy()
    if labels.dtype.kind not in "iu":
        raise InputError(f"{where}: column '{column}' holds {values.type}, not integers")
    return labels.astype(np.int64)


def decode(cell: Any, where: str) -> np.ndarray:
    """Decode an image: a struct of bytes and path; ``where`` names the cell in an error.

    Returns:
        Pixels (h, w) if it is grey and (h, w, 3) if it is not, uint8.

    Raises:
        InputError: If it holds no bytes, or none that Pillow can decode without loss.
    """
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


def _stack(where: str, images: list[np.ndarray], colour: bool) -> np.ndarray:
    """Images of one size as (n, channels, h, w)."""
    sizes = {image.shape[:2] for image in images}
    if len(sizes) > 1:
        first, second = sorted(sizes)[:2]
        raise InputError(
            f"{where}: images of different sizes (height, width), {first} and {second} among them; "
            "resize them to one size first"
        )
    if not colour:
        return np.stack(images)[:, None]
    pixels = np.empty((len(images), 3, *images[0].shape[:2]), dtype=np.uint8)
    for target, image in zip(pixels, images, strict=True):
        # A grey image has no channel axis: it is copied to all three.
        target[:] = image.transpose(2, 0, 1) if image.ndim == 3 else image
    return pixels
