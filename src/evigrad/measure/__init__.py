"""Evaluation of a trained model: metrics on data, and the log evidence by any estimator."""

from evigrad.measure.judging import (
    EvidenceValue,
    describe_estimator,
    evaluate_evidence,
    tight_estimator,
)
from evigrad.measure.metrics import evaluate

__all__ = [
    "EvidenceValue",
    "describe_estimator",
    "evaluate",
    "evaluate_evidence",
    "tight_estimator",
]
