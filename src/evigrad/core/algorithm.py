"""Algorithm 1: the log evidence estimated from a block, and its gradient.

    log q(D|h) = (1/T) log p(D|w) − ½ (w−w₀)ᵀ P0 (w−w₀) − ½ c · scale · ℓ(block)

D stands for the data, h for the hyperparameters and w for the weights. The prior has mean w₀ and
diagonal precision P0, and T is the temperature. H is the sum of the outer products of the block's
rows, and ℓ = log|I + P0^{-1/2} H P0^{-1/2}|. The factor ``scale`` scales ℓ up to all rows, by
Theorem 2 for blocks of a partition, and by Shearer's inequality for random subsets. The weight c
of the log-determinant is 1 for the log evidence (docs/theory.md explains other values). The
estimate is computed in these steps:

    micro-batch → outputs f → cotangents of a root of −∇² log p(y|f) → rows → statistic → ℓ

The loss is −(log q + log hyperprior) / N. If only the prior and a scale of the rows are learned,
one pass without a graph computes the statistic, and autograd differentiates the loss from there.
Hyperparameters of the forward pass need two passes (see ``two_passes``).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evigrad.core.block import MicroBatch
from evigrad.core.changes import likelihood_changes
from evigrad.core.curvature.anchored import LogDet
from evigrad.core.curvature.base import Curvature, log_det_of
from evigrad.core.curvature.linalg import TOLERATED_NATS
from evigrad.core.model import Estimate, LinearizedModel, Pass
from evigrad.core.protocols import Density, Linearization, Prior, Purpose, Sweep
from evigrad.core.roots import RootRows
from evigrad.errors import ConfigurationError, NotFiniteError

Model = LinearizedModel[Density, Prior]

# The terms of an estimate that are averaged.
TERMS = ("log_evidence", "log_likelihood", "log_prior", "log_det", "log_hyperprior")


def purpose_of(
    model: Model, curvature: Curvature[Any], num_outputs: int, learned: Iterable[str]
) -> Purpose:
    """Return what the first pass is for if the gradient of ``learned`` hyperparameters follows.

    One pass is enough for the prior, and for likelihood parameters that only scale the rows.
    """
    names = [name for name in learned if not name.startswith("prior.")]
    if not names:
        return Purpose.VALUE
    if any(name.startswith("model.") for name in names):
        return Purpose.DIFFERENTIATE
    changed = likelihood_changes(model, curvature, num_outputs)
    return Purpose.STEPS if changed == "scales" else Purpose.DIFFERENTIATE


# ------------------------------------------------------------ the first pass, and the value


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over the micro-batches so far."""

    log_likelihood: Tensor
    statistic: Any
    log_probabilities: tuple[Tensor, ...] = ()
    outputs: tuple[tuple[MicroBatch, Tensor], ...] = ()
    num_outputs: int = 0
    linearized: tuple[Linearization, RootRows] | None = None


def run_pass(model: Model, curvature: Curvature[Any], sweep: Sweep) -> Pass:
    """Return the log likelihood and the statistic of one pass over a block.

    The curvature turns rows into a statistic for the purpose of the sweep.
    """
    purpose, block = sweep.purpose, sweep.block

    def step(sums: _Sums, batch: MicroBatch) -> _Sums:
        statistic, outputs, linearized = sums.statistic, sums.outputs, sums.linearized
        if not batch.has_rows:  # such examples come after all examples with rows
            with torch.no_grad():
                f = sweep.outputs(batch)
        else:
            if purpose is Purpose.DIFFERENTIATE and sweep.holds_graph(batch):
                linearized = _with_graph(model, sweep, batch)
                linearization, root = linearized[0].without_graph(linearized[1])
            else:
                linearization = sweep.linearize(batch, graph=False)
                root = model.cotangents(linearization.outputs, batch)
                if root.vectors.requires_grad:
                    # The vectors themselves depend on the likelihood's parameters (a score, or a
                    # density without a separate scale), so the rows need a graph.
                    linearization = sweep.linearize(batch, graph=True)
                if purpose is Purpose.STEPS:  # each step has its own scale
                    root = replace(root, scale=None)
            f = linearization.outputs
            statistic = curvature.collect(statistic, linearization, root)
        log_probabilities = sweep.log_probabilities(f, batch)
        log_likelihood = model.log_likelihood(log_probabilities, batch.likelihood_weights)
        if purpose is Purpose.STEPS:  # a view of the inputs would hold all of them in memory
            outputs = (*outputs, (replace(batch, x=batch.x[:0].clone()), f.detach()))
        return _Sums(
            sums.log_likelihood + log_likelihood,
            statistic,
            (*sums.log_probabilities, log_probabilities.detach()),
            outputs,
            f.shape[1],
            linearized,
        )

    device = next(iter(model.weights.values())).device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    statistic = curvature.empty(purpose, block.num_collected(curvature.counts_data))
    sums = sweep.fold(step, _Sums(zero, statistic))
    return Pass(
        model=model,
        curvature=curvature,
        block=replace(block, inputs=None, targets=None),
        statistic=sweep.total(sums.statistic),
        log_likelihood=sums.log_likelihood,
        log_probabilities=torch.cat(sums.log_probabilities),
        num_outputs=sums.num_outputs,
        outputs=sums.outputs,
        linearized=sums.linearized,
    )


