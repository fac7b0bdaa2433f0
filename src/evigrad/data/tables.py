"""Tables of features and a target, in Parquet and CSV files."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evigrad.data.dataset import (
    TEST_FRACTION,
    DataSet,
    Scaling,
    draw_subset,
    shuffled,
    stratified_split,
)
from evigrad.errors import ConfigurationError, EvigradWarning, InputError, nearest, require

# Endings of files that are tables.
SUFFIXES = (".parquet", ".csv", ".tsv")
# What a table's target may be taken for.
TWO_OUTPUTS = ("heteroscedastic", "natural-gaussian")
LIKELIHOODS = ("categorical", "gaussian", *TWO_OUTPUTS, "poisson")
SPLIT_PREFIX = "test_"
# A target of more different whole numbers is a quantity and not classes.
MOST_CLASSES = 20
_AUTOMPG = "cylinders displacement horsepower weight acceleration year origin name mpg".split()
# A column with more different texts holds names or remarks and not categories.
MOST_CATEGORIES = 100


def autompg() -> tuple[Path, Any]:
    """UCI's Auto MPG that mlxtend ships, 392 cars: its file, and a ``pyarrow.Table``."""
    package = require("mlxtend", "The data set 'autompg'")
    csv = require("pyarrow.csv", "The data set 'autompg'")
    file = Path(str(files(package).joinpath("data", "data", "autompg.csv.gz")))
    with reading(file, "a table"):
        table = csv.read_csv(file, csv.ReadOptions(column_names=_AUTOMPG))
    origins = np.array(["", "USA", "Europe", "Japan"])[table.column("origin").to_numpy()]
    table = table.set_column(_AUTOMPG.index("origin"), "origin", [origins.tolist()])
    return file, table.drop_columns("name").replace_schema_metadata({"target": "mpg"})


def table_data_set(
    name: str,
    file: Path,
    table: Any,
    subset: int | None,
    seed: int,
    split: int | None,
    target: str | None = None,
    likelihood: str | None = None,
) -> DataSet:
    """Return the data set of a ``pyarrow.Table``; arguments as of `evigrad.data.load`.

    The schema metadata of a Parquet file may name the columns: ``features`` (comma-separated) and
    ``target``. Else ``target`` names that column, and all others are features: numbers as they
    are, and one 0/1 column for each value of a column of texts. Columns with one value in all rows
    are left out, with a warning. Boolean columns ``test_00``, ``test_01``, ... are splits: true
    rows are that split's test set. Without any, a fifth of the rows drawn by the split's number,
    stratified by class, is the test set. Features and real targets, but not counts, are
    standardised with the mean and deviation of the split's (drawn) train rows. Whole numbers are
    classes only where metadata do not name the target. Inputs are (F,), float32; the target is one
    number or a label. Errors name the file.

    Raises:
        ConfigurationError: If there is no such column or split, or none is named as the target.
        InputError: If a value is missing or of no use, or a split leaves no train or no test data.
    """
    names = table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"{file}: there are two columns named '{twice[0]}'")
    if table.num_rows < 2:
        raise InputError(f"{file}: a table has two rows or more, and there are {table.num_rows}")
    metadata = table.schema.metadata or {}
    is_declared = target is None and b"target" in metadata
    target, features = _roles(file, table, metadata, target)
    x = _inputs(file, table, features, b"features" not in metadata)
    values = table.column(target)
    if likelihood is None:
        likelihood = "categorical" if _is_classes(values, is_declared) else "gaussian"
    is_classes, class_names = likelihood == "categorical", np.empty(0)
    if is_classes:
        class_names, labels = np.unique(_present(file, target, values), return_inverse=True)
        y = torch.from_numpy(labels.astype(np.int64))
    else:
        y = torch.from_numpy(_numbers(file, target, values)[:, None])
    if likelihood == "poisson" and bool(((y < 0) | (y % 1 != 0)).any()):
        raise InputError(f"{file}: column '{target}' holds values that are no counts 0, 1, 2, ...")
    if len(y.unique(dim=0)) < 2:
        raise InputError(f"{file}: the target '{target}' is the same in all rows")
    is_test = _test_rows(file, table, {*features, target}, seed, split, y if is_classes else None)
    train = np.flatnonzero(~is_test)
    train = train[draw_subset(len(train), subset, seed)]
    test = np.flatnonzero(is_test)
    scaling = Scaling.of(x[train])
    scaled = scaling(x).float()
    of_target = None if likelihood in ("categorical", "poisson") else Scaling.of(y[train])
    y = y if is_classes else (y if of_target is None else of_target(y)).float()
    return DataSet(
        name=name,
        train=(scaled[train], y[train]),
        test=(scaled[test], y[test]),
        num_outputs=len(class_names) or (2 if likelihood in TWO_OUTPUTS else 1),
        input_shape=(x.shape[1],),
        likelihood=likelihood,
        class_names=tuple(map(str, class_names)),
        mean=scaling.mean.float(),
        std=scaling.std.float(),
        target_mean=None if of_target is None else of_target.mean.float(),
        target_std=None if of_target is None else of_target.std.float(),
    )


