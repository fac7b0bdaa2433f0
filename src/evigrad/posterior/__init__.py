"""Predictions with uncertainty: the linearized Laplace posterior of a network's outputs.

The posterior of the weights is N(w*, (H + P0)⁻¹), where H is the Gauss-Newton matrix of all data.
If the network is linear in the weights, the outputs have the distribution N(f(x; w*), J Σ Jᵀ).
``posterior`` passes over the data to compute a structure's statistic, and predicts.
``covariances`` computes Σ from the statistic. ``predictive`` turns outputs into predictions of
targets. ``mode`` measures how far the weights are from the mode w* of the log joint density.
"""

from evigrad.posterior.mode import mode_gap
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
    "mode_gap",
]
