"""Well-known image sets from the Hugging Face hub, by the library `datasets` if it is installed."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np

from evigrad.data.dataset import DataSet
from evigrad.data.image_table import (
    ImageTable,
    decode,
    find_columns,
    integer_labels,
    load_tables,
)
from evigrad.errors import ConfigurationError

# Rows whose encoded images are Python objects at one time, as these are copies.
_ROWS = 1000
# An error of the library may hold pages of advice.
_LONGEST_REASON = 300


@dataclass(frozen=True)
class HubSet:
    """A data set's repository on the hub, and the name of its test split."""

    repository: str
    test: str = "test"


HUB = {
    "mnist": HubSet("ylecun/mnist"),
    "fashion_mnist": HubSet("zalando-datasets/fashion_mnist"),
    "cifar10": HubSet("uoft-cs/cifar10"),
    "cifar100": HubSet("uoft-cs/cifar100"),
    # The labels of the official test split were never published: all results use this one.
    "tiny_imagenet": HubSet("zh-plus/tiny-imagenet", test="valid"),
}


def hub_is_installed() -> bool:
    """Whether the library ``datasets`` is there; False for a mere folder of that name."""
    try:
        spec = find_spec("datasets")
    except ValueError:  # imported, but not from a file
        return True
    return spec is not None and spec.origin is not None


def load_from_hub(
    name: str,
    elsewhere: str,
    subset: int | None,
    seed: int,
    variant: str | None = None,
) -> DataSet:
    """Load a data set of `HUB`; the library keeps it in its own cache after the first download.

    Args:
        name: The name, without the variant's.
        elsewhere: For the error: how else to get the data set.
        subset: Number of train data to draw; None takes all.
        seed: Seed of that draw.
        variant: One of `evigrad.data.variants.VARIANTS`; None leaves the images as they are.

    Returns:
        The data set.

    Raises:
        ConfigurationError: If the library is not installed, there is no network and nothing in the
            library's cache, or the hub does not give the data set.
        InputError: If it is no image set.
    """
    place = HUB[name]
    if not hub_is_installed():
        raise ConfigurationError(
            f"There is no data set '{name}' here. {elsewhere} Or, where there is a network: pip"
            f" install 'evigrad[hub]', and it comes from the Hugging Face hub ({place.repository})."
        )
    try:
        splits = _download(place.repository)
        train, test = splits["train"], splits[place.test]
    # The library's errors have no base in common: its own, those of several HTTP clients, of Arrow
    # and of the file system. None of them says what to do here.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
        raise ConfigurationError(
            f"There is no data set '{name}' here, and the Hugging Face hub did not give"
            f" {place.repository} ({reason}). {elsewhere}"
        ) from error
    return load_tables(
        name,
        _table(f"{place.repository}, train", train),
        _table(f"{place.repository}, {place.test}", test),
        subset,
        seed,
        variant,
    )


def _download(repository: str) -> Any:
    """The splits of a repository, from the library's cache if they are there."""
    library: Any = import_module("datasets")
    if library.config.HF_HUB_OFFLINE or _network_may_exist(library.config.HF_ENDPOINT):
        return library.load_dataset(repository)
    with _offline(library):
        return library.load_dataset(repository)


def _network_may_exist(endpoint: str) -> bool:
    """False where the hub's name has no address, and there is no proxy that may know one."""
    # Without this the library tries for half a minute before it reads its cache.
    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, None)
    except OSError:
        return False
    return True


@contextmanager
def _offline(library: Any) -> Iterator[None]:
    """Have the library read nothing but its cache."""
    library.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        library.config.HF_HUB_OFFLINE = False


def _table(where: str, split: Any) -> ImageTable:
    """A split of the library as a table that decodes images on demand."""
    image, label = find_columns(where, split.column_names)
    # In this format the library returns what it stores: encoded images and plain labels.
    stored = split.with_format("arrow")
    labels = stored[:].column(label)
    return ImageTable(
        where=where,
        labels=integer_labels(where, label, labels),
        class_names=tuple(getattr(split.features[label], "names", None) or ()),
        read=lambda rows: _decode(where, stored[:].column(image), rows),
    )


def _decode(where: str, column: Any, rows: np.ndarray) -> list[np.ndarray]:
    images: list[np.ndarray] = []
    for start in range(0, len(rows), _ROWS):
        some = rows[start : start + _ROWS]
        cells = column.take(some).to_pylist()
        images += [
            decode(cell, f"{where}, row {row}") for row, cell in zip(some, cells, strict=True)
        ]
    return images
