"""Colours, dashes and markers of what figures show: told apart in print and by the colour-blind."""

import math
import re
from collections.abc import Sequence
from typing import Any

from evigrad.experiments.cases import Row
from evigrad.experiments.definition import Experiment
from evigrad.plots import DASHES, LIGHT

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


class Styles:
    """A colour, a dash and a marker for each name, the same in all panels.

    What the file calls ``reference`` is black; the rest go through shades if they are in an order,
    as sizes are, or through colours that are told apart.

    Args:
        names: In their order.
        reference: Names in black.
        ordered: Whether the others are in an order.
    """

    def __init__(
        self, names: Sequence[str], reference: Sequence[str] = (), ordered: bool = False
    ) -> None:
        others = [name for name in names if name not in reference]
        # The ink is for what the others are compared with, and for nothing else.
        plain = [colour for colour in LIGHT.lines if colour != LIGHT.ink]
        colours = _shades(len(others)) if ordered else plain
        self._styles: dict[str, dict[str, Any]] = {}
        for place, name in enumerate(others):
            round_ = place // len(colours)
            self._styles[name] = {
                "color": colours[place % len(colours)],
                "linestyle": DASHES[(place if not ordered else round_) % len(DASHES)],
                "marker": MARKERS[place % len(MARKERS)],
            }
        for place, name in enumerate(name for name in names if name in reference):
            dash, marker = DASHES[place % len(DASHES)], MARKERS[place % len(MARKERS)]
            self._styles[name] = {"color": LIGHT.ink, "linestyle": dash, "marker": marker}

    def line(self, name: str) -> dict[str, Any]:
        """Colour and dash of a line."""
        return {key: value for key, value in self._styles[name].items() if key != "marker"}

    def all(self, name: str) -> dict[str, Any]:
        """Colour, dash and marker."""
        return dict(self._styles[name])


def in_order(labels: Sequence[str], experiment: Experiment) -> list[str]:
    """Labels as a legend has them.

    Args:
        labels: As they come, each several times maybe.
        experiment: Says which are black, and whether the others are in the order of their sizes.

    Returns:
        Each once; what is black at the end.
    """
    reference = experiment.content.get("reference", [])
    found = list(dict.fromkeys(labels))
    others = [label for label in found if label not in reference]
    if experiment.content.get("ordered", False):
        # Without a number in it, all.
        others.sort(key=lambda label: [*map(int, re.findall(r"\d+", label)), math.inf])
    return others + [label for label in found if label in reference]


def labels_and_styles(experiment: Experiment, rows: list[Row]) -> tuple[list[str], Styles]:
    """What a legend has, and how each is drawn.

    Args:
        experiment: As for `in_order`.
        rows: With labels.

    Returns:
        The labels in their order, and styles by them.
    """
    content, labels = experiment.content, in_order([row["label"] for row in rows], experiment)
    return labels, Styles(labels, content.get("reference", []), content.get("ordered", False))


def _shades(count: int) -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    # Without the light end of the map, which is hard to see on white.
    shades = colormaps["viridis_r"]
    return [to_hex(shades(0.12 + 0.88 * i / max(count - 1, 1))) for i in range(count)]
