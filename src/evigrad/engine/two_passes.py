"""The first pass over a block, to its statistic, and the second, from its cotangent to gradients.

Data flow one way: micro-batch → outputs → cotangents of the likelihood's root → rows
(``jacobians``) → statistic (``curvature``); the second pass makes the same rows again, with a graph
into all that the forward pass depends on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.curvature import Statistic, exact_hessian, inner_product
from evigrad.engine.cotangents import root_rows
from evigrad.engine.kept import KeptPass, weighted
from evigrad.engine.passes import (
    SHARED,
    BlockPass,
    Chunk,
    check_fits,
    linearized,
    outputs,
    over_chunks,
)
from evigrad.engine.problem import InputPlan, Problem
from evigrad.jacobians import Linearization, check_rows, refuse_once_differentiable
from evigrad.likelihoods import RootRows
from evigrad.likelihoods.calls import log_probabilities


@dataclass(frozen=True)
class FirstPass:
    """The purpose of a first pass.

    Attributes:
        differentiable: Whether the rows need a graph into the model's hyperparameters.
        keeps_outputs: Whether to keep the outputs for steps on the likelihood's parameters, and
            leave the rows unscaled for these.
        condensed: Whether to keep only what log-determinants need.
        learned: The hyperparameters of model and likelihood that the rows are differentiated in.
    """

    differentiable: bool = False
    keeps_outputs: bool = False
    condensed: bool = False
    learned: Mapping[str, nn.Parameter] = field(default_factory=dict)


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

    Where ranks have shares of the block, the statistic is that of the whole block; or, where no
    graph is wanted, what ``Statistic.to_owners`` makes of it.
    """
    if block_pass.block.shares == 1:
        return _own_pass(block_pass, use)
    ranks = block_pass.problem.ranks
    if block_pass.plan.structure.keeps_rows:
        block_pass = _contracting_alike(block_pass)
    by_layers = use.condensed and block_pass.plan.structure.condenses(1)
    if by_layers:
        by_layers = not ranks.any(not _takes_layers(block_pass))
    with ranks.together() as alike:
        # Only sums can be added up over ranks, not what is condensed of them.
        kept = _own_pass(block_pass, replace(use, condensed=by_layers))
        if by_layers:
            return kept
        if kept.statistic is None:
            kept = replace(kept, statistic=_of_no_rows(block_pass, use))
        alike["form of the curvature"] = kept.statistic.form()
    with_graph = block_pass.problem.settings.gradient == "one-graph"
    structure, share = kept.plan.structure, kept.statistic
    statistic = share.over(ranks) if with_graph else share.to_owners(ranks)
    return replace(kept, statistic=structure.condense(statistic) if use.condensed else statistic)


def _contracting_alike(block_pass: BlockPass) -> BlockPass:
    """Form all rows where ranks would contract different weights, as with inputs of other sizes."""
    problem, names = block_pass.problem, sorted(block_pass.plan.structure.contracted)
    if problem.ranks.same(names):
        return block_pass
    return replace(block_pass, plan=problem.plans.without_contraction(block_pass.plan))


def _takes_layers(block_pass: BlockPass) -> bool:
    """Return whether a share is one micro-batch, so that a layer's rows can be made at a time.

    Not with sizes of micro-batches that each rank finds for itself.
    """
    problem, block = block_pass.problem, block_pass.block
    if problem.sizes.asked is not None or problem.sizes.chosen or block.num_draws > 1:
        return False
    padded = problem.settings.spec.facts.counts_data
    first = next(iter([] if padded else block.cuts()), len(block.indices))
    num_rows = block.num_rows or len(block.indices) * block_pass.plan.partition.rows_per_datum
    return (
        block.num_rows != 0
        and block.has_all_rows(slice(0, first))
        and block_pass.plan.structure.condenses(block.shares * num_rows)
    )


def _of_no_rows(block_pass: BlockPass, use: FirstPass) -> Statistic:
    """The statistic of a share without rows, from any row of its first datum."""
    x, y = next(iter(block_pass.batches))
    columns = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    block = replace(block_pass.block.share(slice(0, 1), 1), columns=columns, anchored=None)
    labels = [own[:1] for own in block_pass.labels]
    one = replace(block_pass, batches=[(x[:1], y[:1])], block=block, labels=labels)
    with torch.no_grad():
        return _own_pass(one, replace(use, condensed=False)).statistic.of_nothing()


