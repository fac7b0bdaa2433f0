"""Packages that an extra installs, and files that they read, with errors that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from evigrad.errors import EvigradError, InputError


def require(module: str, purpose: str, extra: str = "data") -> Any:
    """Import a module that an extra of evigrad installs.

    Args:
        module: Dotted name of the module.
        purpose: What needs it, as the subject of the error's sentence.
        extra: The extra's name.

    Returns:
        The module.

    Raises:
        EvigradError: If it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise EvigradError(
            f"{purpose} needs the package '{package}', which is not installed: "
            f"pip install 'evigrad[{extra}]'"
        ) from error


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
        return parquet.read_table(file, page_checksum_verification=True, partitioning=None)
