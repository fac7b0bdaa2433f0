"""Store rows in another type or on another device."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Storage:
    """How rows are stored.

    Attributes:
        dtype: Type of the stored rows. None: unchanged. Products have the type ``working_dtype``.
        device: Device of the stored rows. None: unchanged. On a machine with a GPU, the CPU
            stores them in pinned memory, which is copied at full speed.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def keep(self, rows: Tensor) -> Tensor:
        """Return the rows, or the factors of their products, in their stored form."""
        if self.dtype is not None and rows.is_floating_point():
            rows = rows.to(self.dtype)
        if self.device is None or self.device == rows.device:
            return rows
        if rows.dim() != 2 or not rows.is_floating_point():
            return rows.to(self.device)
        pinned = self.device.type == "cpu" and rows.is_cuda
        return by_columns(rows, torch.empty(0, device=self.device), pinned)

    def itemsize(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes of a stored number on this device, or 0 if it is stored elsewhere."""
        if self.device not in (None, device):
            return 0
        return (self.dtype or dtype).itemsize


def by_columns(matrix: Float[Tensor, "R n"], like: Tensor, pinned: bool) -> Float[Tensor, "R n"]:
    """Return a copy on the device of ``like`` with contiguous columns, for fast copies of slabs."""
    turned = torch.empty(
        matrix.shape[::-1], dtype=matrix.dtype, device=like.device, pin_memory=pinned
    )
    turned.copy_(matrix.detach().mT.contiguous())
    return turned.mT
