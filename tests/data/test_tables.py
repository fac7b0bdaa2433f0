"""Tables: what follows from their columns, standardisation, splits, errors."""

import datetime
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evigrad.data import Scaling, load
from evigrad.errors import ConfigurationError, EvigradError, EvigradWarning, InputError

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
pa_csv: Any = pytest.importorskip("pyarrow.csv")

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
    arrow_table = pa.table(dict(table)).replace_schema_metadata(
        dict(METADATA if metadata is None else metadata)
    )
    pq.write_table(arrow_table, folder / "uci" / "crab.parquet")


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

    def sizes(**settings: Any) -> tuple[int, int]:
        data = load("crab", tmp_path, **settings)
        return len(data.train[0]), len(data.test[0])

    assert sizes() == sizes(seed=2) == sizes(split=0, seed=1) == (7, 3)
    assert sizes(split=1) == sizes(seed=1) == (3, 7)
    with pytest.raises(ConfigurationError, match="split must be between 0 and 1"):
        sizes(split=2)
    with pytest.raises(ConfigurationError, match="split must be between 0 and 1 for .* got"):
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


def test_unusable_tables(tmp_path: Path) -> None:
    for table, metadata, words in [
        (columns(), METADATA | {"features": "heigth"}, "Did you mean 'height'"),
        (columns() | {"width": np.full(10, np.nan)}, METADATA, "'width' lacks 10 of 10 values"),
        (columns() | {"test_00": np.ones(10, bool)}, METADATA, "'test_00' must be boolean"),
        (columns() | {"test_00": np.zeros(10, bool)}, METADATA, "'test_00' must be boolean"),
        (columns() | {"test_00": np.arange(10)}, METADATA, "'test_00' must be boolean"),
        (columns() | {"weight": np.ones(10)}, METADATA, "the same in all rows"),
        (without("weight"), METADATA, "no column 'weight', which its metadata names"),
    ]:
        write(tmp_path, table, metadata)
        with pytest.raises(InputError) as error:
            load("crab", data_dir=tmp_path)
        assert words in str(error.value)


def houses(count: int = 50) -> dict[str, Any]:
    """Columns of every kind: real, whole, text and yes/no."""
    random = np.random.RandomState(1)
    area, rooms = 50 + 100 * random.rand(count), random.randint(1, 9, count)
    return {
        "area": area,
        "rooms": rooms,
        "town": [["Bern", "Chur", "Genf"][n % 3] for n in range(count)],
        "garden": random.rand(count) < 0.5,
        "country": ["CH"] * count,
        "price": 3000 * area + 20_000 * rooms + 1000 * random.randn(count),
        "class": [["cheap", "dear"][n % 2] for n in range(count)],
        "stars": random.randint(3, 6, count),
    }


def save(file: Path, table: Mapping[str, Any]) -> Path:
    arrow_table = pa.table(dict(table))
    if file.suffix == ".parquet":
        pq.write_table(arrow_table, file)
    else:
        mark = {".csv": ",", ".tsv": "\t"}[file.suffix]
        options = pa_csv.WriteOptions(delimiter=mark, quoting_style="needed")
        pa_csv.write_csv(arrow_table, file, options)
    return file


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_a_plain_table_of_a_real_target(tmp_path: Path, suffix: str) -> None:
    table = houses()
    file = save(tmp_path / f"houses.{suffix}", table)
    with pytest.warns(EvigradWarning, match="same in all rows: country"):
        data = load(str(file), target="price")
    assert (data.name, data.likelihood, data.num_outputs) == ("houses", "gaussian", 1)
    # area, rooms, three towns, garden, two classes, stars
    assert data.input_shape == (9,)
    assert (len(data.train[0]), len(data.test[0])) == (40, 10)
    torch.testing.assert_close(data.train[0].mean(0), torch.zeros(9), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.train[1].std(0, correction=0), torch.ones(1))
    assert data.target_mean is not None and data.target_std is not None
    both = torch.cat([data.train[1], data.test[1]])
    scaling = Scaling(data.target_mean, data.target_std)
    with pytest.raises(InputError, match="pass only the means"):
        scaling.undo(torch.zeros(3, 2))  # means and log variances
    prices = scaling.undo(both).squeeze(1).sort().values.numpy()
    np.testing.assert_allclose(prices, np.sort(table["price"]), rtol=1e-5)
    towns = (data.test[0] * data.std + data.mean)[:, 2:5].round(decimals=4)
    assert set(towns.flatten().tolist()) == {0.0, 1.0} and (towns.sum(1) == 1).all()


