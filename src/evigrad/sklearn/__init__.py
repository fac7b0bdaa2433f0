"""Scikit-learn estimators for tabular data that learn their hyperparameters in one fit.

They need scikit-learn: ``pip install 'evigrad[sklearn]'``.
"""

from evigrad.errors import require

require("sklearn.utils.validation", "evigrad.sklearn", extra="sklearn")

from evigrad.sklearn.estimators import (  # noqa: E402
    EvidenceClassifier,
    EvidenceEstimator,
    EvidenceRegressor,
)

__all__ = ["EvidenceClassifier", "EvidenceEstimator", "EvidenceRegressor"]
