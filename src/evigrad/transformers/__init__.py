"""Learned weight decay and hyperparameters in the ``Trainer`` of Hugging Face's Transformers.

It needs Transformers, ``pip install 'evigrad[transformers]'``; nothing else in evigrad imports it.
"""

from evigrad.transformers.callback import EvidenceCallback

__all__ = ["EvidenceCallback"]
