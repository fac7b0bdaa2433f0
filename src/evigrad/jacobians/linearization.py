"""The rows of a micro-batch: one forward pass, then one backward pass for each root column."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, InputError, nearest
from evigrad.jacobians.arguments import check_call, check_output
from evigrad.jacobians.generic import loop_rows, vmap_rows
from evigrad.jacobians.recorder import Call, Recorder, reachable
from evigrad.jacobians.rules import KroneckerUse
from evigrad.jacobians.state import model_run

LOOP = "generic: loop"


@dataclass(frozen=True)
class JacobianPlan:
    """Which path the rows in each parameter take; made by ``plan``.

    Attributes:
        words: Name → the path in words, in the order of the weights.
        uses: Name → the structure of each use, for the parameters with a closed form.
        vectorised: Names whose generic rows may be computed for all data at once.
        kronecker: Names whose every use has Kronecker factors.
        datum_shape: Shape of one input.
        demoted: Names that take the plain loop whatever a pass shows; see ``demote``.
    """

    words: Mapping[str, str]
    uses: Mapping[str, tuple[tuple[Any, ...], ...]]
    vectorised: frozenset[str]
    kronecker: frozenset[str]
    datum_shape: tuple[int, ...]
    demoted: frozenset[str] = frozenset()

    def describe(self) -> dict[str, str]:
        """Name → "linear", "conv2d", ..., "generic: vmap", "generic: loop" or "unused"."""
        return dict(self.words)


def demote(plan: JacobianPlan, names: Collection[str]) -> JacobianPlan:
    """Send parameters through the plain loop from now on, which is slow and always right.

    Args:
        plan: Any plan.
        names: Of parameters in it.

    Returns:
        A plan that differs in these parameters alone; they have no Kronecker factors in it.

    Raises:
        ConfigurationError: If a name is not in the plan.
    """
    for name in names:
        if name not in plan.words:
            raise ConfigurationError(
                f"The plan has no parameter named {name!r}.{nearest(name, plan.words)}"
            )
    gone = frozenset(names)
    return JacobianPlan(
        words={name: LOOP if name in gone else word for name, word in plan.words.items()},
        uses={name: uses for name, uses in plan.uses.items() if name not in gone},
        vectorised=plan.vectorised - gone,
        kronecker=plan.kronecker - gone,
        datum_shape=plan.datum_shape,
        demoted=plan.demoted | gone,
    )


def uses_of(calls: Sequence[Call]) -> dict[str, list[tuple[Call, str]]]:
    """Name → its recorded uses as (call, slot)."""
    uses: dict[str, list[tuple[Call, str]]] = {}
    for call in calls:
        for slot, name in call.names.items():
            uses.setdefault(name, []).append((call, slot))
    return uses


class Linearization:
    """One forward pass of a model over m data, and the rows of its Jacobian.

    Made by ``linearize``. It holds the autograd graph of the pass for as long as it lives.

    Attributes:
        outputs: f(x); has a graph only if ``differentiable``.
    """

    outputs: Float[Tensor, "m C"]

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        x: Tensor,
        plan: JacobianPlan,
        differentiable: bool,
    ) -> None:
        self._model, self._weights, self._x, self._plan = model, weights, x, plan
        self._differentiable = differentiable
        # Where nothing has a closed form there is nothing to record, and recording might disturb.
        recorder = Recorder(weights if plan.uses else {})
        with model_run(model), torch.enable_grad():
            with recorder:
                output = model(x.clone())  # the model may change its input in place
        self._graph = check_output(output, len(x))
        self.outputs = self._graph if differentiable else self._graph.detach()
        self._uses = uses_of(recorder.calls)
        self._elsewhere = reachable(self._graph, weights)

    def rows(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Vector-Jacobian products, k for each datum.

        Args:
            vectors: Cotangents of the outputs.
            names: Of the parameters wanted; None for all.

        Returns:
            Name → ``vectors[n, j]ᵀ ∂f(x_n)/∂parameter``, (m, k, *parameter shape); zeros where
            the outputs do not use the parameter. If ``differentiable``, with a graph into the
            vectors, the inputs and the parameters of the model that are not in ``weights``.

        Raises:
            ConfigurationError: If a name is not among the weights.
        """
        names = list(self._weights) if names is None else list(names)
        self._check_names(names)
        if not self._differentiable:
            vectors = vectors.detach()
        closed = [name for name in names if self.is_closed(name)]
        generic = [name for name in names if name not in closed and not self._is_idle(name)]
        with torch.set_grad_enabled(self._differentiable):
            rows = self._closed_rows(vectors, closed)
            rows.update(self._generic_rows(vectors, generic))
            shape = vectors.shape[:2]
            for name in names:
                if name not in rows:
                    rows[name] = self._weights[name].new_zeros(*shape, *self._weights[name].shape)
        return {name: rows[name] for name in names}

    def fast_rows_of_datum(
        self, vectors: Float[Tensor, "m k C"], index: int
    ) -> dict[str, Tensor | None]:
        """One datum's part of ``rows``, by the same fast paths as there, for a check.

        Args:
            vectors: Cotangents of the outputs of all data.
            index: Of the datum.

        Returns:
            Name → rows (1, k, *parameter shape), detached, or None where the path fails; for
            all names that do not take the loop in this pass.
        """
        vectors, one = vectors.detach(), slice(index, index + 1)
        rows: dict[str, Tensor | None] = {}
        with torch.no_grad():
            closed = [name for name in self._weights if self.is_closed(name)]
            # The cotangents of all data, as a path that takes one's rows for another's is wrong.
            gradients = self._gradients(vectors, closed, differentiable=False)
            for name in closed:
                for call, slot in self._uses[name]:
                    gradient = gradients[id(call)]
                    if gradient is not None:
                        part = call.datum(index).rows(slot, gradient[one])
                        before = rows.get(name)
                        rows[name] = part if before is None else before + part
            for name, p in self._weights.items():
                if name not in rows and (name in closed or self._is_idle(name)):
                    rows[name] = p.new_zeros(1, vectors.shape[1], *p.shape)
            vectorised = [n for n in self._weights if n not in rows and self._is_vectorised(n)]
            if vectorised:
                arguments = (self._model, self._weights, vectorised, self._x[one], vectors[one])
                try:
                    with model_run(self._model):
                        rows |= vmap_rows(*arguments, differentiable=False)
                except Exception:  # of whatever kind: no path for this datum
                    rows |= dict.fromkeys(vectorised)
        return rows

    def factors(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str]
    ) -> dict[str, list[KroneckerUse]]:
        """The factors of the rows of matrix-like weights.

        Args:
            vectors: Cotangents of the outputs.
            names: Of parameters in ``plan.kronecker``.

        Returns:
            Name → one entry for each use of the weight in the forward pass.

        Raises:
            ConfigurationError: If a name is not in ``plan.kronecker``.
            InputError: If a weight is used otherwise for this batch than it was in planning.
        """
        self._check_names(names)
        for name in names:
            if name not in self._plan.kronecker:
                raise ConfigurationError(
                    f"{name!r} has no Kronecker factors ({self._plan.words[name]}); ask for its"
                    " rows."
                )
            if not self.is_closed(name):
                raise InputError(
                    f"{name!r} is used otherwise for this batch than for the probe that the plan"
                    " was made with, so it has no Kronecker factors here. Plan with inputs of the"
                    " same shape, or choose a structure other than kfac."
                )
        if not self._differentiable:
            vectors = vectors.detach()
        with torch.set_grad_enabled(self._differentiable):
            gradients = self._gradients(vectors, names)
            return {
                name: [self._factors_of(call, gradients, vectors) for call, _ in self._uses[name]]
                for name in names
            }

    def is_closed(self, name: str) -> bool:
        """Whether a parameter's uses in this very pass are those of the plan's closed forms."""
        uses = self._uses.get(name, [])
        return (
            name in self._plan.uses
            and name not in self._elsewhere
            and self._x.shape[1:] == self._plan.datum_shape
            and tuple(call.structure(slot) for call, slot in uses) == self._plan.uses[name]
            and all(set(call.batch_sizes) == {len(self._x)} for call, _ in uses)
            and not any(call.input_changed for call, _ in uses)
        )

    def _check_names(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._weights:
                raise ConfigurationError(
                    f"There is no weight named {name!r}.{nearest(name, self._weights)}"
                )

    def _is_idle(self, name: str) -> bool:
        # Whoever demoted a parameter knows better than this pass whether it is used.
        used = name in self._uses or name in self._elsewhere or name in self._plan.demoted
        return not used

    def _closed_rows(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str]
    ) -> dict[str, Tensor]:
        gradients = self._gradients(vectors, names)
        rows: dict[str, Tensor] = {}
        for name in names:
            for call, slot in self._uses[name]:
                gradient = gradients[id(call)]
                if gradient is not None:
                    part = call.rows(slot, gradient)
                    rows[name] = rows[name] + part if name in rows else part
        return rows

    def _gradients(
        self,
        vectors: Float[Tensor, "m k C"],
        names: Sequence[str],
        differentiable: bool | None = None,
    ) -> dict[int, Tensor | None]:
        """id(call) → gradients of the k rows of each datum in the call's output, (m, k, *out)."""
        graph = self._differentiable if differentiable is None else differentiable
        calls = list({id(c): c for name in names for c, _ in self._uses[name]}.values())
        if not calls or not self._graph.requires_grad:
            return {id(call): None for call in calls}
        columns = [
            torch.autograd.grad(
                self._graph,
                [call.edge for call in calls],
                grad_outputs=vectors[:, j],
                retain_graph=True,
                create_graph=graph,
                allow_unused=True,
            )
            for j in range(vectors.shape[1])
        ]
        return {
            id(call): None if of_call[0] is None else torch.stack(of_call, dim=1)
            for call, of_call in zip(calls, zip(*columns, strict=True), strict=True)
        }

    def _factors_of(
        self, call: Call, gradients: Mapping[int, Tensor | None], vectors: Float[Tensor, "m k C"]
    ) -> KroneckerUse:
        gradient = gradients[id(call)]
        if gradient is None:  # the outputs do not use the call's
            gradient = vectors.new_zeros(*vectors.shape[:2], *call.output_shape[1:])
        use = call.factors(gradient)
        # Detached, because a view of the recorded input keeps that one's claim to a gradient.
        return (
            use
            if self._differentiable
            else KroneckerUse(use.inputs.detach(), use.gradients.detach())
        )

    def _generic_rows(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str]
    ) -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {}
        # What was not planned so (a use that is new in this pass) goes the way that needs no plan.
        vectorised = [name for name in names if self._is_vectorised(name)]
        others = [name for name in names if name not in vectorised]
        for compute, some in ((vmap_rows, vectorised), (loop_rows, others)):
            if some:
                with model_run(self._model):
                    rows |= compute(
                        self._model, self._weights, some, self._x, vectors, self._differentiable
                    )
        return rows

    def _is_vectorised(self, name: str) -> bool:
        return name in self._plan.vectorised and self._x.shape[1:] == self._plan.datum_shape


def linearize(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    x: Tensor,
    plan: JacobianPlan,
    differentiable: bool,
) -> Linearization:
    """Run the model over a micro-batch and keep what the rows of its Jacobian need.

    The model must be in evaluation mode. Its attributes, buffers, hooks and gradients stay as they
    are.

    Args:
        model: Maps m inputs to (m, C).
        weights: Name → trainable parameter of the model, the coordinates of the Jacobian.
        x: The m inputs; dim 0 counts the data.
        plan: From ``plan`` for the same model and weights.
        differentiable: Whether outputs and rows shall have a graph into the parameters of the
            model that are not in ``weights``, and into x. (Outputs may then have one into some of
            the weights too.) Otherwise they are detached.

    Returns:
        The linearization, which holds the graph of this one forward pass.

    Raises:
        InputError: If there are no data, or the outputs are not of shape (m, C).
        ConfigurationError: If a weight is not a parameter of the model that requires a gradient,
            or gradients are off.
    """
    check_call(model, weights, x)
    return Linearization(model, weights, x, plan, differentiable)
