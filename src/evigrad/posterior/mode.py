"""Measure how far the weights are from the mode of the posterior, in nats of log evidence.

The Laplace approximation assumes that the weights are at the mode of the log joint density. If this
density has the gradient g at the weights w, the mode of the linearized model is w + (H + P0)⁻¹ g.
At this mode, the log joint density and the log evidence of the linearized model are higher by

    ½ gᵀ (H + P0)⁻¹ g,      g = Jᵀ ∇_f log p(y|f) / T − P0 (w − w₀).

This is exact for a Gaussian likelihood. For other likelihoods, it is an approximation of second
order in the Newton step. H and the log-determinant do not change (J. Antorán et al., 2022,
arXiv:2206.08900, section 4).
"""

import math
from typing import Any

import torch
from torch import Tensor

from evigrad.blocks.sources import as_source
from evigrad.errors import MemoryBudgetError, NotFiniteError
from evigrad.likelihoods.calls import in_columns, log_probabilities
from evigrad.likelihoods.positions import flattened
from evigrad.network import model_outputs
from evigrad.network.modes import evaluation_mode
from evigrad.passes.checks import check_inputs
from evigrad.passes.memory import fits
from evigrad.passes.problem import Problem
from evigrad.posterior.posterior import make_posterior

# Number of examples per backward pass, halved when memory runs out.
_AT_ONCE = 1000


def mode_gap(problem: Problem, data: Any, structure: str, rows: int | None = None) -> float:
    """Return ½ gᵀ (H + P0)⁻¹ g in nats, summed over all N training examples.

    H is approximated as in a posterior with this ``structure`` and this number of ``rows``.

    Raises:
        NotFiniteError: If the result is NaN or infinite.
    """
    posterior = make_posterior(problem, data, structure, rows)
    gradient = log_joint_gradient(problem, data)
    gap = 0.5 * posterior.variance_of({name: gradient[name] for name in posterior.parameters})
    if not math.isfinite(gap):
        raise NotFiniteError(
            f"The gap to the mode is {gap}, because the gradient of the log joint density is too"
            " large. Look for weights, inputs or prior precisions that have diverged, and lower"
            " their learning rates."
        )
    return gap


def log_joint_gradient(problem: Problem, data: Any) -> dict[str, Tensor]:
    """Return the gradient g of the log joint density of all data with respect to the weights.

    The model is in evaluation mode. If it draws noise, the noise has seed 0.

    Raises:
        MemoryBudgetError: If the gradient of a single example does not fit into memory.
    """
    source, ranks, weights = as_source(data), problem.ranks, problem.weights
    totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    generator = torch.Generator().manual_seed(0)

    def add(indices: Tensor) -> None:
        x, y = source.fetch(indices)
        f = model_outputs(problem.model, check_inputs(x, problem.device), positions=True)
        y = in_columns(problem.likelihood, f.shape[1:], y)
        f, y = flattened(problem.likelihood, f, y)
        if not len(f):
            return
        value = log_probabilities(problem.likelihood, f, y, alone=False).sum()
        gradients = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                totals[name] += gradient

    with (
        ranks.together(),  # before the sum, in which the others would wait for a rank that failed
        evaluation_mode(problem.model, generator),
        torch.enable_grad(),
    ):
        part, size = ranks.part(len(source)), _AT_ONCE
        start = part.start
        while start < part.stop:
            indices = torch.arange(start, min(start + size, part.stop), device="cpu")
            if fits(lambda batch=indices: add(batch)):
                start += len(indices)
            elif len(indices) > 1:
                size = len(indices) // 2
            else:
                raise MemoryBudgetError(
                    "The gradient of one example does not fit into the free memory.",
                    "Use a smaller network, or a machine with more memory.",
                )
    sums = ranks.sum(list(totals.values()))
    precisions, deviations = problem.prior.precisions(), problem.prior.deviations(weights)
    return {
        name: total / problem.temperature - precisions[name] * deviations[name]
        for name, total in zip(totals, sums, strict=True)
    }
