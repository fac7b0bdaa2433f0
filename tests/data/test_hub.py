"""Well-known sets from the Hugging Face Hub, played by a module that has no network."""

import importlib
import socket
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from image_files import pixels, png, table, write

from evigrad.data import HUB, available, load
from evigrad.data.hub import hub_is_installed
from evigrad.errors import ConfigurationError, InputError

pa: Any = pytest.importorskip("pyarrow")
pytest.importorskip("PIL.Image")

NAMES = ("cat", "dog", "emu")
IMAGES = {
    "train": [png(image) for image in pixels(7, (4, 5, 3))],
    "test": [png(image) for image in pixels(3, (4, 5, 3), 1)],
}
LABELS = {"train": [0, 1, 2, 0, 1, 2, 0], "test": [2, 1, 0]}
# Columns of the images and labels, and others, as they are on the hub.
COLUMNS = {
    "mnist": ("image", "label"),
    "fashion_mnist": ("image", "label"),
    "cifar10": ("img", "label"),
    "cifar100": ("img", "fine_label", "coarse_label"),
    "tiny_imagenet": ("image", "label"),
}
ADDRESS = "https://hub.invalid"


class HubSplit:
    """What evigrad uses of a ``datasets.Dataset``."""

    def __init__(self, stored: Any, arrow: bool = False) -> None:
        self.stored = stored
        self.arrow = arrow
        self.column_names: list[str] = stored.column_names
        self.features = {name: SimpleNamespace() for name in stored.column_names}
        for label in ("label", "fine_label"):
            self.features[label] = SimpleNamespace(names=list(NAMES))

    def with_format(self, kind: str) -> "HubSplit":
        assert kind == "arrow"
        return HubSplit(self.stored, arrow=True)

    def __getitem__(self, key: slice) -> Any:
        assert self.arrow, "in any other format it decodes images"
        return self.stored[key]


class Hub(ModuleType):
    """What evigrad uses of the module ``datasets``."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.__spec__ = ModuleSpec("datasets", None, origin="datasets/__init__.py")
        self.config = SimpleNamespace(HF_HUB_OFFLINE=False, HF_ENDPOINT=ADDRESS)
        self.calls: list[tuple[str, bool]] = []
        self.repositories: dict[str, Any] = {}
        self.error: Exception | None = None

    def load_dataset(self, path: str) -> Any:
        self.calls.append((path, self.config.HF_HUB_OFFLINE))
        if self.error is not None:
            raise self.error
        return self.repositories[path]


def parts(name: str) -> dict[str, Any]:
    image, label, *others = COLUMNS[name]
    tables = {
        part: table(IMAGES[part], LABELS[part], NAMES, (image, label)) for part in ("train", "test")
    }
    for part, extended in tables.items():
        for other in others:
            extended = extended.append_column(other, pa.array([9] * extended.num_rows))
        tables[part] = pa.concat_tables([extended[:2], extended[2:]])  # in two chunks
    return tables


@pytest.fixture(autouse=True)
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No data folder, no proxy; a name server that knows the hub and notes who asked."""
    names: list[str] = []
    monkeypatch.delenv("EVIGRAD_DATA", raising=False)
    monkeypatch.setattr("evigrad.data.hub.getproxies", lambda: {})
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: names.append(host))
    return names


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    module = Hub()
    for name, place in HUB.items():
        tables = parts(name)
        splits = {"train": tables["train"], place.test: tables["test"]}
        module.repositories[place.repository] = {k: HubSplit(v) for k, v in splits.items()}
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def no_address(host: str, port: Any) -> None:
    raise socket.gaierror("Name or service not known")


