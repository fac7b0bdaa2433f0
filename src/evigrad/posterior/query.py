"""Inputs of a prediction, and passes over them that can be differentiated in the inputs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from evigrad.blocks.sources import without_arrays
from evigrad.core.block import Block
from evigrad.core.types import MicroBatch
from evigrad.errors import ConfigurationError, InputError, MemoryBudgetError
from evigrad.inputs import AtPositions, Tree, as_inputs, tensors_of, with_tensors
from evigrad.network import Linearization, derivatives_named, refuse_once_differentiable
from evigrad.network.modes import evaluation_mode, model_run
from evigrad.network.network import InputPlan
from evigrad.network.recorder import reachable
from evigrad.passes.checks import check_count, check_inputs
from evigrad.passes.memory import GIB, available_bytes
from evigrad.passes.parameters import held_constant
from evigrad.passes.problem import Problem
from evigrad.passes.sweep import new_sweep

# The name of the inputs in ``Network.differentiated``.
_INPUTS = "inputs"
# Computes tensors whose dimension 0 counts examples, from the linearization of a micro-batch.
Step = Callable[[Linearization], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Query:
    """Checked inputs of a prediction.

    Attributes:
        problem: The model of the posterior.
        plan: The plan for the inputs.
        x: The inputs (n, ...) of all batches.
        shape: The shape (b..., q, ...) of the outputs without C.
        batch_dims: The number of dimensions b.
        seed: Seed of models that draw noise.
        differentiable: Whether results have a graph to the inputs.
    """

    problem: Problem
    plan: InputPlan
    x: Tensor | Tree
    shape: tuple[int, ...]
    batch_dims: int
    seed: int
    differentiable: bool

    @classmethod
    def of(cls, problem: Problem, x: Any, batch_dims: int, seed: int) -> Self:
        """Return the checked inputs, whose first ``batch_dims`` dimensions count batches."""
        (x,) = without_arrays((x,), problem.dtype)
        sizes: tuple[int, ...] = ()
        if batch_dims:
            check_count("batch_dims", batch_dims)
            leaves = tensors_of(x := as_inputs(x))
            sizes, *others = {tuple(leaf.shape[: batch_dims + 1]) for leaf in leaves}
            if others or len(sizes) <= batch_dims:
                raise InputError(
                    f"With batch_dims={batch_dims}, all inputs must have equal first dimensions"
                    f" (b..., q), got the shapes {[tuple(leaf.shape) for leaf in leaves]}. Use a"
                    " smaller batch_dims."
                )
            x = with_tensors(x, [leaf.flatten(0, batch_dims) for leaf in leaves])
        x = check_inputs(x, problem.device)
        assert not isinstance(x, AtPositions)
        with torch.no_grad(), constant_beside(problem):
            plan = problem.network.plan(x)
        shape = (*(sizes or (len(x),)), *plan.positions)
        requires_grad = any(leaf.requires_grad for leaf in tensors_of(x))
        differentiable = torch.is_grad_enabled() and requires_grad
        return cls(problem, plan, x, shape, batch_dims, seed, differentiable)

    def results(self, step: Step) -> tuple[Tensor, ...]:
        """Return the results of ``step`` for all inputs, with a graph to them if differentiable.

        Raises:
            ConfigurationError: If the outputs have no derivatives with respect to inputs that
                require a gradient.
        """
        if not self.differentiable:
            with torch.no_grad():
                return self._passed(self.x, step)
        leaves = tensors_of(self.x)
        copies = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
        with torch.enable_grad(), derivatives_named():
            results = self._passed(with_tensors(self.x, copies), step)
            named: dict[str, Any] = {str(i): copy for i, copy in enumerate(copies)}
            if reachable(results[0], named):
                return _ToInputs.apply(self, results, copies, *leaves)
        raise ConfigurationError(
            "The inputs require a gradient, but the model's outputs have no derivative with respect"
            " to the inputs. forward may detach, convert or round the inputs, or run under"
            " torch.no_grad(). Remove such operations, or call the posterior inside"
            " torch.no_grad()."
        )

    def _passed(self, x: Tensor | Tree, step: Step) -> tuple[Tensor, ...]:
        problem = replace(self.problem, generator=torch.Generator().manual_seed(self.seed))
        network, plan = problem.network, self.plan
        every = AtPositions.every(x, prod(plan.positions)) if plan.positions else x
        weights = torch.ones(len(every), dtype=torch.float64, device="cpu")
        block = Block(torch.arange(len(every), device="cpu"), None, 1.0, weights)

        def add(parts: list[tuple[Tensor, ...]], batch: MicroBatch) -> list[tuple[Tensor, ...]]:
            if self.differentiable and _INPUTS not in network.differentiated:
                few = batch.x[:2].detach()
                refuse_once_differentiable(plan.model, network.weights, [_INPUTS], few)
                network.differentiated.add(_INPUTS)
            return [*parts, step(sweep.linearize(batch, graph=self.differentiable))]

        with constant_beside(problem):
            y = torch.zeros(len(every), device="cpu")
            sweep = new_sweep(problem, plan, [(every, y)], block)
            parts = sweep.fold(add, list[tuple[Tensor, ...]]())
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def check_memory(self, numbers: int, advice: str) -> None:
        """Raise an error if this many numbers of covariances do not fit into the free memory."""
        needed, free = numbers * self.problem.dtype.itemsize, available_bytes(self.problem.device)
        if free is not None and needed > free:
            raise MemoryBudgetError(
                f"The covariances of {self.plan.num_outputs:,} outputs of {prod(self.shape):,}"
                f" examples need {needed / GIB:.3g} GiB of memory, but only {free / GIB:.3g} GiB is"
                " free.",
                advice,
            )


class _ToInputs(torch.autograd.Function):
    """Autograd function for results of a pass, whose only gradients are for the inputs.

    The graph of the pass also leads to weights without a closed form, which must get no gradient.
    ``copies`` are the leaves of this graph, and stand for the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Query, results: Sequence[Tensor], copies: Sequence[Tensor], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.query, ctx.results, ctx.copies = query, results, copies
        ctx.set_materialize_grads(False)
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "Predictions can be differentiated only once with respect to the inputs. Omit"
                " create_graph=True."
            )
        pairs = [
            (result, cotangent)
            for result, cotangent in zip(ctx.results, cotangents, strict=True)
            if cotangent is not None and result.requires_grad
        ]
        inputs, problem = [copy for copy in ctx.copies if copy.requires_grad], ctx.query.problem
        gradients = iter(())
        if pairs:
            model = ctx.query.plan.model
            # As in the pass, because checkpoints run the model again.
            with constant_beside(problem), evaluation_mode(model, None), model_run(model):
                results, cotangents = zip(*pairs, strict=True)
                options = {"retain_graph": True, "allow_unused": True}
                with derivatives_named():
                    gradients = iter(torch.autograd.grad(results, inputs, cotangents, **options))
        of_leaves = [next(gradients, None) if c.requires_grad else None for c in ctx.copies]
        return None, None, None, *of_leaves


def constant_beside(problem: Problem) -> AbstractContextManager[None]:
    """Return a context in which only the problem's weights get gradients."""
    weight_ids = {id(weight) for weight in problem.weights.values()}
    return held_constant(p for p in problem.model.parameters() if id(p) not in weight_ids)
