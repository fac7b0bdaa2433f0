"""Data sets as the rest of evigrad uses them, how they are split, and how they are scaled."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import ConfigurationError, InputError

Split = tuple[Tensor, Tensor]

# Share of the test set, for data without a split of their own.
TEST_FRACTION = 0.2


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set in memory: n train and t test data, normalised with the train set's statistics.

    Attributes:
        name: The name it was loaded by.
        train: Inputs (n, *input_shape), and targets: labels (n,) int64 for classification, values
            (n, D) for regression.
        test: The same for the test data. Never used for a choice: see ``split_validation``.
        num_outputs: Number of outputs C of a network for it: classes, or target dimensions D, or
            2D for a noise that depends on the input.
        input_shape: Shape of one input.
        likelihood: Name of the likelihood that fits the targets, "categorical" or "gaussian", or
            of regression that a table was loaded for.
        class_names: Words for the classes; empty for regression.
        mean: Subtracted from the inputs, broadcastable to one input: per channel (C, 1, 1) for
            images, per feature (F,) for tables.
        std: Divides the inputs after that, of the shape of ``mean``. A channel or feature that is
            constant over the train set has 1.
        target_mean: Subtracted from the targets, (D,); None for classification and counts.
        target_std: Divides the targets, (D,); None for classification and counts.
    """

    name: str
    train: Split
    test: Split
    num_outputs: int
    input_shape: tuple[int, ...]
    likelihood: str
    class_names: tuple[str, ...]
    mean: Tensor
    std: Tensor
    target_mean: Tensor | None = None
    target_std: Tensor | None = None

    @property
    def is_classification(self) -> bool:
        """Whether the targets are labels."""
        return self.likelihood == "categorical"

    def __repr__(self) -> str:
        """The sizes and shapes in one line, without the tensors."""
        return f"DataSet({self.describe()})"

    def split_validation(self, fraction: float = 0.2, seed: int = 0) -> tuple[Split, Split]:
        """Split the train set, for choices that must not see the test set.

        Stratified by class for classification. The inputs stay normalised with the statistics of
        the whole train set.

        Args:
            fraction: Share of the validation part, strictly between 0 and 1.
            seed: Seed of the split.

        Returns:
            The train and the validation part, each (x, y).

        Raises:
            ConfigurationError: If one of the parts would be empty.
        """
        x, y = self.train
        count = round(fraction * len(x)) if 0 < fraction < 1 else 0
        if not 0 < count < len(x):
            raise ConfigurationError(
                f"fraction={fraction} of {len(x):,} train data leaves a part empty: "
                "choose a fraction between 0 and 1 that gives each part one datum at least"
            )
        if self.is_classification:
            first, second = stratified_split(y.cpu().numpy(), fraction, seed)
        else:
            order = shuffled(len(x), seed)
            first, second = np.sort(order[count:]), np.sort(order[:count])
        train_rows, validation_rows = torch.from_numpy(first), torch.from_numpy(second)
        return (x[train_rows], y[train_rows]), (x[validation_rows], y[validation_rows])

    def with_test_subset(self, count: int, seed: int = 0) -> "DataSet":
        """The same train set with ``count`` test data, drawn at random, for cheaper evaluations."""
        x, y = self.test
        if not 1 <= count <= len(x):
            raise ConfigurationError(
                f"test_subset={count}: {self.name} has {len(x):,} test data, of which 1 or more can"
                " be taken"
            )
        chosen = torch.from_numpy(np.sort(shuffled(len(x), seed)[:count]))
        return replace(self, test=(x[chosen], y[chosen]))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "DataSet":
        """Return a copy on another device, or with inputs, real targets and scales of another type.

        None leaves them; labels stay int64.
        """

        def moved(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(moved, value))
            if not isinstance(value, Tensor):
                return value
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

        return replace(self, **{name: moved(value) for name, value in vars(self).items()})

    def describe(self) -> str:
        """In a line, as ``digits: 1,438 train and 359 test data of shape 1x8x8, 10 classes``."""
        shape = "x".join(map(str, self.input_shape))
        if self.is_classification:
            targets = f"{self.num_outputs} classes"
        else:
            count = self.train[1].shape[1]
            kind = "count" if self.likelihood == "poisson" else "real target"
            targets = f"{count} {kind}" + "s" * (count > 1)
        return (
            f"{self.name}: {len(self.train[0]):,} train and {len(self.test[0]):,} test data "
            f"of shape {shape}, {targets}"
        )


