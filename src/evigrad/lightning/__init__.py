"""Learned weight decay, noise and hyperparameters in a Lightning ``Trainer``.

It needs Lightning, ``pip install 'evigrad[lightning]'``; nothing else in evigrad imports it.
"""

from evigrad.lightning.callback import EvidenceCallback

__all__ = ["EvidenceCallback"]