@pytest.mark.each(1)
@pytest.mark.parametrize("name", HUB)
@pytest.mark.parametrize(("variant", "subset"), [("", None), (":rotated180", 4)])
def test_same_as_from_files(
    hub: Hub, tmp_path: Path, name: str, variant: str, subset: int | None
) -> None:
    for part in ("train", "test"):
        write(tmp_path / f"{name}_{part}.parquet", IMAGES[part], LABELS[part], NAMES)
    data = load(name + variant, subset=subset, seed=2)
    assert hub.calls == [(HUB[name].repository, False)]
    expected = load(name + variant, tmp_path, subset=subset, seed=2)
    assert len(hub.calls) == 1  # the data folder goes first
    assert data.name == expected.name == name + variant
    assert data.class_names == expected.class_names == NAMES
    for mine, theirs in zip(
        (*data.train, *data.test), (*expected.train, *expected.test), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_class_names_where_the_hub_has_none(hub: Hub) -> None:
    for split in hub.repositories["ylecun/mnist"].values():
        split.features["label"] = SimpleNamespace(dtype="int64")
    assert load("mnist").class_names == ("0", "1", "2")


def test_available(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uci").mkdir()
    for file in ("mnist_train", "mnist_test", "fish_train", "fish_test", "uci/crab"):
        (tmp_path / f"{file}.parquet").touch()
    assert available() == ["digits", "mnist5k", "autompg", *sorted(HUB)]
    assert available(tmp_path) == [
        "digits",
        "mnist5k",
        "autompg",
        *sorted([*HUB, "fish"]),
        "uci/crab",
    ]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert available() == ["digits", "mnist5k", "autompg"]


@pytest.mark.parametrize("folder", [True, False])
def test_without_the_library(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_up: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError) as error:
        load("cifar100:scaled", tmp_path if folder else None)
    says(error, f"The data folder is {tmp_path}" if folder else "--data-dir")
    says(error, "pip install 'evigrad[hub]'", "uoft-cs/cifar100")
    assert looked_up == []


def says(error: pytest.ExceptionInfo[ConfigurationError], *more: str) -> None:
    """Every such error says what to put where."""
    words = str(error.value)
    files = ("_train.parquet", "_test.parquet", "columns image, a struct of bytes and path, and")
    for word in ("was not found", *files, "label, integers", *more):
        assert word in words
    assert "EVIGRAD_DATA" in words or "The data folder is" in words


def test_a_folder_of_that_name_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "datasets").mkdir()
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not hub_is_installed()
    (tmp_path / "datasets" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert hub_is_installed()


class LibraryError(Exception):
    """Of no class that Python has."""


@pytest.mark.parametrize(
    "raised",
    [
        ConnectionError("Couldn't reach 'uoft-cs/cifar10' on the Hub\n(LocalEntryNotFoundError)"),
        FileNotFoundError("Dataset 'uoft-cs/cifar10' doesn't exist on the Hub"),
        LibraryError("pages of advice " * 1000),
        ValueError("BuilderConfig 'default' not found"),
    ],
)
def test_errors_of_the_library(hub: Hub, raised: Exception, tmp_path: Path) -> None:
    hub.error = raised
    with pytest.raises(ConfigurationError) as error:
        load("cifar10", tmp_path)
    reason = " ".join(str(raised).split())[:100]
    says(error, f"({type(raised).__name__}: {reason}", "cifar10_train.parquet")
    assert error.value.__cause__ is raised
    assert len(str(error.value)) < 1000


def test_split_that_the_hub_lacks(hub: Hub) -> None:
    del hub.repositories["zh-plus/tiny-imagenet"]["valid"]
    with pytest.raises(ConfigurationError) as error:
        load("tiny_imagenet")
    says(error, "zh-plus/tiny-imagenet", "KeyError: 'valid'", "tiny_imagenet_test.parquet")


def test_no_network_means_the_cache_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    assert len(load("mnist").train[0]) == 7
    hub.error = ConnectionError("Couldn't reach 'ylecun/mnist' on the Hub (OfflineModeIsEnabled)")
    with pytest.raises(ConfigurationError) as error:
        load("mnist")
    says(error, "OfflineModeIsEnabled", "--data-dir")
    # The library was told for these calls only.
    assert hub.calls == [("ylecun/mnist", True)] * 2
    assert not hub.config.HF_HUB_OFFLINE


def test_when_the_name_server_is_asked(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, looked_up: list[str]
) -> None:
    load("mnist")
    assert looked_up == ["hub.invalid"]
    # A proxy may know more names; and who wants to be offline is.
    monkeypatch.setattr("evigrad.data.hub.getproxies", lambda: {"https": "http://proxy"})
    load("mnist")
    monkeypatch.setattr("evigrad.data.hub.getproxies", lambda: {})
    hub.config.HF_HUB_OFFLINE = True
    load("mnist")
    assert looked_up == ["hub.invalid"]
    assert [offline for _, offline in hub.calls] == [False, False, True]
    assert hub.config.HF_HUB_OFFLINE


@pytest.mark.parametrize("name", ["digits", "digits:scaled", "fish", "half"])
def test_other_names_never_reach_the_hub(hub: Hub, tmp_path: Path, name: str) -> None:
    (tmp_path / "half_train.parquet").touch()
    if name.startswith("digits"):
        load(name, tmp_path)
    else:
        with pytest.raises(ConfigurationError):
            load(name, tmp_path)
    assert hub.calls == []


def test_half_a_set_in_the_folder_is_an_error(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "mnist_train.parquet").touch()
    with pytest.raises(ConfigurationError, match=r"no mnist_test\.parquet"):
        load("mnist", tmp_path)
    assert hub.calls == []


def test_near_misses_of_hub_names() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'cifar100'"):
        load("cifar-100")


def with_columns(names: list[str]) -> Callable[[Any], Any]:
    return lambda stored: stored.rename_columns(names)


def with_labels(values: list[Any]) -> Callable[[Any], Any]:
    return lambda stored: stored.set_column(1, "label", pa.array(values))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_columns(["picture", "label"]), r"no column 'image', got picture, label"),
        (with_columns(["image", "kind"]), r"no column 'label', got image, kind"),
        (with_labels([0, 1, None]), "rows without a label"),
        (with_labels(["a", "b", "c"]), "column 'label' must contain integers, got string"),
        (with_labels([0, -1, 1]), "got -1 to"),
        (lambda stored: table([b"junk"] * 3, [0, 1, 2]), "row 0: the image cannot be decoded"),
    ],
)
def test_unusable_repositories(hub: Hub, change: Callable[[Any], Any], words: str) -> None:
    splits = hub.repositories["ylecun/mnist"]
    splits["test"] = HubSplit(change(splits["test"].stored))
    with pytest.raises(InputError, match=f"^ylecun/mnist, test.*{words}"):
        load("mnist")
