"""Processes that share the work on one evidence: the one place that knows of ``torch.distributed``.

Each process is a *rank* of R. Wherever there is one process, nothing here does anything.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, distributed, nn

from evigrad.errors import ConfigurationError, RankError

if TYPE_CHECKING or distributed.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group = ProcessGroup | DeviceMesh
else:
    Group = Any

T = TypeVar("T")

# Where in the source of Gloo an error arose, which begins its text.
_PLACE = re.compile(r"^\[\S*:\d+\] ")
# The attribute of an error that other ranks were told of, whichever object did so.
_TOLD = "_evigrad_told"
# Longest text of an error that other ranks are told, in bytes.
_TEXT = 2000


class Ranks:
    """The processes of a group, or the only one.

    All ranks call the same methods in the same order; each call waits for the others. Results are
    equal on all ranks, to the last bit.

    Args:
        group: A process group, as ``torch.distributed.group.WORLD`` after ``init_process_group``;
            or a device mesh of one dimension. None for one process.

    Attributes:
        rank: The number of this process, from 0.
        count: R.
        sent: Bytes that this rank has sent, beside the headers of messages. A sum of n bytes sends
            2n(R − 1)/R (a ring), a gathered tensor or shard n(R − 1); what rank 0 gives to all is
            counted there, n(R − 1).

    Raises:
        ConfigurationError: If it is no such group, or this process is not in it.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.rank, self.count, self.sent = 0, 1, 0
        self._group, self._place = None, torch.device("cpu")
        if group is None:
            return
        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigurationError(
                "There is no process group yet: call torch.distributed.init_process_group first."
            )
        given: Any = group
        if hasattr(given, "get_group"):
            if given.ndim != 1:
                raise ConfigurationError(
                    f"The device mesh has {given.ndim} dimensions: give the one over the replicas,"
                    " as mesh['replicas']."
                )
            given = given.get_group()
        if not isinstance(given, distributed.ProcessGroup):
            raise ConfigurationError(
                f"process_group is a process group or a device mesh, not {given!r}: say"
                " torch.distributed.group.WORLD in a process that is one of it."
            )
        group = given
        self._group = group
        self.rank, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        if distributed.get_backend(group) == "nccl":
            self._place = torch.device("cuda", torch.cuda.current_device())

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes."""
        return self.rank == 0

    def part(self, count: int, rank: int | None = None) -> slice:
        """A rank's part of ``count`` things, or this one's; the first may be longer by one."""
        first = self.rank if rank is None else rank
        start, stop = (-(-count * each // self.count) for each in (first, first + 1))
        return slice(start, stop)

    # ------------------------------------------------------------ tensors

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over the ranks of tensors that have the same shapes and types everywhere.

        They have no graph. Tensors of one type travel together.
        """
        if self.count == 1:
            return list(tensors)
        found = [tensor.detach() for tensor in tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in found):
            chosen = [i for i, tensor in enumerate(found) if tensor.dtype == dtype]
            flat = torch.cat([found[i].reshape(-1).to(self._place) for i in chosen])
            with self._contact():
                distributed.all_reduce(flat, group=self._group)
            self.sent += 2 * flat.nbytes * (self.count - 1) // self.count
            for i, own in zip(chosen, flat.split([found[i].numel() for i in chosen]), strict=True):
                found[i] = own.reshape(found[i].shape).to(found[i].device)
        return found

    def any(self, value: bool) -> bool:
        """Whether a value is true on a rank; raises what another rank has raised before."""
        return value if self.count == 1 else any(self._exchange(b"", int(value)))

    def same(self, value: object) -> bool:
        """Whether all ranks have this value, by its ``repr``; raises as ``any`` does."""
        return self.count == 1 or len(set(self._exchange(b"", _digest(value)))) == 1

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Each rank's tensor, in the order of ranks; they may differ in length (dimension 0)."""
        if self.count == 1:
            return [tensor]
        length = torch.tensor([len(tensor)], device=self._place)
        lengths = [int(each) for each in self._gathered(length)]
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:], device=self._place)
        padded[: len(tensor)] = tensor.detach()
        parts = self._gathered(padded)
        return [part[:own].to(tensor.device) for part, own in zip(parts, lengths, strict=True)]

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return what each rank sent here, in their order, and send the r-th part to rank r.

        Tensors are of one type and may be empty; ``shapes`` are those of what arrives.
        """
        if self.count == 1:
            return list(parts)
        dtype, device = parts[0].dtype, parts[0].device
        sizes = [dtype.itemsize * prod(shape) for shape in shapes]
        own = [part.nbytes for part in parts]
        with self.together():  # an error of one rank until here, or here, is one of all
            sent = torch.cat([part.detach().reshape(-1) for part in parts]).to(self._place)
            # As bytes, since not every backend sends every type.
            found = torch.empty(sum(sizes), dtype=torch.uint8, device=self._place)
        with self._contact():
            distributed.all_to_all_single(
                found, sent.view(torch.uint8), sizes, own, group=self._group
            )
        self.sent += sum(own) - own[self.rank]
        found = found.view(dtype).to(device).split([prod(shape) for shape in shapes])
        return [part.reshape(*shape) for part, shape in zip(found, shapes, strict=True)]

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give the values of rank 0 to all ranks, in place."""
        if self.count == 1:
            return
        for tensor in tensors:
            with torch.no_grad(), self._contact():
                sent = tensor.detach().to(self._place).contiguous()
                distributed.broadcast(sent, group=self._group, group_src=0)
                tensor.copy_(sent)
            self.sent += sent.nbytes * (self.count - 1) if self.is_first else 0

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor that is sharded over the ranks (a ``DTensor``); another is returned."""
        if not is_shard(tensor):
            return tensor
        sharded: Any = tensor.detach()
        with self._contact():
            found = sharded.full_tensor()
        # From the outermost dimension of the mesh, as there may be shards of shards. Each is filled
        # up to the longest for the way.
        mesh, shape = sharded.device_mesh, list(sharded.shape)
        for size, own, how in zip(
            mesh.shape, mesh.get_coordinate(), sharded.placements, strict=True
        ):
            if not how.is_replicate():
                length, longest = shape[how.dim], -(-shape[how.dim] // size)
                shape[how.dim] = longest
                self.sent += prod(shape) * sharded.element_size() * (size - 1)
                shape[how.dim] = min(longest, max(0, length - own * longest))
        return found

    def shared(self, value: T) -> T:
        """Rank 0's tensors and plain values on all ranks; tensors arrive on the CPU."""
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
        found = [torch.empty_like(tensor) for _ in range(self.count)]
        with self._contact():
            distributed.all_gather(found, tensor, group=self._group)
        self.sent += tensor.nbytes * (self.count - 1)
        return found

    # ------------------------------------------------------------ errors

    def agree(self) -> None:
        """Raise what another rank has raised so far, before a call that would wait for it."""
        with self.together():
            pass

    @contextmanager
    def together(self) -> Iterator[dict[str, object]]:
        """Raise on all ranks what one of them raises inside, so that no rank waits for ever.

        Inside, ranks may compute different things, and enter it again. An exception stays what it
        is on its own rank, and is a ``RankError`` with its text on the others.

        Yields:
            A dictionary to put in, by name, what has to be the same on all ranks.

        Raises:
            ConfigurationError: On all ranks, with the names of what is not the same.
            RankError: If another rank raised an exception.
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
        own = [_digest(value) for value in alike.values()]
        if self.same(own):
            return
        found = torch.stack(self.gather(torch.tensor(own, device="cpu")))
        names = [n for n, same in zip(alike, (found == found[0]).all(0), strict=True) if not same]
        raise ConfigurationError(
            f"The {self.count} ranks differ in the {', '.join(names)}: all have to make"
            " the same calls, with the same model, data and settings."
        )

    def _exchange(self, text: bytes, number: int) -> list[int]:
        """The numbers of all ranks, if all are well; ``text`` says what is wrong here."""
        seen = torch.tensor([len(text), number], device=self._place)
        lengths, numbers = torch.stack(self._gathered(seen)).mT.tolist()
        if any(lengths):
            padded = torch.tensor(
                list(text.ljust(max(lengths), b" ")), dtype=torch.uint8, device="cpu"
            )
            texts = self._gathered(padded.to(self._place))
            if not text:
                raise RankError(
                    "; ".join(
                        f"Rank {rank} failed with {bytes(own.tolist()).decode(errors='replace')}"
                        for rank, own in enumerate(texts)
                        if lengths[rank]
                    )
                )
        return numbers

    @staticmethod
    def _is_known(error: BaseException | None) -> bool:
        """Whether the other ranks know of an error, or cannot be told."""
        while error is not None:
            if isinstance(error, RankError) or _TOLD in vars(error):
                return True
            error = error.__cause__
        return False

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """Turn a broken connection into an error that says so."""
        try:
            yield
        except RuntimeError as error:
            reason = _PLACE.sub("", str(error)).strip().partition(". ")[0].partition("\n")[0]
            raise RankError(
                f"Rank {self.rank} of {self.count} has lost the others, as when one of them was"
                f" killed, or did not answer in time ({reason})."
            ) from error


def _digest(value: object) -> int:
    return crc32(repr(value).encode())


# ------------------------------------------------------------ what is sharded


def sharding_of(model: nn.Module) -> str | None:
    """By what a model's parameters are sharded: ``FSDP1``, ``FSDP2``, ``DTensor``; or None."""
    modules = list(model.modules())
    for kind, name in (("FSDP1", "FullyShardedDataParallel"), ("FSDP2", "FSDPModule")):
        if any(isinstance(module, _class("fsdp", name)) for module in modules):
            return kind
    return "DTensor" if any(map(is_shard, model.parameters())) else None


