"""Learn a network's hyperparameters by stochastic gradient on the marginal likelihood.

The names listed here, with ``evigrad.likelihoods``, ``evigrad.priors`` and ``evigrad.errors``, are
the public face; everything else may change.
"""

from evigrad.allocator import kept_memory
from evigrad.blocks import Block
from evigrad.descriptions import ParameterReport
from evigrad.errors import EvigradError, EvigradWarning
from evigrad.estimate import Estimate
from evigrad.evidence import Evidence
from evigrad.training import FitResult, LoadedRun, TuneResult, fit, load, tune

__all__ = [
    "Block",
    "Estimate",
    "EvigradError",
    "EvigradWarning",
    "Evidence",
    "FitResult",
    "LoadedRun",
    "ParameterReport",
    "TuneResult",
    "fit",
    "kept_memory",
    "load",
    "tune",
]
__version__ = "0.1.0"
