"""The network's latest outputs for every datum: they score rows without a pass of their own."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evigrad.errors import InputError


class OutputMemory:
    """The latest outputs of each datum, as training and estimates computed them.

    They may be some steps old, or those of another random transform: any choice of anchors gives a
    bound.
    """

    def __init__(self, num_data: int) -> None:
        self.num_data = num_data
        self._outputs: Float[Tensor, "N C"] | None = None
        self._seen: Bool[Tensor, " N"] = torch.zeros(num_data, dtype=torch.bool)

    def update(self, indices: Tensor, f: Float[Tensor, "m C"]) -> None:
        """Store outputs (m, C), without a graph, of the data at positions (m,)."""
        where, values = indices.cpu(), f.detach().float().cpu()
        if where.shape != (len(values),):
            raise InputError(
                f"{len(values)} outputs need as many positions in the data set, not"
                f" {tuple(where.shape)}."
            )
        if len(where) and not 0 <= int(where.min()) <= int(where.max()) < self.num_data:
            raise InputError(f"Positions of data lie in 0 … {self.num_data - 1}.")
        if self._outputs is None or self._outputs.shape[1:] != values.shape[1:]:
            self._outputs = values.new_zeros(self.num_data, values.shape[1])
            self._seen.zero_()
        self._outputs[where] = values
        self._seen[where] = True

    def missing(self) -> Int[Tensor, " n"]:
        """Positions of the data without outputs."""
        return (~self._seen).nonzero().squeeze(1)

    @property
    def outputs(self) -> Float[Tensor, "N C"]:
        """The latest outputs of all data, on the CPU; raises if some are missing."""
        if self._outputs is None or not bool(self._seen.all()):
            raise InputError("The outputs of some data are not known.")
        return self._outputs

    def state_dict(self) -> dict[str, Any]:
        """Tensors, for a checkpoint."""
        return {"outputs": self._outputs, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of ``state_dict`` for as many data."""
        outputs = state["outputs"]
        self._outputs = None if outputs is None else outputs.clone()
        self._seen = state["seen"].clone()
