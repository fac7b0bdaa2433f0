"""Predictions with uncertainty: the linearized Laplace posterior of a network's outputs.

The posterior of the weights is N(w*, Σ) with Σ = (H + P0)⁻¹. H is the Gauss-Newton matrix of all
data, and P0 contains the prior precisions. For a network that is made linear in the weights, the
outputs have the distribution N(f(x; w*), J Σ Jᵀ), where J is the Jacobian of the outputs.

``posterior`` passes over the data to compute the statistic of a structure, such as ``kfac``, and
makes predictions. ``covariances`` computes Σ from the statistic. ``predictive`` computes
predictions of targets from the outputs, and ``quantiles`` inverts their probabilities.
``variational`` fits Gaussian distributions by a bound, and ``calibration`` scales predictions by
held-out data. ``mode`` measures how far the weights are from w*, the mode of the log joint density.
"""

from evigrad.posterior.joint import JointPredictive
from evigrad.posterior.mode import NewtonStep, newton_step
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
    "JointPredictive",
    "NewtonStep",
    "Posterior",
    "Predictive",
    "load_posterior",
    "make_posterior",
    "newton_step",
]
