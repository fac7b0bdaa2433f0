"""Outputs (m, …, C) with several positions for each datum, each of which has a target of its own.

Given the outputs, the targets of all positions are independent: a position of a sequence, or a
pixel, is a datum of its own to every likelihood and every estimator. Data are then counted by their
targets; a target that the likelihood leaves out (``Likelihood.counted``) is none. A sequence of
which all targets are left out counts nothing, alone or in a batch with others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from evigrad.errors import InputError
from evigrad.inputs import AtPositions, Inputs
from evigrad.likelihoods.base import Likelihood
from evigrad.likelihoods.calls import check_targets

NO_TARGET = (
    "No target counts: the likelihood's ignore_index leaves all of them out. Give at least one"
    " target that it counts."
)


def counted(likelihood: Likelihood, shape: Sequence[int], y: Tensor) -> Tensor:
    """Return where targets (m, …) count, (m, T), over the ``shape`` of a datum's positions."""
    target_shape = tuple(y.shape[1 : 1 + len(shape)])
    if target_shape != tuple(shape):
        hint = "Where some have none, as the last one of a language model, fill in -100."
        if target_shape[:1] == tuple(shape[1:2]):
            hint = "Of a model with its channels second take evigrad.Outputs(model, channel_dim=1)."
        raise InputError(
            f"The model has outputs at positions {tuple(shape)} of each datum, and the targets are"
            f" at {target_shape}: give a target for each position. {hint}"
        )
    flat_targets = y.flatten(0, len(shape))
    counts = likelihood.counted(flat_targets)
    if counts is None or counts.shape != flat_targets.shape[:1]:  # which ``validate`` will refuse
        counts = torch.ones(len(flat_targets), dtype=torch.bool, device=y.device)
    return counts.view(len(y), -1)


def targets_at(
    likelihood: Likelihood,
    shape: Sequence[int],
    y: Tensor,
    device: torch.device,
    first_datum: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the checked targets (n, ...) at positions that count, and where these are, (m, T)."""
    *shape, num_outputs = shape
    counts = counted(likelihood, shape, y)
    targets = y.flatten(1, len(shape))[counts]

    def check(chunk: Tensor) -> None:
        check_targets(likelihood, (len(chunk), num_outputs), chunk, device)

    try:
        if len(targets):
            check(targets)
    except InputError as error:
        first, end = 0, len(targets)  # of a range that holds the first unfit target
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
        except InputError as of_one:
            datum, position = counts.nonzero()[first].tolist()
            where = f"Datum {first_datum + datum}, position {position}"
            raise InputError(f"{where}: {of_one}") from error
        raise
    return targets, counts


def flattened(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked outputs (n, C) and their targets (n, ...) at all positions that count."""
    if f.dim() == 2 or not is_batch(y, len(f)):
        shape = (*f.shape[:-2], f.shape[-1]) if f.dim() > 2 else f.shape
        check_targets(likelihood, shape, y, f.device)
        return f, y
    targets, counts = targets_at(likelihood, f.shape[1:], y, f.device)
    return f.flatten(1, -2)[counts], targets


def spread(
    likelihood: Likelihood, shape: Sequence[int], x: Inputs, y: Tensor
) -> tuple[AtPositions, Tensor]:
    """Return inputs and checked targets with each position that counts as a datum of its own."""
    assert not isinstance(x, AtPositions)
    targets, counts = targets_at(likelihood, shape, y, x.device)
    data, positions = counts.nonzero(as_tuple=True)
    return AtPositions(x, data, positions), targets


def is_batch(y: object, m: int) -> bool:
    """Whether these are targets of m data, in a tensor."""
    return isinstance(y, Tensor) and y.ndim > 0 and len(y) == m
