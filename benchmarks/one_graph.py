"""The twin of the two passes: one graph over the whole block, with plain autograd."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evigrad import Estimate, Evidence
from evigrad.core.algorithm import log_evidence
from evigrad.core.block import MicroBatch
from evigrad.core.model import Pass
from evigrad.core.protocols import Purpose
from evigrad.passes.intake import resolve
from evigrad.passes.parameters import divided, held_constant
from evigrad.passes.sweep import MicroBatchSweep


class OneGraph(Evidence):
    """An evidence without shortcuts: formed rows, H instead of kernels, and one graph."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.problem = replace(self.problem, purpose=Purpose.ROWS, curvatures={})

    def backward(
        self, x: Any, y: Tensor | None = None, *, wrt: str | Sequence[str] | None = None
    ) -> Estimate:
        learnable, others = divided(self.hyperparameters(), wrt)
        parameters = list(learnable.values())
        with torch.enable_grad(), held_constant(others):
            estimate, loss = log_evidence(_with_graph(resolve(self.problem, x, y)))
            gradients = torch.autograd.grad(
                loss, parameters, allow_unused=True, materialize_grads=True
            )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return estimate


def _with_graph(sweep: MicroBatchSweep) -> Pass:
    model, curvature = sweep.problem.model, sweep.curvature

    def step(state: tuple[Any, list[Tensor]], batch: MicroBatch) -> tuple[Any, list[Tensor]]:
        statistic, terms = state
        if not batch.has_rows:
            f = sweep.outputs(batch)
        else:
            linearization = sweep.linearize(batch, graph=True)
            f = linearization.outputs
            statistic = curvature.collect(statistic, linearization, model.cotangents(f, batch))
        return statistic, [*terms, sweep.log_probabilities(f, batch)]

    statistic, terms = sweep.fold(step, (None, []))
    log_probabilities = torch.cat(terms)
    return Pass(
        model=model,
        curvature=curvature,
        block=sweep.block,
        statistic=statistic,
        log_likelihood=model.log_likelihood(log_probabilities, sweep.block.likelihood_weights),
        log_probabilities=log_probabilities.detach(),
        num_outputs=sweep.plan.num_outputs,
    )