def _with_graph(model: Model, sweep: Sweep, batch: MicroBatch) -> tuple[Linearization, RootRows]:
    """Return a micro-batch's linearization and its cotangents, with a graph."""
    with torch.enable_grad():
        linearization = sweep.linearize(batch, graph=True)
        return linearization, model.cotangents(linearization.outputs, batch)


def log_evidence(block_pass: Pass) -> tuple[Estimate, Tensor]:
    """Return the estimate of the log evidence for the current hyperparameters, and the loss."""
    model = block_pass.model
    statistic, precisions = block_pass.statistic, model.prior.precisions()
    if model.estimator.scaled:
        precisions = _divided(precisions, block_pass.block.scale)
    log_likelihood = block_pass.log_likelihood
    if block_pass.outputs:  # use the current parameters of the likelihood
        scale, parameters = _scale(block_pass), list(model.likelihood.parameters())
        if scale is not None:
            statistic, precisions = block_pass.curvature.rescaled(
                statistic, precisions, scale, parameters
            )
        terms = [
            model.log_likelihood(model.likelihood.log_prob(f, batch.y), batch.likelihood_weights)
            for batch, f in block_pass.outputs
        ]
        log_likelihood = torch.stack(terms).sum()
    log_det = log_det_of(block_pass.curvature, statistic, precisions, block_pass.conditioning)
    log_prior, log_hyperprior = _prior_terms(model)
    estimate, factor = _estimate(block_pass, log_likelihood, log_det, log_prior, log_hyperprior)
    value = log_likelihood + log_prior - factor * log_det.value
    return estimate, -(value + log_hyperprior) / model.num_data


def _divided(precisions: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return precisions P0/M, for which ℓ is log|I + M P0⁻¹ H|."""
    return {name: precision / scale for name, precision in precisions.items()}


def _scale(block_pass: Pass) -> Tensor | None:
    """Return the current scale of each row, or None if no row has a scale."""
    model, scales = block_pass.model, list[Tensor]()
    for batch, f in block_pass.outputs:
        root = model.cotangents(f, batch)
        if root.scale is None:
            return None
        scales.append(root.scale if root.present is None else root.scale[root.present])
    scale = torch.cat([s.flatten() for s in scales])
    if not len(scale):
        # A share without rows: if the scale is one number, any row has it.
        (batch, f), *_ = block_pass.outputs
        column = torch.zeros(len(f), 1, dtype=torch.int64, device="cpu")
        root = model.cotangents(f, replace(batch, columns=column))
        assert root.scale is not None
        scale = root.scale.flatten()
    return scale


# ------------------------------------------------------------ the gradient


def one_pass(
    model: Model, curvature: Curvature[Any], sweep: Sweep, learned: Mapping[str, Tensor]
) -> tuple[Estimate, list[Tensor]]:
    """Return the estimate of the log evidence and the gradient of the loss, from a single pass.

    The purpose of the sweep is ``VALUE`` or ``STEPS`` (see ``purpose_of``).
    """
    estimate, loss = log_evidence(run_pass(model, curvature, sweep))
    return estimate, gradients_of(loss, list(learned.values()))


def two_passes(
    model: Model, curvature: Curvature[Any], sweep: Sweep, learned: Mapping[str, Tensor]
) -> tuple[Estimate, list[Tensor]]:
    """Return the estimate of the log evidence and the gradient of the loss, from two passes.

    The purpose of the sweep is ``DIFFERENTIATE``, and the hyperparameters may be any.

    The statistic 𝒯 is a sum of terms 𝒯_b over micro-batches b, so the gradient of ℓ is also a sum:

        dℓ/dh = ⟨∂ℓ/∂𝒯, d𝒯/dh⟩ = Σ_b d⟨∂ℓ/∂𝒯, 𝒯_b⟩/dh

    The first pass accumulates 𝒯 without a graph, and one factorization yields ∂ℓ/∂𝒯. The second
    pass computes each term 𝒯_b again, with the graph of one micro-batch at a time. If a block is a
    single small micro-batch, its graph stays in memory between the passes.
    """
    prior_parameters = [p for name, p in learned.items() if name.startswith("prior.")]
    pass_parameters = [p for name, p in learned.items() if not name.startswith("prior.")]
    with torch.no_grad():
        first = run_pass(model, curvature, sweep)
    precisions = model.prior.precisions()
    if model.estimator.scaled:
        precisions = _divided(precisions, first.block.scale)
    differential = curvature.differentiate(
        first.statistic, precisions, prior_parameters, first.conditioning
    )
    with torch.enable_grad():
        log_prior, log_hyperprior = _prior_terms(model)
        direct = gradients_of(log_prior + log_hyperprior, prior_parameters)
    estimate, factor = _estimate(
        first, first.log_likelihood, differential.log_det, log_prior, log_hyperprior
    )

    def step(sums: list[Tensor], batch: MicroBatch) -> list[Tensor]:
        f, inner = _pulled_back(first, sweep, differential.cotangent, batch)
        log_likelihood = model.log_likelihood(
            model.likelihood.log_prob(f, batch.y), batch.likelihood_weights
        )
        # Statistics were summed over ranks already, and the mean over ranks follows later.
        objective = log_likelihood - factor * first.block.shares * inner
        if not objective.requires_grad:
            return sums
        gradients = torch.autograd.grad(objective, pass_parameters, allow_unused=True)
        return [s if g is None else s + g for s, g in zip(sums, gradients, strict=True)]

    with torch.enable_grad():
        pulled = sweep.fold(step, [torch.zeros_like(p) for p in pass_parameters], graph=True)
    in_prior = [
        d if g is None else d - factor * g
        for d, g in zip(direct, differential.gradients, strict=True)
    ]
    gradients = dict(
        zip(map(id, [*prior_parameters, *pass_parameters]), [*in_prior, *pulled], strict=True)
    )
    return estimate, [-gradients[id(p)] / model.num_data for p in learned.values()]


def _pulled_back(
    first: Pass, sweep: Sweep, cotangent: Any, batch: MicroBatch
) -> tuple[Tensor, Tensor | float]:
    """Return a micro-batch's outputs and ⟨cotangent, the micro-batch's part of the statistic⟩."""
    if not batch.has_rows:
        return sweep.outputs(batch), 0.0
    if first.linearized is not None and sweep.holds_graph(batch):
        linearization, root = first.linearized
    else:
        linearization, root = _with_graph(first.model, sweep, batch)
    inner = first.curvature.inner(cotangent, batch.data, linearization, root)
    return linearization.outputs, inner


def gradients_of(value: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a scalar, with zeros for parameters that do not affect it."""
    if not parameters:
        return []
    return list(torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True))


