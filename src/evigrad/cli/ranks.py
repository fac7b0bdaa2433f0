"""The processes of one run that ``torchrun`` starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from evigrad.cli.setup import device_name
from evigrad.distributed import Group, Ranks
from evigrad.errors import ConfigurationError

# A rank without an answer for this long counts as lost. A killed rank is noticed at once. This time
# is for machines that hang, and is longer than ranks wait for a checkpoint on a slow disk.
_PATIENCE = timedelta(minutes=10)


@contextmanager
def started_ranks(device: str) -> Iterator[Group | None]:
    """Yield the process group of the ranks that a launcher started, or None without a launcher."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield None
        return
    on_gpu = device_name(device).startswith("cuda")
    if on_gpu:
        # Each rank uses its own GPU.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"Could not connect the {os.environ['WORLD_SIZE']} processes of this command ({error})."
            " WORLD_SIZE sets their number. Start them with torchrun."
        ) from error
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def described_ranks(group: Group | None) -> str:
    """Test the connection between the processes. Return their number and backend as text."""
    if group is None:
        works = "is available" if distributed.is_available() else "is missing in this PyTorch"
        return f"One process (torch.distributed, for several processes, {works})"
    ranks = Ranks(group)
    ranks.agree()
    return f"Processes: {ranks.count}, connected by {distributed.get_backend()}"
