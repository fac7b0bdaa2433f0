"""Tables of features and a target in Parquet and CSV files."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evigrad.data.columns import (
    DATES,
    DECLARED,
    NUMERIC,
    TEXT,
    Column,
    problem_of,
    problem_of_marks,
    problem_of_missing,
    refuse,
    words_of_constants,
)
from evigrad.data.dataset import (
    COUNTS,
    TEST_FRACTION,
    DataSet,
    Scaling,
    draw_subset,
    shuffled,
    stratified_split,
)
from evigrad.errors import (
    ConfigurationError,
    EvigradError,
    EvigradWarning,
    InputError,
    nearest,
    require,
)

# Endings of files that are tables.
SUFFIXES = (".parquet", ".csv", ".tsv")
# Likelihoods of a table's target.
TWO_OUTPUTS = ("heteroscedastic", "natural-gaussian")
LIKELIHOODS = ("categorical", "gaussian", "student-t", *TWO_OUTPUTS, *COUNTS)
SPLIT_PREFIX = "test_"
# Names of columns: a string with commas, or several strings.
Names = str | Sequence[str] | None
_LEAVE_OUT = "remove the column with --drop NAME (drop=...)"
_OTHER_TARGET = "choose another target"
# A target with more different whole numbers is a quantity, not a class.
MOST_CLASSES = 20
_AUTOMPG = "cylinders displacement horsepower weight acceleration year origin name mpg".split()


def autompg() -> tuple[Path, Any]:
    """Return the file and the table of UCI's Auto MPG data (392 cars), which mlxtend ships."""
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
    likelihood: str | None = None,
    target: str | None = None,
    features: Names = None,
    drop: Names = None,
    categorical: Names = None,
) -> DataSet:
    """Return the data set in a ``pyarrow.Table``. For the arguments, see `evigrad.data.load`.

    The schema metadata of a Parquet file may contain ``target``, the name of the target column, and
    ``features``, the comma-separated names of the feature columns. Otherwise, the argument
    ``target`` names the target column, and all other columns are features. Numeric columns are used
    unchanged, and text columns become one 0/1 column per value (see ``columns``). Constant columns
    are omitted with a warning, unless they are named as features. Boolean columns ``test_00``,
    ``test_01``, ... are splits, whose true rows are the test set. Without splits, the test set is a
    random fifth of the rows, seeded by the split's number and stratified by class. Features and
    numeric targets, but not counts, are standardized with the mean and standard deviation of the
    training rows that are used. Whole numbers are classes only if the metadata does not name the
    target. Inputs are (F,), float32. The target is one number or a label. Errors name the file and
    all problems of its columns.

    Raises:
        ConfigurationError: If a column or split does not exist, or no target is named.
        InputError: If a value is missing or invalid, or a split has no training or no test data.
    """
    names = table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"{file}: columns must have different names, got two named '{twice[0]}'. Rename one."
        )
    if table.num_rows < 2:
        raise InputError(f"{file}: a table must have at least two rows, got {table.num_rows}.")
    metadata = table.schema.metadata or {}
    is_declared = target is None and b"target" in metadata
    are_named = features is not None or b"features" in metadata
    target, chosen, declared = _roles(file, table, metadata, target, features, drop, categorical)
    columns = [_column(table, name, name in declared) for name in chosen]
    goal, values = _column(table, target, False), table.column(target)
    if likelihood is None:
        few = goal.kind == "whole numbers" and len(values.unique()) <= MOST_CLASSES
        is_classes = goal.kind in (TEXT, "yes/no") or (few and not is_declared)
        likelihood = "categorical" if is_classes else "gaussian"
    is_classes = likelihood == "categorical"
    problems = [problem_of(column, _LEAVE_OUT) for column in columns]
    refuse(str(file), [*problems, _problem_of_target(goal, values, likelihood)])
    x = _inputs(file, columns, not are_named)
    class_names = np.empty(0)
    if is_classes:
        class_names, labels = np.unique(_present(values), return_inverse=True)
        y = torch.from_numpy(labels.astype(np.int64))
    else:
        y = torch.from_numpy(goal.values[:, None])
    is_test = _test_rows(file, table, {*chosen, target}, seed, split, y if is_classes else None)
    train = np.flatnonzero(~is_test)
    train = train[draw_subset(len(train), subset, seed)]
    test = np.flatnonzero(is_test)
    scaling = Scaling.of(x[train])
    scaled = scaling(x).float()
    target_scaling = None if likelihood in ("categorical", *COUNTS) else Scaling.of(y[train])
    y = y if is_classes else (y if target_scaling is None else target_scaling(y)).float()
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
        target_mean=None if target_scaling is None else target_scaling.mean.float(),
        target_std=None if target_scaling is None else target_scaling.std.float(),
    )


