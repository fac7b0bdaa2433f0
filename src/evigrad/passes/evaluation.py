"""Compute estimates and gradients for blocks, in float64 if float32 is not accurate enough."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from evigrad.core import algorithm
from evigrad.core.curvature import RoundingError, rounding_refused
from evigrad.core.model import Estimate, Pass
from evigrad.core.protocols import Purpose
from evigrad.network import derivatives_named
from evigrad.passes.kept import KeptPass
from evigrad.passes.memory import fits
from evigrad.passes.sweep import MicroBatchSweep

Result = TypeVar("Result")


def estimate_of(sweep: MicroBatchSweep) -> Estimate:
    """Return the estimate for one block."""
    estimate, _ = precisely(sweep, lambda sweep: algorithm.log_evidence(_pass(sweep)))
    return estimate


def pass_over(sweep: MicroBatchSweep, learned: Iterable[str]) -> Pass:
    """Return a pass over a block, in a data type that is accurate enough.

    It serves for steps on the ``learned`` hyperparameters of the prior and the likelihood.
    """
    scales = any(not name.startswith("prior.") for name in learned)
    sweep = replace(sweep, purpose=Purpose.STEPS if scales else Purpose.VALUE)
    # The trial detects rounding under the current prior, which every step would encounter.
    return precisely(sweep, _pass, trial=algorithm.log_evidence)


def _pass(sweep: MicroBatchSweep) -> Pass:
    return algorithm.run_pass(sweep.problem.model, sweep.curvature, sweep)


def estimates_and_gradients(
    sweeps: Sequence[MicroBatchSweep], learned: Mapping[str, nn.Parameter]
) -> tuple[list[Estimate], list[Tensor]]:
    """Return the estimate for one block and its gradients, or zeros if a rank has no block.

    The gradients are in the order of the ``learned`` hyperparameters. The caller must freeze all
    other hyperparameters.
    """
    if not sweeps:
        return [], [torch.zeros_like(p) for p in learned.values()]
    (sweep,) = sweeps
    model, num_outputs = sweep.problem.model, sweep.plan.num_outputs
    purpose = algorithm.purpose_of(model, sweep.curvature, num_outputs, learned)
    pulled = {name: p for name, p in learned.items() if not name.startswith("prior.")}
    work = algorithm.two_passes if purpose is Purpose.DIFFERENTIATE else algorithm.one_pass
    estimate, gradients = precisely(
        replace(sweep, purpose=purpose, learned=pulled),
        lambda sweep: work(model, sweep.curvature, sweep, learned),
    )
    return [estimate], gradients


def kept_gradients(
    passes: Sequence[KeptPass], learned: Mapping[str, nn.Parameter]
) -> tuple[list[Estimate], list[Tensor]]:
    """Return the estimates of kept passes, and the gradients of their mean."""
    parameters = list(learned.values())
    estimates, total = list[Estimate](), [torch.zeros_like(p) for p in parameters]
    for kept in passes:
        estimate, loss = algorithm.log_evidence(kept)
        estimates.append(estimate)
        gradients = algorithm.gradients_of(loss / len(passes), parameters)
        total = [a + b for a, b in zip(total, gradients, strict=True)]
    return estimates, total


def precisely(
    sweep: MicroBatchSweep,
    work: Callable[[MicroBatchSweep], Result],
    *,
    trial: Callable[[Result], object] | None = None,
) -> Result:
    """Return the result of ``work``. If float32 rounds too much, run ``work`` again in float64.

    Every evaluation starts in float32, so it does not depend on earlier evaluations. If the user
    set ``gram_dtype``, or if memory is too small for float64, rounding causes only a warning.
    ``work`` must have no side effects if it raises an error. ``trial`` is called with the result,
    to detect rounding errors of later steps.
    """
    problem = sweep.problem
    sweep.check_memory()
    with derivatives_named():
        sweep = sweep.verified()
        narrow = any(weight.dtype != torch.float64 for weight in problem.model.weights.values())
        if problem.settings.gram_dtype is not None or not narrow or problem.device.type == "mps":
            return work(sweep)
        try:
            with rounding_refused():
                result = work(sweep)
                if trial is not None:
                    trial(result)
                return result
        except RoundingError:
            precise = replace(sweep, curvature=problem.curvature(sweep.plan, torch.float64))

        def again() -> Result:
            precise.check_memory()
            return work(precise)

        if sweep.block.shares > 1:  # a rank cannot return to float32 without the others
            return again()
        in_float64 = fits(again)
        return in_float64[0] if in_float64 else work(sweep)
