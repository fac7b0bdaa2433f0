"""Learn a network's hyperparameters by stochastic gradient ascent on the marginal likelihood.

The public API consists of the names in ``__all__``, here and in the public subpackages. All other
names may change without notice. Each name is imported when it is first used, so commands that need
no tensors, such as ``evigrad --help``, do not wait for PyTorch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evigrad.blocks import Block as Block
    from evigrad.blocks.anchors import Anchoring as Anchoring
    from evigrad.core.model import Estimate as Estimate
    from evigrad.errors import EvigradError as EvigradError
    from evigrad.errors import EvigradWarning as EvigradWarning
    from evigrad.evidence import Evidence as Evidence
    from evigrad.inputs import Outputs as Outputs
    from evigrad.measure.bracket import Bracket as Bracket
    from evigrad.measure.bracket import bracket as bracket
    from evigrad.passes.problem import ParameterReport as ParameterReport
    from evigrad.passes.settings import Memory as Memory
    from evigrad.posterior import JointPredictive as JointPredictive
    from evigrad.posterior import Posterior as Posterior
    from evigrad.posterior import Predictive as Predictive
    from evigrad.training import FitResult as FitResult
    from evigrad.training import LoadedRun as LoadedRun
    from evigrad.training import TuneResult as TuneResult
    from evigrad.training import fit as fit
    from evigrad.training import load as load
    from evigrad.training import tune as tune
    from evigrad.training.learner import Learner as Learner
    from evigrad.training.settings import Laplace as Laplace
    from evigrad.training.settings import Optimization as Optimization
    from evigrad.training.settings import Schedule as Schedule

__version__ = "0.1.0"

_HOMES = {
    "Anchoring": "evigrad.blocks.anchors",
    "Bracket": "evigrad.measure.bracket",
    "bracket": "evigrad.measure.bracket",
    "Block": "evigrad.blocks",
    "Estimate": "evigrad.core.model",
    "EvigradError": "evigrad.errors",
    "EvigradWarning": "evigrad.errors",
    "Evidence": "evigrad.evidence",
    "FitResult": "evigrad.training",
    "JointPredictive": "evigrad.posterior",
    "Laplace": "evigrad.training.settings",
    "Learner": "evigrad.training.learner",
    "LoadedRun": "evigrad.training",
    "Memory": "evigrad.passes.settings",
    "Optimization": "evigrad.training.settings",
    "Outputs": "evigrad.inputs",
    "ParameterReport": "evigrad.passes.problem",
    "Posterior": "evigrad.posterior",
    "Predictive": "evigrad.posterior",
    "Schedule": "evigrad.training.settings",
    "TuneResult": "evigrad.training",
    "fit": "evigrad.training",
    "load": "evigrad.training",
    "tune": "evigrad.training",
}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # type checkers would assume that every name exists

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            globals()[name] = value = getattr(import_module(_HOMES[name]), name)
            return value
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
