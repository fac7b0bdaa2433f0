"""The twin of the two passes: one graph over the whole block, and plain autograd through it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evigrad import Estimate, Evidence
from evigrad.engine.cotangents import root_rows
from evigrad.engine.evaluation import objective
from evigrad.engine.intake import resolve
from evigrad.engine.kept import KeptPass, weighted
from evigrad.engine.parameters import divided, held_constant
from evigrad.engine.passes import BlockPass, Chunk, linearized, outputs, over_chunks
from evigrad.engine.two_passes import _add_hessian
from evigrad.likelihoods.calls import log_probabilities


class OneGraph(Evidence):
    """An evidence without shortcuts: formed rows, H instead of kernels, and a graph of all rows."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        plain = replace(self._problem.settings, plain_curvature=True)
        self._problem.plans.settings = plain
        self._problem = replace(self._problem, settings=plain)

    def backward(
        self, x: Any, y: Tensor | None = None, *, wrt: str | Sequence[str] | None = None
    ) -> Estimate:
        learnable, others = divided(self.hyperparameters(), wrt)
        parameters = list(learnable.values())
        with torch.enable_grad(), held_constant(others):
            estimate, loss = objective(_with_graph(resolve(self._problem, x, y)))
            gradients = torch.autograd.grad(
                loss, parameters, allow_unused=True, materialize_grads=True
            )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return estimate


def _with_graph(block_pass: BlockPass) -> KeptPass:
    problem, structure = block_pass.problem, block_pass.plan.structure

    def step(state: tuple[Any, list[Tensor]], batch: Chunk) -> tuple[Any, list[Tensor]]:
        statistic, log_probs = state
        if not batch.has_rows:
            f = outputs(block_pass, batch)
        elif problem.settings.spec.curvature == "hessian":
            statistic, f = _add_hessian(block_pass, batch, statistic, True)
        else:
            linearization = linearized(block_pass, batch, True)
            f = linearization.outputs
            statistic = structure.accumulate(statistic, linearization, root_rows(problem, f, batch))
        return statistic, [*log_probs, log_probabilities(problem.likelihood, f, batch.y)]

    statistic, terms = over_chunks(block_pass, "first", step, (None, []))
    log_probs = torch.cat(terms)
    return KeptPass(
        problem=problem,
        plan=block_pass.plan,
        log_likelihood=weighted(problem, log_probs, block_pass.block.likelihood_weights),
        statistic=statistic,
        block=block_pass.block,
        log_probs=log_probs.detach(),
    )
