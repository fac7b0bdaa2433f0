"""Files that no crash can break, and a folder that only one process writes into."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from evigrad.errors import ConfigurationError

# What a file is called until it is whole. One that a crash leaves behind is in nobody's way.
PARTIAL = ".partial"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file so that at every moment the old one or the new one is there, and is whole.

    Also after the machine itself went down: the new one is on the disk before it gets its name.

    Args:
        path: The file; replaced on the way out, left as it is after an exception.

    Yields:
        Where to write.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_names(path.parent)


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
