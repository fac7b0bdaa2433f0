"""Figures of the ranges of learned invariances, in familiar units."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from evigrad.plots import series
from evigrad.report.content import Drawing, listed, show
from evigrad.report.curves import rotation_path, value_paths
from evigrad.report.records import Record

PREFIX = "range/"


@dataclass(frozen=True)
class Kind:
    """Ranges that share a figure.

    Attributes:
        name: Name of the figure's file.
        title: Title of the figure.
        unit: Label of its axis.
        sentence: What the figure shows.
        lines: From the transform's name of each range to the word beside its line.
        change: From a range to the value in the figure.
        floor: The value of a zero range, if the axis is to start there.
        words: The value in a sentence or a table.
    """

    name: str
    title: str
    unit: str
    sentence: str
    lines: Mapping[str, str]
    change: Callable[[float], float]
    floor: float | None
    words: Callable[[float], str]


# The units of `evigrad.invariances.AffineInvariance`: u · range with u uniform on ±1 is an angle in
# radians, a share of half a side, or the logarithm of a factor.
ROTATION = Kind(
    name="rotation",
    title="rotation",
    unit="largest angle (radians)",
    sentence="Inputs are rotated by random angles, uniform between minus and plus this one.",
    lines={"rotation": "rotation"},
    change=float,
    floor=0.0,
    words=lambda angle: f"±{show(angle)} rad (±{show(math.degrees(angle))}°)",
)
TRANSLATION = Kind(
    name="translation",
    title="translation",
    unit="largest shift (part of half the side)",
    sentence=(
        "Inputs are moved by random shifts, uniform between minus and plus this one; 1 is half the"
        " image's width (x) or height (y)."
    ),
    lines={"translation_x": "x", "translation_y": "y"},
    change=float,
    floor=0.0,
    words=lambda shift: f"±{show(shift)} of half the side",
)
SCALE = Kind(
    name="scale",
    title="scaling and shear",
    unit="largest factor",
    sentence=(
        "Inputs are stretched by random factors between 1 over this one and this one (shear: along"
        " one diagonal); at 1 they are left as they are."
    ),
    lines={"scale_x": "x", "scale_y": "y", "shear": "shear"},
    change=math.exp,
    floor=1.0,
    words=lambda logarithm: f"factor up to {show(math.exp(logarithm))}",
)
OTHER = Kind(
    name="other",
    title="ranges of the transform",
    unit="range",
    sentence="Ranges of the random transform, in its own units.",
    lines={},
    change=float,
    floor=None,
    words=show,
)
_KINDS = (ROTATION, TRANSLATION, SCALE)


@dataclass(frozen=True)
class Range:
    """A range of a random transform.

    Attributes:
        name: Name in the metrics.
        column: Column of the metrics.
        kind: The figure that it belongs to.
        first: Value at the first epoch.
        last: Value at the last epoch.
    """

    name: str
    column: str
    kind: Kind
    first: float
    last: float

    @property
    def word(self) -> str:
        """The label of its line; a transform that is one of several keeps its own name."""
        place, _, name = self.name.rpartition(".")
        word = self.kind.lines.get(name, name)
        return f"{place}.{word}" if place else word


def used_ranges(record: Record) -> list[Range]:
    """The ranges of a run that are not zero in every epoch: those of transforms that it uses."""
    found = []
    for name, column in record.columns(PREFIX).items():
        values = series(record.history, column)[1]
        short = name.rpartition(".")[2]
        kind = next((kind for kind in _KINDS if short in kind.lines), OTHER)
        if any(values):
            found.append(Range(name, column, kind, values[0], values[-1]))
    return found


def range_drawings(record: Record, suffix: str = "", of: str = "") -> list[Drawing]:
    """Figures of the ranges that change, one for each kind.

    Args:
        record: The run.
        suffix: End of the files' names.
        of: End of the titles.

    Returns:
        The figures.
    """
    drawings = []
    changing = [each for each in used_ranges(record) if record.changes([each.column])]
    for kind in (*_KINDS, OTHER):
        members = [each for each in changing if each.kind is kind]
        # A figure with two vertical axes has room for one line.
        groups = [[each] for each in members] if kind is ROTATION else [members] if members else []
        for count, group in enumerate(groups, start=1):
            number = f"-{count}" if len(groups) > 1 else ""
            drawings.append(_drawing(record, kind, group, number + suffix, of))
    return drawings


def _drawing(record: Record, kind: Kind, members: Sequence[Range], suffix: str, of: str) -> Drawing:
    history, title = record.history, f"{kind.title}{of}"
    if kind is ROTATION:
        make = partial(rotation_path, history, members[0].column, title)
        names = [""]
    else:
        columns = {each.word: each.column for each in members}
        make = partial(value_paths, history, columns, title, kind.unit, kind.change, kind.floor)
        names = [f"{word} " for word in columns]
    ends, starts = (
        listed([f"{name}{kind.words(value)}" for name, value in zip(names, values, strict=True)])
        for values in ([each.last for each in members], [each.first for each in members])
    )
    return Drawing(
        name=f"range-{kind.name}{suffix}",
        title=title,
        sentence=f"{kind.sentence} After epoch {record.epochs}: {ends}; after the first: {starts}.",
        make=lambda palette: make(palette=palette),
    )
