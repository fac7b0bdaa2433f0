"""Well-known image sets from the Hugging Face Hub, if its library `datasets` is installed."""

import socket
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from evigrad.data.images import Images, table_images
from evigrad.errors import ConfigurationError

# An error of the library may hold pages of advice.
_LONGEST_REASON = 300


class HubSet(NamedTuple):
    """A data set's repository on the hub, and the name of its test split."""

    repository: str
    test: str = "test"


HUB = {
    "mnist": HubSet("ylecun/mnist"),
    "fashion_mnist": HubSet("zalando-datasets/fashion_mnist"),
    "cifar10": HubSet("uoft-cs/cifar10"),
    "cifar100": HubSet("uoft-cs/cifar100"),
    # The labels of the official test split were never published, so all results use this one.
    "tiny_imagenet": HubSet("zh-plus/tiny-imagenet", test="valid"),
}


def hub_is_installed() -> bool:
    """Return whether the library ``datasets`` is installed. A folder of this name is ignored."""
    try:
        spec = find_spec("datasets")
    except ValueError:  # imported, but not from a file
        return True
    return spec is not None and spec.origin is not None


def hub_images(name: str, elsewhere: str) -> tuple[Images, Images]:
    """Return the training and test part of a `HUB` set.

    ``elsewhere`` is part of the errors. It says where to put files of the data set instead.

    Raises:
        ConfigurationError: If the library ``datasets`` is not installed, or the download failed.
    """
    place = HUB[name]
    if not hub_is_installed():
        raise ConfigurationError(
            f"The data set '{name}' was not found. {elsewhere} To download it from the Hugging Face"
            f" hub ({place.repository}) instead, first run: pip install 'evigrad[hub]'."
        )
    try:
        splits = _download(place.repository)
        train, test = splits["train"], splits[place.test]
    # The library's errors have no common base: its own, those of several HTTP clients, of Arrow and
    # of the file system. None of them says what to do here.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
        raise ConfigurationError(
            f"The data set '{name}' was not found, and the download of {place.repository} from the"
            f" Hugging Face Hub failed ({reason}). {elsewhere}"
        ) from error
    where = place.repository
    return _images(f"{where}, train", train), _images(f"{where}, {place.test}", test)


def _images(where: str, split: Any) -> Images:
    names = {column: getattr(split.features[column], "names", None) for column in split.features}
    # In this format the library returns what it stores: encoded images and plain labels.
    return table_images(where, split.with_format("arrow")[:], names)


def _download(repository: str) -> Any:
    """Return the splits of a repository, from the library's cache if possible."""
    library: Any = import_module("datasets")
    was_offline = library.config.HF_HUB_OFFLINE
    if not was_offline:
        library.config.HF_HUB_OFFLINE = not _network_may_exist(library.config.HF_ENDPOINT)
    try:
        return library.load_dataset(repository)
    finally:
        library.config.HF_HUB_OFFLINE = was_offline


def _network_may_exist(endpoint: str) -> bool:
    """Return False if the hub's name has no address, and no proxy may know one."""
    # Without this check the library tries for half a minute before it reads its cache.
    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, None)
    except OSError:
        return False
    return True