# ------------------------------------------------------------ estimates


def _prior_terms(model: Model) -> tuple[Tensor, Tensor]:
    weights = {name: w.detach() for name, w in model.weights.items()}
    return -0.5 * model.prior.quadratic(weights), model.prior.log_hyperprior()


def _estimate(
    block_pass: Pass,
    log_likelihood: Tensor,
    log_det: LogDet,
    log_prior: Tensor,
    log_hyperprior: Tensor,
) -> tuple[Estimate, float]:
    """Return the estimate, and the factor of ℓ in it without the sign."""
    model = block_pass.model
    scale = 1.0 if model.estimator.scaled else block_pass.block.scale
    weight = 0.5 * model.log_det_weight
    terms = (log_likelihood, log_prior, scale * log_det.value, log_hyperprior)
    # On a GPU, each read of a number waits for all operations before it, so read all at once.
    numbers = torch.stack([term.detach().to(log_likelihood) for term in terms]).tolist()
    likelihood, prior, determinant, hyperprior = numbers
    value = likelihood + prior - weight * determinant
    if determinant < -TOLERATED_NATS * scale:
        raise ConfigurationError(
            f"The log-determinant of '{model.estimator.name}' must not be negative, got"
            f" {determinant / scale:.4g}. log|I + S| is at least 0, because S is a"
            " sum of outer products. Check the signs in log_det."
        )
    if not math.isfinite(value):
        raise NotFiniteError(
            f"The log evidence is {value} (log likelihood {likelihood:.4g}, log prior"
            f" {prior:.4g}, log-determinant {determinant:.4g}), so weights or hyperparameters have"
            " diverged. Lower their learning rates."
        )
    estimate = Estimate(
        log_evidence=value,
        log_likelihood=likelihood,
        log_prior=prior,
        log_det=determinant,
        log_det_weight=model.log_det_weight,
        log_hyperprior=hyperprior,
        is_bound=block_pass.is_bound,
        num_data=model.num_data,
        estimator=model.estimator.name,
        entropies=log_det.entropies,
    )
    return estimate, weight * scale


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of estimates of the same evidence.

    The mean is a bound if all estimates are bounds.
    """
    count = len(estimates)
    if count == 1:
        return estimates[0]
    means = {name: sum(getattr(e, name) for e in estimates) / count for name in TERMS}
    is_bound = all(estimate.is_bound for estimate in estimates)
    return replace(estimates[0], **means, is_bound=is_bound, entropies=())
