"""Checks and conversions of targets that several likelihoods share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evigrad.errors import InputError
from evigrad.inputs import MISSING_LABELS, refuse_cells, refuse_where


def check_one_per_output(f_shape: Sequence[int], y: Tensor) -> None:
    """Raise an InputError unless targets are (m, C), because a missing axis would broadcast."""
    if tuple(y.shape) != tuple(f_shape):
        hint = " Use y.unsqueeze(-1)." if y.ndim == 1 and f_shape[1] == 1 else ""
        raise InputError(
            f"Targets must have the shape of the outputs, {tuple(f_shape)}, got"
            f" {tuple(y.shape)}.{hint}"
        )


def check_whole_labels(labels: Tensor, of: str = "") -> None:
    """Raise an InputError if a label among real numbers is a fraction or NaN."""
    words = f"is not a label{of}. Labels are whole numbers. {MISSING_LABELS}"
    refuse_where(labels != labels.round(), labels, words)


def like(f: Tensor, targets: Tensor) -> Tensor:
    """Return targets that are numbers in the type of the outputs, and labels unchanged."""
    return targets.to(f) if targets.is_floating_point() else targets


def as_numbers(values: Any) -> Tensor:
    """Return a tensor of numbers, sequences, arrays or series. Tensors stay on their device."""
    if isinstance(values, Tensor):
        return values
    array = np.asarray(values)
    if array.dtype.kind not in "biufc":
        refuse_cells(array)
        array = np.array(array.tolist())  # numbers in an array of objects
    if array.dtype.kind not in "biufc":
        raise InputError(f"Targets must be numbers, got an array of dtype {array.dtype}.")
    # PyTorch warns about arrays that are read-only, such as columns of pandas.
    return torch.as_tensor(array if array.flags.writeable else array.copy(), device="cpu")


def precisely(values: Tensor) -> Tensor:
    """Return the values in float64, if the device has it."""
    return values if values.device.type == "mps" else values.double()


def total(values: Tensor) -> float:
    """Return the sum in float64. In float32, a sum over a batch would lose precision."""
    return float(values.detach().double().sum())
