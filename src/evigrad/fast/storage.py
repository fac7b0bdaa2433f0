"""Rows in another type or on another device than the network."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Storage:
    """How rows are kept.

    Attributes:
        dtype: Type of the kept rows; None leaves it. Products are in ``working_dtype``.
        device: Where they are; None leaves them there. The CPU of a machine with a GPU keeps them
            in pinned memory, which copies at full speed.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def keep(self, rows: Tensor) -> Tensor:
        """The rows, or what they are products of, as they are kept."""
        if self.dtype is not None and rows.is_floating_point():
            rows = rows.to(self.dtype)
        if self.device is None or self.device == rows.device:
            return rows
        if rows.dim() != 2 or not rows.is_floating_point():
            return rows.to(self.device)
        pinned = self.device.type == "cpu" and rows.is_cuda
        return by_columns(rows, torch.empty(0, device=self.device), pinned)

    def itemsize(self, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes that a number of this type takes on this device; 0 where it is kept elsewhere."""
        if self.device not in (None, device):
            return 0
        return (self.dtype or dtype).itemsize


def by_columns(matrix: Float[Tensor, "R n"], like: Tensor, pinned: bool) -> Float[Tensor, "R n"]:
    """A copy on the device of ``like`` with contiguous columns, so that slabs copy in one piece."""
    turned = torch.empty(
        matrix.shape[::-1], dtype=matrix.dtype, device=like.device, pin_memory=pinned
    )
    turned.copy_(matrix.detach().mT.contiguous())
    return turned.mT
