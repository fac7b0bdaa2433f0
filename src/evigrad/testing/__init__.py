"""Conformance suites for custom likelihoods, layer rules and curvatures.

Each function compares a custom object with plain automatic differentiation and finite differences
in float64. It raises a ``ConformanceError`` at the first difference. Call it from a test.
"""

from evigrad.testing.curvatures import check_curvature
from evigrad.testing.likelihoods import check_likelihood
from evigrad.testing.rules import check_rule

__all__ = ["check_curvature", "check_likelihood", "check_rule"]
