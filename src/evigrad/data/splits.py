"""Random choices that never change between versions: subsets and stratified splits."""

import numpy as np

from evigrad.errors import ConfigurationError

# Share of the test set, for data without a split of their own.
TEST_FRACTION = 0.2


def shuffled(count: int, seed: int) -> np.ndarray:
    """The numbers 0 to ``count - 1`` in a random order, int64; the seed is 0 to 2^32 - 1.

    Returns:
        Shape (count,).

    Raises:
        ConfigurationError: If the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise ConfigurationError(f"seed={seed}: it must lie between 0 and 2^32 - 1")
    # RandomState, not default_rng: its stream is frozen by contract, so a split never changes.
    return np.random.RandomState(seed).permutation(count).astype(np.int64)


def draw_subset(count: int, subset: int | None, seed: int) -> np.ndarray:
    """Positions of a uniformly random subset; a smaller subset of a seed is part of a larger one.

    Args:
        count: Number of data to draw from.
        subset: Number of data to draw; None takes all, in their own order.
        seed: Seed of the draw.

    Returns:
        Shape (subset,), int64, distinct.

    Raises:
        ConfigurationError: If ``subset`` is below 1 or above ``count``.
    """
    if subset is None:
        return np.arange(count, dtype=np.int64)
    if not 1 <= subset <= count:
        raise ConfigurationError(
            f"subset={subset}, but the train set has {count:,} data: choose 1 to {count:,}, "
            "or leave subset out to take all"
        )
    return shuffled(count, seed)[:subset]


def stratified_split(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, ...]:
    """Split positions in two so that every class is represented in proportion.

    The second part has ``round(fraction * n)`` members; where the classes do not divide evenly,
    those with the largest remainders get one more.

    Args:
        labels: Class of each datum, shape (n,).
        fraction: Share of the second part, strictly between 0 and 1.
        seed: Seed of the draw.

    Returns:
        Positions of the first and of the second part, each in increasing order.
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
