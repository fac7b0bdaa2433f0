"""Options of an invariance: what is transformed, how far, and over how many samples."""

import math
from dataclasses import dataclass
from typing import Any

from evigrad.errors import ConfigurationError, nearest
from evigrad.invariances import GENERATORS, AffineInvariance
from evigrad.invariances.affine import LIMITS

# Instead of names: all generators. Instead of a range: its limit.
EVERYTHING = "affine"
LIMIT = "max"


@dataclass(frozen=True)
class Invariance:
    """An average over affine transforms that a network can be wrapped in.

    Attributes:
        ranges: Initial ranges by generator; may be empty where images are flipped.
        learn: Whether the ranges are learned.
        flip: Whether images are mirrored at random.
        samples: Transforms of each input.
        average: ``logits`` or ``probabilities``.
    """

    ranges: dict[str, float]
    learn: bool
    flip: bool
    samples: int
    average: str

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Names of the learned hyperparameters in a wrapped network."""
        return ("invariance",) if self.learn and self.ranges else ()

    def as_record(self, fill: list[float]) -> dict[str, Any]:
        """The ``invariance`` of ``make_network``'s record; ``fill`` colours what lies outside."""
        transform = {"ranges": self.ranges, "learn": self.learn, "flip": self.flip, "fill": fill}
        return {"transform": transform, "num_samples": self.samples, "average": self.average}

    def describe(self) -> str:
        """The transforms in words, as a part of a sentence."""
        names = "all affine maps" if len(self.ranges) == len(GENERATORS) else ", ".join(self.ranges)
        what = " and ".join(part for part in (names, "flips" if self.flip else "") if part)
        return f"averaged over {self.samples} samples of {what}"


def read_invariance(
    text: str | None, initial: float, learn: bool, flip: bool, samples: int, average: str
) -> Invariance | None:
    """The invariance that options ask for.

    Args:
        text: ``affine``, or names of generators, each maybe with ``=`` and its range.
        initial: Range of generators without one.
        learn: Whether the ranges are learned.
        flip: Whether images are mirrored at random.
        samples: Transforms of each input.
        average: ``logits`` or ``probabilities``.

    Returns:
        The invariance, or None where none is asked for.

    Raises:
        ConfigurationError: If a name or a range does not exist.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not parts and not flip:
        return None
    ranges: dict[str, float] = {}
    for part in parts:
        name, given, value = part.partition("=")
        names = GENERATORS if name == EVERYTHING else (name,)
        for each in names:
            if each not in GENERATORS:
                known = [EVERYTHING, *GENERATORS]
                raise ConfigurationError(
                    f"--invariance: there is no '{each}'.{nearest(each, known)} Choose of"
                    f" {', '.join(known)}."
                )
            ranges[each] = _range(each, value) if given else initial
    if samples < 1:
        raise ConfigurationError(f"--samples: give at least 1, not {samples}.")
    found = Invariance(ranges, learn, flip, samples, average)
    AffineInvariance(found.ranges)  # refuses ranges beyond their limits
    return found


def _range(name: str, text: str) -> float:
    if text.strip() == LIMIT:
        return LIMITS[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigurationError(
            f"--invariance: the range of {name} is a number or {LIMIT}, not '{text}'."
        )
    return value
