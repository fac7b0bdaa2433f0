"""Outputs (m, …, C) with several positions per example, each with its own target.

Given the outputs, the targets of all positions are independent. Therefore, each position of a
sequence, or each pixel, counts as one example in every likelihood and estimator. N is the number of
targets that count (see ``Likelihood.counted``). A sequence without such targets contributes
nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from evigrad.errors import InputError
from evigrad.inputs import AtPositions, Inputs
from evigrad.likelihoods.base import Likelihood
from evigrad.likelihoods.calls import check_targets

NO_TARGET = (
    "At least one target must count, got none: all have the likelihood's ignore_index. Use at least"
    " one other label."
)


def counted(likelihood: Likelihood, shape: Sequence[int], y: Tensor) -> Tensor:
    """Return a mask (m, T) of the targets that count, for T positions of this ``shape``."""
    target_shape = tuple(y.shape[1 : 1 + len(shape)])
    if target_shape != tuple(shape):
        hint = (
            "If some positions have no target, such as the last position of a sequence, use the"
            " label -100 there."
        )
        if target_shape[:1] == tuple(shape[1:2]):
            hint = "If the model's channels come second, use evigrad.Outputs(model, channel_dim=1)."
        raise InputError(
            f"Targets must have the shape of the outputs' positions, {tuple(shape)} per example,"
            f" got {target_shape}. {hint}"
        )
    flat_targets = y.flatten(0, len(shape))
    counts = likelihood.counted(flat_targets)
    if counts is None or counts.shape != flat_targets.shape[:1]:  # ``validate`` will raise an error
        counts = torch.ones(len(flat_targets), dtype=torch.bool, device=y.device)
    return counts.view(len(y), -1)


def targets_at(
    likelihood: Likelihood,
    shape: Sequence[int],
    y: Tensor,
    device: torch.device,
    first_datum: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the validated targets (n, …) at positions that count, and the mask of ``counted``."""
    *shape, num_outputs = shape
    counts = counted(likelihood, shape, y)
    targets = y.flatten(1, len(shape))[counts]

    def check(chunk: Tensor) -> None:
        check_targets(likelihood, (len(chunk), num_outputs), chunk, device)

    try:
        if len(targets):
            check(targets)
    except InputError as error:
        first, end = 0, len(targets)  # a range that holds the first unfit target
        while end - first > 1:
            middle = (first + end) // 2
            try:
                check(targets[first:middle])
            except InputError:
                end = middle
            else:
                first = middle
        try:
            check(targets[first:end])
        except InputError as first_error:
            datum, position = counts.nonzero()[first].tolist()
            where = f"Example {first_datum + datum}, position {position}"
            raise InputError(f"{where}: {first_error}") from error
        raise
    return targets, counts


def flattened(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs (n, C) and validated targets (n, …) at all positions that count."""
    if f.dim() == 2 or not is_batch(y, len(f)):
        shape = (*f.shape[:-2], f.shape[-1]) if f.dim() > 2 else f.shape
        check_targets(likelihood, shape, y, f.device)
        return f, y
    targets, counts = targets_at(likelihood, f.shape[1:], y, f.device)
    return f.flatten(1, -2)[counts], targets


def spread(
    likelihood: Likelihood, shape: Sequence[int], x: Inputs, y: Tensor
) -> tuple[AtPositions, Tensor]:
    """Return inputs and validated targets, with each position that counts as one example."""
    assert not isinstance(x, AtPositions)
    targets, counts = targets_at(likelihood, shape, y, x.device)
    data, positions = counts.nonzero(as_tuple=True)
    return AtPositions(x, data, positions), targets


def is_batch(y: object, m: int) -> bool:
    """Return whether ``y`` is a tensor with targets of m examples."""
    return isinstance(y, Tensor) and y.ndim > 0 and len(y) == m
