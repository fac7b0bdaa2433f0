"""Freed memory is kept for the next pass, where the C library would give it back to the system.

A pass frees tensors of many megabytes and soon asks for as many again. By default glibc gives
each of them back to the system and takes fresh pages for the next one, which the system fills with
zeros, one interrupt for every four kilobytes: on a CPU that can take several times as long as the
computation itself (``docs/performance.md``). A GPU's memory is PyTorch's own to keep.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
# Who sets one of these has decided on the matter.
OWN_SETTINGS = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)

# Options of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# No allocation has pages of its own, and the heap is cut only where more than 2 GiB at its end are
# free, the most that can be asked for.
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1))
# What glibc's own adjustment ends at in a process that frees large tensors; setting an option
# switches that adjustment off.
_USUAL = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**26))

_lock = threading.Lock()
_depth = 0


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep memory that is freed, up to some gigabytes, until the block ends.

    ``fit`` and the command line do so by themselves; for a training loop of your own it is worth a
    line around it. It concerns the whole process, changes no number, and does nothing where the C
    library is not glibc or its allocator is set up by the environment. Blocks may be nested.

    Yields:
        Nothing.
    """
    global _depth
    library = None if any(name in os.environ for name in OWN_SETTINGS) else _glibc()
    if library is None:
        yield
        return
    with _lock:
        _depth += 1
        if _depth == 1:
            _set(library, _KEEPING)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _set(library, _USUAL)
                library.malloc_trim(0)


def held_bytes() -> int:
    """Memory that the allocator has of the system and that nobody uses at the moment.

    Returns:
        Bytes; 0 where the C library does not tell.
    """
    library = _glibc()
    if library is None or not hasattr(library, "mallinfo2"):
        return 0
    info = library.mallinfo2()
    # Free pages may be the system's again: of what is resident, what is not in use is left.
    resident = _resident_bytes() - info.uordblks - info.hblkhd
    return max(0, min(info.fordblks, resident))


class _MallInfo(ctypes.Structure):
    """The result of mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def _glibc() -> Any:
    """The C library of this process where it is glibc, else None."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # no such thing on this system
        return None
    if not all(hasattr(library, name) for name in ("gnu_get_libc_version", "mallopt")):
        return None
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _MallInfo
    return library


def _set(library: Any, options: tuple[tuple[int, int], ...]) -> None:
    for option, value in options:
        library.mallopt(option, value)


def _resident_bytes() -> int:
    """Memory of the process that no file stands behind."""
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
