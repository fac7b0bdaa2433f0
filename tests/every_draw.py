"""Every draw of a tiny case, for claims about expectations."""

from collections.abc import Iterator
from itertools import combinations, product

import torch
from torch import Tensor

from evigrad.blocks import Block
from evigrad.core.partition import Partition


def every_subset(partition: Partition, m: int) -> Iterator[Block]:
    """Every block that ``partition.subset(m, ...)`` can return, equally likely."""
    for indices in combinations(range(partition.num_data), m):
        for columns in _every_columns(partition, m):
            yield partition._subset_block(torch.tensor(indices), columns)


def _every_columns(partition: Partition, m: int) -> Iterator[Tensor | None]:
    if partition.spec.rows:
        for pairs in combinations(range(m * partition.num_outputs), partition._size):
            yield partition._row_columns(torch.tensor(pairs), m)
    elif partition._width is None:
        yield partition._fixed_columns(m)
    else:
        choices = list(combinations(range(partition.num_outputs), partition._width))
        if partition.spec.iid:
            yield from map(torch.tensor, product(choices, repeat=m))
        else:
            for choice in choices:
                yield torch.tensor(choice).repeat(m, 1)
