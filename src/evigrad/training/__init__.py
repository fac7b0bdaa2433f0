"""Training: interleaved updates of weights and hyperparameters, and the records of a run."""

from evigrad.training.data_checks import learns_likelihood
from evigrad.training.fit import fit, prepare
from evigrad.training.history import read_metrics
from evigrad.training.load import LoadedRun, load
from evigrad.training.run_directory import RunDirectory
from evigrad.training.settings import Settings
from evigrad.training.trainer import FitResult, Trainer
from evigrad.training.tune import TuneResult, tune

__all__ = [
    "FitResult",
    "LoadedRun",
    "RunDirectory",
    "Settings",
    "Trainer",
    "TuneResult",
    "fit",
    "learns_likelihood",
    "load",
    "prepare",
    "read_metrics",
    "tune",
]
