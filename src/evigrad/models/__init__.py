"""Networks by name: small ones, the paper's residual networks with Fixup, and sequences."""

from evigrad.models.catalogue import MODELS, make_model, make_network
from evigrad.models.residual import fixup_scalars

__all__ = ["MODELS", "fixup_scalars", "make_model", "make_network"]
