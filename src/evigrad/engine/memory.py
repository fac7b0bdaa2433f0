"""Refuse what would not fit into memory, before it is tried."""

import os
from pathlib import Path
from typing import Any

import torch

from evigrad.curvature.base import Structure
from evigrad.engine.allocator import give_back
from evigrad.errors import MemoryBudgetError

GIB = 2**30
MEMINFO = Path("/proc/meminfo")
# A container's memory limit and use (control group, version 2).
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that an allocation may still take; None where the system does not tell.

    On the CPU, memory that the allocator keeps is given back first: it may be fragmented.
    """
    if device.type == "cpu":
        give_back()
    return _free_bytes(device)


def check_memory(
    structure: Structure[Any],
    num_rows: int,
    device: torch.device,
    pass_bytes: int = 0,
    summarised: bool = False,
) -> None:
    """Refuse a structure that is predicted to need more memory than is free.

    Args:
        structure: The structure.
        num_rows: Rows of the block.
        device: Where the weights are.
        pass_bytes: The rows of one pass, where the structure does not keep them.
        summarised: Whether the block is a single, condensed pass (``Structure.summarise``).

    Raises:
        MemoryBudgetError: It names the need, what is free, and the cheaper choice.
    """
    predict = structure.summarised_bytes if summarised else structure.predicted_bytes
    kept = predict(num_rows)
    needed = kept + pass_bytes
    free = _free_bytes(device)
    if free is not None and needed > free:
        free = available_bytes(device)
    if free is None or needed <= free:
        return
    cheaper = structure.cheaper if kept > pass_bytes else "a smaller micro_batch"
    raise MemoryBudgetError(
        f"{structure.name!r} with {num_rows} rows needs about {needed / GIB:.3g} GiB"
        f" on {device}, where {free / GIB:.3g} GiB are free. Cheaper: {cheaper}."
    )


def _free_bytes(device: torch.device) -> int | None:
    """What is free now, without what the CPU's allocator keeps."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that PyTorch has reserved but not allocated is free too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [free for free in (_system_bytes(), _cgroup_bytes()) if free is not None]
    return min(known, default=None)


def _system_bytes() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # no Linux
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
