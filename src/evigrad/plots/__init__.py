"""Figures of runs, and what all figures share: colours, axes, labels.

Every function draws on a ``Figure`` of its own, never through pyplot's global state: it works
without a display, in threads, and leaves the user's figures and settings alone.
"""

from evigrad.plots.runs import learning_curves, precision_paths, save_all
from evigrad.plots.style import DARK, LIGHT, Palette, new_figure, save

__all__ = [
    "DARK",
    "LIGHT",
    "Palette",
    "learning_curves",
    "new_figure",
    "precision_paths",
    "save",
    "save_all",
]