def _own_pass(block_pass: BlockPass, use: FirstPass) -> KeptPass:
    """The pass over this rank's data alone."""
    problem = block_pass.problem
    check_fits(problem, block_pass.plan, block_pass.block, use.condensed)
    zero = torch.zeros((), dtype=torch.float64, device=problem.device)
    while True:
        due = problem.plans.check_is_due()
        shared = use.condensed and block_pass.block.shares > 1
        if shared:  # a rank may have passed over other data, alone
            due = problem.ranks.any(due)
        block_pass = replace(block_pass, suspicious=due)
        start = _Sums(block_pass.plan, zero, to_check=due)
        kind = SHARED if shared else "first"
        sums = over_chunks(block_pass, kind, partial(_add, block_pass, use), start)
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
            found = Linearization(plan.model, problem.weights, chunk.x, plan.jacobian, False)
        shared = use.condensed and block_pass.block.shares > 1
        plan = problem.plans.checked(plan, found, problem.ranks if shared else None)
        sums = replace(sums, plan=plan, to_check=False)
    block_pass = replace(block_pass, plan=sums.plan)
    spec, likelihood = block_pass.problem.settings.spec, block_pass.problem.likelihood
    statistic: Any = sums.statistic
    if not chunk.has_rows:
        # Data that count only in the likelihood; they follow all that have rows.
        with torch.set_grad_enabled(use.differentiable):
            f = outputs(block_pass, chunk)
    elif spec.curvature == "hessian":
        statistic, f = _add_hessian(block_pass, chunk, statistic, use.differentiable)
    else:
        found = _add_rows(block_pass, use, chunk, statistic)
        if found is None:
            return replace(sums, is_closed=False)
        statistic, f = found
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
    linearization = linearized(block_pass, chunk, use.differentiable)
    is_closed = all(map(linearization.is_closed, structure.contracted))
    if use.condensed and block_pass.block.shares > 1:
        is_closed = not block_pass.problem.ranks.any(not is_closed)
    if not is_closed:
        return None
    root = root_rows(block_pass.problem, linearization.outputs, chunk)
    if root.vectors.requires_grad and not use.differentiable:
        # The cotangents themselves depend on the likelihood's hyperparameters (a score, or a
        # likelihood that does not separate a scale): the rows then need a graph.
        linearization = linearized(block_pass, chunk, True)
    _check_second_derivatives(block_pass, chunk, root, use.learned)
    if use.keeps_outputs:
        root = replace(root, scale=None)
    f = linearization.outputs
    if (
        use.condensed
        and block_pass.block.has_all_rows(chunk.data)
        and not root.vectors.requires_grad
    ):
        ranks = block_pass.problem.ranks if block_pass.block.shares > 1 else None
        return structure.summarise(linearization, root, ranks), f
    return structure.accumulate(statistic, linearization, root), f


def _check_second_derivatives(
    block_pass: BlockPass, chunk: Chunk, root: RootRows, learned: Mapping[str, nn.Parameter]
) -> None:
    """Check once that the rows have the derivatives that the gradient takes."""
    problem = block_pass.problem
    checked = problem.plans.differentiated
    if checked.issuperset(learned):
        return
    model = (chunk.plan or block_pass.plan).model
    of_model = {name: p for name, p in learned.items() if name.startswith("model.")}
    varies = root.vectors.requires_grad
    if of_model or varies:
        check_rows(model, problem.weights, of_model, list(learned), chunk.x, varies)
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
        f, inner = _inner(block_pass, cotangent, chunk, learned)
        objective = log_likelihood_of(problem, f, chunk) - 0.5 * scale * inner
        if not objective.requires_grad:
            return sums
        found = torch.autograd.grad(objective, arguments, allow_unused=True)
        return [s if g is None else s + g for s, g in zip(sums, found, strict=True)]

    with torch.enable_grad():
        return over_chunks(block_pass, "second", add, [torch.zeros_like(a) for a in arguments])


def _inner(
    block_pass: BlockPass,
    cotangent: Statistic,
    chunk: Chunk,
    learned: Mapping[str, nn.Parameter],
) -> tuple[Tensor, Tensor | float]:
    """The outputs of a micro-batch, and ⟨cotangent, its term of the statistic⟩."""
    if not chunk.has_rows:
        return outputs(block_pass, chunk), 0.0
    if block_pass.problem.settings.spec.curvature == "hessian":
        term, f = _add_hessian(block_pass, chunk, None, True)
        return f, inner_product(cotangent, term)
    linearization = linearized(block_pass, chunk, True)
    root = root_rows(block_pass.problem, linearization.outputs, chunk)
    _check_second_derivatives(block_pass, chunk, root, learned)
    inner = block_pass.plan.structure.inner(cotangent, chunk.data, linearization, root)
    return linearization.outputs, inner
