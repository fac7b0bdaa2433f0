"""The estimators that ``auto`` chooses from, by size, and what measures them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Candidate:
    """An estimator that may be chosen.

    Attributes:
        name: Of the estimator.
        share: The part of its rows that are anchors; None where it has none.
        root: Its root; None for the estimator's own.
        is_bound: Whether the expectation of its log evidence is a lower bound on the exact one.
        is_exact: Whether every draw is the exact number.
    """

    name: str
    share: float | None = None
    root: str | None = None
    is_bound: bool = True
    is_exact: bool = False


@dataclass(frozen=True)
class Family:
    """Estimators that differ in their size alone.

    Attributes:
        make: The estimator of a size.
        first: The size to begin with.
        largest: The size that takes all there is.
        rounded: The next lower size that is worth having, of any.
        sharing: How much less a step of the largest size costs than in proportion to those below,
            as the steps of a round share the one pass of it; 1 where each has its own.
        variants: Others, tried at the size that was found, or at less where they take longer.
    """

    make: Callable[[int], Candidate]
    first: int
    largest: int
    rounded: Callable[[int], int] = field(default=lambda size: two_digits(size))
    sharing: float = 1.0
    variants: Sequence[Callable[[int], Candidate]] = ()


@dataclass(frozen=True)
class Draws:
    """Some draws of an estimator.

    Attributes:
        values: Estimates of the log-determinant of all the data, in nats.
        lower: The largest lower bound on the exact one that they prove, or None.
    """

    values: list[float]
    lower: float | None = None


@runtime_checkable
class Meter(Protocol):
    """Measures estimators on the network at hand."""

    def seconds(self, candidate: Candidate) -> float | str:
        """Time of a hyperparameter step, or why the estimator cannot be used."""
        ...

    def draws(self, candidate: Candidate, count: int) -> Draws:
        """The next draws of its log-determinant."""
        ...

    def elapsed(self) -> float:
        """Seconds since the search began."""
        ...


def two_digits(size: int) -> int:
    """A number that is easily named, not above the given one.

    Args:
        size: Any size; at least 1 is returned.

    Returns:
        Its first two digits, and zeros.
    """
    unit = 10 ** max(0, len(str(size)) - 2)
    return max(1, size // unit * unit)


def even(size: int, total: int) -> int:
    """The size of blocks that are about the same, as a small last one makes a bound noisy.

    Args:
        size: Of a block, at most.
        total: Of all blocks together.

    Returns:
        The least size for as few blocks.
    """
    return -(-total // -(-total // size))
