"""The anchored bound: rows that every block is conditioned on, and blocks of the rest (DESIGN 3.2).

The network's latest outputs tell which rows matter (``outputs``, ``scores``, ``choice``), and its
last layer how alike they are (``last_layer``, ``greedy``, ``groups``); without either, the inputs
tell which data represent the others (``centres``). ``blocks`` and ``tail`` partition the others,
and ``stream`` draws blocks in proportion to their predicted entropy (``masses``). ``book`` keeps
this state over a training; ``curvature.conditional`` computes the estimate.
"""

from evigrad.blocks.anchors.blocks import AnchoredBlocks
from evigrad.blocks.anchors.book import AnchorBook
from evigrad.blocks.anchors.centres import Centres
from evigrad.blocks.anchors.choice import CHOICES, Anchoring, choose
from evigrad.blocks.anchors.outputs import OutputMemory
from evigrad.blocks.anchors.scores import Scores
from evigrad.blocks.anchors.stream import AnchoredStream, Drawn

__all__ = [
    "CHOICES",
    "AnchorBook",
    "AnchoredBlocks",
    "AnchoredStream",
    "Anchoring",
    "Centres",
    "Drawn",
    "OutputMemory",
    "Scores",
    "choose",
]
