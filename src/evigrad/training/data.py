"""The data of a run: held on the model's device, or read again in every epoch."""

import zlib
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from evigrad.blocks.sources import Source, as_source
from evigrad.errors import InputError
from evigrad.jacobians.modes import seeded
from evigrad.training.checkpoint import digest
from evigrad.training.randomness import derived_seed

# Items of a data set that its fingerprint reads: reading all of them might take a day.
_COMPARED = 64


class RunData(Source):
    """Data (see ``evigrad.blocks.sources.as_source``) on the model's device.

    Tensors are held there. Items of a data set are read when they are needed, and what they draw
    from the global generators of PyTorch, NumPy and Python is seeded by the run's seed, the
    present ``epoch`` (0 before the first) and the positions that are read together. So a block is
    the same at every reading in an epoch, another one in the next, and an interrupted run goes on
    with the same draws.
    """

    def __init__(self, data: Any, device: torch.device, seed: int = 0) -> None:
        self._device, self._seed, self.epoch = device, seed, 0
        with seeded(derived_seed(seed, "data"), device):
            self._source = as_source(data)
        if self._source.is_held:
            self._source = as_source(self.fetch(torch.arange(len(self))))
        self.is_held = self._source.is_held

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Tensor, Tensor]:
        """See ``Source.fetch``."""
        if self._source.is_held:
            x, y = self._source.fetch(indices)
        else:
            key = zlib.crc32(indices.numpy().tobytes())
            with seeded(derived_seed(self._seed, "data", self.epoch) ^ key, self._device):
                x, y = self._source.fetch(indices)
        for what, tensor in (("Inputs", x), ("Targets", y)):
            if tensor.is_meta:
                raise InputError(f"{what} are on meta, which holds no numbers: give real ones.")
        return x.to(self._device), y.to(self._device)

    def labels(self) -> Int[Tensor, " N"]:
        """See ``Source.labels``."""
        with seeded(derived_seed(self._seed, "data"), self._device):
            return self._source.labels()

    def _targets(self) -> Tensor:
        return self.fetch(torch.arange(len(self)))[1]

    def fingerprint(self) -> str:
        """Digest of all held data, or of some items of a data set, if equal at a second reading."""
        count = len(self)
        if self._source.is_held:
            return digest(self.fetch(torch.arange(count)))
        positions = torch.linspace(0, count - 1, min(count, _COMPARED)).long()
        epoch, self.epoch = self.epoch, 0
        pairs = zip(self.fetch(positions), self.fetch(positions), strict=True)
        self.epoch = epoch
        x, y = (a if torch.equal(a, b) else torch.empty_like(a[:0]) for a, b in pairs)
        return f"{count} items {digest((x, y))}"
