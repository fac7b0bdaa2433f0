"""Measures of a trained model: metrics on data, its log evidence by any estimator, and times."""

from evigrad.measure.judging import (
    EvidenceValue,
    describe_estimator,
    evaluate_evidence,
    tight_estimator,
    time_steps,
)
from evigrad.measure.metrics import evaluate

__all__ = [
    "EvidenceValue",
    "describe_estimator",
    "evaluate",
    "evaluate_evidence",
    "tight_estimator",
    "time_steps",
]
