"""Figures of runs, and shared elements of all figures: colors, axes, labels.

Every function draws on its own ``Figure``, never on pyplot's global state. Therefore, it works
without a display and in threads, and does not change the user's figures or settings.
"""

from evigrad.plots.runs import learning_curves, precision_paths, save_all
from evigrad.plots.style import LIGHT, Palette, new_figure, save

__all__ = [
    "LIGHT",
    "Palette",
    "learning_curves",
    "new_figure",
    "precision_paths",
    "save",
    "save_all",
]
