"""Learn a network's hyperparameters by stochastic gradient on the marginal likelihood.

The names listed here, with ``evigrad.likelihoods``, ``evigrad.priors`` and ``evigrad.errors``, are
the public face; everything else may change. Each name is imported when it is first used: what needs
no tensor, as ``evigrad --help``, does not wait for PyTorch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evigrad.blocks import Block
    from evigrad.blocks.anchors import Anchoring
    from evigrad.engine.allocator import kept_memory
    from evigrad.engine.evaluation import Estimate
    from evigrad.engine.problem import ParameterReport
    from evigrad.engine.settings import Memory
    from evigrad.errors import EvigradError, EvigradWarning
    from evigrad.evidence import Evidence
    from evigrad.inputs import Outputs
    from evigrad.posterior import Posterior, Predictive
    from evigrad.training import FitResult, LoadedRun, TuneResult, fit, load, tune
    from evigrad.training.bracket import Bracket, bracket
    from evigrad.training.learner import Learner
    from evigrad.training.settings import Laplace, Optimization, Schedule

__all__ = [
    "Anchoring",
    "Bracket",
    "Block",
    "Estimate",
    "EvigradError",
    "EvigradWarning",
    "Evidence",
    "FitResult",
    "Laplace",
    "Learner",
    "LoadedRun",
    "Memory",
    "Optimization",
    "Outputs",
    "ParameterReport",
    "Posterior",
    "Predictive",
    "Schedule",
    "TuneResult",
    "bracket",
    "fit",
    "kept_memory",
    "load",
    "tune",
]
__version__ = "0.1.0"

_HOMES = {
    "Anchoring": "evigrad.blocks.anchors",
    "Bracket": "evigrad.training.bracket",
    "bracket": "evigrad.training.bracket",
    "Block": "evigrad.blocks",
    "Estimate": "evigrad.engine.evaluation",
    "EvigradError": "evigrad.errors",
    "EvigradWarning": "evigrad.errors",
    "Evidence": "evigrad.evidence",
    "FitResult": "evigrad.training",
    "Laplace": "evigrad.training.settings",
    "Learner": "evigrad.training.learner",
    "LoadedRun": "evigrad.training",
    "Memory": "evigrad.engine.settings",
    "Optimization": "evigrad.training.settings",
    "Outputs": "evigrad.inputs",
    "ParameterReport": "evigrad.engine.problem",
    "Posterior": "evigrad.posterior",
    "Predictive": "evigrad.posterior",
    "Schedule": "evigrad.training.settings",
    "TuneResult": "evigrad.training",
    "fit": "evigrad.training",
    "kept_memory": "evigrad.engine.allocator",
    "load": "evigrad.training",
    "tune": "evigrad.training",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            globals()[name] = found = getattr(import_module(_HOMES[name]), name)
            return found
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
