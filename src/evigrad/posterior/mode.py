"""Measure how far the weights are from the mode of the posterior, in nats of log evidence.

The Laplace approximation assumes that the weights are at the mode of the log joint density. If this
density has the gradient g at the weights w, the mode of the linearized model is w + (H + P0)⁻¹ g.
At this mode, the log joint density and the log evidence of the linearized model are higher by

    ½ gᵀ (H + P0)⁻¹ g,      g = Jᵀ ∇_f log p(y|f) / T − P0 (w − w₀).

This is exact for a Gaussian likelihood. For other likelihoods, it is an approximation of second
order in the Newton step. H and the log-determinant do not change (J. Antorán et al., 2022,
arXiv:2206.08900, section 4).

A network with kinks, such as ReLU, can be at a mode where g is not zero. The linearized model then
has a gap, but the Newton step lowers the log joint density of the network. ``NewtonStep.taken``
takes the step only if the network gains a large part of what the linearized model predicts.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evigrad.blocks.sources import Subset, as_source
from evigrad.errors import NotFiniteError
from evigrad.likelihoods.calls import in_columns, log_probabilities
from evigrad.likelihoods.positions import flattened
from evigrad.network import model_outputs
from evigrad.network.modes import evaluation_mode
from evigrad.passes.checks import check_count, check_inputs
from evigrad.passes.memory import in_parts
from evigrad.passes.problem import Problem
from evigrad.posterior.posterior import make_posterior

# Number of examples per backward pass, halved when memory runs out. With 1,000, a pass of a
# convolutional network over CIFAR-10 takes twice as long.
_AT_ONCE = 200
# Lengths that ``NewtonStep.taken`` tries, relative to the Newton step. An approximation of H may
# lead to a step that is too long.
_SHARES = (1.0, 0.5)
# Share of the predicted gain that a step must reach. Half of an exact step reaches three quarters.
_REACHED = 0.5


@dataclass(frozen=True)
class NewtonStep:
    """A Newton step of the linearized model from the weights toward the mode.

    Attributes:
        gap: ½ gᵀ (H + P0)⁻¹ g in nats, summed over all N training examples. At the mode of the
            linearized model, the log joint density is higher by this much.
    """

    gap: float
    _problem: Problem
    _data: Any
    _log_joint: float
    _gradient: dict[str, Tensor]
    _changes: dict[str, Tensor]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Return a context in which the weights are nearer to the mode, if the step leads there.

        The context takes the Newton step, or half of it, if the network then gains at least half of
        what the linearized model predicts. Otherwise, the weights do not change.
        """
        weights = {name: self._problem.model.weights[name].detach() for name in self._changes}
        saved = {name: weight.clone() for name, weight in weights.items()}

        def move(share: float) -> None:
            for name, weight in weights.items():
                weight.copy_(saved[name] + share * self._changes[name])

        try:
            for share in _SHARES:
                move(share)
                after, _ = log_joint(self._problem, self._data, slope=False)
                if after - self._log_joint >= _REACHED * self.gap:
                    break
            else:
                move(0.0)
            yield
        finally:
            for name, weight in weights.items():
                weight.copy_(saved[name])


def newton_step(
    problem: Problem,
    data: Any,
    structure: str,
    rows: int | None = None,
    examples: int | None = None,
    *,
    other: NewtonStep | None = None,
) -> NewtonStep:
    """Return the Newton step from the present weights. It does not change the weights.

    H is approximated as in a posterior with this ``structure`` and this number of ``rows``. With
    ``examples``, this many random examples represent all examples in H, but not in g. ``other`` is
    a step from the same weights with another approximation of H. Its g is not computed again.

    Raises:
        NotFiniteError: If the gap is NaN or infinite.
    """
    problem = replace(problem, generator=torch.Generator().manual_seed(0))
    with problem.ranks.together():
        posterior = make_posterior(*_sampled(problem, data, examples), structure, rows)
    value, gradient = (other._log_joint, other._gradient) if other else log_joint(problem, data)
    changes = posterior._covariance.times(gradient)
    gap = 0.5 * sum((gradient[name] * change).sum().item() for name, change in changes.items())
    if not math.isfinite(gap):
        raise NotFiniteError(
            f"The gap to the mode is {gap}, because the gradient of the log joint density is too"
            " large. Look for weights, inputs or prior precisions that have diverged, and lower"
            " their learning rates."
        )
    return NewtonStep(gap, problem, data, value, gradient, changes)


def _sampled(problem: Problem, data: Any, examples: int | None) -> tuple[Problem, Any]:
    """Return n of the N examples, and a problem in which each of them counts as N / n examples.

    A likelihood p raised to the power N / (n T) has N / n times the curvature.
    """
    if examples is not None:
        check_count("examples", examples)
    source = as_source(data)
    if examples is None or examples >= len(source):
        return problem, data
    chosen = torch.randperm(len(source), generator=torch.Generator().manual_seed(0), device="cpu")
    temperature = problem.model.temperature * examples / len(source)
    model = replace(problem.model, num_data=examples, temperature=temperature)
    return replace(problem, model=model), Subset(source, chosen[:examples].sort().values)


def log_joint(
    problem: Problem, data: Any, *, slope: bool = True
) -> tuple[float, dict[str, Tensor]]:
    """Return the log joint density of all data and the weights, without its constants.

    With ``slope``, also return its gradient g with respect to the weights.

    The model is in evaluation mode. If it draws noise, the noise has seed 0.

    Raises:
        MemoryBudgetError: If the gradient of a single example does not fit into memory.
    """
    source, ranks, weights = as_source(data), problem.ranks, problem.model.weights
    totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    dtype = torch.promote_types(problem.dtype, torch.float32)
    log_prob = torch.zeros((), dtype=dtype, device=problem.device)
    generator = torch.Generator().manual_seed(0)

    def add(indices: Tensor) -> None:
        x, y = source.fetch(indices)
        f = model_outputs(problem.network.model, check_inputs(x, problem.device), positions=True)
        y = in_columns(problem.model.likelihood, f.shape[1:], y)
        f, y = flattened(problem.model.likelihood, f, y)
        if not len(f):
            return
        value = log_probabilities(problem.model.likelihood, f, y, compare=False).sum()
        if slope:
            gradients = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
            for name, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    totals[name] += gradient
        log_prob.add_(value.detach())  # last, because memory may run out before

    with (
        ranks.together(),  # before the sum, in which the others would wait for a rank that failed
        evaluation_mode(problem.network.model, generator),
        torch.set_grad_enabled(slope),
    ):
        in_parts(ranks.part(len(source)), _AT_ONCE, add)
    log_prob, *sums = ranks.sum([log_prob, *totals.values()])
    prior = problem.model.prior
    precisions, deviations = prior.precisions(), prior.deviations(weights)
    decay = sum((precisions[n] * d.square()).sum().item() for n, d in deviations.items())
    gradient = {
        name: total / problem.model.temperature - precisions[name] * deviations[name]
        for name, total in zip(totals, sums, strict=True)
    }
    return float(log_prob) / problem.model.temperature - 0.5 * decay, gradient
