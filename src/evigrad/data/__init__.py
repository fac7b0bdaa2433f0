"""Data sets by name, in memory, normalised with the statistics of their train split."""

from evigrad.blocks.streamed import Streamed
from evigrad.data.catalogue import DATA_DIR_VARIABLE, SHIPPED, available, load
from evigrad.data.dataset import DataSet, Scaling, Split
from evigrad.data.hub import HUB
from evigrad.data.variants import VARIANTS

__all__ = [
    "DATA_DIR_VARIABLE",
    "HUB",
    "SHIPPED",
    "VARIANTS",
    "DataSet",
    "Scaling",
    "Split",
    "Streamed",
    "available",
    "load",
]
