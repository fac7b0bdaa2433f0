"""The data of a run, held on the model's device or read in every epoch, and its random streams.

Each stream is seeded from the run's one seed, its use and the epoch by a hash, so that no stream
depends on how much another has consumed: evaluating more often, or continuing from a later epoch,
changes no draw. The global random state is restored after every use.
"""

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from evigrad.blocks.positions import PositionSource
from evigrad.blocks.sources import Source, as_source
from evigrad.core.permutation import permutation
from evigrad.errors import InputError
from evigrad.inputs import tensors_of
from evigrad.network.modes import seeded

# Items of a data set that its fingerprint reads: reading all of them might take a day.
_COMPARED = 64
# Data that are digested at once, as data on a GPU are copied to the host for it.
_DIGESTED = 4096

Use = Literal["shuffle", "model", "evidence", "evaluation", "bracket", "data"]

# The number of a use is part of the seed: numbers must never change or be used again.
_USES: dict[Use, int] = {
    "shuffle": 0,  # the order of the training data
    "model": 1,  # what the model draws while its weights train, as dropout
    "evidence": 2,  # the blocks of the evidence
    "evaluation": 3,  # what the model draws on test data
    "bracket": 4,  # the bounds on the evidence
    "data": 6,  # what the items of a data set draw
}


def derived_seed(seed: int, use: Use, epoch: int = 0, rank: int = 0) -> int:
    """Return the seed, below 2^63, of one stream; of an epoch or a rank if each has its own."""
    sequence = np.random.SeedSequence([seed, _USES[use], epoch, *([rank] if rank else [])])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def stream(seed: int, use: Use, epoch: int = 0) -> torch.Generator:
    """A CPU generator at the start of a stream, with the arguments of ``derived_seed``."""
    return torch.Generator().manual_seed(derived_seed(seed, use, epoch))


def batches(
    seed: int, epoch: int, num_data: int, epoch_size: int, batch_size: int
) -> Iterator[Int[Tensor, " m"]]:
    """Yield the positions of the data in each batch of an epoch, counted from 1.

    All data are passed in random order, then again in another: an epoch is the next ``epoch_size``
    of them. The order is drawn from the seed and the number of the pass; that of very many data is
    not written out. All batches are about as large: a last one of a single datum would break batch
    normalisation.
    """
    count = -(-epoch_size // batch_size)
    place, order, present = (epoch - 1) * epoch_size, torch.empty(0, device="cpu"), -1
    for number in range(count):
        left = epoch_size // count + (number < epoch_size % count)
        parts = []
        while left:
            done, start = divmod(place, num_data)
            if done != present:
                order, present = permutation(num_data, stream(seed, "shuffle", done + 1)), done
            parts.append(order[start : start + left])
            place, left = place + len(parts[-1]), left - len(parts[-1])
        yield torch.cat(parts)


class RunData(Source):
    """Data (see ``evigrad.blocks.sources.as_source``) on the model's device.

    Tensors are held there. Items of a data set are read when they are needed, and what they draw
    from the global generators of PyTorch, NumPy and Python is seeded by the run's seed, the
    present ``epoch`` (0 before the first) and the positions that are read together. So a block is
    the same at every reading in an epoch, another one in the next, and an interrupted run goes on
    with the same draws. If ``is_column``, targets (m,) are given as (m, 1).
    """

    def __init__(
        self, data: Any, device: torch.device, seed: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        self._device, self._seed, self.epoch = device, seed, 0
        self.is_column = False
        with seeded(derived_seed(seed, "data"), device):
            self._source = as_source(data, dtype)
        if self._source.is_held:
            self._source = as_source(self.fetch(torch.arange(len(self), device="cpu")))
        self.is_held = self._source.is_held

    def __len__(self) -> int:
        return len(self._source)

    def spread(self, count: int) -> tuple[Any, Tensor]:
        """Data from all over the data set, ``count`` at most."""
        positions = torch.linspace(0, len(self) - 1, min(len(self), count), device="cpu").long()
        return self.fetch(positions.clamp(max=len(self) - 1))  # linspace rounds in float32

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        """See ``Source.fetch``."""
        if self._source.is_held:
            x, y = self._source.fetch(indices)
        else:
            key = zlib.crc32(indices.numpy().tobytes())
            with seeded(derived_seed(self._seed, "data", self.epoch) ^ key, self._device):
                x, y = self._source.fetch(indices)
        for what, tensors in (("Inputs", tensors_of(x)), ("Targets", [y])):
            if any(tensor.is_meta for tensor in tensors):
                raise InputError(f"{what} are on meta, which holds no numbers: give real ones.")
        return x.to(self._device), self._in_columns(y.to(self._device))

    def _in_columns(self, y: Tensor) -> Tensor:
        return y.unsqueeze(1) if self.is_column else y

    def labels(self) -> Int[Tensor, " N"]:
        """See ``Source.labels``."""
        with seeded(derived_seed(self._seed, "data"), self._device):
            return self._source.labels()

    def targets(self) -> Tensor:
        """See ``Source.targets``."""
        if self.is_held:
            return self._in_columns(self._source.targets())
        return self.fetch(torch.arange(len(self), device="cpu"))[1]

    def num_targets(self, indices: Int[Tensor, " m"]) -> int:
        """How many targets count in a loss at these positions, maybe several for each datum."""
        if isinstance(self.by_target, PositionSource):
            return len(self.by_target.of_data(indices))
        return len(indices)

    def fingerprint(self) -> str:
        """Digest of all held data, or of some items of a data set, if equal at a second reading."""
        count = len(self)
        if self._source.is_held:
            x, y = self.fetch(torch.arange(count, device="cpu"))
            return digest([*tensors_of(x), y])
        epoch, self.epoch = self.epoch, 0
        readings = (self.spread(_COMPARED) for _ in range(2))
        once, again = ([*tensors_of(x), y] for x, y in readings)
        self.epoch = epoch
        pairs = zip(once, again, strict=True)
        return f"{count} items {digest([a if torch.equal(a, b) else a[:0] for a, b in pairs])}"


def digest(data: Iterable[Tensor]) -> str:
    """Return a hexadecimal digest of inputs and targets: values, types, shapes and order."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in data:
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        for part in tensor.detach().split(_DIGESTED):
            # Byte by byte, as NumPy has no bfloat16.
            hasher.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()
