"""Check the samplers of a ``DataLoader``, because the evidence counts each example once."""

import warnings
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from torch import Tensor, distributed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from evigrad.errors import EvigradWarning, InputError

# These samplers stand for all examples, in an order that is not used, unless they draw fewer.
_OF_ALL_EXAMPLES = (SequentialSampler, RandomSampler, DistributedSampler)


def check_sampler(loader: DataLoader[Any], *, is_read: bool = False) -> None:
    """Raise an error if a sampler omits or repeats examples of the data set.

    Args:
        loader: DataLoader whose data set has a length.
        is_read: Whether the loader's batches are used, not only its data set. If true, uniform
            draws with replacement also raise an error.

    Raises:
        InputError: If the sampler omits or repeats examples.
    """
    sampler, num_examples = _sampler_of(loader), _num_examples(loader)
    action = None
    if isinstance(sampler, WeightedRandomSampler):
        action = "draws examples by weights"
    elif is_read and isinstance(sampler, RandomSampler) and sampler.replacement:
        action = "draws with replacement"
    elif isinstance(sampler, RandomSampler) and sampler.num_samples < num_examples:
        action = f"draws {sampler.num_samples} examples"
    elif (indices := _indices(sampler)) is not None:
        if sorted(indices) != list(range(num_examples)):
            action = f"draws {len(indices)} indices"
    elif not isinstance(sampler, _OF_ALL_EXAMPLES) and isinstance(sampler, Sized):
        # Batch samplers count batches, and a sampler of one process counts only its part.
        counts_examples = sampler is not loader.batch_sampler and not _is_distributed()
        if counts_examples and len(sampler) != num_examples:
            action = f"draws {len(sampler)} examples"
    if action is not None:
        raise InputError(
            f"The {type(sampler).__name__} of the DataLoader {action}, but the evidence counts"
            f" each of the N = {num_examples} examples of the data set once. To train on a"
            " subset, pass torch.utils.data.Subset(dataset, indices) instead of a sampler. To"
            " weight examples, use evigrad.likelihoods.Weighted."
        )


def warn_of_ignored_sampler(loader: DataLoader[Any]) -> None:
    """Warn that a sampler or ``drop_last`` is ignored, if it may select only some examples."""
    sampler, num_examples = _sampler_of(loader), _num_examples(loader)
    ignored = None
    if isinstance(sampler, SequentialSampler):
        batches = loader.batch_sampler
        if isinstance(batches, BatchSampler) and batches.drop_last:
            if omitted := num_examples % batches.batch_size:
                examples = "1 example" if omitted == 1 else f"{omitted} examples"
                ignored = f"drop_last=True of the DataLoader, which omits {examples},"
    elif isinstance(sampler, RandomSampler):
        if sampler.replacement or sampler.num_samples != num_examples:
            how = f"replacement={sampler.replacement}, num_samples={sampler.num_samples}"
            ignored = f"The RandomSampler of the DataLoader ({how})"
    elif _indices(sampler) is None:
        ignored = f"The {type(sampler).__name__} of the DataLoader"
    if ignored:
        warnings.warn(
            f"{ignored} is ignored: each of the N = {num_examples} examples of the data set counts"
            " once in the evidence. To use only a part, pass"
            " torch.utils.data.Subset(dataset, indices).",
            EvigradWarning,
            stacklevel=8,  # the caller of fit
        )


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of examples, or a custom batch sampler that has none."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.sampler
    # Libraries that distribute batches over processes wrap the batch sampler.
    while not hasattr(batches, "sampler") and hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", batches)


def _indices(sampler: Any) -> list[int] | None:
    """Return the indices that a sampler stores, or None if it draws them later."""
    indices = sampler.indices if isinstance(sampler, SubsetRandomSampler) else sampler
    if isinstance(indices, Sequence | np.ndarray | Tensor):
        return [int(index) for index in indices]
    return None


def _num_examples(loader: DataLoader[Any]) -> int:
    return len(loader.dataset)  # pyright: ignore[reportArgumentType]


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()
