"""Freed memory is kept for the next pass, where the C library would give it back to the system.

A pass frees tensors of many megabytes and soon asks for as many again. By default glibc gives
each of them back to the system and takes fresh pages for the next one, which the system fills with
zeros, one interrupt for each: on a CPU that can take as long as the computation itself
(``docs/performance.md``). A GPU's memory is PyTorch's own to keep.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Variables of the environment that set glibc's allocator up: whoever gives one has decided.
ENVIRONMENT = (
    *("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"),
    "GLIBC_TUNABLES",
)

# Options of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# No allocation has pages of its own, and the heap is never cut.
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))
# Setting an option ends glibc's adjustment of the thresholds to what a process frees. These are the
# largest ones that it comes to.
_USUAL = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**26))

_lock = threading.RLock()
_depth = 0


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep all memory that is freed until the block ends.

    ``fit`` and the command line do so by themselves; for a training loop of your own it is worth a
    line around it. It changes no number. It does nothing where tensors do not come from glibc's
    allocator, or where that is set up by the environment (``ENVIRONMENT``), and in threads other
    than the main one only for tensors of up to 64 MB. Blocks may be nested, and lie beside each
    other in several threads: the last one to end gives all free memory back. The thresholds of
    mallopt(3) are fixed from then on, and those that the process had set itself are not restored.

    Yields:
        Nothing.
    """
    global _depth
    library = None if _is_set_up() else _glibc()
    if library is None:
        yield
        return
    with _lock:
        _depth += 1
    try:
        _set(library, _KEEPING)
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _set(library, _USUAL)
                give_back()


def give_back() -> None:
    """Give memory that is kept, and free, back to the system; kept is what is freed from now on."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _is_set_up() -> bool:
    """Whether the environment says how the allocator is to work."""
    given = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return any(name != "GLIBC_TUNABLES" or "malloc" in value for name, value in given.items())


@cache
def _glibc() -> Any:
    """The C library of this process where it is glibc, else None."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # no such thing on this system
        return None
    needed = ("gnu_get_libc_version", "mallopt", "malloc_trim")
    if not all(hasattr(library, name) for name in needed):
        return None
    library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def _set(library: Any, options: tuple[tuple[int, int], ...]) -> None:
    for option, value in options:
        library.mallopt(option, value)
