"""Files that no crash can break, and a folder that only one process writes into."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from evigrad.errors import ConfigurationError

# What a file is called until it is whole. One that a crash leaves behind is in nobody's way.
PARTIAL = ".partial"
# What stands between a file's content and the digest of it.
_SEAL = b"\nevigrad blake2b "
_DIGEST_BYTES = 32
_PART_BYTES = 2**20  # that are read at once


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file that could not be written, and the reason: the disk is full, or read-only.

    Args:
        path: The file.

    Raises:
        ConfigurationError: In the place of the system's own error.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror or error}. Make room for it, or name"
            " another folder; what is there already is left as it was."
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file so that at every moment the old one or the new one is there, and is whole.

    Also after the machine itself went down: the new one is on the disk before it gets its name.

    Args:
        path: The file; replaced on the way out, left as it is after an exception.

    Yields:
        Where to write, and to read what was written.
    """
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        try:
            with partial.open("w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):  # as on a read-only disk
                partial.unlink(missing_ok=True)
            raise
    _sync_names(path.parent)


def seal(file: IO[bytes]) -> None:
    """Append a digest of what was written, by which ``is_intact`` finds a single changed bit.

    Args:
        file: Open for reading too. Archives of ``torch.save`` may have something behind them.
    """
    size = file.seek(0, os.SEEK_END)
    digest = _digest(file, size)
    file.seek(size)
    file.write(_SEAL + digest)


def is_intact(path: Path) -> bool:
    """Whether a file holds what was written.

    Args:
        path: The file.

    Returns:
        False where its content and its digest differ; True too for one that was never sealed.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - len(_SEAL) - _DIGEST_BYTES
        file.seek(max(size, 0))
        end = file.read()
        return not end.startswith(_SEAL) or end == _SEAL + _digest(file, size)


def _digest(file: IO[bytes], size: int) -> bytes:
    """The digest of the first ``size`` bytes."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    file.seek(0)
    while part := file.read(min(size, _PART_BYTES)):
        found.update(part)
        size -= len(part)
    return found.digest()


def _sync_names(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system knows how."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other processes, and other runs of this one, from writing into a folder.

    The lock is the system's own and lies on the folder itself: it leaves no file, and is gone with
    the process however that ends. Where the file system has no locks nothing is locked.

    Args:
        folder: Which exists.

    Raises:
        ConfigurationError: If it is locked.
    """
    descriptor = _locked(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock until it is closed, or None where there are no locks."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # not a POSIX system
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigurationError(
            f"Another process is writing into {folder}: the run goes on there. Wait until it is"
            " done, or end it first."
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