def test_a_scaling_takes_arrays():
    values = np.random.default_rng(0).normal(3.0, 2.0, (50, 2))
    scaling = Scaling.of(values)
    torch.testing.assert_close(scaling(values), Scaling.of(torch.tensor(values))(values))
    torch.testing.assert_close(scaling(values).std(0, correction=0), torch.ones(2).double())


@pytest.mark.filterwarnings("ignore:.*country:evigrad.errors.EvigradWarning")
def test_what_a_target_is(tmp_path: Path) -> None:
    file = str(save(tmp_path / "houses.csv", houses()))
    data = load(file, target="class")
    assert (data.likelihood, data.class_names) == ("categorical", ("cheap", "dear"))
    assert data.test[1].bincount().tolist() == [5, 5]  # stratified
    stars = load(file, target="stars")
    assert (stars.likelihood, stars.class_names) == ("categorical", ("3", "4", "5"))
    assert load(file, target="stars", likelihood="gaussian").num_outputs == 1
    two = load(file, target="price", likelihood="heteroscedastic")
    real = load(file, target="price", likelihood="gaussian")
    assert (two.num_outputs, two.is_classification) == (2, False)
    assert torch.equal(two.train[1], real.train[1])
    assert two.describe().endswith("1 real target")
    counts = load(file, target="stars", likelihood="poisson")
    assert (counts.num_outputs, counts.is_classification, counts.target_std) == (1, False, None)
    assert counts.describe().endswith("1 count")
    assert sorted({*counts.train[1].flatten().tolist()}) == [3.0, 4.0, 5.0]
    with pytest.raises(InputError, match="'price' holds values that are not counts"):
        load(file, target="price", likelihood="poisson")
    assert load(file, target="garden").class_names == ("False", "True")
    for name, words in (
        ("town", "'town' holds texts instead of numbers"),
        ("prize", "Did you mean 'price'"),
    ):
        with pytest.raises(EvigradError, match=words):
            load(file, target=name, likelihood="gaussian")
    with pytest.raises(ConfigurationError, match="--target NAME.*area, rooms, town"):
        load(file)
    with pytest.raises(ConfigurationError, match=r"no file .*Did you mean '.*houses.csv'"):
        load(str(tmp_path / "house.csv"), target="price")
    with pytest.raises(ConfigurationError, match="target is only for tables, got target=price"):
        load("digits", target="price")


@pytest.mark.filterwarnings("ignore:.*country:evigrad.errors.EvigradWarning")
def test_the_random_split_is_that_of_the_seed(tmp_path: Path) -> None:
    file = str(save(tmp_path / "houses.csv", houses()))
    first, same, other = (load(file, seed=seed, target="price") for seed in (0, 0, 1))
    assert torch.equal(first.test[0], same.test[0])
    assert not torch.equal(first.test[0], other.test[0])
    assert torch.equal(load(file, seed=5, split=1, target="price").test[0], other.test[0])


