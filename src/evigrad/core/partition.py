"""Partitions of examples and outputs into blocks, and random draws of a block.

The index set I contains every pair (example, output). Each pair is a row of the Gram matrix, and
l(X) denotes the log-determinant for the rows in X. There are two ways to draw a block B. Both give
an unbiased estimate of an upper bound on l(I), and thus of a lower bound on the log evidence:

- *Partition mode* draws one of the M blocks of a partition of I uniformly. The estimate is M l(B),
  even if the last blocks are smaller. Its expectation is sum_m l(B_m) >= l(I) (Theorem 2).
- *Subset mode* draws a uniformly random subset of fixed size. The estimate is |I|/|B| l(B). Each
  pair is in B with probability |B|/|I|, so the expectation is at least l(I) (Shearer's inequality).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from evigrad.core.block import Block, padded_columns
from evigrad.core.names import Estimator
from evigrad.core.permutation import WRITTEN, Permutation, permutation
from evigrad.errors import ConfigurationError, InputError


class Partition:
    """The blocks of an estimator for N examples with C outputs.

    All randomness comes from the generators passed to the methods, not from the global state.

    Args:
        spec: The estimator. If SUBSET is a number of rows and exceeds their total number, all rows
            are used.
        num_data: Number of examples, N.
        num_outputs: Number of outputs, C.
        num_rows: Number of rows of an example whose outputs are all in one block. Default: C.

    Attributes:
        rows_per_datum: Number of rows of an example in a block, unless a block is a set of single
            rows.
        num_blocks: Number of blocks in a partition, M.
        splits_outputs: Whether the rows of an example are split over several blocks.

    Raises:
        InputError: If there are no examples or outputs, or SUBSET is a number of examples above N.
        ConfigurationError: If OUTPUTS exceeds C.
    """

    def __init__(
        self, spec: Estimator, num_data: int, num_outputs: int, num_rows: int | None = None
    ) -> None:
        if num_data < 1 or num_outputs < 1:
            raise InputError(
                "An estimate needs at least one example and one output, got"
                f" {num_data} examples and {num_outputs} outputs."
            )
        total = num_data * num_outputs if spec.rows else num_data
        if spec.exceeds(total):
            raise InputError(
                f"'{spec}' needs blocks of {spec.subset} examples, but there are only {total}. "
                "Lower SUBSET, or use N for all examples."
            )
        if spec.curvature == "ggn" and (spec.outputs or 1) > num_outputs:
            raise ConfigurationError(
                f"'{spec}' needs blocks of {spec.outputs} outputs, but the model has only "
                f"{num_outputs}. Lower OUTPUTS, or use C for all outputs."
            )
        self.spec = spec
        self.num_data = num_data
        self.num_outputs = num_outputs
        self._size = min(spec.subset or total, total)
        self._data_groups = -(-total // self._size)  # for `rows`: groups of rows
        # ef and mc have their own rows for each example, so no outputs are split.
        draws_outputs = spec.curvature == "ggn" and (spec.outputs or num_outputs) < num_outputs
        self._width = spec.outputs if draws_outputs else None
        whole = num_outputs if num_rows is None else num_rows
        part_rows = self._width if spec.curvature == "ggn" else spec.outputs
        self.rows_per_datum = part_rows or whole
        self._output_groups = -(-num_outputs // self._width) if self._width else 1
        self.num_blocks = self._data_groups * self._output_groups
        self.splits_outputs = spec.rows or draws_outputs

    @property
    def block_rows(self) -> int:
        """The number of rows in a full block."""
        return self._size if self.spec.rows else self._size * self.rows_per_datum

    def blocks(self, generator: torch.Generator, labels: Tensor | None = None) -> Sequence[Block]:
        """Return the blocks of a random partition in random order, each built when it is read.

        With N examples in groups of m and C outputs in groups of k, there are M = ceil(N/m)
        ceil(C/k) blocks of scale M. This call advances the generator, which must be on the CPU.
        Reading the blocks does not advance it. ``grouped`` estimators need class ``labels`` (N,).
        """
        if self.spec.rows:
            build = self._row_blocks(generator)
        else:
            build = self._grid_blocks(self._data_order(generator, labels), generator)
        return _LazyBlocks(permutation(self.num_blocks, generator), build)

    def _data_order(
        self, generator: torch.Generator, labels: Tensor | None
    ) -> "Permutation | Int[Tensor, ' N']":
        if not self.spec.grouped:
            return permutation(self.num_data, generator)
        if labels is None:
            raise ConfigurationError(
                f"'{self.spec}' fills its blocks class by class, so it needs class labels."
                " Pass labels to blocks()."
            )
        order = torch.randperm(self.num_data, generator=generator, device="cpu")
        classes, codes = class_labels(labels, self.num_data).unique(return_inverse=True)
        rank = torch.randperm(len(classes), generator=generator, device="cpu")
        return order[rank[codes[order]].argsort(stable=True)]

    def _grid_blocks(
        self, order: "Permutation | Int[Tensor, ' N']", generator: torch.Generator
    ) -> Callable[[int], Block]:
        # A seed per group of data replaces its permutations of the outputs, which would take N*C
        # numbers. The blocks of a group agree in whatever order they are built.
        limit = torch.iinfo(torch.int64).max
        few = min(self._data_groups, WRITTEN)
        seeds = torch.randint(limit, (few,), generator=generator, device="cpu")

        def build(number: int) -> Block:
            data_group, output_group = divmod(number, self._output_groups)
            indices = order[data_group * self._size : (data_group + 1) * self._size].clone()
            columns = self._fixed_columns(len(indices))
            if self._width is not None:
                # There may be more groups than seeds. Groups with one seed are WRITTEN apart.
                group_generator = torch.Generator().manual_seed(
                    int(seeds[data_group % few]) ^ data_group // few
                )
                outputs = self._output_orders(len(indices), group_generator)
                first = output_group * self._width
                columns = outputs[:, first : first + self._width].clone()
            weights = torch.full(
                (len(indices),), float(self._data_groups), dtype=torch.float64, device="cpu"
            )
            return Block(indices, columns, float(self.num_blocks), weights)

        return build

    def _row_blocks(self, generator: torch.Generator) -> Callable[[int], Block]:
        order = permutation(self.num_data * self.num_outputs, generator)

        def build(number: int) -> Block:
            pairs = order[number * self._size : (number + 1) * self._size]
            indices, local = (pairs // self.num_outputs).unique(return_inverse=True)
            # Examples with equal numbers of rows go through the network together.
            by_rows = local.bincount().argsort(descending=True, stable=True)
            indices, local = indices[by_rows], by_rows.argsort()[local]
            columns = padded_columns(local, pairs % self.num_outputs, len(indices))
            weights = (columns >= 0).sum(1).double() * self.num_blocks / self.num_outputs
            return Block(indices, columns, float(self.num_blocks), weights)

        return build

    def _output_orders(self, m: int, generator: torch.Generator) -> Int[Tensor, "m C"]:
        """Return random orders of the outputs: one per example if ``iid``, or else one for all."""
        rows = m if self.spec.iid else 1
        keys = torch.rand(
            rows, self.num_outputs, dtype=torch.float64, generator=generator, device="cpu"
        )
        return keys.argsort(dim=1).expand(m, -1)

    def _fixed_columns(self, m: int) -> Int[Tensor, "m k"] | None:
        """Return the columns of curvatures with their own rows for each example."""
        if self.spec.curvature not in ("ef", "mc"):
            return None
        return torch.arange(self.spec.outputs or 1, device="cpu").repeat(m, 1)

    def subset(self, m: int, generator: torch.Generator) -> Block:
        """Return a block of m examples drawn uniformly, with outputs drawn for the block.

        For a batch (x, y) that is already a random subset, only the columns, the scale and the
        weights of the block are used. The indices are not.

        m may differ from the SUBSET in the name. If SUBSET is a number of rows, this many rows are
        drawn from the m*C rows of the examples. Examples without a row then have only -1 in their
        columns. The block has scale |I|/|B| and likelihood weights N/m. Its indices are in random
        order, or 0..N-1 if m = N.
        """
        self._check_subset(m)
        indices = (
            torch.arange(m, device="cpu")
            if m == self.num_data
            else choose_distinct(self.num_data, m, generator)
        )
        if self.spec.rows:
            return self._subset_block(
                indices,
                self._row_columns(choose_distinct(m * self.num_outputs, self._size, generator), m),
            )
        columns = self._fixed_columns(m)
        if self._width is not None:
            columns = self._output_orders(m, generator)[:, : self._width].clone()
        return self._subset_block(indices, columns)

    def _row_columns(self, pairs: Int[Tensor, " r"], m: int) -> Int[Tensor, "m k"]:
        return padded_columns(pairs // self.num_outputs, pairs % self.num_outputs, m)

    def _subset_block(
        self, indices: Int[Tensor, " m"], columns: Int[Tensor, "m k"] | None
    ) -> Block:
        m = len(indices)
        scale = self.num_data / m
        if self.spec.rows:
            scale = self.num_data * self.num_outputs / self._size
        elif self._width is not None:
            scale = self.num_data * self.num_outputs / (m * self._width)
        weights = torch.full((m,), self.num_data / m, dtype=torch.float64, device="cpu")
        return Block(indices, columns, scale, weights)

    def _check_subset(self, m: int) -> None:
        if self.spec.grouped:
            raise ConfigurationError(
                f"The blocks of '{self.spec}' are not random subsets of the data. Take them from "
                "blocks(), or omit 'grouped'."
            )
        if not 1 <= m <= self.num_data:
            raise InputError(
                f"A subset must contain between 1 and {self.num_data} examples, got {m}."
            )
        if self.spec.subset is None and m < self.num_data:
            raise InputError(
                f"'{self.spec}' needs all {self.num_data} examples, got {m}. For subsets of {m}, "
                f"use '{replace(self.spec, subset=m)}'."
            )
        if self.spec.rows and self._size > m * self.num_outputs:
            raise InputError(
                f"'{self.spec}' draws {self._size} rows, but {m} examples with {self.num_outputs} "
                f"outputs have only {m * self.num_outputs}. Pass at least "
                f"{-(-self._size // self.num_outputs)} examples, or lower SUBSET."
            )


class _LazyBlocks(Sequence[Block]):
    """Blocks that are built as they are read."""

    def __init__(
        self, order: "Permutation | Int[Tensor, ' M']", build: Callable[[int], Block]
    ) -> None:
        self._order, self._build = order, build

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._build(number) for number in self._order[index].tolist()]
        return self._build(int(self._order[index]))


def class_labels(targets: Tensor, num_data: int) -> Int[Tensor, " N"]:
    """Return targets as int64 labels (N,) on the CPU, or raise an error if they are not labels."""
    if targets.shape != (num_data,):
        raise InputError(
            f"Class labels must have the shape ({num_data},), got {tuple(targets.shape)}. "
            "Pass one label per example."
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise InputError(
            f"Class labels must be integers, got {targets.dtype}. If these numbers are classes, "
            "convert them with .long()."
        )
    return targets.detach().to("cpu", torch.int64)


def choose_distinct(n: int, size: int, generator: torch.Generator) -> Int[Tensor, " size"]:
    """Return ``size`` distinct integers from 0 to n − 1, with equal probability for each choice."""
    if 4 * size > n:
        return torch.randperm(n, generator=generator, device="cpu")[:size].clone()
    # Skip repetitions, because a permutation of all n would take a pass over the data set.
    chosen: dict[int, None] = {}
    while len(chosen) < size:
        chosen.update(
            dict.fromkeys(torch.randint(n, (size,), generator=generator, device="cpu").tolist())
        )
    return torch.tensor(list(chosen)[:size], device="cpu")
