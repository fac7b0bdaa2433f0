"""Keep freed memory for the next pass, which the C library would return to the system.

A pass frees tensors of many megabytes and soon asks for as many again. By default glibc returns
each to the system and takes fresh pages for the next one, which the system fills with zeros, one
interrupt for each: on a CPU that can take as long as the computation itself
(``docs/performance.md``). On a GPU, PyTorch does this by itself.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Environment variables that configure glibc's allocator; where one is set, nothing is changed.
ENVIRONMENT = (
    *("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"),
    "GLIBC_TUNABLES",
)

# Options of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# No allocation gets its own pages, and the heap never shrinks.
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))
# Setting an option ends glibc's own adjustment of the thresholds. These are the largest that the
# adjustment reaches.
_USUAL = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**26))

_lock = threading.RLock()
_depth = 0


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep all memory that is freed until the block ends; no result changes.

    ``fit`` and the command line do so by themselves; use it around a training loop of your own. It
    does nothing where tensors do not come from glibc's allocator or where the environment
    configures that (``ENVIRONMENT``); in threads other than the main one it works only for tensors
    of up to 64 MB. Blocks may be nested, and run in several threads at once: the last one to end
    returns all free memory. Afterwards the thresholds of mallopt(3) stay fixed; thresholds that the
    process had set itself are not restored.

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
    """Return memory that is free now to the system; what is freed later is kept again."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _is_set_up() -> bool:
    variables = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return any(name != "GLIBC_TUNABLES" or "malloc" in value for name, value in variables.items())


@cache
def _glibc() -> Any:
    """The C library of this process where it is glibc, else None."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # this system has none
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