def read_table(name: str, file: Path) -> Any:
    """Return the ``pyarrow.Table`` of a Parquet, CSV or TSV file, or raise InputError."""
    if file.suffix == ".parquet":
        return read_parquet(name, file)
    csv = require("pyarrow.csv", f"The data set '{name}'")
    with reading(file, "a table"):
        with file.open("rb") as lines:
            header = lines.readline()
    # Bytes that are not UTF-8 become one mark; zero bytes are a sign of UTF-16.
    if {"\0", "\N{REPLACEMENT CHARACTER}"} & {*header.decode(errors="replace")}:
        raise InputError(f"{file}: the first line is not UTF-8. Save the file as UTF-8.")
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
                f"{file}: column '{field.name}' is not UTF-8 (it may be Latin-1). Save the file as"
                " UTF-8."
            )
    return table


def _roles(
    file: Path,
    table: Any,
    metadata: dict[bytes, bytes],
    target: str | None,
    features: Names,
    drop: Names,
    categorical: Names,
) -> tuple[str, list[str], set[str]]:
    """Return the names of the target's column, of feature columns, and of category columns."""
    columns = table.column_names
    if target is None and b"target" in metadata:
        target = metadata[b"target"].decode(errors="replace").strip()
        _refuse_strange(InputError, file, [target], "which its metadata names", columns)
    if target is None:
        raise ConfigurationError(
            f"{file}: no target column is set. Set it with --target NAME (target=...). The columns"
            f" are {', '.join(columns)}."
        )
    _refuse_strange(ConfigurationError, file, [target], "to be the target", columns)
    if features is None and b"features" in metadata:
        named = _listed(metadata[b"features"].decode(errors="replace"))
        _refuse_strange(InputError, file, named, "which its metadata names", columns)
    elif features is None:
        named = [c for c in columns if not _is_split(c) or _kind(table.column(c)) != "yes/no"]
    else:
        named = _names(file, "features", features, columns, target)
    dropped = _names(file, "drop", drop, columns, target)
    if features is not None and (both := [name for name in named if name in dropped]):
        raise ConfigurationError(
            f"{file}: --features and --drop both name '{both[0]}'. Remove it from one option."
        )
    chosen = [name for name in named if name != target and name not in dropped]
    declared = _names(file, "categorical", categorical, columns, target)
    if idle := [name for name in declared if name not in chosen]:
        raise ConfigurationError(
            f"{file}: --categorical must name features, got '{idle[0]}', which is not a feature."
            " Remove it from this option, or make it a feature."
        )
    if not chosen:
        raise InputError(
            f"{file}: a table must have a feature besides the target '{target}', got none. Check"
            " the columns and the options --features and --drop."
        )
    return target, chosen, set(declared)


def _names(file: Path, option: str, names: Names, columns: list[str], target: str) -> list[str]:
    """Return the columns that an option names. Raise an error for others and for the target."""
    listed = _listed(names)
    _refuse_strange(ConfigurationError, file, listed, f"which --{option} names", columns)
    if target in listed:
        raise ConfigurationError(
            f"{file}: --{option} must not name the target, got '{target}'. Remove it from the"
            " option."
        )
    return list(dict.fromkeys(listed))


def _listed(names: Names) -> list[str]:
    if isinstance(names, str):
        return [name.strip() for name in names.split(",")]
    return list(names or ())


def _refuse_strange(
    error: type[EvigradError], file: Path, names: Sequence[str], words: str, columns: list[str]
) -> None:
    """Raise an error for names that are not columns."""
    problems = [
        f"{file} has no column '{name}', {words}.{nearest(name, columns)} The columns are"
        f" {', '.join(columns)}."
        for name in names
        if name not in columns
    ]
    if problems:
        raise error(" ".join(problems))


def _kind(values: Any) -> str:
    """Return the kind of a column: text, yes/no, whole numbers, numbers, or a type's name."""
    types = require("pyarrow", "A table").types
    kind = values.type.value_type if types.is_dictionary(values.type) else values.type
    if types.is_string(kind) or types.is_large_string(kind):
        return TEXT
    if types.is_date(kind) or types.is_timestamp(kind):
        return DATES
    if types.is_boolean(kind):
        return "yes/no"
    if types.is_integer(kind):
        return "whole numbers"
    return "numbers" if types.is_floating(kind) or types.is_decimal(kind) else str(kind)


