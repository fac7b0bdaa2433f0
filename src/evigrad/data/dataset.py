"""Data sets, with functions that split and scale them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods.targets import as_numbers

# Likelihoods whose targets are counts, which are not standardized.
COUNTS = ("poisson", "negative-binomial")

Split = tuple[Tensor, Tensor]

# Share of the test set, for data without their own split.
TEST_FRACTION = 0.2


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set in memory, normalized with the statistics of the training examples.

    Images with raw pixels are not normalized: ``mean`` is 0 and ``std`` is 1.

    Attributes:
        name: Name by which the data set was loaded.
        train: Inputs (n, *input_shape) and targets. Targets are int64 labels (n,) for
            classification, and numbers (n, D) for regression.
        test: Test data in the same format. Do not use them to choose models or settings. For
            choices, use ``split_validation``.
        num_outputs: Number of outputs C of a network for these data. It is the number of classes,
            the target dimension D, or 2D for input-dependent noise.
        input_shape: Shape of one input.
        likelihood: Name of the likelihood of the targets: "categorical", "gaussian", or the
            likelihood for which a table was loaded.
        class_names: Names of the classes. Empty for regression.
        mean: Mean that was subtracted from the inputs, broadcastable to one input: per channel
            (C, 1, 1) for images, per feature (F,) for tables.
        std: Standard deviation that the inputs were divided by, in the shape of ``mean``. It is 1
            for a channel or feature that is constant over the training set.
        target_mean: Mean that was subtracted from the targets, (D,). None for classification and
            counts.
        target_std: Standard deviation that the targets were divided by, (D,). None for
            classification and counts.

    See also: docs/fit.md.
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
        """Return whether the targets are labels."""
        return self.likelihood == "categorical"

    def __repr__(self) -> str:
        """Return the sizes and shapes in one line, without the tensors."""
        return f"DataSet({self.describe()})"

    def split_validation(self, fraction: float = 0.2, seed: int = 0) -> tuple[Split, Split]:
        """Split the training set into a training part and a validation part.

        Choose models and settings on the validation part, because choices must not use the test
        set. For classification, the split is stratified by class. The inputs stay normalized with
        the statistics of the whole training set.

        Args:
            fraction: Share of the validation part, between 0 and 1. Default: 0.2.
            seed: Seed of the split.

        Returns:
            The training part and the validation part, each (x, y).

        Raises:
            ConfigurationError: If one of the parts would be empty.
        """
        x, y = self.train
        count = round(fraction * len(x)) if 0 < fraction < 1 else 0
        if not 0 < count < len(x):
            raise ConfigurationError(
                f"fraction must be between 0 and 1 and leave at least one example in each part, got"
                f" {fraction} for {len(x):,} training examples."
            )
        if self.is_classification:
            first, second = stratified_split(y.cpu().numpy(), fraction, seed)
        else:
            order = shuffled(len(x), seed)
            first, second = np.sort(order[count:]), np.sort(order[:count])
        train_rows, validation_rows = torch.from_numpy(first), torch.from_numpy(second)
        return (x[train_rows], y[train_rows]), (x[validation_rows], y[validation_rows])

    def with_test_subset(self, count: int, seed: int = 0) -> "DataSet":
        """Return the data set with only ``count`` random test examples, for faster evaluations."""
        x, y = self.test
        if not 1 <= count <= len(x):
            raise ConfigurationError(
                f"test_subset must be between 1 and {len(x):,}, the number of test examples of"
                f" {self.name}, got {count}."
            )
        chosen = torch.from_numpy(np.sort(shuffled(len(x), seed)[:count]))
        return replace(self, test=(x[chosen], y[chosen]))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "DataSet":
        """Return a copy on another device, or with another floating-point type.

        None leaves the device or the type unchanged. Labels stay int64.
        """

        def moved(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(moved, value))
            if not isinstance(value, Tensor):
                return value
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

        return replace(self, **{name: moved(value) for name, value in vars(self).items()})

    def describe(self) -> str:
        """Return a line such as ``digits: 1,438 train and 359 test examples of shape ...``."""
        shape = "x".join(map(str, self.input_shape))
        if self.is_classification:
            targets = f"{self.num_outputs} classes"
        else:
            count = self.train[1].shape[1]
            kind = "count" if self.likelihood in COUNTS else "real target"
            targets = f"{count} {kind}" + "s" * (count > 1)
        return (
            f"{self.name}: {len(self.train[0]):,} train and {len(self.test[0]):,} test examples "
            f"of shape {shape}, {targets}"
        )


@dataclass(frozen=True, eq=False)
class Scaling:
    """Standardize values: subtract a mean and divide by a standard deviation, column by column.

    Networks and priors expect inputs and targets of about unit scale. ``Scaling.of(y)`` computes
    the statistics of the training targets. Call the scaling to standardize targets, and ``undo`` to
    convert predictions back. For each example, the log likelihood of the standardized targets
    exceeds the log likelihood of the original targets by the sum of log ``std``.

    Attributes:
        mean: Mean to subtract, in the shape of one example.
        std: Standard deviation to divide by. It is 1 for a constant column.

    Examples:
        >>> import torch
        >>> from evigrad.data import Scaling
        >>> y = torch.tensor([[1.0], [3.0]])
        >>> scaling = Scaling.of(y)
        >>> scaling(y).flatten().tolist(), scaling.undo(scaling(y)).flatten().tolist()
        ([-1.0, 1.0], [1.0, 3.0])

    See also: docs/fit.md.
    """

    mean: Float[Tensor, "..."]
    std: Float[Tensor, "..."]

    @classmethod
    def of(cls, values: Float[Tensor, "n ..."] | np.ndarray) -> "Scaling":
        """Return the scaling that standardizes these values, apart from missing ones (NaN).

        Statistics are computed in float64.
        """
        values = as_numbers(values)
        exact = values.double()
        missing = exact.isnan()
        if bool(missing.any()):
            mean = exact.nanmean(dim=0)
            std = (exact - mean).square().nanmean(dim=0).sqrt()
        else:
            mean, std = exact.mean(dim=0), exact.std(dim=0, correction=0)
        # Compared exactly, because rounding gives a constant column a tiny nonzero deviation.
        least = torch.where(missing, torch.inf, exact).amin(dim=0)
        most = torch.where(missing, -torch.inf, exact).amax(dim=0)
        std = torch.where(least >= most, 1.0, std)
        return cls(mean.to(values), std.to(values))

    def __call__(self, values: Float[Tensor, "n ..."] | np.ndarray) -> Float[Tensor, "n ..."]:
        """Return standardized values, one example per row, in the same shape."""
        values = as_numbers(values)
        return (values - self.mean.to(values)) / self.std.to(values)

    def undo(self, values: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Return standardized values, such as predicted means, in their original units.

        Args:
            values: Values in the shape of the scaled data. If a network also predicts log
                variances, pass only the means.

        Returns:
            The values, in the same shape.

        Raises:
            InputError: If the values have another shape.
        """
        shape = tuple(self.mean.shape)
        if values.shape[max(0, values.ndim - len(shape)) :] != shape:
            raise InputError(
                f"values must have the shape {shape} per example, got {tuple(values.shape)}. If the"
                " network also predicts log variances, pass only the means."
            )
        return values * self.std.to(values) + self.mean.to(values)


def shuffled(count: int, seed: int) -> np.ndarray:
    """Return the integers 0 to ``count - 1`` in random order. The seed must be below 2^32."""
    if not 0 <= seed < 2**32:
        raise ConfigurationError(f"seed must be between 0 and 2^32 - 1, got {seed}.")
    # RandomState, not default_rng: its stream is frozen by contract, so a split never changes.
    return np.random.RandomState(seed).permutation(count).astype(np.int64)


def draw_subset(count: int, subset: int | None, seed: int) -> np.ndarray:
    """Return ``subset`` of ``count`` positions, drawn uniformly, or all if ``subset`` is None."""
    if subset is None:
        return np.arange(count, dtype=np.int64)
    if not 1 <= subset <= count:
        raise ConfigurationError(
            f"subset must be between 1 and {count:,}, the number of training examples, got"
            f" {subset}. Omit subset to use all examples."
        )
    return shuffled(count, seed)[:subset]


def stratified_split(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, ...]:
    """Return the positions of two parts, in which each class has about the same proportion.

    The second part has ``round(fraction * n)`` members. If a class does not divide evenly, its
    number of members in this part is rounded up or down. The positions in each part are sorted.
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