@pytest.mark.filterwarnings("ignore:.*country:evigrad.errors.EvigradWarning")
def test_columns_that_cannot_be_used(tmp_path: Path) -> None:
    for changes, words in [
        ({"area": [None] * 3 + [1.5] * 47}, "'area' lacks 3 of 50 values"),
        ({"garden": [None] + [True, False] * 25}, "'garden' lacks 1 of 51 values"),
        ({"area": [None] * 3 + [1.5] * 47}, "SimpleImputer.*--drop NAME"),
        (
            {"town": [f"street {n}" for n in range(150)]},
            "'town' must hold at most 100 categories, got 150 different texts",
        ),
        ({"price": [None] + [1.5] * 49}, "'price' lacks 1 of 50 values"),
        ({"area": [datetime.date(2020, 1, 1)] * 50}, "'area' holds dates instead of numbers"),
        ({"area": ["1.5", "?"] * 25}, r"'area' holds numbers, but also '\?': fill"),
        ({"area": ["1", "2", "-"] * 20}, "'area' holds numbers, but also '-': fill"),
        ({"area": ["1,5", "2"] * 25}, "'area' holds numbers with a decimal comma, such as '1,5'"),
        ({"price": ["1.5", "2.5", "?"] * 20}, r"'price' holds numbers, but also '\?'"),
    ]:
        for suffix in ["csv", "parquet"]:
            table = houses(len(next(iter(changes.values())))) | changes
            file = save(tmp_path / f"houses.{suffix}", table)
            with pytest.raises(InputError, match=words):
                load(str(file), target="price")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_all_problems_are_told_at_once(tmp_path: Path, suffix: str) -> None:
    changes = {
        "area": [None] * 3 + [1.5] * 147,
        "town": [f"street {n}" for n in range(150)],
        "built": [datetime.date(2020, 1, 1)] * 150,
        "price": ["1.5", "2.5", "?"] * 50,
    }
    file = save(tmp_path / f"houses.{suffix}", houses(150) | changes)
    words = r"has 4 problems.*'area' lacks 3.*'town' must hold.*'built' holds dates.*'price' holds"
    with pytest.raises(InputError, match=words):
        load(str(file), target="price", likelihood="gaussian")
    without = {"target": "rooms", "drop": ["area", "built"], "features": None}
    with pytest.raises(InputError, match="'town' must hold at most 100 categories, got 150"):
        load(str(file), **without)
    assert load(str(file), target="rooms", features="garden").input_shape == (1,)


@pytest.mark.filterwarnings("ignore:.*country:evigrad.errors.EvigradWarning")
def test_columns_that_are_chosen(tmp_path: Path) -> None:
    table = houses() | {"town": [None, "Bern", "Chur", "Genf", "Bern"] * 10}
    file = str(save(tmp_path / "houses.csv", table))

    def width(**columns: Any) -> int:
        return load(file, target="price", **columns).input_shape[0]

    numbers = len(np.unique(table["rooms"]))
    assert width() == 4 + 2 + 4  # a missing text is a category of its own
    assert width(features="area, town") == width(features=["area", "town"]) == 1 + 4
    assert width(drop="town,garden") == 5
    assert width(categorical="rooms") == 9 + numbers
    for columns, words in (
        ({"features": "aera,tonw"}, "'aera', which --features names.* 'area'.*'tonw'"),
        ({"drop": "price"}, "--drop must not name the target, got 'price'"),
        ({"features": "area", "drop": "area"}, "--features and --drop both name 'area'"),
        ({"drop": "rooms", "categorical": "rooms"}, "must name features, got 'rooms'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            width(**columns)
    with pytest.raises(ConfigurationError, match="drop is only for tables, got drop=area"):
        load("digits", drop="area")


def test_semicolons_and_files_that_are_no_tables(tmp_path: Path) -> None:
    file = tmp_path / "wine.csv"
    file.write_text(
        "acid;alcohol;quality\n" + "".join(f"{n};{n % 4}.5;{n % 3}\n" for n in range(9))
    )
    assert load(str(file), target="quality").input_shape == (2,)
    lines = "a,Größe,town\n" + "1,2,Zürich\n3,4,Genève\n" * 5
    for content, words in (
        (b"", ""),
        (b"a,b\n1\n2,3,4\n", ""),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"a,a\n1,2\n3,4\n", "got two named 'a'"),
        (b"a,b\n1,2\n", "must have at least two rows, got 1"),
        (lines.encode("latin-1"), "first line is not UTF-8. Save the file as UTF-8"),
        (lines.replace("öß", "os").encode("latin-1"), r"'town' is not UTF-8 \(it may be Latin-1\)"),
        (lines.encode("utf-16"), "first line is not UTF-8"),
        (lines.encode("utf-16-le"), "first line is not UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=rf"wine\.csv.*{words}"):
            load(str(file), target="a")
    file.write_text("\ufeff" + lines, encoding="utf-8")
    assert load(str(file), target="a").input_shape == (3,)


def test_damaged_pages(tmp_path: Path) -> None:
    file = save(tmp_path / "houses.parquet", houses(2000))
    content, random = file.read_bytes(), np.random.RandomState(0)
    refused = 0
    for place in random.randint(0, len(content), 60):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(str(file), target="price")
        except EvigradError:
            refused += 1
    assert refused


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
