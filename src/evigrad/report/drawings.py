"""The figures of a report, and the facts in their captions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from evigrad.plots import Palette
from evigrad.plots.runs import (
    PRECISION,
    PRECISION_UNIT,
    QUANTITIES,
    WIDTH,
    Quantity,
    quantity_curves,
    value_paths,
)
from evigrad.plots.style import number
from evigrad.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Replaces a missing value.
NOTHING = "–"


@dataclass(frozen=True)
class Drawing:
    """A figure, the ``name`` of its file, and the facts in its caption."""

    name: str
    title: str  # for readers who cannot see the figure
    kind: str  # which caption of the page's template it has
    facts: Any  # what the caption says besides its sentence
    make: "Callable[[Palette], Figure]"


def show(value: object, factor: float = 1.0, digits: int = 0) -> str:
    """Return any value as a short text. A dash replaces None and numbers that are not finite.

    ``factor`` multiplies a number. ``digits`` is the number of decimals, or 0 for three significant
    digits.
    """
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and factor == 1.0:
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, int | float):
        value = factor * value
        if not math.isfinite(value):
            return NOTHING
        text = f"{value:.{digits}f}" if digits else number(value)
        return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {show(part)}" for key, part in value.items()) or NOTHING
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(show, value)) or NOTHING
    return str(value)


def curves(runs: Sequence[Run]) -> list[Drawing]:
    """Return learning curves of all runs, with one figure for each recorded quantity."""
    histories = {run.label: run.history for run in runs}
    drawings = []
    for name, quantity in QUANTITIES.items():
        if not quantity.values(histories):
            continue
        columns = quantity.columns.values()
        facts = {
            "ends": {run.label: ends for run in runs if (ends := _last_values(run, quantity))},
            "is_cut": quantity.limits(histories) is not None,
            "has_errors": any(run.values(f"{column}_sem") for run in runs for column in columns),
            "is_once": "test" in quantity.columns
            and max(len(run.values(column)) for run in runs for column in columns) == 1,
        }
        make = partial(quantity_curves, histories, quantity)
        drawings.append(Drawing(name, quantity.title, name, facts, make))
    return drawings


def _last_values(run: Run, quantity: Quantity) -> str:
    """Return the last value of each kind of line, such as ``test 97.00 %, train 99.00 %``."""
    digits, unit = (2, " %") if quantity.factor == 100 else (0, "")
    values = {kind: run.last(column) for kind, column in quantity.columns.items()}
    return ", ".join(
        (f"{kind} " if len(values) > 1 else "") + show(value, quantity.factor, digits) + unit
        for kind, value in values.items()
        if value is not None
    )


@dataclass(frozen=True)
class Group:
    """Hyperparameters of a run that share a figure."""

    run: Run
    kind: str  # name of the figure's file, and of its caption in the page's template
    columns: Mapping[str, str]  # from the name of each to its column of the metrics, with a value
    title: str
    unit: str
    show: Callable[[float], str] = show  # a value in words
    options: Mapping[str, Any] = field(default_factory=dict)  # more for ``value_paths``

    @property
    def is_learned(self) -> bool:
        """Return whether any of the hyperparameters changes over the epochs."""
        return any(len({*self.run.values(column)}) > 1 for column in self.columns.values())

    @property
    def ends(self) -> dict[str, tuple[str, str]]:
        """Return each hyperparameter's first and last value as text, sorted by the last value."""
        values = {name: self.run.values(column) for name, column in self.columns.items()}
        names = sorted(values, key=lambda name: values[name][-1])
        return {name: (self.show(values[name][0]), self.show(values[name][-1])) for name in names}

    def drawing(self) -> Drawing:
        """Return the figure of the hyperparameters over the epochs."""
        title = self.run.titled(self.title)

        def make(palette: Palette) -> "Figure":
            path = (self.run.history, self.columns, title, self.unit)
            return value_paths(*path, palette=palette, **self.options)

        return Drawing(self.kind + self.run.suffix, title, self.kind, self, make)


# The units of `evigrad.invariances.AffineInvariance`: u · range with u uniform on ±1 is an angle in
# radians, a share of half a side, or the logarithm of a factor.
_RANGES: dict[str, dict[str, Any]] = {
    "range-rotation": {
        "title": "rotation",
        "unit": "largest angle (radians)",
        "show": lambda angle: f"±{show(angle)} rad (±{show(math.degrees(angle))}°)",
        "options": {"floor": 0.0, "in_degrees": True},
    },
    "range-translation": {
        "title": "translation",
        "unit": "largest shift (part of half the side)",
        "show": lambda shift: f"±{show(shift)} of half the side",
        "options": {"floor": 0.0},
    },
    "range-scale": {
        "title": "scaling and shear",
        "unit": "largest factor",
        "show": lambda logarithm: f"factor up to {show(math.exp(logarithm))}",
        "options": {"floor": 1.0, "change": math.exp},
    },
    "range-other": {"title": "ranges of the transform", "unit": "range"},
}
_KINDS = {
    "rotation": "range-rotation",
    **dict.fromkeys(("translation_x", "translation_y"), "range-translation"),
    **dict.fromkeys(("scale_x", "scale_y", "shear"), "range-scale"),
}


def hyperparameters(run: Run) -> list[Group]:
    """Return the hyperparameters of a run in groups, such as prior, noise and ranges.

    Learned and fixed ranges of transforms are in separate groups. Ranges that are zero in all
    epochs and empty groups are omitted.
    """
    prior = {"log": True, "size": (WIDTH, 4.0)}
    noise = {
        f"noise of output {name.removeprefix('/')}" if name else "noise": column
        for name, column in run.columns("noise").items()
    }
    ranges: dict[tuple[str, bool], dict[str, str]] = {}
    for name, column in run.columns("range/").items():
        values = {*run.values(column)}
        if any(values):
            kind = _KINDS.get(name.rpartition(".")[2], "range-other")
            ranges.setdefault((kind, len(values) > 1), {})[name] = column
    precisions, others = run.columns(PRECISION), run.columns("model/")
    likelihood = run.columns("likelihood/")
    groups = [
        Group(run, "prior_precision", precisions, "prior precision", PRECISION_UNIT, options=prior),
        Group(run, "noise", noise, "observation noise", "scale of the noise"),
        Group(run, "likelihood", likelihood, "parameters of the likelihood", "value"),
        *[Group(run, kind, columns, **_RANGES[kind]) for (kind, _), columns in ranges.items()],
        Group(run, "model", others, "hyperparameters of the network", "value or norm"),
    ]
    return [group for group in groups if group.columns]