def _column(table: Any, name: str, is_declared: bool) -> Column:
    """Return a column for the rules. ``is_declared`` makes its values categories."""
    values = table.column(name)
    kind = _kind(values)
    if kind in NUMERIC and not is_declared:
        cells = values.to_numpy()
        return Column(name, kind, cells.astype(np.float64))
    if is_declared or kind == TEXT:
        present = [None if value != value else value for value in values.to_pylist()]
    else:  # only whether they are there matters
        present = [None if is_null else True for is_null in values.is_null().to_pylist()]
    return Column(name, DECLARED if is_declared else kind, np.array([*present, None], object)[:-1])


def _problem_of_target(column: Column, values: Any, likelihood: str) -> str | None:
    """Return what is wrong with the target, or None."""
    if likelihood == "categorical":
        problem = problem_of_missing(column, _OTHER_TARGET)
        if problem is None and column.kind == TEXT:
            problem = problem_of_marks(column, _OTHER_TARGET)
    else:
        problem = problem_of(column, _OTHER_TARGET, must_be_numbers=True)
    if problem is not None:
        return problem
    if likelihood in COUNTS and bool(((column.values < 0) | (column.values % 1 != 0)).any()):
        return (
            f"column '{column.name}' holds values that are not counts 0, 1, 2, ...: use another"
            f" likelihood, or {_OTHER_TARGET}"
        )
    if len(np.unique(_present(values))) < 2:
        return f"the target '{column.name}' is the same in all rows: {_OTHER_TARGET}"
    return None


def _present(values: Any) -> np.ndarray:
    """Return the values of a column without missing values."""
    return np.array(values.to_pylist()) if _kind(values) == TEXT else values.to_numpy()


def _inputs(file: Path, columns: Sequence[Column], choose: bool) -> Tensor:
    """Return the features (n, F) float64, with 0/1 columns. ``choose`` omits constant ones."""
    if choose and (constant := [column for column in columns if column.is_constant]):
        if len(constant) == len(columns):
            raise InputError(
                f"{file}: at least one feature must vary between rows, got only constant features."
                " Check the columns and the option --drop."
            )
        warnings.warn(
            f"{file.name}: {words_of_constants([column.name for column in constant])}",
            EvigradWarning,
            stacklevel=4,  # the caller of load
        )
        columns = [column for column in columns if not column.is_constant]
    parts = []
    for column in columns:
        if column.kind in NUMERIC:
            parts.append(column.values[:, None])
        else:
            position_of = {value: place for place, value in enumerate(column.categories)}
            parts.append(np.eye(len(position_of))[[position_of[v] for v in column.values]])
    return torch.from_numpy(np.concatenate(parts, axis=1))


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
    """Return the rows of a split's test set, (n,) bool."""
    count = table.num_rows
    columns = sorted(c for c in table.column_names if _is_split(c) and c not in used)
    if columns:
        index = seed % len(columns) if split is None else split
        if not 0 <= index < len(columns):
            raise ConfigurationError(
                f"split must be between 0 and {len(columns) - 1} for '{file.stem}', got {split}."
            )
        refuse(str(file), [problem_of_missing(_column(table, columns[index], False), _LEAVE_OUT)])
        is_test = _present(table.column(columns[index]))
        if is_test.dtype != np.bool_ or is_test.all() or not is_test.any():
            raise InputError(
                f"{file}: column '{columns[index]}' must be boolean, with some test rows (true) and"
                " some training rows (false). Correct or remove the column."
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
    """Convert errors while reading a file into an InputError that names the file."""
    try:
        yield
    # The bases of pyarrow's own errors; a damaged length may ask for any amount of memory.
    except (OSError, ValueError, NotImplementedError, LookupError, MemoryError) as error:
        raise InputError(f"{file} cannot be read as {kind} ({error}). Check the file.") from error


def read_parquet(name: str, file: Path) -> Any:
    """Return the ``pyarrow.Table`` of a Parquet file, or raise InputError."""
    parquet = require("pyarrow.parquet", f"The data set '{name}'")
    with reading(file):
        table = parquet.read_table(file, page_checksum_verification=True, partitioning=None)
        list(table.column_names)  # raises if they are not text
        return table
