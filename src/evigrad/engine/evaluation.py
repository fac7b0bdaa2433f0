"""The estimate of a block, and the ways to differentiate it.

- Two passes: accumulate the statistic without a graph, differentiate its log-determinant, and go
  through the data once more with a graph, one micro-batch at a time. Only the
  statistic's memory grows with the block.
- One pass without a graph, where only the prior and a mere scale of the rows are learned.

All give the gradient of −(log evidence + log hyperprior) / N.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evigrad.blocks import Block
from evigrad.curvature import LogDet, RoundingError, rounding_refused
from evigrad.engine.cotangents import is_one_number, needs_two_passes, root_rows
from evigrad.engine.kept import KeptPass
from evigrad.engine.memory import fits
from evigrad.engine.passes import BlockPass
from evigrad.engine.problem import Problem
from evigrad.engine.two_passes import FirstPass, first_pass, log_likelihood_of, second_pass
from evigrad.errors import ConfigurationError, NotFiniteError
from evigrad.jacobians import derivatives_named

# The numbers of an estimate that are averaged.
_TERMS = ("log_evidence", "log_likelihood", "log_prior", "log_det", "log_hyperprior")

Found = TypeVar("Found")


@dataclass(frozen=True)
class Estimate:
    """One estimate of the log evidence of the whole data set, in nats.

    ``log_evidence = log_likelihood + log_prior - log_det / 2``: the linearised Laplace
    approximation with all constants in (the paper's Algorithm 1).

    Attributes:
        log_evidence: Estimate of log q(D|h).
        log_likelihood: Estimate of (1/T) log p(D|w,h).
        log_prior: −½ (w−w₀)ᵀP0(w−w₀), exact. (The rest of log p(w|h) cancels in the determinant.)
        log_det: Estimate of ℓ(I) = log|I + S|, scaled to the whole data set.
        log_hyperprior: Log density of the hyperparameters, not part of ``log_evidence``.
        is_bound: Whether the expectation of ``log_evidence`` is a lower bound on the log evidence
            of the same curvature; a single estimate can be above it.
        num_data: N.
        estimator: Canonical name of the estimator.
        entropies: ℓ(Z) of the anchors and ℓ(B_b|Z) of each drawn part of an anchored block, in
            nats; empty for other blocks.
    """

    log_evidence: float
    log_likelihood: float
    log_prior: float
    log_det: float
    log_hyperprior: float
    is_bound: bool
    num_data: int
    estimator: str
    entropies: tuple[float, ...] = ()

    @property
    def per_datum(self) -> float:
        """The log evidence divided by N, in nats per datum."""
        return self.log_evidence / self.num_data


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of independent values; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    return float(torch.tensor(values, dtype=torch.float64, device="cpu").std()) / len(values) ** 0.5


def estimates_of(passes: BlockPass | Sequence[KeptPass]) -> list[Estimate]:
    """The estimate on a block, in float64 where float32 is too coarse, or those of kept passes."""

    def work(block_pass: BlockPass) -> Estimate:
        return objective(first_pass(block_pass, FirstPass(condensed=True)))[0]

    if isinstance(passes, BlockPass):
        with derivatives_named():
            return [precisely(passes, work)]
    return [objective(kept)[0] for kept in passes]


def gradients_of(
    passes: BlockPass | Sequence[KeptPass], learnable: Mapping[str, nn.Parameter]
) -> tuple[list[Estimate], list[Tensor]]:
    """Return the estimates of ``estimates_of``, and the gradient of their mean.

    It is in the ``learnable`` hyperparameters, in their order; no other requires a gradient.
    """
    parameters = list(learnable.values())
    if not isinstance(passes, BlockPass):
        estimates, total = list[Estimate](), [torch.zeros_like(p) for p in parameters]
        for kept in passes:
            estimate, value = objective(kept)
            estimates.append(estimate)
            gradients = _gradients(value / len(passes), parameters)
            total = [a + b for a, b in zip(total, gradients, strict=True)]
        return estimates, total
    problem = passes.problem
    if needs_two_passes(problem, learnable, passes.plan.partition.num_outputs):
        with derivatives_named():
            estimate, gradients = precisely(
                passes, lambda block_pass: _two_passes(block_pass, learnable)
            )
        return [estimate], gradients
    beside = any(not name.startswith("prior.") for name in learnable)
    use = FirstPass(keeps_outputs=beside, condensed=True)

    def one_pass(block_pass: BlockPass) -> tuple[Estimate, list[Tensor]]:
        estimate, value = objective(first_pass(block_pass, use))
        return estimate, _gradients(value, parameters)

    with derivatives_named():
        estimate, gradients = precisely(passes, one_pass)
    return [estimate], gradients


def precisely(
    block_pass: BlockPass,
    work: Callable[[BlockPass], Found],
    trial: Callable[[Found], object] | None = None,
) -> Found:
    """Return what ``work`` returns; where float32 rounds too much, run it again in float64.

    Every evaluation starts in float32, so that none depends on earlier ones. Where the user chose
    ``gram_dtype`` or memory does not suffice, a warning tells of the rounding instead. ``work``
    leaves nothing behind where it raises; ``trial`` is called on the result to provoke rounding
    errors that later steps would meet.
    """
    problem = block_pass.problem
    narrow = any(weight.dtype != torch.float64 for weight in problem.weights.values())
    if problem.settings.gram_dtype is not None or not narrow or problem.device.type == "mps":
        return work(block_pass)
    try:
        with rounding_refused():
            result = work(block_pass)
            if trial is not None:
                trial(result)
            return result
    except RoundingError:
        precise = problem.plans.in_float64(block_pass.plan)
    if block_pass.block.shares > 1:  # a rank cannot go back to float32 without the others
        return work(replace(block_pass, plan=precise))
    wide = fits(lambda: work(replace(block_pass, plan=precise)))
    return wide[0] if wide else work(block_pass)


def objective(kept: KeptPass) -> tuple[Estimate, Tensor]:
    """The estimate under present hyperparameters, and −(log evidence + log hyperprior) / N."""
    problem, structure = kept.problem, kept.plan.structure
    precisions, log_likelihood = problem.prior.precisions(), kept.log_likelihood
    statistic: Any = kept.statistic
    if kept.outputs:
        statistic, precisions = _rescaled(kept, precisions)
        terms = [log_likelihood_of(problem, f, chunk) for chunk, f in kept.outputs]
        log_likelihood = torch.stack(terms).sum()
    log_det = structure.evaluate(statistic, precisions, kept.conditioning)
    log_prior, log_hyperprior = _prior_terms(problem)
    estimate = _estimate(kept, log_likelihood, log_det, log_prior, log_hyperprior)
    log_evidence = log_likelihood + log_prior - 0.5 * (kept.block.scale * log_det.value)
    return estimate, -(log_evidence + log_hyperprior) / problem.settings.num_data


def _two_passes(
    block_pass: BlockPass, learnable: Mapping[str, nn.Parameter]
) -> tuple[Estimate, list[Tensor]]:
    """The gradient in two passes over the block, one micro-batch at a time."""
    problem = block_pass.problem
    of_prior = [p for name, p in learnable.items() if name.startswith("prior.")]
    of_passes = {name: p for name, p in learnable.items() if not name.startswith("prior.")}
    with torch.no_grad():
        kept = first_pass(block_pass, FirstPass())
    scale = kept.block.scale
    differential = kept.plan.structure.differentiate(
        kept.statistic, problem.prior.precisions(), of_prior, kept.conditioning
    )
    with torch.enable_grad():
        log_prior, log_hyperprior = _prior_terms(problem)
        direct = _gradients(log_prior + log_hyperprior, of_prior)
    estimate = _estimate(kept, kept.log_likelihood, differential.log_det, log_prior, log_hyperprior)
    # The check in the first pass may have replaced the plan.
    again = replace(block_pass, plan=kept.plan)
    # Gradients are later averaged over ranks, so scale this rank's term by their number.
    shared_scale = scale * kept.block.shares
    pulled = second_pass(again, differential.cotangent, shared_scale, of_passes)
    in_prior = [
        d if g is None else d - 0.5 * scale * g
        for d, g in zip(direct, differential.gradients, strict=True)
    ]
    gradients = dict(
        zip(map(id, [*of_prior, *of_passes.values()]), [*in_prior, *pulled], strict=True)
    )
    return estimate, [-gradients[id(p)] / problem.settings.num_data for p in learnable.values()]


def _rescaled(kept: KeptPass, precisions: Mapping[str, Tensor]) -> tuple[Any, Mapping[str, Tensor]]:
    """Statistic and precisions, with the rows' scale that the likelihood now gives."""
    problem, scales = kept.problem, list[Tensor]()
    for chunk, f in kept.outputs:
        root = root_rows(problem, f, chunk)
        if root.scale is None:
            return kept.statistic, precisions
        scales.append(root.scale if root.present is None else root.scale[root.present])
    scale = torch.cat([s.flatten() for s in scales])
    if not len(scale) and not hasattr(kept.statistic, "with_scale"):
        # A share without rows: any row has the scale, if it is one number.
        (chunk, f), *_ = kept.outputs
        column = torch.zeros(len(f), 1, dtype=torch.int64, device="cpu")
        scale = root_rows(problem, f, replace(chunk, columns=column)).scale
        assert scale is not None
        scale = scale.flatten()
    if hasattr(kept.statistic, "with_scale"):
        return kept.statistic.with_scale(scale), precisions
    # r² H under the precisions P0 has the log-determinant of H under P0 / r².
    first = scale[0]
    if not is_one_number(scale, list(problem.likelihood.parameters())):
        raise ConfigurationError(
            f"{problem.settings.spec.name} sums rows of different scales, so that a kept pass"
            " cannot follow the likelihood's parameters. Take an 'ntk' estimator, or one noise for"
            " all outputs."
        )
    return kept.statistic, {n: p / first.square().to(p) for n, p in precisions.items()}


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of several estimates of the same evidence; a bound if all of them are."""
    count = len(estimates)
    if count == 1:
        return estimates[0]
    means = {
        name: sum(getattr(estimate, name) for estimate in estimates) / count for name in _TERMS
    }
    is_bound = all(estimate.is_bound for estimate in estimates)
    return replace(estimates[0], **means, is_bound=is_bound, entropies=())


def over_ranks(
    problem: Problem,
    blocks: Sequence[Block],
    estimates: Sequence[Estimate],
    gradients: Sequence[Tensor] = (),
) -> tuple[Estimate, list[Tensor]]:
    """Return the mean of the estimates of all ranks, and that of the gradients of ``estimates``.

    Each is on one of the ``blocks``. A rank counts as often as these have draws of anchored blocks
    (others have one). It may have none, but for the first; its gradients are zero. With H numbers
    in the gradients a rank sends 2 (R − 1)/R · 8 (H + 7) bytes.
    """
    if problem.ranks.count == 1:
        return mean_estimate(estimates), list(gradients)
    count, settings = sum(max(1, block.num_draws) for block in blocks), problem.settings
    unbound = sum(not e.is_bound for e in estimates)
    draws_per_estimate = count / max(1, len(estimates))
    terms = [draws_per_estimate * sum(getattr(e, name) for e in estimates) for name in _TERMS]
    scalars = torch.tensor([count, unbound, *terms], dtype=torch.float64, device="cpu")
    sums = problem.ranks.sum([scalars, *(count * g.to(scalars) for g in gradients)])
    count, unbound, *terms = sums[0].tolist()
    mean = Estimate(
        **{name: term / count for name, term in zip(_TERMS, terms, strict=True)},
        is_bound=unbound == 0,
        num_data=settings.num_data,
        estimator=settings.spec.name,
    )
    return mean, [(s / count).to(g) for s, g in zip(sums[1:], gradients, strict=True)]


def _prior_terms(problem: Problem) -> tuple[Tensor, Tensor]:
    weights = {name: w.detach() for name, w in problem.weights.items()}
    return -0.5 * problem.prior.quadratic(weights), problem.prior.log_hyperprior()


def _estimate(
    kept: KeptPass,
    log_likelihood: Tensor,
    log_det: LogDet,
    log_prior: Tensor,
    log_hyperprior: Tensor,
) -> Estimate:
    settings = kept.problem.settings
    terms = (log_likelihood, log_prior, kept.block.scale * log_det.value, log_hyperprior)
    likelihood, prior, determinant, hyperprior = (float(t.detach()) for t in terms)
    value = likelihood + prior - 0.5 * determinant
    if not math.isfinite(value):
        raise NotFiniteError(
            f"The log evidence is {value} (log likelihood {likelihood:.4g}, log prior"
            f" {prior:.4g}, log-determinant {determinant:.4g}): weights or"
            " hyperparameters have diverged; lower their learning rates."
        )
    return Estimate(
        log_evidence=value,
        log_likelihood=likelihood,
        log_prior=prior,
        log_det=determinant,
        log_hyperprior=hyperprior,
        is_bound=kept.is_bound,
        num_data=settings.num_data,
        estimator=settings.spec.name,
        entropies=log_det.entropies,
    )


def _gradients(value: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradient of a number in each of the parameters, zeros where it does not depend on one."""
    if not parameters:
        return []
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    return list(gradients)
