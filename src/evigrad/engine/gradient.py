"""The number and its gradient: the estimate of a block, and two ways to differentiate it.

- ``two_pass``: accumulate the statistic without a graph, differentiate its log-determinant, and
  go through the data once more with a graph, one micro-batch at a time (DESIGN 3.3). Memory does
  not grow with the block but for the statistic.
- ``one_graph``: one autograd graph over the whole block, the reference that the others are tested
  against.

Where no more than the prior and a mere scale of the rows (a noise) is learned, one pass without a
graph is enough (``one_pass``). All give the gradient of −(log evidence + log hyperprior) / N.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from evigrad.engine.assembly import Assembly, Terms
from evigrad.engine.collected import Collected
from evigrad.engine.estimate import Estimate
from evigrad.engine.passes import Task
from evigrad.errors import EvigradError

Gradients = list[Tensor | None]


def objective(assembly: Assembly, collected: Collected) -> tuple[Estimate, Tensor]:
    """The estimate of a collected pass, and −(log evidence + log hyperprior) / N.

    Args:
        assembly: Of the evidence.
        collected: A pass.

    Returns:
        The estimate, and the objective with a graph where gradients are on.
    """
    terms = assembly.terms(collected)
    log_prior, log_hyperprior = _prior_terms(assembly)
    estimate = _estimate(assembly, terms, log_prior, log_hyperprior)
    log_evidence = terms.log_likelihood + log_prior - 0.5 * terms.log_det
    return estimate, -(log_evidence + log_hyperprior) / assembly.settings.num_data


def of_kept(
    assembly: Assembly, passes: Sequence[Collected], learnable: Sequence[nn.Parameter]
) -> tuple[Estimate, Gradients]:
    """The mean over kept passes, without any pass through the network.

    Args:
        assembly: Of the evidence.
        passes: One or more.
        learnable: What to differentiate in; may be empty.

    Returns:
        The estimate and the gradients.
    """
    estimates: list[Estimate] = []
    total: Gradients = [None] * len(learnable)
    for collected in passes:
        estimate, value = objective(assembly, collected)
        estimates.append(estimate)
        if learnable:
            found = torch.autograd.grad(value / len(passes), list(learnable), allow_unused=True)
            total = [_sum(a, b) for a, b in zip(total, found, strict=True)]
    return mean_estimate(estimates), total


def of_task(assembly: Assembly, task: Task) -> Estimate:
    """The estimate on a block of data, in float64 where it has to be.

    Args:
        assembly: Of the evidence.
        task: The block.

    Returns:
        The estimate.
    """

    def work(task: Task) -> Estimate:
        return objective(assembly, assembly.collect(task, False, condense=True))[0]

    return assembly.precisely(task, work)


def of_data(
    assembly: Assembly, task: Task, learnable: Mapping[str, nn.Parameter]
) -> tuple[Estimate, Gradients]:
    """The gradient on a block of data, in float64 where it has to be.

    Args:
        assembly: Of the evidence.
        task: The block.
        learnable: Hyperparameters to differentiate in, by name; no other requires a gradient.

    Returns:
        The estimate, and one gradient for each hyperparameter, in their order.
    """
    return assembly.precisely(task, lambda task: _of_data(assembly, task, learnable))


def _of_data(
    assembly: Assembly, task: Task, learnable: Mapping[str, nn.Parameter]
) -> tuple[Estimate, Gradients]:
    """The gradient on a block of data, by the way that suits what is learned."""
    of_prior = [p for name, p in learnable.items() if name.startswith("prior.")]
    of_passes = [p for name, p in learnable.items() if not name.startswith("prior.")]
    if assembly.settings.gradient == "one-graph":
        in_network = any(name.startswith("model.") for name in learnable)
        return one_graph(assembly, task, list(learnable.values()), in_network)
    if not needs_two_passes(assembly, learnable, task.prepared.partition.num_outputs):
        return one_pass(assembly, task, list(learnable.values()), bool(of_passes))
    estimate, found = two_pass(assembly, task, of_prior, of_passes)
    order = {id(p): gradient for p, gradient in zip(of_prior + of_passes, found, strict=True)}
    return estimate, [order[id(p)] for p in learnable.values()]


def needs_two_passes(assembly: Assembly, learnable: Iterable[str], num_outputs: int) -> bool:
    """Whether what is learned is in the rows, and not only beside them or a scale of all.

    Args:
        assembly: Of the evidence.
        learnable: Names of hyperparameters.
        num_outputs: C.

    Returns:
        False where steps on a statistic of the unscaled rows give the gradient.
    """
    names = list(learnable)
    if any(name.startswith("model.") for name in names):
        return True
    if all(name.startswith("prior.") for name in names):
        return False
    in_rows = assembly.rows_depend_on_likelihood(num_outputs)
    return in_rows or assembly.noise_differs_in_sums(num_outputs)


def one_pass(
    assembly: Assembly, task: Task, learnable: Sequence[nn.Parameter], with_noise: bool
) -> tuple[Estimate, Gradients]:
    """The gradient in the prior and a noise, by one pass without a graph.

    Args:
        assembly: Of the evidence.
        task: The block.
        learnable: What to differentiate in.
        with_noise: Whether that is more than the prior.

    Returns:
        The estimate and the gradients.
    """
    collected = assembly.collect(task, False, keep_outputs=with_noise, condense=True)
    estimate, value = objective(assembly, collected)
    return estimate, list(torch.autograd.grad(value, list(learnable), allow_unused=True))


def one_graph(
    assembly: Assembly, task: Task, learnable: Sequence[nn.Parameter], in_network: bool
) -> tuple[Estimate, Gradients]:
    """The gradient by one autograd graph over the whole block.

    Args:
        assembly: Of the evidence.
        task: The block.
        learnable: What to differentiate in.
        in_network: Whether the network depends on it.

    Returns:
        The estimate and the gradients.
    """
    collected = assembly.collect(task, in_network)
    estimate, value = objective(assembly, collected)
    return estimate, list(torch.autograd.grad(value, list(learnable), allow_unused=True))


def two_pass(
    assembly: Assembly,
    task: Task,
    of_prior: Sequence[nn.Parameter],
    of_passes: Sequence[nn.Parameter],
) -> tuple[Estimate, Gradients]:
    """The gradient in two passes over the block, micro-batch by micro-batch.

    Args:
        assembly: Of the evidence.
        task: The block.
        of_prior: Learnable parameters of the prior.
        of_passes: Learnable hyperparameters of the model and of the likelihood.

    Returns:
        The estimate and the gradients, those of the prior first.
    """
    num_data = assembly.settings.num_data
    with torch.no_grad():
        collected = assembly.collect(task, differentiable=False)
    structure, scale = collected.prepared.structure, collected.block.scale
    differential = structure.differentiate(
        collected.statistic, assembly.prior.precisions(), of_prior
    )
    terms = Terms(
        collected.log_likelihood, scale * differential.log_det, assembly.is_bound(collected)
    )
    with torch.enable_grad():
        log_prior, log_hyperprior = _prior_terms(assembly)
        direct: Gradients = [None] * len(of_prior)
        if of_prior:
            value = log_prior + log_hyperprior
            direct = list(torch.autograd.grad(value, list(of_prior), allow_unused=True))
    estimate = _estimate(assembly, terms, log_prior, log_hyperprior)
    # What the spot check of the first pass may have changed holds for the second too.
    again = Task(**{**vars(task), "prepared": collected.prepared})
    pulled = assembly.pull_back(again, differential.cotangent, scale, of_passes)
    prior_gradients: Gradients = []
    for own, of_log_det in zip(direct, differential.gradients, strict=True):
        part = None if of_log_det is None else -0.5 * scale * of_log_det
        whole = _sum(own, part)
        prior_gradients.append(None if whole is None else -whole / num_data)
    return estimate, prior_gradients + [-gradient / num_data for gradient in pulled]


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of several estimates of the same evidence.

    Args:
        estimates: One or more.

    Returns:
        An estimate; a bound if all of them are.
    """
    first, count = estimates[0], len(estimates)
    if count == 1:
        return first

    def mean(name: str) -> float:
        return sum(getattr(estimate, name) for estimate in estimates) / count

    return Estimate(
        log_evidence=mean("log_evidence"),
        log_likelihood=mean("log_likelihood"),
        log_prior=mean("log_prior"),
        log_det=mean("log_det"),
        log_hyperprior=first.log_hyperprior,
        is_bound=all(estimate.is_bound for estimate in estimates),
        num_data=first.num_data,
        estimator=first.estimator,
    )


