"""The data and the random streams of a run.

Data are held on the model's device, or their items are read in every epoch. Each stream is seeded
by a hash of the run's seed, the stream's purpose and the epoch. Therefore, draws from one stream do
not affect another stream. Evaluating more often or resuming from a later epoch changes no draw. The
global random state is restored after every use.
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

# Number of items of a data set that its fingerprint reads. Reading all might take a day.
_COMPARED = 64
# Number of examples that are digested at once, because data on a GPU are copied to the host.
_DIGESTED = 4096

Use = Literal["shuffle", "model", "evidence", "evaluation", "bracket", "data", "held-out"]

# The number of a use is part of the seed. Numbers must never change or be used again.
_USES: dict[Use, int] = {
    "shuffle": 0,  # the order of the training data
    "model": 1,  # what the model draws while its weights train, such as dropout
    "evidence": 2,  # the blocks of the evidence
    "evaluation": 3,  # what the model draws on test data
    "bracket": 4,  # the bounds on the evidence
    "data": 6,  # what the items of a data set draw
    "held-out": 7,  # which examples a choice of settings predicts
}


def derived_seed(seed: int, use: Use, epoch: int = 0, rank: int = 0) -> int:
    """Return the seed (below 2^63) of a random stream, which may depend on epoch and rank."""
    sequence = np.random.SeedSequence([seed, _USES[use], epoch, *([rank] if rank else [])])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def stream(seed: int, use: Use, epoch: int = 0) -> torch.Generator:
    """Return a CPU generator with the seed from ``derived_seed``."""
    return torch.Generator().manual_seed(derived_seed(seed, use, epoch))


def batches(
    seed: int, epoch: int, num_data: int, epoch_size: int, batch_size: int
) -> Iterator[Int[Tensor, " m"]]:
    """Yield the positions of the examples in each batch of an epoch.

    Epochs are numbered from 1. Passes over all data follow one another, each in a new random order.
    An epoch consists of the next ``epoch_size`` examples. The seed and the number of the pass
    determine the order. All batches have about the same size, because a last batch of one example
    would break batch normalization.
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
    """Training or test data (see ``evigrad.blocks.sources.as_source``) on the model's device.

    Tensors are kept on this device. Items of a data set are read when they are needed. Before items
    are read, the global generators of PyTorch, NumPy and Python are seeded from the run's seed, the
    current ``epoch`` (0 before the first) and the positions of these items. Therefore, every
    reading of a block gives the same items within an epoch, but new random transforms in the next
    epoch. A resumed run repeats the same draws. If ``is_column`` is True, targets of shape (m,)
    become (m, 1).
    """

    def __init__(
        self, data: Any, device: torch.device, seed: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        self.device, self._seed, self.epoch = device, seed, 0
        self.is_column = False
        with seeded(derived_seed(seed, "data"), device):
            self._source = as_source(data, dtype)
        if self._source.is_held:
            self._source = as_source(self.fetch(torch.arange(len(self), device="cpu")))
        self.is_held = self._source.is_held

    @property
    def unseeded(self) -> Source:
        """See ``Source.unseeded``."""
        return self._source

    def __len__(self) -> int:
        return len(self._source)

    def spread(self, count: int) -> tuple[Any, Tensor]:
        """Return at most ``count`` examples, evenly spread over the data set."""
        positions = torch.linspace(0, len(self) - 1, min(len(self), count), device="cpu").long()
        return self.fetch(positions.clamp(max=len(self) - 1))  # linspace rounds in float32

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        """See ``Source.fetch``."""
        if self._source.is_held:
            x, y = self._source.fetch(indices)
        else:
            key = zlib.crc32(indices.numpy().tobytes())
            with seeded(derived_seed(self._seed, "data", self.epoch) ^ key, self.device):
                x, y = self._source.fetch(indices)
        for what, tensors in (("Inputs", tensors_of(x)), ("Targets", [y])):
            if any(tensor.is_meta for tensor in tensors):
                raise InputError(
                    f"{what} must contain numbers, got tensors on the meta device. Use tensors on"
                    " the CPU or an accelerator."
                )
        return x.to(self.device), self._in_columns(y.to(self.device))

    def _in_columns(self, y: Tensor) -> Tensor:
        return y.unsqueeze(1) if self.is_column else y

    def labels(self) -> Int[Tensor, " N"]:
        """See ``Source.labels``."""
        with seeded(derived_seed(self._seed, "data"), self.device):
            return self._source.labels()

    def targets(self) -> Tensor:
        """See ``Source.targets``."""
        if self.is_held:
            return self._in_columns(self._source.targets())
        return self.fetch(torch.arange(len(self), device="cpu"))[1]

    def num_targets(self, indices: Int[Tensor, " m"]) -> int:
        """Return how many targets of the examples at ``indices`` contribute to a loss."""
        if isinstance(self.by_target, PositionSource):
            return len(self.by_target.of_data(indices))
        return len(indices)

    def fingerprint(self) -> str:
        """Return a digest of all data if they are tensors, or of a few items of a data set.

        The digest omits inputs or targets of the items if they differ between two readings.
        """
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
    """Return a hexadecimal digest of tensors: their values, types, shapes and order."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in data:
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        for part in tensor.detach().split(_DIGESTED):
            # As bytes, because NumPy has no bfloat16.
            hasher.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()