@dataclass(frozen=True, eq=False)
class Scaling:
    """Subtracts a mean and divides by a deviation, column by column.

    Networks and priors are made for inputs and targets of about unit scale. ``Scaling.of(y)`` has
    the statistics of the training targets. Calling it standardises these and others, and ``undo``
    brings predictions back into their units. A log likelihood of standardised targets is larger
    than that of the targets themselves by the sum of log ``std``.

    Attributes:
        mean: Subtracted first, of the shape of one datum.
        std: Divides the rest; 1 for a column that is constant.
    """

    mean: Float[Tensor, "..."]
    std: Float[Tensor, "..."]

    @classmethod
    def of(cls, values: Float[Tensor, "n ..."]) -> "Scaling":
        """The scaling, computed in float64, that gives training data mean 0 and deviation 1."""
        exact = values.double()
        std = exact.std(dim=0, correction=0)
        # Compared exactly: rounding gives a constant column a tiny deviation that is not zero.
        std = torch.where((exact == exact[:1]).all(dim=0), 1.0, std)
        return cls(exact.mean(dim=0).to(values), std.to(values))

    def __call__(self, values: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Standardise values, one datum in each row; the shape stays."""
        return (values - self.mean.to(values)) / self.std.to(values)

    def undo(self, values: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Bring standardised values, as predicted means, back into their own units.

        Args:
            values: Of the shape of the data that the scaling is of; means alone where a network
                has log variances too.

        Returns:
            The values, in the same shape.

        Raises:
            InputError: If they have another shape.
        """
        shape = tuple(self.mean.shape)
        if values.shape[max(0, values.ndim - len(shape)) :] != shape:
            raise InputError(
                f"The scaling is that of data of shape {shape} each, not of values"
                f" {tuple(values.shape)}: of a network with log variances give the means alone."
            )
        return values * self.std.to(values) + self.mean.to(values)


def shuffled(count: int, seed: int) -> np.ndarray:
    """The numbers 0 to ``count - 1`` in a random order, (count,) int64; seeds are below 2^32."""
    if not 0 <= seed < 2**32:
        raise ConfigurationError(f"seed={seed}: it must lie between 0 and 2^32 - 1")
    # RandomState, not default_rng: its stream is frozen by contract, so a split never changes.
    return np.random.RandomState(seed).permutation(count).astype(np.int64)


def draw_subset(count: int, subset: int | None, seed: int) -> np.ndarray:
    """Draw positions uniformly; a smaller subset of a seed is part of a larger one. None: all."""
    if subset is None:
        return np.arange(count, dtype=np.int64)
    if not 1 <= subset <= count:
        raise ConfigurationError(
            f"subset={subset}, but the train set has {count:,} data: choose 1 to {count:,}, "
            "or leave subset out to take all"
        )
    return shuffled(count, seed)[:subset]


def stratified_split(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, ...]:
    """Return the positions of two parts in which every class is represented in proportion.

    The second part has ``round(fraction * n)`` members; where the classes do not divide evenly,
    those with the largest remainders get one more. Each part is in increasing order.
    """
    classes, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shares = fraction * counts
    take = np.floor(shares).astype(np.int64)
    missing = round(fraction * len(labels)) - int(take.sum())
    take[np.argsort(take - shares, kind="stable")[:missing]] += 1
    order = shuffled(len(labels), seed)
    second = np.concatenate(
        [order[inverse[order] == index][: take[index]] for index in range(len(classes))]
    )
    return np.setdiff1d(np.arange(len(labels)), second), np.sort(second)