def is_shard(tensor: Tensor) -> bool:
    """Whether a process has only its shard of a tensor, or it is managed as if it had."""
    return isinstance(tensor, _class("tensor", "DTensor"))


def num_processes(tensor: Tensor) -> int | None:
    """Over how many processes a tensor is sharded; None if it is whole."""
    sharded: Any = tensor
    return sharded.device_mesh.size() if is_shard(tensor) else None


def shards(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters by name, in shards under FSDP2, as optimisers have them."""
    kind = _class("fsdp", "FSDPModule")
    managed: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    for module in managed:
        module.reshard()  # a pass without a backward one has left it whole, and maybe rounded
    return dict(model.named_parameters())


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in the same memory; another tensor is returned."""
    sharded: Any = tensor
    return sharded.to_local() if is_shard(tensor) else tensor


def part_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The part of a whole tensor that a rank has of another one of the same shape."""
    if not is_shard(other):
        return tensor
    like: Any = other
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    mine = distribute(tensor.detach(), like.device_mesh, like.placements, src_data_rank=None)
    return mine.to_local().to(like.to_local().device)


def _class(module: str, name: str) -> Any:
    """A class of ``torch.distributed``, or no class where there can be no instance of it yet."""
    # Importing these modules takes seconds, and who has something sharded has imported them.
    return getattr(sys.modules.get(f"torch.distributed.{module}"), name, ())
