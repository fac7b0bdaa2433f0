"""Predictions with uncertainty: the linearised Laplace posterior of a network's outputs.

The weights have the posterior N(w*, (H + P0)⁻¹), H the Gauss-Newton matrix of all data, and the
network is taken as linear in them, so that its outputs have N(f(x; w*), J Σ Jᵀ). ``posterior``
passes over the data for a structure's statistic, of which ``covariances`` makes Σ, and predicts
with it; ``predictive`` is what a prediction says of targets.
"""

from evigrad.posterior.posterior import (
    DEFAULT_STRUCTURE,
    STRUCTURES,
    Posterior,
    load_posterior,
    make_posterior,
)
from evigrad.posterior.predictive import LINKS, Predictive

__all__ = [
    "DEFAULT_STRUCTURE",
    "LINKS",
    "STRUCTURES",
    "Posterior",
    "Predictive",
    "load_posterior",
    "make_posterior",
]
