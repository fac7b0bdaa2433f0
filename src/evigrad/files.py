"""Writing files that a crash cannot leave incomplete, and locking folders for a single writer."""

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
            f"Cannot write {path}: {error.strerror or error}. Free some disk space or use another"
            " folder. Existing files were not changed."
        ) from error


@contextmanager
def replacing(path: Path, before: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a new file that replaces ``path`` only after it has been written completely.

    If an exception is raised, the old file at ``path`` is kept. The new file is flushed to the disk
    before it replaces the old file, so it survives a power failure. If ``before`` is given, an old
    file whose digest shows that it is intact is renamed to ``before``.

    Yields:
        The new file, open for reading and writing bytes.
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
    """Append a digest of the content for ``is_intact``. ``torch.load`` ignores digests."""
    size = file.seek(0, os.SEEK_END)
    digest = _digest(file, size)
    file.seek(size)
    file.write(_SEAL + digest)


def is_intact(path: Path) -> bool | None:
    """Return whether a file's content matches its digest, or None if there is no digest."""
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
    """Lock a folder against other processes and against other runs in this process.

    The lock creates no file, and the operating system releases it when the process ends. If the
    file system does not support locks, the folder is not locked. If ``wait`` is True, the call
    waits until the folder is unlocked.

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
                f"Another process or run is writing to {folder}. Wait until it has finished, or"
                " stop it."
            ) from None
        except (ImportError, OSError):  # not a POSIX system, or no locks
            pass
        yield
