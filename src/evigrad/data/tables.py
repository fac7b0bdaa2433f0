"""Regression tables in Parquet files, with train/test splits as boolean columns."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evigrad.data.dataset import DataSet
from evigrad.data.optional import require
from evigrad.data.parquet import open_parquet
from evigrad.data.splits import draw_subset
from evigrad.errors import ConfigurationError, InputError, nearest

SPLIT_PREFIX = "test_"


def load_table(name: str, file: Path, subset: int | None, seed: int, split: int | None) -> DataSet:
    """Read a regression table.

    The schema metadata names the columns: ``features`` (comma-separated) and ``target``. Boolean
    columns ``test_00``, ``test_01``, ... are splits: true rows are that split's test set. Features
    and target are standardised with the mean and deviation of the split's (drawn) train rows.

    Args:
        name: Name of the data set.
        file: The Parquet file.
        subset: Number of train data to draw; None takes all.
        seed: Seed of that draw.
        split: Index of the split; None takes ``seed`` modulo the number of splits.

    Returns:
        The data set, float32, inputs (F,) and one target.

    Raises:
        ConfigurationError: If there is no such split.
        InputError: If metadata, columns or split columns are missing, a value is not finite, or a
            split leaves no train or no test data.
    """
    parquet: Any = require("pyarrow.parquet", f"The data set '{name}'")
    opened = open_parquet(parquet, file)
    metadata = opened.schema_arrow.metadata or {}
    if b"features" not in metadata or b"target" not in metadata:
        raise InputError(
            f"{file}: the schema metadata must have the keys 'features' (comma-separated column "
            "names) and 'target' (a column name)"
        )
    features = [feature.strip() for feature in metadata[b"features"].decode().split(",")]
    target = metadata[b"target"].decode().strip()
    table = opened.read()
    x = np.stack([_column(file, table, feature) for feature in features], axis=1)
    y = _column(file, table, target)[:, None]

    is_test = _test_rows(name, file, table, seed, split)
    train = np.flatnonzero(~is_test)
    train = train[draw_subset(len(train), subset, seed)]
    test = np.flatnonzero(is_test)
    x_train, x_test, mean, std = _standardise(x[train], x[test])
    y_train, y_test, target_mean, target_std = _standardise(y[train], y[test])
    return DataSet(
        name=name,
        train=(x_train, y_train),
        test=(x_test, y_test),
        num_outputs=1,
        input_shape=(len(features),),
        likelihood="gaussian",
        class_names=(),
        mean=mean,
        std=std,
        target_mean=target_mean,
        target_std=target_std,
    )


def _column(file: Path, table: Any, column: str) -> np.ndarray:
    if column not in table.column_names:
        raise InputError(
            f"{file}: its metadata names a column '{column}' that it does not have."
            + nearest(column, table.column_names)
        )
    values = table.column(column).to_numpy()
    if values.dtype.kind not in "iufb" or not np.isfinite(values).all():
        raise InputError(f"{file}: column '{column}' holds values that are no finite numbers")
    return values.astype(np.float64)


def _test_rows(name: str, file: Path, table: Any, seed: int, split: int | None) -> np.ndarray:
    """Which rows are the test set of a split, (n,) bool."""
    columns = sorted(
        column
        for column in table.column_names
        if column.startswith(SPLIT_PREFIX) and column.removeprefix(SPLIT_PREFIX).isdigit()
    )
    if not columns:
        raise InputError(f"{file}: no split column (test_00, test_01, ...; boolean)")
    index = seed % len(columns) if split is None else split
    if not 0 <= index < len(columns):
        raise ConfigurationError(
            f"split={split}, but '{name}' has {len(columns)} splits, 0 to {len(columns) - 1}"
        )
    is_test = table.column(columns[index]).to_numpy()
    if is_test.dtype != np.bool_ or is_test.all() or not is_test.any():
        raise InputError(
            f"{file}: column '{columns[index]}' must be boolean, with some test rows (true) and "
            "some train rows (false)"
        )
    return is_test


def _standardise(train: np.ndarray, test: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and test columns standardised, mean and deviation; all float32."""
    mean = train.mean(axis=0)
    std = train.std(axis=0)
    # Compared exactly: rounding gives a constant column a tiny deviation that is not zero.
    std[(train == train[0]).all(axis=0)] = 1.0
    scaled = ((train - mean) / std, (test - mean) / std, mean, std)
    first, second, third, fourth = (torch.from_numpy(a.astype(np.float32)) for a in scaled)
    return first, second, third, fourth
