"""Keep freed memory for the next pass, instead of returning it to the operating system.

A pass frees tensors of many megabytes and soon allocates tensors of similar sizes. By default,
glibc returns this memory to the system and then requests new pages. Each new page causes a page
fault, and the system fills the page with zeros. On a CPU, this can take as long as the computation
(``docs/performance.md``). On a GPU, PyTorch keeps freed memory anyway.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Environment variables that configure glibc's allocator. If one is set, nothing is changed.
ENVIRONMENT = (
    *("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"),
    "GLIBC_TUNABLES",
)

# Options of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# No allocation gets its own pages, and the heap never shrinks.
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))
# Setting an option ends glibc's automatic adjustment of the thresholds. These are the largest
# values that the adjustment reaches.
_USUAL = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**26))

_lock = threading.RLock()
_depth = 0


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory for reuse until the ``with`` block ends. Results do not change.

    ``fit`` and the command line keep memory automatically. Call this function around a custom
    training loop. It has no effect if tensors do not come from glibc's allocator, or if environment
    variables such as ``GLIBC_TUNABLES`` configure the allocator. In threads other than the main
    thread, it works only for tensors of at most 64 MB. ``with`` blocks may be nested and run in
    several threads. When the last block ends, all free memory is returned to the system.
    Afterwards, the thresholds of mallopt(3) stay fixed at the largest values that glibc chooses
    automatically, even if the process had set other values.

    Yields:
        Nothing.

    Examples:
        >>> import torch
        >>> from evigrad import kept_memory
        >>> with kept_memory():
        ...     x = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> x.sum().item()
        8.0

    See also: docs/performance.md.
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
    """Give free memory back to the operating system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _is_set_up() -> bool:
    variables = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return any(name != "GLIBC_TUNABLES" or "malloc" in value for name, value in variables.items())


@cache
def _glibc() -> Any:
    """Return the C library of this process if it is glibc, or None."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # not available on this system
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