def _prior_terms(assembly: Assembly) -> tuple[Tensor, Tensor]:
    weights = {name: w.detach() for name, w in assembly.weights.items()}
    return -0.5 * assembly.prior.quadratic(weights), assembly.prior.log_hyperprior()


def _estimate(
    assembly: Assembly, terms: Terms, log_prior: Tensor, log_hyperprior: Tensor
) -> Estimate:
    parts = (terms.log_likelihood, log_prior, terms.log_det, log_hyperprior)
    log_likelihood, log_prior_value, log_det, log_hyper = (float(p.detach()) for p in parts)
    value = log_likelihood + log_prior_value - 0.5 * log_det
    if not math.isfinite(value):
        raise EvigradError(
            f"The log evidence is {value} (log likelihood {log_likelihood:.4g}, log prior"
            f" {log_prior_value:.4g}, log-determinant {log_det:.4g}): weights or"
            " hyperparameters have diverged; lower their learning rates."
        )
    return Estimate(
        log_evidence=value,
        log_likelihood=log_likelihood,
        log_prior=log_prior_value,
        log_det=log_det,
        log_hyperprior=log_hyper,
        is_bound=terms.is_bound,
        num_data=assembly.settings.num_data,
        estimator=assembly.settings.spec.name,
    )


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right