def read_table(name: str, file: Path) -> Any:
    """Return the ``pyarrow.Table`` of a Parquet, CSV or TSV file.

    Raises:
        InputError: If the file cannot be read.
    """
    if file.suffix == ".parquet":
        return read_parquet(name, file)
    csv = require("pyarrow.csv", f"The data set '{name}'")
    with reading(file, "a table"):
        with file.open("rb") as lines:
            header = lines.readline()
    # Bytes that are no UTF-8 become one mark; zero bytes are a sign of UTF-16.
    if {"\0", "\N{REPLACEMENT CHARACTER}"} & {*header.decode(errors="replace")}:
        raise InputError(f"{file}: its first line is not UTF-8: save the file as UTF-8")
    with reading(file, "a table"):
        delimiter = max(",;\t", key=lambda mark: header.count(mark.encode()))
        table = csv.read_csv(
            file,
            parse_options=csv.ParseOptions(delimiter=delimiter),
            convert_options=csv.ConvertOptions(strings_can_be_null=True),
        )
    for field in table.schema:
        if str(field.type) == "binary":  # what cannot be decoded stays bytes
            raise InputError(
                f"{file}: column '{field.name}' is not UTF-8 (it may be Latin-1): save the file as"
                " UTF-8"
            )
    return table


def _roles(
    file: Path, table: Any, metadata: dict[bytes, bytes], target: str | None
) -> tuple[str, list[str]]:
    """Names of the target's column and of the features'."""
    columns = table.column_names
    if target is None and b"target" in metadata:
        target = metadata[b"target"].decode(errors="replace").strip()
        if target not in columns:
            raise InputError(_no_column(file, target, "which its metadata names", columns))
    if target is None:
        raise ConfigurationError(
            f"{file}: say which column is the target, with --target NAME (target=...). There are"
            f" {', '.join(columns)}."
        )
    if target not in columns:
        raise ConfigurationError(_no_column(file, target, "to be the target", columns))
    if b"features" in metadata:
        listed = [
            each.strip() for each in metadata[b"features"].decode(errors="replace").split(",")
        ]
        for column in listed:
            if column not in columns:
                raise InputError(_no_column(file, column, "which its metadata names", columns))
    else:
        listed = [c for c in columns if not _is_split(c) or _kind(table.column(c)) != "yes/no"]
    features = [each for each in listed if each != target]
    if not features:
        raise InputError(f"{file}: there is no column beside the target '{target}'")
    return target, features


def _no_column(file: Path, column: str, words: str, columns: list[str]) -> str:
    return (
        f"{file} has no column '{column}', {words}.{nearest(column, columns)} There are"
        f" {', '.join(columns)}."
    )


def _kind(values: Any) -> str:
    """What a column holds: text, yes/no, whole numbers, numbers, or the name of another type."""
    types = require("pyarrow", "A table").types
    kind = values.type.value_type if types.is_dictionary(values.type) else values.type
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if types.is_boolean(kind):
        return "yes/no"
    if types.is_integer(kind):
        return "whole numbers"
    return "numbers" if types.is_floating(kind) or types.is_decimal(kind) else str(kind)


def _is_classes(values: Any, is_declared: bool) -> bool:
    """Whether a target of no named likelihood is of classes."""
    kind = _kind(values)
    few = kind == "whole numbers" and len(values.unique()) <= MOST_CLASSES
    return kind in ("text", "yes/no") or (few and not is_declared)


def _present(file: Path, column: str, values: Any) -> np.ndarray:
    """A column; refuses missing values."""
    if missing := values.null_count:
        raise InputError(
            f"{file}: column '{column}' lacks {missing:,} of {len(values):,} values: fill them in,"
            " or take out their rows"
        )
    if _kind(values) != "text":
        return values.to_numpy()
    texts = np.array(values.to_pylist())
    _refuse_marks(file, column, texts)
    return texts


