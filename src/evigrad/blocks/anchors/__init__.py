"""The anchored bound: rows that every block is conditioned on, and parts of the rest.

``selection`` keeps the network's latest outputs, which tell by the likelihood's root how much each
row matters, and chooses anchors by them and by how alike rows are in the network's last layer
(``choice``). ``partition`` divides the other rows into parts, and ``stream`` draws
them. ``curvature.conditional`` computes the estimate.
"""

from evigrad.blocks.anchors.choice import CHOICES, Anchoring
from evigrad.blocks.anchors.selection import AnchorSelection
from evigrad.blocks.anchors.stream import AnchoredStream, DrawnParts

__all__ = ["CHOICES", "AnchorSelection", "AnchoredStream", "Anchoring", "DrawnParts"]
