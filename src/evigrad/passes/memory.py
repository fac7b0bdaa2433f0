"""Measure free memory, choose sizes of micro-batches, and reject blocks that are too large."""

import ctypes
import gc
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evigrad.core.curvature import Curvature
from evigrad.errors import EvigradWarning, MemoryBudgetError, is_out_of_memory

T = TypeVar("T")

# Part of the free memory to use. The rest is for fragmentation and for other processes.
FREE_SHARE = 0.7
# Memory of a pass relative to the most that its tensors hold. Kernels need workspace, and the free
# memory of allocators is fragmented.
PEAK_FACTOR = 2.0
# An automatic pass on a CPU takes at most this, because larger passes are not faster. For a small
# network with 1,000 classes, KFAC took 8.5 s of CPU time with 8 examples (0.13 GB), 8.0 s with 64
# (1.1 GB) and 12 s with one. With ten classes, 80 images (0.08 GB) were as fast as 400.
CPU_PASS_BYTES = 2**29
GIB = 2**30
# Smaller needs are not compared with the free memory, because reading it takes longer than a small
# block.
SMALL_BYTES = 2**24
MEMINFO = Path("/proc/meminfo")
# The peak is counted again after this growth. Each count visits all storages, and a pass over
# thousands of rows has thousands.
_GROWTH = 1.01
# A container's memory limit and use (control group, version 2).
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def available_bytes(device: torch.device) -> int | None:
    """Return the number of bytes that can still be allocated, or None if it is unknown.

    On the CPU, memory that the allocator keeps is first returned to the system, because this memory
    may be fragmented.
    """
    if device.type == "cpu":
        give_back()
    return _free_bytes(device)


def check_memory(
    curvature: Curvature[Any],
    num_rows: int,
    device: torch.device,
    pass_bytes: int = 0,
    condensed: bool = False,
    hint: str = "",
) -> None:
    """Raise an error if a curvature is predicted to need more memory than is free.

    ``pass_bytes`` is the memory for the rows of one pass, if rows are not stored. ``condensed``
    means that the block is a single micro-batch that is condensed immediately. The message ends
    with ``hint``.

    Raises:
        MemoryBudgetError: If memory is too small. The message states the needed and the free
            memory, and suggests a cheaper choice.
    """
    predict = curvature.condensed_bytes if condensed else curvature.predicted_bytes
    kept = predict(num_rows)
    needed = kept + pass_bytes
    if needed <= SMALL_BYTES:
        return
    free = _free_bytes(device)
    if free is not None and needed > free:
        free = available_bytes(device)
    if free is None or needed <= free:
        return
    cheaper = curvature.cheaper if kept > pass_bytes else "a smaller micro_batch"
    raise MemoryBudgetError(
        f"{curvature.name!r} with {num_rows} rows needs about {needed / GIB:.3g} GiB of memory"
        f" on {device}, but only {free / GIB:.3g} GiB is free.",
        f"Use {cheaper}. {hint}".rstrip(),
    )


def give_back() -> None:
    """Return free memory of the CPU allocator to the system, if the C library can do this."""
    try:
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    except (OSError, TypeError, AttributeError):  # not glibc
        pass


