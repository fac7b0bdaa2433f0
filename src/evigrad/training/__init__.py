"""Training: the interleaved scheme of weights and hyperparameters, and what it records."""

from evigrad.training.along import PRECISION, curves_along, evidence_along, make_grid
from evigrad.training.evaluation import (
    EvidenceValue,
    describe_estimator,
    evaluate_evidence,
    tight_estimator,
    time_steps,
)
from evigrad.training.fit import fit, learns_likelihood, prepare
from evigrad.training.load import LoadedRun, load
from evigrad.training.metrics import evaluate, read_metrics
from evigrad.training.run import FitResult, Run
from evigrad.training.run_directory import RunDirectory
from evigrad.training.settings import Settings
from evigrad.training.tune import TuneResult, tune

__all__ = [
    "EvidenceValue",
    "PRECISION",
    "FitResult",
    "LoadedRun",
    "Run",
    "RunDirectory",
    "Settings",
    "TuneResult",
    "curves_along",
    "describe_estimator",
    "evaluate",
    "evaluate_evidence",
    "evidence_along",
    "fit",
    "learns_likelihood",
    "load",
    "make_grid",
    "prepare",
    "read_metrics",
    "tight_estimator",
    "time_steps",
    "tune",
]
