"""Compute estimates and gradients for blocks, in float64 if float32 is not accurate enough."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evigrad.core import algorithm
from evigrad.core.curvature import Curvature, RoundingError, rounding_refused
from evigrad.core.model import Estimate, Pass
from evigrad.core.protocols import Purpose, Sweep
from evigrad.network import derivatives_named, modes
from evigrad.passes.kept import KeptPass
from evigrad.passes.memory import run_if_it_fits
from evigrad.passes.sweep import MicroBatchSweep
from evigrad.passes.verification import VerifiedSweep

Result = TypeVar("Result")


def estimate_of(sweep: MicroBatchSweep) -> Estimate:
    """Return the estimate for one block."""
    model = sweep.problem.model

    def work(curvature: Curvature[Any], sweep: Sweep) -> Estimate:
        return algorithm.log_evidence(algorithm.run_pass(model, curvature, sweep))[0]

    return precisely(sweep, work)


def pass_over(sweep: MicroBatchSweep, learned: Iterable[str]) -> Pass:
    """Return a pass over a block, in a data type that is accurate enough.

    It serves for steps on the ``learned`` hyperparameters of the prior and the likelihood.
    """
    scales = any(not name.startswith("prior.") for name in learned)
    sweep = replace(sweep, purpose=Purpose.STEPS if scales else Purpose.VALUE)
    # The trial detects rounding under the current prior, which every step would encounter.
    run_pass = partial(algorithm.run_pass, sweep.problem.model)
    return precisely(sweep, run_pass, trial=algorithm.log_evidence)


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
    work = algorithm.two_passes if purpose is Purpose.DIFFERENTIATE else algorithm.one_pass
    pulled = [name for name in learned if not name.startswith("prior.")]
    sweep = replace(sweep, purpose=purpose, learned=pulled)
    estimate, gradients = precisely(sweep, partial(work, model, learned=learned))
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
    work: Callable[[Curvature[Any], Sweep], Result],
    *,
    trial: Callable[[Result], object] | None = None,
) -> Result:
    """Return the result of ``work``. If float32 rounds too much, compute matrices in float64.

    The network and the rows keep the type of the weights when ``work`` runs again. ``work`` is a
    function of a curvature and a sweep. If a check of the network is due, the sweep has no
    incorrect fast derivatives, and checks that the model does not mix examples. Every evaluation
    starts with matrices in float32, so it does not depend on earlier evaluations. If the user set
    ``gram_dtype``, or if memory is too small for float64, rounding causes only a warning. TF32 is
    off, because its rounding would matter in almost all blocks. ``work`` must have no side effects
    if it raises an error. ``trial`` is called with the result, to detect rounding errors of later
    steps.
    """
    problem = sweep.problem
    has_tf32 = problem.device.type == modes.TF32_DEVICE
    with derivatives_named(), modes.without_tf32() if has_tf32 else nullcontext():
        is_due = problem.network.check_is_due()
        sweep = sweep.verified() if is_due else sweep
        sweep.check_memory()
        decorated: Callable[[MicroBatchSweep], Sweep] = VerifiedSweep if is_due else lambda s: s
        narrow = any(weight.dtype != torch.float64 for weight in problem.model.weights.values())
        if problem.settings.gram_dtype is not None or not narrow or problem.device.type == "mps":
            return work(sweep.curvature, decorated(sweep))
        try:
            with rounding_refused():
                result = work(sweep.curvature, decorated(sweep))
                if trial is not None:
                    trial(result)
                return result
        except RoundingError:
            precise = replace(sweep, curvature=problem.curvature(sweep.plan, torch.float64))

        def again() -> Result:
            precise.check_memory()
            return work(precise.curvature, decorated(precise))

        if sweep.block.shares > 1:  # a rank cannot return to float32 without the others
            return again()
        in_float64 = run_if_it_fits(again)
        return in_float64[0] if in_float64 else work(sweep.curvature, decorated(sweep))
