"""Reports of training runs: one HTML page, and the figures in it."""

from evigrad.report.images import augmented_images, draw_transforms
from evigrad.report.write import write_report

__all__ = ["augmented_images", "draw_transforms", "write_report"]
