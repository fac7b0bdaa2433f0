"""One pass over all data for the statistic of a posterior."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from evigrad.blocks.anchors import Anchoring, AnchorSelection
from evigrad.blocks.sources import Source, as_source
from evigrad.curvature import partition_names
from evigrad.engine.checks import check_choice, check_count, check_inputs
from evigrad.engine.intake import CheckedSource, Data, resolve
from evigrad.engine.kept import KeptPass
from evigrad.engine.memory import MicroBatches
from evigrad.engine.parameters import held_constant
from evigrad.engine.passes import Batch
from evigrad.engine.problem import PROBE_SIZE, Plans, Problem
from evigrad.engine.two_passes import FirstPass, first_pass
from evigrad.errors import ConfigurationError, MemoryBudgetError
from evigrad.estimators import EstimatorSpec
from evigrad.jacobians import model_outputs, model_run
from evigrad.jacobians.modes import evaluation_mode

# The estimator of each structure, whose statistic it takes.
STRUCTURES = {
    "kfac": "kfac-N-C",
    "last-layer": "full-N-C",
    "diag": "diag-N-C",
    "full": "full-N-C",
    "ntk": "ntk-N-C",
}
DEFAULT_STRUCTURE = "kfac"

# Data read at once; how many of these pass together is the memory's choice.
_AT_ONCE = 1000


def check_structure(structure: str, rows: int | None) -> None:
    """Refuse a structure that does not exist, and rows for one that takes all."""
    check_choice("structure", structure, list(STRUCTURES))
    if rows is not None:
        check_count("rows", rows)
        if structure != "ntk":
            raise ConfigurationError(
                f"rows={rows} is how much of the data structure='ntk' keeps; {structure!r} takes"
                " all: leave rows away."
            )


def posterior_problem(
    problem: Problem, structure: str, rows: int | None, names: Sequence[str]
) -> Problem:
    """The problem of a posterior over the weights of these names, the others held constant."""
    name = STRUCTURES[structure] if rows is None else f"ntk-{rows}-rows-anchored"
    spec, settings = EstimatorSpec.parse(name), problem.settings
    precise = torch.float32 if problem.device.type == "mps" else torch.float64
    settings = replace(
        settings,
        spec=spec,
        root=spec.default_root,
        gram_dtype=settings.gram_dtype or precise,
        rows_dtype=settings.rows_dtype if spec.facts.keeps_rows else None,
        rows_device=settings.rows_device if spec.facts.keeps_rows else None,
        anchoring=None,
        split_blocks=False,
        parameter_partition="tensor",  # of all weights, which may be others
        # Without shortcuts: rows that can be multiplied with others, H instead of their kernel, and
        # sums that every rank has.
        gradient="one-graph",
    )
    weights = {name: problem.weights[name] for name in names}
    return replace(
        problem,
        weights=weights,
        settings=settings,
        plans=Plans(problem.model, weights, problem.prior, settings),
        # All data at once are too many.
        sizes=MicroBatches(settings.micro_batch or "auto", settings.memory_budget),
    )


def collect(problem: Problem, data: object) -> KeptPass:
    """Return the statistic of all data, or of the rows that the estimator keeps.

    Raises:
        ConfigurationError: If the likelihood cannot make rows.
        InputError: If the data do not fit.
        MemoryBudgetError: If the statistic would not fit the free memory.
    """
    source, spec = CheckedSource(problem, data), problem.settings.spec
    given: Data = _Batches(source)
    if spec.anchored:
        stream = AnchorSelection(
            Anchoring(),
            problem.settings.num_data,
            spec.subset or 0,
            problem.settings.root,
            problem.likelihood,
            problem.plans,
            problem.generator,
        ).stream(source)
        given = next(iter(stream))
    try:
        return first_pass(resolve(problem, given, None), FirstPass())
    except MemoryBudgetError as error:
        count = sum(weight.numel() for weight in problem.weights.values())
        raise MemoryBudgetError(
            f"The posterior over {count:,} weights does not fit: {error} Among posteriors,"
            " structure='kfac', 'last-layer' and 'diag' take less, and 'ntk' takes less with fewer"
            " rows=..."
        ) from error


class _Batches:
    """All data of a source, in batches."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Batch]:
        source = self._source.anew()
        for indices in torch.arange(len(source)).split(_AT_ONCE):
            yield source.fetch(indices)


def last_layer(problem: Problem, data: object) -> list[str]:
    """Return the weights of the module that is called last, of those that have any.

    A module that holds another one with weights of its own is no layer.

    Raises:
        ConfigurationError: If no module with weights is called.
    """
    x = check_inputs(as_source(data).first(PROBE_SIZE)[0], problem.device)
    problem.plans.of(x)  # which checks the model
    owned = partition_names(list(problem.weights), "module")
    last: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: last.append(name)

    model = problem.model
    layers = [n for n in owned if not any(_is_below(other, n) for other in owned)]
    handles = [model.get_submodule(n).register_forward_hook(note(n)) for n in layers]
    own = torch.Generator().manual_seed(0)  # not the evidence's
    try:
        with evaluation_mode(model, own), model_run(model), torch.no_grad():
            model_outputs(model, x, positions=True)
    finally:
        for handle in handles:
            handle.remove()
    if not last:
        raise ConfigurationError(
            "No module with weights of its own is called as a module, so that there is no last"
            " layer: take structure='kfac' or 'diag'."
        )
    return owned[last[-1]]


def _is_below(name: str, other: str) -> bool:
    """Whether a module lies below another one."""
    return name != other and (not other or name.startswith(other + "."))


def constant_beside(problem: Problem) -> AbstractContextManager[None]:
    """Hold all parameters but the problem's weights constant, so that they cost no graph."""
    own = {id(weight) for weight in problem.weights.values()}
    return held_constant(p for p in problem.model.parameters() if id(p) not in own)
