"""Gaussian priors over the weights, and the groups of weights that share a precision."""

from evigrad.priors.gaussian import STRUCTURES, GaussianPrior, NormalHyperprior

__all__ = ["STRUCTURES", "GaussianPrior", "NormalHyperprior"]
