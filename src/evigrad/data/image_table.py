"""Image sets in tables with a column of encoded images and one of labels, wherever they lie."""

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

# Names of the two columns, the first one that a table has. CIFAR sets have ``img``, and CIFAR-100
# has ``fine_label`` (its 100 classes) beside ``coarse_label``.
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")

# A number beyond is no class, and would stand for as many outputs.
MOST_CLASSES = 100_000

# Modes that Pillow converts without loss of meaning. Not among them: transparency and 16 bits, of
# which a conversion would drop a part without a word.
GREY_MODES = frozenset({"1", "L"})
COLOUR_MODES = frozenset({"RGB", "P", "CMYK", "YCbCr", "HSV", "LAB"})


@dataclass(frozen=True)
class ImageTable:
    """One part, train or test, of an image set.

    Attributes:
        where: What an error calls it: its file, for example.
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
    """Make a data set of two tables.

    Only the drawn train rows are decoded. Images are RGB as soon as one of them is: grey ones among
    them are converted. Pixels are scaled to [0, 1] and standardised per channel with the mean and
    deviation of the drawn train images.

    Args:
        name: Name of the data set, without the variant's.
        train: The train part.
        test: The test part.
        subset: Number of train data to draw; None takes all.
        seed: Seed of that draw.
        variant: One of `evigrad.data.variants.VARIANTS`; None leaves the images as they are.

    Returns:
        The data set; class names come from the train table where it has them.

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
    """The names of the image column and of the label column.

    Args:
        where: What an error calls the table.
        columns: All columns of the table.

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
    """Labels out of a column.

    Args:
        where: What an error calls the table.
        column: The column's name.
        values: The column, a ``pyarrow.ChunkedArray``.

    Returns:
        Shape (n,), int64.

    Raises:
        InputError: If it is empty, or holds anything but integers.
    """
    if len(values) == 0 or values.null_count:
        raise InputError(f"{where}: {'no rows' if len(values) == 0 else 'rows without a label'}")
    labels = values.to_numpy()
    if labels.dtype.kind not in "iu":
        raise InputError(f"{where}: column '{column}' holds {values.type}, not integers")
    return labels.astype(np.int64)


def decode(cell: Any, where: str) -> np.ndarray:
    """Decode the image in a cell of a table.

    Args:
        cell: A struct of bytes and path.
        where: What an error calls the cell.

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
        # A grey image has no channel axis and fills all three alike.
        target[:] = image.transpose(2, 0, 1) if image.ndim == 3 else image
    return pixels
