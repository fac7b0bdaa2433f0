"""Training: the interleaved scheme of weights and hyperparameters, and what it records."""

from evigrad.training.fit import fit, learns_likelihood, prepare
from evigrad.training.history import read_metrics
from evigrad.training.load import LoadedRun, load
from evigrad.training.run import FitResult, Run
from evigrad.training.run_directory import RunDirectory
from evigrad.training.settings import Settings
from evigrad.training.tune import TuneResult, tune

__all__ = [
    "FitResult",
    "LoadedRun",
    "Run",
    "RunDirectory",
    "Settings",
    "TuneResult",
    "fit",
    "learns_likelihood",
    "load",
    "prepare",
    "read_metrics",
    "tune",
]
