"""Training: the interleaved scheme of weights and hyperparameters, and what it records."""

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
    "FitResult",
    "LoadedRun",
    "Run",
    "RunDirectory",
    "Settings",
    "TuneResult",
    "describe_estimator",
    "evaluate",
    "evaluate_evidence",
    "fit",
    "learns_likelihood",
    "load",
    "prepare",
    "read_metrics",
    "tight_estimator",
    "time_steps",
    "tune",
]
