"""What experiments there are: each kind a module with cases and a table, a figure and remarks."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from evigrad.errors import ConfigurationError, nearest
from evigrad.experiments.cases import Case, Row
from evigrad.experiments.definition import Experiment
from evigrad.experiments.kinds import (
    bounds,
    comparison,
    learning,
    overview,
    pareto,
    selection,
    subsets,
)
from evigrad.experiments.schema import check_keys
from evigrad.experiments.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Kind:
    """How an experiment is run and shown.

    Attributes:
        cases: What is run.
        table: All its numbers.
        remarks: What theory demands and whether it holds, in words, if there is anything to say.
        figure: Its figure, if it has one.
    """

    cases: Callable[[Experiment], list[Case]]
    table: Callable[[Experiment, list[Row]], Table]
    remarks: Callable[[Experiment, list[Row]], list[str]] | None = None
    figure: "Callable[[Experiment, list[Row]], Figure] | None" = None


def _kind(module: ModuleType) -> Kind:
    optional = (getattr(module, name, None) for name in ("remarks", "figure"))
    return Kind(module.cases, module.table, *optional)


KINDS = {
    "bounds": _kind(bounds),
    "pareto": _kind(pareto),
    "learning": _kind(learning),
    "subsets": _kind(subsets),
    "comparison": _kind(comparison),
    "selection": _kind(selection),
    "overview": _kind(overview),
}


def kind_of(experiment: Experiment) -> Kind:
    """The kind of an experiment.

    Args:
        experiment: Any.

    Returns:
        Its kind.

    Raises:
        ConfigurationError: If there is no such kind, or it has other keys.
    """
    if experiment.kind not in KINDS:
        raise ConfigurationError(
            f"The experiment {experiment.name} is of the kind '{experiment.kind}'; known are"
            f" {', '.join(KINDS)}.{nearest(str(experiment.kind), KINDS)}"
        )
    check_keys(experiment)
    return KINDS[experiment.kind]
