"""The anchored bound: every block contains the same anchors and one part of the other rows.

A row is the derivative of one output of one example with respect to all weights. ``selection``
stores the latest outputs of the network, and ``choice`` chooses the anchors from these outputs.
``partition`` divides the other rows into parts, and ``stream`` draws the parts.
``evigrad.core.curvature.anchored`` computes the estimate.
"""

from evigrad.blocks.anchors.choice import CHOICES, Anchoring
from evigrad.blocks.anchors.selection import AnchorSelection
from evigrad.blocks.anchors.stream import AnchoredStream, DrawnParts

__all__ = ["CHOICES", "AnchorSelection", "AnchoredStream", "Anchoring", "DrawnParts"]