def _free_bytes(device: torch.device) -> int | None:
    """Return the bytes free now, except what the CPU allocator keeps, or None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that PyTorch has reserved but not allocated is free too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    readings = [free for free in (_system_bytes(), _cgroup_bytes()) if free is not None]
    return min(readings, default=None)


def _system_bytes() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _cgroup_bytes() -> int | None:
    try:
        limit = CGROUP_LIMIT.read_text().strip()
        return None if limit == "max" else int(limit) - int(CGROUP_USED.read_text())
    except (OSError, ValueError):
        return None


class PeakBytes(TorchDispatchMode):
    """Measure the peak memory of tensors created in this context, counting each storage once.

    The context intercepts every operation. It therefore works on every device and inside function
    transforms.

    Attributes:
        most: The peak so far, in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._sum = 0
        self._made: dict[StorageWeakRef, int] = {}
        self._given: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count the storages that it creates."""
        kwargs = kwargs or {}
        self._given |= {s for s in _storages((args, kwargs)) if s not in self._made}
        result = func(*args, **kwargs)
        for storage, size in _storages(result).items():
            if storage not in self._given:
                self._sum += size - self._made.get(storage, 0)
                self._made[storage] = size
        if self._sum > _GROWTH * self.most:  # an upper limit, because some may have been freed
            self._made = {s: size for s, size in self._made.items() if not s.expired()}
            self._sum = sum(self._made.values())
            self.most = max(self.most, self._sum)
        return result


def _storages(values: Any) -> dict[StorageWeakRef, int]:
    """Return the storages of all tensors in nested containers, with their bytes."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    storages = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


@dataclass
class MicroBatches:
    """Sizes of micro-batches, by kind of pass and size of an example.

    Attributes:
        asked: Number of examples per pass, None for all examples in one pass, or ``"auto"``.
        budget: Bytes for a pass, or None for a share of the free memory.
        chosen: Sizes so far, for passes whose size is automatic or that ran out of memory.
    """

    asked: int | str | None
    budget: int | None = None
    chosen: dict[str, int] = field(default_factory=dict)

    def size(
        self,
        kind: str,
        total: int,
        per_datum: Callable[[], float],
        free: int | None,
        limit: int | None = None,
    ) -> int:
        """Return the number of examples for a pass with an automatic size, from 1 to ``total``.

        ``per_datum`` measures the bytes of an example in this kind of pass. ``free`` is the free
        memory in bytes, or None if it is unknown. Without a budget, a pass takes at most ``limit``
        bytes.
        """
        budget = self.budget
        if budget is None:
            shares = [int(FREE_SHARE * free)] if free is not None else []
            budget = min(shares + ([limit] if limit is not None else []), default=None)
        if kind not in self.chosen and budget is not None:
            needed = max(1.0, PEAK_FACTOR * per_datum())
            self.chosen[kind] = max(1, int(budget / needed))
        return min(total, self.chosen.get(kind, total))

    def halve(self, kind: str, failed: int) -> None:
        """Halve the size of later passes, because a pass over ``failed`` examples did not fit.

        Warn unless the size is automatic.

        Raises:
            MemoryBudgetError: If a single example does not fit.
        """
        self.chosen[kind] = halved(failed)
        if self.asked != "auto":
            warnings.warn(
                f"The {kind.partition(' of ')[0]} over {failed} examples did not fit into memory."
                f" Later passes take {failed // 2} examples, which does not change results. To"
                f" avoid this warning, set micro_batch={failed // 2} or 'auto'.",
                EvigradWarning,
                stacklevel=2,
            )


def halved(size: int) -> int:
    """Return half the number of examples of a pass that did not fit into memory.

    Raises:
        MemoryBudgetError: If the pass had a single example.
    """
    if size == 1:
        raise MemoryBudgetError(
            "A pass over a single example does not fit into memory. Use a smaller network, fewer"
            " augmentation samples, or a machine with more memory."
        )
    return size // 2


def in_parts(part: slice, size: int, work: Callable[[Tensor], None]) -> None:
    """Do ``work`` on the positions of each batch of a part. Batches are halved to fit in memory.

    ``work`` must have no effect if it runs out of memory.

    Raises:
        MemoryBudgetError: If a single example does not fit.
    """
    start = part.start
    while start < part.stop:
        indices = torch.arange(start, min(start + size, part.stop), device="cpu")
        if fits(partial(work, indices)):
            start += len(indices)
        else:
            size = halved(len(indices))


def fits(work: Callable[[], T]) -> list[T]:
    """Return a list with the result of ``work``, or an empty list if memory is too small.

    ``work`` must be repeatable, and must have no side effects if it fails.
    """
    try:
        return [work()]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Outside the handler, whose traceback kept the tensors of the failed pass.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return []
