"""Communication between processes that evaluate the evidence together.

Each of the R processes is a *rank*. A single process does not communicate.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from evigrad.errors import ConfigurationError, RankError

if TYPE_CHECKING or distributed.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group = ProcessGroup | DeviceMesh
else:
    Group = Any

T = TypeVar("T")

# Position in the source of Gloo at the start of an error's text.
_PLACE = re.compile(r"^\[\S*:\d+\] ")
# Attribute of an error that other ranks know.
_TOLD = "_evigrad_told"
# Longest text of an error for other ranks, in bytes.
_TEXT = 2000


class Ranks:
    """The processes of a process group, or a single process.

    All ranks must call methods such as ``sum`` in the same order. Each call waits for the other
    ranks and gives the same result on all ranks, to the last bit.

    Args:
        group: Process group, such as ``torch.distributed.group.WORLD`` after
            ``init_process_group``, or a one-dimensional device mesh. Default: None, which means a
            single process.

    Attributes:
        rank: Index of this process, from 0.
        count: Number of processes R.
        sent: Number of bytes that this rank has sent, without message headers. A sum of n bytes
            counts as 2n(R − 1)/R bytes (the cost of a ring). A gathered tensor of n bytes counts as
            n(R − 1). On rank 0, copying n bytes to all ranks counts as n(R − 1).

    Raises:
        ConfigurationError: If ``group`` has the wrong type, does not contain this process, or is a
            mesh of several dimensions. Also if ``torch.distributed`` is not initialized.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.rank, self.count, self.sent = 0, 1, 0
        self._group, self._place = None, torch.device("cpu")
        if group is None:
            return
        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigurationError(
                "There is no process group yet. Call torch.distributed.init_process_group first."
            )
        mesh: Any = group
        if hasattr(mesh, "get_group"):
            if mesh.ndim != 1:
                raise ConfigurationError(
                    f"The device mesh must have one dimension, got {mesh.ndim}. Use the mesh over"
                    " the replicas, such as mesh['replicas']."
                )
            group = mesh.get_group()
        if not isinstance(group, distributed.ProcessGroup):
            raise ConfigurationError(
                "process_group must be a device mesh, or a process group that contains this"
                f" process, got {group!r}. Use torch.distributed.group.WORLD."
            )
        self._group = group
        self.rank, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        if distributed.get_backend(group) == "nccl":
            self._place = torch.device("cuda", torch.cuda.current_device())

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, the only rank that writes files."""
        return self.rank == 0

    def part(self, count: int, rank: int | None = None) -> slice:
        """Return the slice of ``count`` items for ``rank``. Default: the rank of this process."""
        first = self.rank if rank is None else rank
        start, stop = (-(-count * index // self.count) for index in (first, first + 1))
        return slice(start, stop)

    # ------------------------------------------------------------ tensors

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum of each tensor over the ranks, without a graph."""
        if self.count == 1:
            return list(tensors)
        sums = [tensor.detach() for tensor in tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in sums):
            chosen = [i for i, tensor in enumerate(sums) if tensor.dtype == dtype]
            flat = torch.cat([sums[i].reshape(-1).to(self._place) for i in chosen])
            with self._contact():
                distributed.all_reduce(flat, group=self._group)
            self.sent += 2 * flat.nbytes * (self.count - 1) // self.count
            for i, part in zip(chosen, flat.split([sums[i].numel() for i in chosen]), strict=True):
                sums[i] = part.reshape(sums[i].shape).to(sums[i].device)
        return sums

    def any(self, value: bool) -> bool:
        """Return whether a value is true on any rank, or raise RankError if another rank failed."""
        return value if self.count == 1 else any(self._exchange(b"", int(value)))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in order. Their lengths (dimension 0) may differ."""
        if self.count == 1:
            return [tensor]
        length = torch.tensor([len(tensor)], device=self._place)
        lengths = [int(n) for n in self._gathered(length)]
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:], device=self._place)
        padded[: len(tensor)] = tensor.detach()
        parts = self._gathered(padded)
        return [part[:size].to(tensor.device) for part, size in zip(parts, lengths, strict=True)]

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of rank 0 to all ranks, in place."""
        if self.count == 1:
            return
        for tensor in tensors:
            with torch.no_grad(), self._contact():
                sent = tensor.detach().to(self._place).contiguous()
                distributed.broadcast(sent, group=self._group, group_src=0)
                tensor.copy_(sent)
            self.sent += sent.nbytes * (self.count - 1) if self.is_first else 0

    def shared(self, value: T) -> T:
        """Return rank 0's ``value`` on all ranks. On other ranks, its tensors are on the CPU."""
        if self.count == 1:
            return value
        file = BytesIO()
        if self.is_first:
            torch.save(value, file)
        length = torch.tensor(file.tell(), device="cpu")
        self.share([length])
        content = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if self.is_first:
            content.copy_(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
        self.share([content])
        if self.is_first:
            return value
        return torch.load(BytesIO(content.numpy().tobytes()), "cpu", weights_only=True)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(tensor) for _ in range(self.count)]
        with self._contact():
            distributed.all_gather(tensors, tensor, group=self._group)
        self.sent += tensor.nbytes * (self.count - 1)
        return tensors

    # ------------------------------------------------------------ errors

    def agree(self) -> None:
        """Wait for the other ranks, and raise RankError if one of them failed."""
        with self.together():
            pass

    @contextmanager
    def together(self) -> Iterator[dict[str, object]]:
        """Raise an error on all ranks if one rank fails in this context.

        Thus no rank waits forever for a failed rank. The ranks may compute different things in the
        context, and contexts may be nested.

        Yields:
            An empty dictionary. Add values that must be equal on all ranks, by name.

        Raises:
            ConfigurationError: On all ranks, if added values differ. The message names them.
            RankError: If another rank raised an exception. The message contains the exception.
        """
        alike: dict[str, object] = {}
        if self.count == 1:
            yield alike
            return
        try:
            yield alike
        except Exception as error:
            if not self._is_known(error):
                vars(error)[_TOLD] = True
                self._exchange(f"{type(error).__name__}: {error}".encode()[:_TEXT], 0)
            raise
        digests = [_digest(value) for value in alike.values()]
        if len(set(self._exchange(b"", _digest(digests)))) == 1:
            return
        rank_digests = torch.stack(self.gather(torch.tensor(digests, device="cpu")))
        is_same = (rank_digests == rank_digests[0]).all(0)
        names = [name for name, same in zip(alike, is_same, strict=True) if not same]
        raise ConfigurationError(
            f"The {self.count} ranks differ in the {', '.join(names)}. All ranks must make the same"
            " calls with the same model, data and settings."
        )

    def _exchange(self, text: bytes, number: int) -> list[int]:
        """Return the numbers of all ranks if none failed. ``text`` is the error of this rank."""
        seen = torch.tensor([len(text), number], device=self._place)
        lengths, numbers = torch.stack(self._gathered(seen)).mT.tolist()
        if any(lengths):
            texts = self.gather(torch.tensor(list(text), dtype=torch.uint8, device="cpu"))
            if not text:
                raise RankError(
                    "; ".join(
                        f"Rank {rank} failed with {bytes(reason.tolist()).decode(errors='replace')}"
                        for rank, reason in enumerate(texts)
                        if lengths[rank]
                    )
                )
        return numbers

    @staticmethod
    def _is_known(error: BaseException | None) -> bool:
        """Return whether the other ranks have seen an error, or cannot be reached."""
        while error is not None:
            if isinstance(error, RankError) or _TOLD in vars(error):
                return True
            error = error.__cause__
        return False

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """Turn the error of a broken connection into a RankError."""
        try:
            yield
        except RuntimeError as error:
            reason = _PLACE.sub("", str(error)).strip().partition(". ")[0].partition("\n")[0]
            raise RankError(
                f"Rank {self.rank} of {self.count} has lost contact with the other ranks"
                f" ({reason}). One of them may have been killed or may have taken too long to"
                " answer. Check the output of all ranks for errors."
            ) from error


