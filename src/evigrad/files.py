"""Files that a crash does not leave incomplete, and folders with a single writer."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from evigrad.errors import ConfigurationError

# Suffix of a file until it is whole. A file that a crash leaves behind does no harm.
PARTIAL = ".partial"
# Bytes between a file's content and its digest.
_SEAL = b"\nevigrad blake2b "
_DIGEST_BYTES = 32
_PART_BYTES = 2**20  # read at once


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a ConfigurationError that names the file and the reason."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write {path}: {error.strerror or error}. Free some space, or use another"
            " folder. Existing files were not changed."
        ) from error


@contextmanager
def replacing(path: Path, before: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a file for reading and writing that replaces an old file only when it is complete.

    The old file is replaced at the end, or kept if an exception is raised. The new file is
    synchronized to the disk before it is renamed, so it survives a power failure. If the old file's
    digest shows that it is intact, it is first renamed to ``before``, if given.

    Yields:
        The open file.
    """
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        try:
            with partial.open("w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if before is not None and path.exists() and is_intact(path):
                os.replace(path, before)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):  # such as on a read-only disk
                partial.unlink(missing_ok=True)
            raise
    _sync_names(path.parent)


def seal(file: IO[bytes]) -> None:
    """Append a digest, by which ``is_intact`` detects changes. ``torch.load`` ignores it."""
    size = file.seek(0, os.SEEK_END)
    digest = _digest(file, size)
    file.seek(size)
    file.write(_SEAL + digest)


def is_intact(path: Path) -> bool | None:
    """Return whether content and digest agree, or None if the file has no digest."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - len(_SEAL) - _DIGEST_BYTES
        file.seek(max(size, 0))
        end = file.read()
        return end == _SEAL + _digest(file, size) if end.startswith(_SEAL) else None


def _digest(file: IO[bytes], size: int) -> bytes:
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    file.seek(0)
    while part := file.read(min(size, _PART_BYTES)):
        hasher.update(part)
        size -= len(part)
    return hasher.digest()


def _sync_names(folder: Path) -> None:
    """Write a folder's directory entries to the disk, if the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def sole_writer(folder: Path, wait: bool = False) -> Iterator[None]:
    """Keep other processes, and other runs in this process, from writing into a folder.

    The operating system's lock on the folder leaves no file and ends with the process. If the file
    system has no locks, nothing is locked. If ``wait`` is True, the call waits until the folder is
    unlocked.

    Raises:
        ConfigurationError: If the folder is locked and ``wait`` is False.
    """
    with ExitStack() as stack:
        try:
            import fcntl

            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ConfigurationError(
                f"Another process is writing into {folder}. Wait until it has finished, or stop it"
                " first."
            ) from None
        except (ImportError, OSError):  # not a POSIX system, or no locks
            pass
        yield
