"""Figures of runs, one or many compared, and what all figures share: colours, axes, labels.

Every function draws on a ``Figure`` of its own, never through pyplot's global state: it works
without a display, in threads, and leaves the user's figures and settings alone.
"""

from evigrad.plots.comparisons import (
    Curve,
    Panel,
    Point,
    legend_order,
    panels,
    pareto_front,
    points,
)
from evigrad.plots.runs import learning_curves, precision_paths, save_all
from evigrad.plots.style import DARK, LIGHT, Palette, new_figure, save

__all__ = [
    "DARK",
    "LIGHT",
    "Curve",
    "Palette",
    "Panel",
    "Point",
    "learning_curves",
    "legend_order",
    "new_figure",
    "panels",
    "pareto_front",
    "points",
    "precision_paths",
    "save",
    "save_all",
]
