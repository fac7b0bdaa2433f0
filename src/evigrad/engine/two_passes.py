"""The first pass over a block, to its statistic, and the second, from its cotangent to gradients.

Data flow one way: micro-batch → outputs → cotangents of the likelihood's root → rows
(``jacobians``) → statistic (``curvature``); the second pass makes the same rows again, with a graph
into all that the forward pass depends on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.curvature import Statistic, exact_hessian, inner_product
from evigrad.engine.cotangents import root_rows
from evigrad.engine.kept import KeptPass, weighted
from evigrad.engine.passes import (
    BlockPass,
    Chunk,
    check_fits,
    evaluating,
    first_chunk,
    linearized,
    outputs,
    over_chunks,
)
from evigrad.engine.problem import InputPlan, Problem
from evigrad.jacobians import (
    CHECKED_EXAMPLES,
    Linearization,
    check_rows,
    refuse_once_differentiable,
)
from evigrad.likelihoods.calls import log_probabilities


@dataclass(frozen=True)
class FirstPass:
    """The purpose of a first pass.

    Attributes:
        keeps_outputs: Whether to keep the outputs for steps on the likelihood's parameters, and
            leave the rows unscaled for these.
        condensed: Whether to keep only what log-determinants need.
    """

    keeps_outputs: bool = False
    condensed: bool = False


@dataclass(frozen=True, eq=False)
class _Sums:
    """The sums over the micro-batches so far.

    Attributes:
        plan: The plan, without derivatives that a check has found to be wrong.
        log_likelihood: Their terms of (1/T) log p(D|w,h), float64.
        to_check: Whether to check the derivatives on the next micro-batch.
        is_closed: False where a contracted weight had no closed form; the sums are void then.
        statistic: The structure's, None before any rows.
        log_probs: log p(y|w,h) of the data of each micro-batch.
        kept: Micro-batches with their outputs, if asked for.
    """

    plan: InputPlan
    log_likelihood: Tensor
    to_check: bool
    is_closed: bool = True
    statistic: Any = None
    log_probs: tuple[Tensor, ...] = ()
    kept: tuple[tuple[Chunk, Tensor], ...] = ()


def first_pass(block_pass: BlockPass, use: FirstPass) -> KeptPass:
    """Return the log likelihood and the statistic of one pass over a block's data.

    If ranks share the data, each passes over its part, and the statistic is the sum over all parts.
    """
    problem, shared = block_pass.problem, block_pass.block.shares > 1
    if not shared:
        return _local_pass(block_pass, use)
    with problem.ranks.together() as alike:
        # Sums can be added up over ranks. What is condensed of them cannot.
        local = _local_pass(block_pass, replace(use, condensed=False))
        alike["form of the curvature"] = [tensor.shape for tensor in local.statistic.tensors()]
    statistic = local.statistic.all_reduce(problem.ranks)
    condense = local.plan.structure.condense
    return replace(local, statistic=condense(statistic) if use.condensed else statistic)


def _local_pass(block_pass: BlockPass, use: FirstPass) -> KeptPass:
    """The pass over this rank's data."""
    problem = block_pass.problem
    check_fits(problem, block_pass.plan, block_pass.block, use.condensed)
    zero = torch.zeros((), dtype=torch.float64, device=problem.device)
    while True:
        due = problem.plans.check_is_due()
        block_pass = replace(block_pass, suspicious=due)
        start = _Sums(block_pass.plan, zero, to_check=due)
        sums = over_chunks(block_pass, "first", partial(_add, block_pass, use), start)
        if sums.is_closed:
            break
        # The model uses a weight differently for these data: form all rows from here on.
        block_pass = replace(block_pass, plan=problem.plans.without_contraction(sums.plan))
    structure, statistic = sums.plan.structure, sums.statistic
    return KeptPass(
        problem=problem,
        plan=sums.plan,
        log_likelihood=sums.log_likelihood,
        statistic=structure.condense(statistic) if use.condensed else statistic,
        block=replace(block_pass.block, inputs=None, targets=None),
        log_probs=torch.cat(sums.log_probs),
        outputs=sums.kept,
    )


def _add(block_pass: BlockPass, use: FirstPass, sums: _Sums, chunk: Chunk) -> _Sums:
    if not sums.is_closed:
        return sums
    if sums.to_check:
        problem, plan = block_pass.problem, sums.plan
        with torch.enable_grad():
            linearization = Linearization(
                plan.model, problem.weights, chunk.x, plan.jacobian, False
            )
        sums = replace(sums, plan=problem.plans.checked(plan, linearization), to_check=False)
        del linearization  # frees its graph
    block_pass = replace(block_pass, plan=sums.plan)
    spec, likelihood = block_pass.problem.settings.spec, block_pass.problem.likelihood
    statistic: Any = sums.statistic
    if not chunk.has_rows:
        # Data that count only in the likelihood; they follow all that have rows.
        with torch.no_grad():
            f = outputs(block_pass, chunk)
    elif spec.curvature == "hessian":
        statistic, f = _add_hessian(block_pass, chunk, statistic, False)
    else:
        statistic_and_outputs = _add_rows(block_pass, use, chunk, statistic)
        if statistic_and_outputs is None:
            return replace(sums, is_closed=False)
        statistic, f = statistic_and_outputs
    log_probs = log_probabilities(likelihood, f, chunk.y)
    log_likelihood = weighted(block_pass.problem, log_probs, chunk.likelihood_weights)
    likelihood.check_derivatives(f, chunk.y, spec.curvature)
    # A view of the inputs would keep them in memory.
    kept = ((replace(chunk, x=chunk.x[:0].clone()), f.detach()),) if use.keeps_outputs else ()
    return replace(
        sums,
        statistic=statistic,
        log_likelihood=sums.log_likelihood + log_likelihood,
        log_probs=(*sums.log_probs, log_probs.detach()),
        kept=sums.kept + kept,
    )


