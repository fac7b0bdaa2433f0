"""Store rows in another type or on another device."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Storage:
    """How Jacobian rows are stored.

    Attributes:
        dtype: Data type of the stored rows, or None to keep their type. It does not affect the type
            in which products of rows are computed.
        device: Device of the stored rows, or None to keep their device. If rows move from a GPU to
            the CPU, they are stored in pinned memory, which can be copied faster.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def store(self, rows: Tensor) -> Tensor:
        """Return the rows, or the factors of rows that are products, in their stored form."""
        if self.dtype is not None and rows.is_floating_point():
            rows = rows.to(self.dtype)
        if self.device is None or self.device == rows.device:
            return rows
        if rows.dim() != 2 or not rows.is_floating_point():
            return rows.to(self.device)
        pinned = self.device.type == "cpu" and rows.is_cuda
        return by_columns(rows, torch.empty(0, device=self.device), pinned)

    def itemsize(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes per stored entry on this device, or 0 if rows are stored elsewhere."""
        if self.device not in (None, device):
            return 0
        return (self.dtype or dtype).itemsize


def by_columns(matrix: Float[Tensor, "R n"], like: Tensor, pinned: bool) -> Float[Tensor, "R n"]:
    """Return a copy with contiguous columns on the device of ``like``.

    Blocks of columns can then be copied quickly.
    """
    turned = torch.empty(
        matrix.shape[::-1], dtype=matrix.dtype, device=like.device, pin_memory=pinned
    )
    turned.copy_(matrix.detach().mT.contiguous())
    return turned.mT
