from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from evigrad.blocks.sources import as_source
from evigrad.errors import EvigradWarning, InputError
from evigrad.hosted import as_pair, loader_of_pairs

N = 7
DATA = TensorDataset(torch.arange(N)[:, None].float(), torch.arange(N))


class Custom(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


class Batches(Sampler[list[int]]):
    """Has as many batches as there are examples."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1]] * N)

    def __len__(self) -> int:
        return N


OTHER_DATA: list[tuple[str, dict[str, Any]]] = [
    ("SubsetRandomSampler .* draws 3 indices", {"sampler": SubsetRandomSampler([0, 3, 5])}),
    ("SubsetRandomSampler .* draws 7 indices", {"sampler": SubsetRandomSampler([0] * N)}),
    ("draws examples by weights", {"sampler": WeightedRandomSampler([1.0] * N, N)}),
    ("RandomSampler .* draws 3 examples", {"sampler": RandomSampler(DATA, num_samples=3)}),
    (
        "RandomSampler .* draws 3 examples",
        {"sampler": RandomSampler(DATA, replacement=True, num_samples=3)},
    ),
    ("list .* draws 2 indices", {"sampler": [0, 1]}),
    ("Custom .* draws 5 examples", {"sampler": Custom(5)}),
    (
        "SubsetRandomSampler .* draws 4 indices",
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(4)), 2, drop_last=True)},
    ),
]


@pytest.mark.parametrize(("words", "how"), OTHER_DATA)
def test_samplers_of_other_data_are_refused(words: str, how: dict[str, Any]) -> None:
    loader = DataLoader(DATA, **how)
    expected = f"{words}.*N = {N} examples.*torch.utils.data.Subset"
    with pytest.raises(InputError, match=expected):
        as_source(loader)
    with pytest.raises(InputError, match=expected):  # callbacks of other trainers
        loader_of_pairs(loader, as_pair)


@pytest.mark.parametrize(
    "how",
    [
        {"shuffle": True},
        {"shuffle": True, "batch_size": 2, "drop_last": True},
        {"batch_size": N, "drop_last": True},
        {"sampler": SubsetRandomSampler(range(N))},
        {"sampler": list(range(N))[::-1]},
        {"sampler": np.arange(N)},
    ],
)
def test_orders_of_all_data_are_accepted(how: dict[str, Any]) -> None:
    assert len(as_source(DataLoader(DATA, **how))) == N


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("The Custom of the DataLoader", {"sampler": Custom(N)}),
        ("The Batches of the DataLoader", {"batch_sampler": Batches()}),
        ("DistributedSampler", {"sampler": DistributedSampler(DATA, 2, 0)}),
        ("replacement=True", {"sampler": RandomSampler(DATA, replacement=True)}),
        (
            "replacement=True, num_samples=21",
            {"sampler": RandomSampler(DATA, replacement=True, num_samples=3 * N)},
        ),
        ("num_samples=21", {"sampler": RandomSampler(DATA, num_samples=3 * N)}),
        ("drop_last=True .* omits 1 example,", {"batch_size": 2, "drop_last": True}),
    ],
)
def test_orders_that_may_mean_other_data_are_ignored_with_a_warning(
    words: str, how: dict[str, Any]
) -> None:
    with pytest.warns(EvigradWarning, match=f"{words}.* is ignored: each of the N = {N} examples"):
        assert len(as_source(DataLoader(DATA, **how))) == N
