"""The anchored bound: rows that every block is conditioned on, and blocks of the rest (DESIGN 3.2).

The network's latest outputs tell which rows matter (``outputs``, ``choice``), or where they do not,
the inputs which data stand for the others (``centres``); ``blocks`` arranges
the others into blocks of equal weight and draws them; ``curvature.conditional`` has the number.
"""

from evigrad.anchors.blocks import AnchoredBlocks
from evigrad.anchors.book import AnchorBook
from evigrad.anchors.centres import Centres
from evigrad.anchors.choice import CHOICES, Anchoring, choose
from evigrad.anchors.outputs import OutputMemory
from evigrad.anchors.scores import Scores
from evigrad.anchors.stream import AnchoredStream

__all__ = [
    "CHOICES",
    "AnchorBook",
    "AnchoredBlocks",
    "AnchoredStream",
    "Anchoring",
    "Centres",
    "OutputMemory",
    "Scores",
    "choose",
]
