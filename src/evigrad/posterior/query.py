"""Inputs of a prediction, and passes over them that can be differentiated in the inputs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.blocks.sources import without_arrays
from evigrad.core.block import Block, MicroBatch
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
from evigrad.posterior.updates import Update

# The name of the inputs in ``Network.differentiated``.
_INPUTS = "inputs"
# Returns the factors V of all updates, from the roots of a micro-batch.
Factors = Callable[[Mapping[int, Tensor]], list[Tensor]]
# Computes tensors whose dimension 0 counts examples, from the linearization of a micro-batch.
Step = Callable[[Linearization, Factors], tuple[Tensor, ...]]


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
        updates: Observations that change the prediction, each with its own batches.
        differentiable: Whether results have a graph to the inputs or to the updates.
        shift: Differences of the mean weights from the weights of the network, or none.
        scale: Factor on the mean outputs.
    """

    problem: Problem
    plan: InputPlan
    x: Tensor | Tree
    shape: tuple[int, ...]
    batch_dims: int
    seed: int
    updates: Sequence[Update]
    differentiable: bool
    shift: Mapping[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0

    @classmethod
    def of(
        cls, problem: Problem, x: Any, batch_dims: int, seed: int, updates: Sequence[Update]
    ) -> Self:
        """Return the checked inputs, whose first ``batch_dims`` dimensions count batches.

        Inputs are repeated if the updates have more batches.

        Raises:
            InputError: If the batches of the inputs and of the updates do not match.
        """
        (x,) = without_arrays((x,), problem.dtype)
        sizes: tuple[int, ...] = ()
        batches = [update.batch for update in updates]
        if batch_dims:
            check_count("batch_dims", batch_dims)
        if batch_dims or any(batches):
            leaves = tensors_of(x := as_inputs(x))
            sizes, *others = {tuple(leaf.shape[: batch_dims + 1]) for leaf in leaves}
            if others or len(sizes) <= batch_dims:
                raise InputError(
                    f"With batch_dims={batch_dims}, all inputs must have equal first dimensions"
                    f" (b..., q), got the shapes {[tuple(leaf.shape) for leaf in leaves]}. Use a"
                    " smaller batch_dims."
                )
            try:
                batch = torch.broadcast_shapes(sizes[:-1], *batches)
            except RuntimeError as error:
                raise InputError(
                    f"The inputs must have the batches {tuple(batches[-1])} of the observations,"
                    f" got {sizes[:-1]}. Use these batches, or none."
                ) from error
            sizes, batch_dims, before = (*batch, sizes[-1]), len(batch), batch_dims
            leaves = [leaf.expand(*batch, *leaf.shape[before:]) for leaf in leaves]
            x = with_tensors(x, [leaf.flatten(0, batch_dims) for leaf in leaves])
        x = check_inputs(x, problem.device)
        assert not isinstance(x, AtPositions)
        with torch.no_grad(), constant_beside(problem):
            plan = problem.network.plan(x)
        shape = (*(sizes or (len(x),)), *plan.positions)
        leaves = [*tensors_of(x), *_roots_of(updates)]
        differentiable = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        return cls(problem, plan, x, shape, batch_dims, seed, updates, differentiable)

    def results(self, step: Step) -> tuple[Tensor, ...]:
        """Return the results of ``step`` for all inputs, with a graph to them if differentiable.

        Raises:
            ConfigurationError: If the outputs have no derivatives with respect to inputs that
                require a gradient.
        """
        if not self.differentiable:
            with torch.no_grad():
                return self._passed(self.x, self.updates, step)
        inputs = tensors_of(self.x)
        leaves = [*inputs, *_roots_of(self.updates)]
        copies = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
        root_copies = iter(copies[len(inputs) :])
        updates = [
            replace(update, roots={sign: next(root_copies) for sign in update.roots})
            for update in self.updates
        ]
        with torch.enable_grad(), derivatives_named():
            results = self._passed(with_tensors(self.x, copies[: len(inputs)]), updates, step)
            input_copies: dict[str, Any] = {
                str(i): copies[i] for i, leaf in enumerate(inputs) if leaf.requires_grad
            }
            if not input_copies or reachable(results[0], input_copies):
                return _ToInputs.apply(self, results, copies, *leaves)
        raise ConfigurationError(
            "The inputs require a gradient, but the model's outputs have no derivative with respect"
            " to the inputs. forward may detach, convert or round the inputs, or run under"
            " torch.no_grad(). Remove such operations, or call the posterior inside"
            " torch.no_grad()."
        )

    def _passed(
        self, x: Tensor | Tree, updates: Sequence[Update], step: Step
    ) -> tuple[Tensor, ...]:
        problem = replace(self.problem, generator=torch.Generator().manual_seed(self.seed))
        network, plan = problem.network, self.plan
        every = AtPositions.every(x, prod(plan.positions)) if plan.positions else x
        weights = torch.ones(len(every), dtype=torch.float64, device="cpu")
        block = Block(torch.arange(len(every), device="cpu"), None, 1.0, weights)
        graph = self.differentiable and any(leaf.requires_grad for leaf in tensors_of(x))
        numbers = torch.arange(len(every), device=problem.device)
        number = numbers // max(1, prod(self.shape[self.batch_dims :]))  # of the batch
        batches = [
            numbers[: prod(update.batch)]
            .view(update.batch)
            .expand(self.shape[: self.batch_dims])
            .flatten()
            for update in updates
        ]

        def add(parts: list[tuple[Tensor, ...]], batch: MicroBatch) -> list[tuple[Tensor, ...]]:
            def factors(roots: Mapping[int, Tensor]) -> list[Tensor]:
                pairs = zip(updates, batches, strict=True)
                return [update.factor(roots, of[number[batch.data]]) for update, of in pairs]

            if graph and _INPUTS not in network.differentiated:
                few = batch.x[:2].detach()
                refuse_once_differentiable(plan.model, network.weights, [_INPUTS], few)
                network.differentiated.add(_INPUTS)
            return [*parts, step(self._at_mean(sweep.linearize(batch, graph=graph)), factors)]

        with constant_beside(problem):
            y = torch.zeros(len(every), device="cpu")
            sweep = new_sweep(problem, plan, [(every, y)], block)
            parts = sweep.fold(add, list[tuple[Tensor, ...]]())
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def _at_mean(self, linearization: Linearization) -> Linearization:
        """Return the linearization with the outputs of the mean weights, times the scale."""
        if not self.shift and self.scale == 1.0:
            return linearization
        at_mean = copy(linearization)
        if self.shift:
            vectors = {name: shift.unsqueeze(0) for name, shift in self.shift.items()}
            change = linearization.times(vectors)[:, 0]
            at_mean.outputs = at_mean.outputs + change.to(at_mean.outputs)
        at_mean.outputs = self.scale * at_mean.outputs
        return at_mean

    def moved(
        self,
        values: Float[Tensor, "p n C"],
        factors: Sequence[Float[Tensor, "n C _"]],
        coefficients: Sequence[Float[Tensor, "p ... _"]],
    ) -> Float[Tensor, "p ... C"]:
        """Return values of all inputs plus V times the coefficients of each update."""
        total = values.unflatten(1, self.shape)
        for factor, part in zip(factors, coefficients, strict=True):
            rows = factor.unflatten(0, self.shape).flatten(self.batch_dims, -2)
            extra = self.batch_dims + 2 - part.ndim
            part = part.view(len(part), *[1] * extra, *part.shape[1:], 1)
            shift = (rows @ part).squeeze(-1).unflatten(-1, total.shape[-1 - self.inner_dims :])
            extra = shift.ndim - total.ndim
            total = total.view(len(total), *[1] * extra, *total.shape[1:]) + shift.to(total)
        return total

    def mean(
        self, f: Float[Tensor, "n C"], factors: Sequence[Float[Tensor, "n C _"]]
    ) -> Float[Tensor, "... C"]:
        """Return the mean of the outputs after all updates, given the network's outputs."""
        errors = [update.errors.unsqueeze(0) for update in self.updates]
        return self.moved(f.unsqueeze(0), factors, errors)[0]

    @property
    def inner_dims(self) -> int:
        """The number of dimensions of the outputs of a batch, without C."""
        return len(self.shape) - self.batch_dims

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


def _roots_of(updates: Sequence[Update]) -> list[Tensor]:
    return [root for update in updates for root in update.roots.values()]


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
        leaf_gradients = [next(gradients, None) if c.requires_grad else None for c in ctx.copies]
        return None, None, None, *leaf_gradients


def constant_beside(problem: Problem) -> AbstractContextManager[None]:
    """Return a context in which only the problem's weights get gradients."""
    weight_ids = {id(weight) for weight in problem.model.weights.values()}
    return held_constant(p for p in problem.network.model.parameters() if id(p) not in weight_ids)