def _add_rows(
    block_pass: BlockPass, use: FirstPass, chunk: Chunk, statistic: Any
) -> tuple[Any, Tensor] | None:
    """The statistic with a micro-batch's rows, and its outputs; None without a closed form."""
    structure = block_pass.plan.structure
    linearization = linearized(block_pass, chunk, False)
    if not all(map(linearization.is_closed, structure.contracted)):
        return None
    root = root_rows(block_pass.problem, linearization.outputs, chunk)
    if root.vectors.requires_grad:
        # The cotangents themselves depend on the likelihood's hyperparameters (a score, or a
        # likelihood that does not separate a scale): the rows then need a graph.
        linearization = linearized(block_pass, chunk, True)
    if use.keeps_outputs:
        root = replace(root, scale=None)
    f = linearization.outputs
    if (
        use.condensed
        and block_pass.block.has_all_rows(chunk.data)
        and not root.vectors.requires_grad
    ):
        return structure.summarise(linearization, root), f
    return structure.accumulate(statistic, linearization, root), f


def _check_second_derivatives(block_pass: BlockPass, learned: Mapping[str, nn.Parameter]) -> None:
    """Check once that the rows of the first examples have the derivatives that the gradient takes.

    Before the pass, whose memory may be measured.
    """
    problem = block_pass.problem
    checked = problem.plans.differentiated
    if checked.issuperset(learned) or problem.settings.spec.curvature == "hessian":
        return
    of_model = {name: p for name, p in learned.items() if name.startswith("model.")}
    with evaluating(block_pass):
        batch = first_chunk(block_pass, CHECKED_EXAMPLES)
        root = root_rows(problem, linearized(block_pass, batch, True).outputs, batch)
        varies = root.vectors.requires_grad
        if of_model or varies:
            model = (batch.plan or block_pass.plan).model
            check_rows(model, problem.weights, of_model, list(learned), batch.x, varies)
    checked.update(learned)


def _add_hessian(
    block_pass: BlockPass, chunk: Chunk, statistic: Any, differentiable: bool
) -> tuple[Any, Tensor]:
    """The statistic with a micro-batch's exact Hessian, and its outputs."""
    likelihood, temperature = block_pass.problem.likelihood, block_pass.problem.settings.temperature

    def negative_log_likelihood(f: Tensor) -> Tensor:
        return -likelihood.log_prob(f, chunk.y).sum() / temperature

    with torch.set_grad_enabled(differentiable):
        f = outputs(block_pass, chunk)
    learnable = any(p.requires_grad for p in likelihood.parameters())
    graph = torch.is_grad_enabled() and (differentiable or learnable)
    plan, weights = block_pass.plan, block_pass.problem.weights
    model, checked = (chunk.plan or plan).model, block_pass.problem.plans.differentiated
    if not checked.issuperset(weights):
        refuse_once_differentiable(model, weights, [], chunk.x)
        checked.update(weights)
    with exact_hessian(model, weights, chunk.x, negative_log_likelihood, graph) as hessian:
        return plan.structure.accumulate_hessian(statistic, hessian), f


def log_likelihood_of(problem: Problem, f: Tensor, chunk: Chunk) -> Tensor:
    """A micro-batch's term of (1/T) log p(D|w,h), from its outputs ``f``, with a graph."""
    log_probs = log_probabilities(problem.likelihood, f, chunk.y)
    return weighted(problem, log_probs, chunk.likelihood_weights)


def second_pass(
    block_pass: BlockPass,
    cotangent: Statistic,
    scale: float,
    learned: Mapping[str, nn.Parameter],
) -> list[Tensor]:
    """Return the gradient of log likelihood − ½ scale · ℓ in each of the ``learned``.

    ``cotangent`` is the derivative of ℓ in the statistic of the first pass over the block; the
    learned are hyperparameters of the model and of the likelihood.
    """
    problem, arguments = block_pass.problem, list(learned.values())

    def add(sums: list[Tensor], chunk: Chunk) -> list[Tensor]:
        f, inner = _inner(block_pass, cotangent, chunk)
        objective = log_likelihood_of(problem, f, chunk) - 0.5 * scale * inner
        if not objective.requires_grad:
            return sums
        gradients = torch.autograd.grad(objective, arguments, allow_unused=True)
        return [s if g is None else s + g for s, g in zip(sums, gradients, strict=True)]

    with torch.enable_grad():
        _check_second_derivatives(block_pass, learned)
        return over_chunks(block_pass, "second", add, [torch.zeros_like(a) for a in arguments])


def _inner(
    block_pass: BlockPass, cotangent: Statistic, chunk: Chunk
) -> tuple[Tensor, Tensor | float]:
    """The outputs of a micro-batch, and ⟨cotangent, its term of the statistic⟩."""
    if not chunk.has_rows:
        return outputs(block_pass, chunk), 0.0
    if block_pass.problem.settings.spec.curvature == "hessian":
        term, f = _add_hessian(block_pass, chunk, None, True)
        return f, inner_product(cotangent, term)
    linearization = linearized(block_pass, chunk, True)
    root = root_rows(block_pass.problem, linearization.outputs, chunk)
    inner = block_pass.plan.structure.inner(cotangent, chunk.data, linearization, root)
    return linearization.outputs, inner
