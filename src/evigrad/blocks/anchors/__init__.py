"""The anchored bound: anchors, on which every block is conditioned, and parts of the other rows.

``selection`` stores the network's latest outputs and chooses anchors by them (``choice``).
``partition`` divides the other rows into parts, and ``stream`` draws the parts.
``evigrad.core.curvature.anchored`` computes the estimate.
"""

from evigrad.blocks.anchors.choice import CHOICES, Anchoring
from evigrad.blocks.anchors.selection import AnchorSelection
from evigrad.blocks.anchors.stream import AnchoredStream, DrawnParts

__all__ = ["CHOICES", "AnchorSelection", "AnchoredStream", "Anchoring", "DrawnParts"]
