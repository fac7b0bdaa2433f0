"""Data sets by name, in memory, normalised with the statistics of their train split."""

from evigrad.data.catalogue import DATA_DIR_VARIABLE, SHIPPED, available, load
from evigrad.data.dataset import DataSet, Split

__all__ = ["DATA_DIR_VARIABLE", "SHIPPED", "DataSet", "Split", "available", "load"]
