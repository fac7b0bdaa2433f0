"""Networks on tables as estimators of scikit-learn, hyperparameters learned in the one fit.

It needs scikit-learn, ``pip install 'evigrad[sklearn]'``; nothing else in evigrad imports it.
"""

from evigrad.errors import require

require("sklearn.utils.validation", "evigrad.sklearn", extra="sklearn")

from evigrad.sklearn.estimators import EvidenceClassifier, EvidenceRegressor  # noqa: E402

__all__ = ["EvidenceClassifier", "EvidenceRegressor"]