def _digest(value: object) -> int:
    return crc32(repr(value).encode())


# ------------------------------------------------------------ what is sharded


def check_whole(model: nn.Module) -> None:
    """Raise ConfigurationError if a model is wrapped or sharded for several processes."""
    if isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            "The model is a DistributedDataParallel, which averages gradients in every pass. Pass"
            " the model inside it, model.module."
        )
    kinds = {"FullyShardedDataParallel": "FSDP1", "FSDPModule": "FSDP2"}
    wrapped = [kind for name, kind in kinds.items() if _has_any("fsdp", name, model.modules())]
    sharded = _has_any("tensor", "DTensor", model.parameters())
    if wrapped or sharded:
        raise ConfigurationError(
            f"The model's parameters are sharded ({wrapped[0] if wrapped else 'DTensor'}), but"
            " estimates need whole parameters. Pass the model before you shard it. For a training"
            ' loop with FSDP2, see "Weights in shards" in docs/scale.md.'
        )


def _has_any(module: str, name: str, things: Iterable[object]) -> bool:
    """Return whether one of the objects is an instance of a class of ``torch.distributed``."""
    # Importing these modules takes seconds. If something is sharded, they are imported already.
    kind: Any = getattr(sys.modules.get(f"torch.distributed.{module}"), name, ())
    return any(isinstance(thing, kind) for thing in things)
