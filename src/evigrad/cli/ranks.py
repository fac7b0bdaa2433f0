"""The processes that ``torchrun`` starts: one run of them all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from evigrad.cli.setup import device_name
from evigrad.distributed import Group, Ranks
from evigrad.errors import ConfigurationError

# After so long without an answer a rank counts as lost. One that was killed is missed at once; this
# is for machines that hang, and longer than ranks wait for a checkpoint on a slow disk.
_PATIENCE = timedelta(minutes=10)


@contextmanager
def started_ranks(device: str) -> Iterator[Group | None]:
    """The process group of the ranks that a launcher started; None for one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield None
        return
    on_gpu = device_name(device).startswith("cuda")
    if on_gpu:
        # Each rank takes a GPU of its own.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"The processes that WORLD_SIZE={os.environ['WORLD_SIZE']} announces could not be"
            f" connected ({error}). Start them by torchrun."
        ) from error
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def described_ranks(group: Group | None) -> str:
    """How many processes there are and how they are connected, which is tried."""
    if group is None:
        works = "works" if distributed.is_available() else "is missing in this PyTorch"
        return f"1 process; torch.distributed, for several, {works}"
    ranks = Ranks(group)
    ranks.agree()
    return f"{ranks.count} processes, connected by {distributed.get_backend()}"