def _refuse_marks(file: Path, column: str, texts: np.ndarray) -> None:
    """Refuse numbers that are read as texts, for a mark of missing ones or a decimal comma."""
    distinct, counts = np.unique(texts, return_counts=True)
    plain = np.array([_is_number(text) for text in distinct])
    with_comma = np.array([_is_number(text.replace(",", ".")) for text in distinct]) & ~plain
    others = distinct[~plain & ~with_comma]
    if 2 * counts[plain | with_comma].sum() < len(texts):
        return
    if with_comma.any():
        raise InputError(
            f"{file}: column '{column}' holds numbers with a comma, as '{distinct[with_comma][0]}':"
            " write them with a point, and thousands without a mark"
        )
    if len(others):
        marks = ", ".join(f"'{text}'" for text in others[:3])
        raise InputError(
            f"{file}: column '{column}' holds numbers, but also {marks}: fill such values in, or"
            " take out their rows (to make categories of all, put a letter before the numbers)"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(file: Path, column: str, values: Any) -> np.ndarray:
    """A column of numbers as (n,) float64."""
    kind = _kind(values)
    if kind in ("yes/no", "whole numbers", "numbers"):
        numbers = _present(file, column, values).astype(np.float64)
        if np.isfinite(numbers).all():
            return numbers
        raise InputError(f"{file}: column '{column}' holds values that are no finite numbers")
    if kind == "text":
        _present(file, column, values)  # which says why, where they were meant to be numbers
    what = "texts" if kind == "text" else f"values of type {kind}"
    if kind.startswith(("date", "timestamp")):
        what = "dates"
    raise InputError(
        f"{file}: column '{column}' holds {what} and not numbers: take it out of the file, or make"
        " numbers of them"
    )


def _feature(file: Path, table: Any, column: str) -> np.ndarray:
    """A column of numbers as (n, 1); one of texts as a 0/1 column for each different text."""
    values = table.column(column)
    if _kind(values) != "text":
        return _numbers(file, column, values)[:, None]
    categories, codes = np.unique(_present(file, column, values), return_inverse=True)
    if len(categories) > MOST_CATEGORIES:
        raise InputError(
            f"{file}: column '{column}' holds {len(categories):,} different texts, which are no"
            f" categories (at most {MOST_CATEGORIES}): take it out of the file, or make numbers"
        )
    return np.eye(len(categories))[codes]


def _inputs(file: Path, table: Any, features: list[str], choose: bool) -> Tensor:
    """The features (n, F) float64; ``choose`` leaves out constant ones."""
    parts = {column: _feature(file, table, column) for column in features}
    constant = [column for column, part in parts.items() if (part == part[0]).all()]
    if choose and constant:
        if len(constant) == len(parts):
            raise InputError(f"{file}: all features are the same in all rows")
        warnings.warn(
            f"{file.name}: left out of the features, as they are the same in all rows:"
            f" {', '.join(constant)}.",
            EvigradWarning,
            stacklevel=4,  # the caller of load
        )
        parts = {column: part for column, part in parts.items() if column not in constant}
    return torch.from_numpy(np.concatenate(list(parts.values()), axis=1))


def _is_split(column: str) -> bool:
    return column.startswith(SPLIT_PREFIX) and column.removeprefix(SPLIT_PREFIX).isdigit()


def _test_rows(
    file: Path,
    table: Any,
    used: set[str],
    seed: int,
    split: int | None,
    labels: Tensor | None,
) -> np.ndarray:
    """The rows of a split's test set, (n,) bool."""
    count = table.num_rows
    columns = sorted(c for c in table.column_names if _is_split(c) and c not in used)
    if columns:
        index = seed % len(columns) if split is None else split
        if not 0 <= index < len(columns):
            raise ConfigurationError(
                f"split={split}, but '{file.stem}' has {len(columns)} splits, 0 to"
                f" {len(columns) - 1}"
            )
        is_test = _present(file, columns[index], table.column(columns[index]))
        if is_test.dtype != np.bool_ or is_test.all() or not is_test.any():
            raise InputError(
                f"{file}: column '{columns[index]}' must be boolean, with some test rows (true) and"
                " some train rows (false)"
            )
        return is_test
    index = seed if split is None else split
    is_test = np.zeros(count, dtype=np.bool_)
    size = max(1, round(TEST_FRACTION * count))
    if labels is None or size < 2:
        is_test[shuffled(count, index)[:size]] = True
    else:
        is_test[stratified_split(labels.numpy(), TEST_FRACTION, index)[1]] = True
    return is_test


@contextmanager
def reading(file: Path, kind: str = "Parquet") -> Iterator[None]:
    """Turn errors of reading into an InputError that names the file and its kind."""
    try:
        yield
    # The bases of pyarrow's own errors; a damaged length may ask for any amount of memory.
    except (OSError, ValueError, NotImplementedError, LookupError, MemoryError) as error:
        raise InputError(f"{file}: cannot be read as {kind} ({error})") from error


def read_parquet(name: str, file: Path) -> Any:
    """The ``pyarrow.Table`` of a data set's file; InputError if the file is not Parquet."""
    parquet = require("pyarrow.parquet", f"The data set '{name}'")
    with reading(file):
        table = parquet.read_table(file, page_checksum_verification=True, partitioning=None)
        list(table.column_names)  # which may be no text
        return table
