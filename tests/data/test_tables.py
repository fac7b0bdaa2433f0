"""Regression tables: standardisation, splits, errors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evigrad.data import load
from evigrad.errors import ConfigurationError, InputError

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")

METADATA = {"features": "height,width", "target": "weight"}


def columns() -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    is_test = np.arange(10) < 3
    return {
        "height": random.randn(10) * 3 + 1,
        "width": random.randint(0, 9, 10),
        "other": random.randn(10),
        "weight": random.randn(10) - 5,
        "test_00": is_test,
        "test_01": ~is_test,
    }


def write(
    folder: Path, table: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    (folder / "uci").mkdir(exist_ok=True)
    made = pa.table(dict(table)).replace_schema_metadata(
        dict(METADATA if metadata is None else metadata)
    )
    pq.write_table(made, folder / "uci" / "crab.parquet")


@pytest.mark.parametrize("name", ["crab", "uci/crab"])
def test_standardised_with_the_train_rows(tmp_path: Path, name: str) -> None:
    table = columns()
    write(tmp_path, table)
    data = load(name, data_dir=tmp_path)
    x = np.stack([table["height"], table["width"]], axis=1)
    y = table["weight"][:, None]
    np.testing.assert_allclose(data.mean.numpy(), x[3:].mean(0), rtol=1e-6)
    np.testing.assert_allclose(data.std.numpy(), x[3:].std(0), rtol=1e-6)
    for (inputs, targets), rows in ((data.train, slice(3, 10)), (data.test, slice(0, 3))):
        expected = (x[rows] - x[3:].mean(0)) / x[3:].std(0)
        np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-5)
        expected = (y[rows] - y[3:].mean(0)) / y[3:].std(0)
        np.testing.assert_allclose(targets.numpy(), expected, atol=1e-5)
    assert data.train[0].dtype == data.train[1].dtype == torch.float32
    assert (data.likelihood, data.num_outputs, data.input_shape) == ("gaussian", 1, (2,))
    assert data.target_mean is not None
    assert not data.is_classification


def test_the_split_is_chosen_by_number_or_by_the_seed(tmp_path: Path) -> None:
    write(tmp_path, columns())

    def sizes(**settings: int) -> tuple[int, int]:
        data = load("crab", tmp_path, **settings)
        return len(data.train[0]), len(data.test[0])

    assert sizes() == sizes(seed=2) == sizes(split=0, seed=1) == (7, 3)
    assert sizes(split=1) == sizes(seed=1) == (3, 7)
    with pytest.raises(ConfigurationError, match="2 splits, 0 to 1"):
        sizes(split=2)
    with pytest.raises(ConfigurationError, match="2 splits"):
        sizes(split=-1)


def test_subset(tmp_path: Path) -> None:
    write(tmp_path, columns())
    data = load("crab", tmp_path, subset=5)
    assert (len(data.train[0]), len(data.test[0])) == (5, 3)
    torch.testing.assert_close(data.train[0].mean(0), torch.zeros(2), atol=1e-5, rtol=0)


def test_constant_feature_is_only_centred(tmp_path: Path) -> None:
    # 0.1 has no exact binary form: the mean of ten of them is off by rounding.
    write(tmp_path, columns() | {"width": np.full(10, 0.1)})
    data = load("crab", tmp_path)
    assert data.std[1] == 1.0
    torch.testing.assert_close(data.train[0][:, 1], torch.zeros(7), atol=1e-6, rtol=0)


def without(name: str) -> dict[str, np.ndarray]:
    return {column: values for column, values in columns().items() if column != name}


@pytest.mark.parametrize(
    ("table", "metadata", "words"),
    [
        (columns(), {"target": "weight"}, "must have the keys"),
        (columns(), METADATA | {"features": "heigth"}, "Did you mean 'height'"),
        (columns() | {"width": np.full(10, np.nan)}, METADATA, "'width' holds values"),
        (columns() | {"weight": ["heavy"] * 10}, METADATA, "'weight' holds values"),
        (columns() | {"test_00": np.ones(10, bool)}, METADATA, "'test_00' must be boolean"),
        (columns() | {"test_00": np.zeros(10, bool)}, METADATA, "'test_00' must be boolean"),
        (columns() | {"test_00": np.arange(10)}, METADATA, "'test_00' must be boolean"),
        ({k: v for k, v in columns().items() if "test" not in k}, METADATA, "no split column"),
        (without("weight"), METADATA, "names a column 'weight'"),
    ],
)
def test_unusable_tables(
    tmp_path: Path, table: dict[str, Any], metadata: dict[str, str], words: str
) -> None:
    write(tmp_path, table, metadata)
    with pytest.raises(InputError) as error:
        load("crab", data_dir=tmp_path)
    assert words in str(error.value)


# Rows, features and root mean squared error of linear regression on split 0, as published with
# these files.
REAL = {"boston": (506, 13, 3.734), "yacht": (308, 6, 9.2472), "naval": (11_934, 16, 0.0058)}


@pytest.mark.parametrize("name", REAL)
def test_real_tables(data_dir: Path, name: str) -> None:
    if not (data_dir / "uci" / f"{name}.parquet").is_file():
        pytest.skip(f"no uci/{name} in the data folder")
    rows, features, error = REAL[name]
    data = load(name, data_dir=data_dir).to(dtype=torch.float64)
    assert len(data.train[0]) + len(data.test[0]) == rows
    assert data.input_shape == (features,)
    assert data.target_std is not None
    # The targets are centred: no intercept is needed. gelsd copes with naval's constant features.
    solution = torch.linalg.lstsq(*data.train, driver="gelsd", rcond=1e-6).solution
    residual = (data.test[0] @ solution - data.test[1]) * data.target_std
    assert residual.square().mean().sqrt().item() == pytest.approx(error, rel=0.02)
