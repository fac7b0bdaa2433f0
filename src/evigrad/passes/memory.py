"""Read the free memory, choose sizes of micro-batches, and reject blocks that are too large."""

import ctypes
import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from evigrad.core.curvature import Curvature
from evigrad.errors import EvigradWarning, MemoryBudgetError, is_out_of_memory

T = TypeVar("T")

# Part of the free memory to use. The rest is for fragmentation and for other processes.
FREE_SHARE = 0.7
# Memory of a pass relative to the activations, gradients and rows in it. Copies and the graphs of
# second derivatives took 1 to 3 times as much in multilayer, convolutional and attention networks.
PEAK_FACTOR = 3.0
# An automatic pass on a CPU takes at most this, because larger passes are not faster. For a small
# network with 1,000 classes, KFAC took 8.5 s of CPU time with 8 examples (0.13 GB), 8.0 s with 64
# (1.1 GB) and 12 s with one. With ten classes, 80 images (0.08 GB) were as fast as 400.
CPU_PASS_BYTES = 2**29
GIB = 2**30
# Smaller needs are not compared with the free memory, because reading it takes longer than a small
# block.
SMALL_BYTES = 2**24
MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int | None:
    """Return the number of bytes that can still be allocated, or None if it is unknown.

    On the CPU, memory that the allocator keeps is first returned to the system, because this memory
    may be fragmented. The memory limit of a container is unknown.
    """
    if device.type == "cpu":
        give_back()
    return _free_bytes(device)


def check_memory(
    curvature: Curvature[Any],
    num_rows: int,
    device: torch.device,
    curvature_bytes: int,
    pass_bytes: int = 0,
    hint: str = "",
) -> None:
    """Raise an error if a curvature is predicted to need more memory than is free.

    Args:
        curvature: The curvature.
        num_rows: Number of rows of the block.
        device: Device of the weights.
        curvature_bytes: The ``total`` of the curvature's cost.
        pass_bytes: The memory for the rows of one pass, if rows are not stored.
        hint: End of the message.

    Raises:
        MemoryBudgetError: If memory is too small. The message states the needed and the free
            memory, and suggests a cheaper choice.
    """
    needed = curvature_bytes + pass_bytes
    if needed <= SMALL_BYTES:
        return
    free = _free_bytes(device)
    if free is not None and needed > free:
        free = available_bytes(device)
    if free is None or needed <= free:
        return
    cheaper = curvature.cheaper if curvature_bytes > pass_bytes else "a smaller micro_batch"
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


@dataclass
class MicroBatches:
    """Sizes of micro-batches, by kind of pass and size of an example.

    Attributes:
        asked: Number of examples per pass, None for all examples in one pass, or ``"auto"``.
        budget: Bytes for a pass whose size is automatic, or None.
        chosen: Sizes so far, for passes whose size is automatic or that ran out of memory.
        example_bytes: Bytes of an example in any pass, or None to predict them.
    """

    asked: int | str | None
    budget: int | None = None
    chosen: dict[str, int] = field(default_factory=dict)
    example_bytes: int | None = None

    def limit(self, example_bytes: float, device: torch.device) -> int | None:
        """Return the most examples in an automatic pass, or None if memory decides.

        ``example_bytes`` are the gradients and rows of an example. Without a budget, passes on an
        accelerator start with all examples, and are halved when memory runs out. A CPU's allocator
        rarely fails, and the system then ends the process, so passes on a CPU have a limit.
        """
        budget = self.budget
        if budget is None:
            if device.type != "cpu":
                return None
            free = available_bytes(device)
            budget = min(CPU_PASS_BYTES, CPU_PASS_BYTES if free is None else FREE_SHARE * free)
        return max(1, int(budget / (PEAK_FACTOR * (self.example_bytes or example_bytes))))

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
        if run_if_it_fits(partial(work, indices)):
            start += len(indices)
        else:
            size = halved(len(indices))


def run_if_it_fits(work: Callable[[], T]) -> list[T]:
    """Return a list with the result of running ``work``, or an empty list without enough memory.

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
