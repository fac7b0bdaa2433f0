"""When the hyperparameters are learned, and the learning rates over a run."""

import math


def cosine(progress: float, start: float, end: float) -> float:
    """A cosine from ``start`` to ``end``.

    Args:
        progress: Where in the run, from 0 to 1.
        start: Value at 0.
        end: Value at 1.

    Returns:
        The value at ``progress``.
    """
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * progress))


def is_round(epoch: int, burn_in: int, every: int) -> bool:
    """Whether hyperparameter steps follow an epoch.

    They follow the last epoch of the burn-in and every ``every``-th epoch from there, as in the
    paper's schedule: with a burn-in of 10 and every 5 epochs, epochs 10, 15, 20, ...

    Args:
        epoch: The epoch, from 1.
        burn_in: Epochs of the weights alone.
        every: Epochs from one round of hyperparameter steps to the next.

    Returns:
        True where a round of hyperparameter steps follows.
    """
    return epoch >= burn_in and (epoch - burn_in) % every == 0


def count_rounds(epochs: int, burn_in: int, every: int) -> int:
    """The number of rounds of hyperparameter steps in a run.

    Args:
        epochs: Epochs in all.
        burn_in: Epochs of the weights alone.
        every: Epochs from one round to the next.

    Returns:
        The number of epochs for which ``is_round`` is true.
    """
    return sum(is_round(epoch, burn_in, every) for epoch in range(1, epochs + 1))
