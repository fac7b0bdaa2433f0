"""Compute the Jacobian rows of a micro-batch.

With k rows for each example, this takes one forward pass and k backward passes. A method such as
``inner`` takes the gradients of the recorded calls, and adds up the results of ``Call.inner``,
which calls ``Rule.inner``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.core.curvature.base import ROWS_AT_ONCE
from evigrad.core.curvature.kronecker import KroneckerUse
from evigrad.core.curvature.rows import DeferredRows, Rows
from evigrad.core.roots import RootRows, unit_vectors
from evigrad.errors import ConfigurationError, InputError, is_out_of_memory, nearest
from evigrad.fast.contraction import ProductRows
from evigrad.inputs import called
from evigrad.network.arguments import check_call, check_output
from evigrad.network.generic import loop_rows, vmap_rows
from evigrad.network.layers import Rule, matrix_uses
from evigrad.network.modes import model_run, without_autocast
from evigrad.network.ownership import placed, probed
from evigrad.network.paths import JacobianPlan
from evigrad.network.recorder import Call, Recorder, joined, reachable

# With at least this many outputs for each vector, products with vectors take less time as a second
# derivative than by rows: half as much for one vector and ten outputs of a convolutional network.
_OUTPUTS_PER_VECTOR = 4


def uses_of(calls: Sequence[Call]) -> dict[str, list[tuple[Call, str]]]:
    """Return the recorded uses (call, slot) of each parameter, by parameter name."""
    uses: dict[str, list[tuple[Call, str]]] = {}
    for call in calls:
        for slot, name in call.names.items():
            uses.setdefault(name, []).append((call, slot))
    return uses


class Linearization:
    """One forward pass of a model over m examples, and the rows of its Jacobian.

    The model must be in evaluation mode. Its attributes, buffers, hooks and gradients are not
    changed. The linearization keeps the autograd graph of the pass.

    Args:
        model: Module that maps m inputs to outputs (m, C).
        weights: Trainable parameters of the model by name. The Jacobian has one column for each of
            their entries.
        x: The m inputs. Dimension 0 counts the examples.
        plan: A plan that ``plan`` made for the same model and weights.
        differentiable: Whether outputs and rows have a graph into ``x`` and into the model's
            parameters that are not in ``weights``. If False, outputs and rows are detached.

    Attributes:
        outputs: f(x), in the weights' type. It has a graph only if ``differentiable``.
        mixed: Whether the pass ran under autocast. Rows from closed forms then have the precision
            of autocast, but the type of the weights. Other rows are computed without autocast.

    Raises:
        InputError: If there are no data, or the outputs do not have the shape (m, C).
        ConfigurationError: If a weight is not a parameter of the model that requires a gradient,
            or if gradients are disabled.
    """

    outputs: Float[Tensor, "m C"]
    mixed: bool

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        x: Tensor,
        plan: JacobianPlan,
        differentiable: bool,
    ) -> None:
        check_call(model, weights, x)
        self.model, self.weights, self.x, self.plan = model, weights, x, plan
        self._differentiable = differentiable
        # Without closed forms there is nothing to record, and recording might have side effects.
        recorder = Recorder(weights if plan.uses else {}, len(x), plan.uses)
        self.mixed = torch.is_autocast_enabled(x.device.type)
        with model_run(model) as modules, torch.enable_grad():
            with recorder:
                output = called(model, x)
            self._graph = check_output(output, len(x))
            if self.mixed:
                self._graph = self._graph.to(next(iter(weights.values()), x).dtype)
        self.outputs = self._graph if differentiable else self._graph.detach()
        self._recorder_doubts = recorder.may_mix(modules)
        calls, self._owned, nodes = placed(self._graph, recorder.calls)
        if len(x) == 1:  # all rows belong to it, and the graph does not determine the dimension
            calls = [self._as_in_plan(call) for call in calls]
            self._owned = {id(call) for call in calls}
        self._uses = uses_of(calls)
        self._elsewhere = reachable(self._graph, weights, nodes)
        self._kept: tuple[Tensor, dict[int, _Columns | None]] | None = None

    def rows(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return k vector-Jacobian products for each example.

        Args:
            vectors: Cotangents (m, k, C) of the outputs.
            names: Names of the parameters. Default: all.

        Returns:
            The rows ``vectors[n, j]ᵀ ∂f(x_n)/∂parameter`` (m, k, *parameter shape) by name. The
            rows of a parameter are zero if the outputs do not use it. No two tensors share memory.
            If the linearization is ``differentiable``, rows have a graph into the vectors, the
            inputs and the parameters that are not in ``weights``.

        Raises:
            ConfigurationError: If a name is not among the weights.
        """
        names = list(self.weights) if names is None else list(names)
        closed, generic = self._paths(names)
        with self._computing():
            rows = self._closed_rows(self._gradients(vectors), closed)
            if generic:
                rows.update(self._generic_rows(vectors, generic))
            shape = vectors.shape[:2]
            for name in names:
                if name not in rows:
                    rows[name] = self.weights[name].new_zeros(*shape, *self.weights[name].shape)
        return self._unshared({name: rows[name] for name in names})

    def without_graph(self, root: RootRows) -> tuple["Linearization", RootRows]:
        """Return a copy of this linearization and a copy of ``root``, both without a graph.

        The copy reuses the backward passes of this linearization.
        """
        with self._computing():
            gradients = self._gradients(root.vectors)
        scale = None if root.scale is None else root.scale.detach()
        root = replace(root, vectors=root.vectors.detach(), scale=scale)
        plain = copy(self)
        plain._differentiable, plain.outputs = False, self.outputs.detach()
        columns = {
            call: None if column is None else _Columns([p.detach() for p in column.pieces])
            for call, column in gradients.items()
        }
        plain._kept = (root.vectors, columns)
        return plain, root

    def deferred_rows(
        self, root: RootRows, names: Sequence[str], contracted: Collection[str] = ()
    ) -> dict[str, Rows]:
        """Return the rows of each parameter without padding, computed only when they are read.

        The backward passes to the layers' outputs run in this call. Rows are then computed from
        these gradients. Only parameters without a closed form take further backward passes.

        Args:
            root: Cotangents of the outputs.
            names: Names of the parameters.
            contracted: Names from ``matrix_uses``. Rows of these parameters are stored as products
                if this pass has a closed form for them.
        """
        vectors, present = root.vectors, root.present
        if present is None:
            present = torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device)
        products = [name for name in names if name in contracted and self.is_closed(name)]
        # All rows without a closed form in one call, because each call repeats the backward passes.
        generic = [name for name in names if not self.is_closed(name)]
        generic_rows = cache(lambda: self.rows(vectors, generic))
        num_rows = present.numel() if root.present is None else int(present.sum())

        def form(name: str) -> Tensor:
            rows = generic_rows() if name in generic else self.rows(vectors, [name])
            flat = rows[name].reshape(present.numel(), self.weights[name].numel())
            return flat if num_rows == present.numel() else flat[present.flatten()]

        deferred: dict[str, Rows] = {n: DeferredRows(partial(form, n), num_rows) for n in names}
        for name, pairs in self.products(vectors, products).items():
            (call, _), *_ = self._uses[name]
            chunk = tuple(tensor for pair in pairs for tensor in pair)
            shape, is_transposed = self.weights[name].shape, call.rule.transposed
            if chunk:  # the outputs depend on the parameter
                deferred[name] = ProductRows((chunk,), (present,), num_rows, shape, is_transposed)
        return deferred

    def inner(
        self, vectors: Float[Tensor, "m k C"], cotangents: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """Return Σ cotangents · rows. The cotangents (m, k, *parameter shape) get no gradient."""
        closed, generic = self._paths(list(cotangents))
        # Closed forms do not form rows. This value and its gradient cost about one pass through a
        # network with separate weights for each example.
        with self._computing():
            total = vectors.new_zeros(())
            gradients = self._gradients(vectors)
            for name in closed:
                cotangent = cotangents[name].detach()
                for call, slot, (gradient,) in self._joined_uses(name, gradients):
                    total = total + call.inner(slot, gradient, cotangent)
            for name, rows in self._generic_rows(vectors, generic).items():
                total = total + (cotangents[name].detach() * rows).sum()
        return total

    def times(self, vectors: Mapping[str, Float[Tensor, "n *parameter"]]) -> Float[Tensor, "m n C"]:
        """Return the products of each example's Jacobian with n vectors.

        ``inner`` is linear in the cotangents of the outputs, and its derivative with respect to
        them is this product. For few vectors, this is faster than the rows of all outputs.

        Args:
            vectors: The n vectors by parameter name. Other parameters count as zeros.
        """
        num_vectors = len(next(iter(vectors.values())))
        if _OUTPUTS_PER_VECTOR * num_vectors <= self.outputs.shape[1]:
            product = self._product_by_inner(vectors, num_vectors)
            if product is not None:
                return product
        flat = {name: vector.reshape(num_vectors, -1).mT for name, vector in vectors.items()}
        others = [name for name in vectors if not self.is_closed(name)]
        closed = [[name] for name in vectors if name not in others]
        parts = list[Tensor]()
        for _, units in unit_vectors(self.outputs, ROWS_AT_ONCE):
            products = [
                row.reshape(*units.shape[:2], -1).to(flat[name]) @ flat[name]
                # All without a closed form in one call, because each call repeats backward passes.
                for names in [others, *closed]
                for name, row in self.rows(units, names).items()
            ]
            parts.append(torch.stack(products).sum(0))
        return torch.cat(parts, 1).mT

    def _product_by_inner(
        self, vectors: Mapping[str, Tensor], num_vectors: int
    ) -> Float[Tensor, "m n C"] | None:
        """Return ``times`` as a derivative of ``inner``, or None if it contradicts its value.

        It does if an operation has no second derivative, or leaves it out silently.
        """
        size, num_outputs = self.outputs.shape
        with_graph = copy(self)
        with_graph._differentiable, with_graph._kept = True, None
        generator = torch.Generator().manual_seed(0)
        shape = (size, num_vectors, num_outputs)
        cotangents = torch.randn(shape, generator=generator, device="cpu").to(self.outputs)
        matrices = {n: v.to(self.outputs).expand(size, *v.shape) for n, v in vectors.items()}
        try:
            with torch.enable_grad():
                inner = with_graph.inner(cotangents.requires_grad_(), matrices)
                graph = self._differentiable
                (product,) = torch.autograd.grad(inner, cotangents, create_graph=graph)
        except Exception as error:  # mostly an operation without a second derivative
            if is_out_of_memory(error):
                raise
            return None
        terms = cotangents.detach() * product.detach()
        error = (terms.sum() - inner.detach()).abs()
        tolerance = torch.finfo(terms.dtype).eps ** 0.75
        return product if bool(error <= tolerance * terms.abs().sum()) else None

    def fast_rows_of_datum(
        self, vectors: Float[Tensor, "m k C"], index: int
    ) -> dict[str, Tensor | None]:
        """Return one example's rows for a check, computed by the fast algorithms of ``rows``.

        Rows (1, k, *parameter shape) are detached. They are None if an algorithm raises an error.
        Parameters that use the plain loop in this pass are omitted.
        """
        one = slice(index, index + 1)
        closed, generic = self._paths(list(self.weights))
        with self._computing(), torch.no_grad():
            # The cotangents of all examples reveal a path that confuses the rows of two examples.
            gradients = self._plain_gradients(vectors)
            vectors = vectors.detach()
            rows: dict[str, Tensor | None] = {**self._closed_rows(gradients, closed, index)}
            for name, p in self.weights.items():
                if name not in rows and name not in generic:
                    rows[name] = p.new_zeros(1, vectors.shape[1], *p.shape)
            vectorised = [name for name in generic if self._is_vectorised(name)]
            if vectorised:
                arguments = (self.model, self.weights, vectorised, self.x[one], vectors[one])
                try:
                    with model_run(self.model):
                        rows |= vmap_rows(*arguments, differentiable=False)
                except Exception as error:  # any error means that this path fails for the example
                    if is_out_of_memory(error):
                        raise
                    rows |= dict.fromkeys(vectorised)
        return rows

    def other_forms(
        self,
        vectors: Float[Tensor, "m k C"],
        name: str,
        cotangent: Float[Tensor, "n k *parameter"],
        index: int | None = None,
    ) -> dict[str, Callable[[], Tensor]]:
        """Return what the rules of a parameter compute in other ways than by ``rows``, for a check.

        Args:
            vectors: Cotangents of the outputs.
            name: Name of a parameter with closed forms in this pass.
            cotangent: Cotangent of the rows.
            index: The example. Default: all examples.

        Returns:
            Functions by the name of a rule's method. ``inner`` returns Σ cotangent · rows, and is
            missing if no rule overrides this method. ``factors`` and ``products`` return the rows
            (n, k, *parameter shape), and are missing if the plan never uses these methods. The
            result is empty if the outputs do not depend on the parameter.
        """
        with self._computing(), torch.no_grad():
            gradients = self._plain_gradients(vectors)
            uses = [(c, slot, g) for c, slot, (g,) in self._joined_uses(name, gradients)]
        if not uses:
            return {}
        if index is not None:
            uses = [(call.datum(index), slot, g[index : index + 1]) for call, slot, g in uses]
        shape = self.weights[name].shape

        def inner() -> Tensor:
            return torch.stack([call.inner(slot, g, cotangent) for call, slot, g in uses]).sum()

        def factors() -> Tensor:
            parts = [call.factors([g], average=False) for call, _, g in uses]
            rows = [torch.einsum("mkgto,mgti->mkgoi", u.gradients, u.inputs) for u in parts]
            rows = [r.mT if u.transposed else r for r, u in zip(rows, parts, strict=True)]
            return torch.stack(rows).sum(0).reshape(*cotangent.shape[:2], *shape)

        def products() -> Tensor:
            chunk = tuple(tensor for call, _, g in uses for tensor in call.products(g))
            present = torch.ones(cotangent.shape[:2], dtype=torch.bool, device=vectors.device)
            is_transposed = uses[0][0].rule.transposed
            rows = ProductRows((chunk,), (present,), present.numel(), shape, is_transposed)
            return rows.dense().chunks[0].reshape(*cotangent.shape[:2], *shape)

        forms: dict[str, Callable[[], Tensor]] = {}
        if any(type(call.rule).inner is not Rule.inner for call, _, _ in uses):
            forms["inner"] = inner
        if name in self.plan.kronecker:
            forms["factors"] = factors
        if matrix_uses(replace(self.plan, uses={name: self.plan.uses[name]}), self.weights):
            forms["products"] = products
        return forms

    def factors(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str], average: bool = True
    ) -> dict[str, list[KroneckerUse]]:
        """Return the Kronecker factors of each use of the named parameters.

        If ``average``, inputs are averaged over the augmentation samples of each example.
        Otherwise, samples count as positions.

        Raises:
            ConfigurationError: If the plan has no Kronecker factors for a parameter.
            InputError: If a parameter has no Kronecker factors for this batch.
        """
        self._check_names(names)
        for name in names:
            if name not in self.plan.kronecker:
                raise ConfigurationError(
                    f"{name!r} has no Kronecker factors, because its rows are computed by"
                    f" {self.plan.words[name]!r}. Call rows(...) for this parameter instead."
                )
            if not self.is_closed(name):
                raise InputError(
                    f"{name!r} has no Kronecker factors for this batch. The model uses this"
                    " parameter differently than in the plan, or reorders the examples before this"
                    " use. Plan with inputs of the same shape, or use a structure other than kfac."
                )
        with self._computing():
            gradients = self._gradients(vectors)
            factors = {
                name: [
                    call.factors(pieces, average=average)
                    for call, _, pieces in self._joined_uses(
                        name, gradients, vectors, in_pieces=True
                    )
                ]
                for name in names
            }
        # Detached, because a view of the recorded input requires a gradient if the input does.
        if self._differentiable:
            return factors
        return {name: [use.detach() for use in uses] for name, uses in factors.items()}

    def products(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str]
    ) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return the inputs and output gradients whose products are rows.

        Args:
            vectors: Cotangents of the outputs.
            names: Names from ``matrix_uses`` with closed forms in this pass.

        Returns:
            The result of ``Rule.products`` for each use, by parameter name.
        """
        with self._computing():
            gradients = self._gradients(vectors)
            products = {
                name: [
                    call.products(gradient)
                    for call, _, (gradient,) in self._joined_uses(name, gradients, vectors)
                ]
                for name in names
            }
        if self._differentiable:
            return products
        return {n: [(a.detach(), g.detach()) for a, g in pairs] for n, pairs in products.items()}

    def is_closed(self, name: str) -> bool:
        """Return whether this pass uses the parameter as the plan's closed forms expect."""
        return name in self._as_planned[0]

    @property
    def may_mix(self) -> bool:
        """Whether the recorded calls or the graph suggest that examples affected each other."""
        return self._recorder_doubts or bool(self._as_planned[1])

    @cached_property
    def _as_planned(self) -> tuple[set[str], set[str]]:
        """Return names used as planned: those with known examples of rows, and all others."""
        same_shape = self.x.shape[1:] == self.plan.datum_shape
        names = [name for name in self.weights if same_shape and self._is_as_planned(name)]
        uses = {name: self._uses[name] for name in names}
        calls = {id(call): call for pairs in uses.values() for call, _ in pairs}
        owned_ids = self._owned
        unowned_calls = [call for key, call in calls.items() if key not in owned_ids]
        if unowned_calls:
            with without_autocast(self.x.device):
                owned_ids = owned_ids | probed(self._graph, unowned_calls, self._differentiable)
        closed = {n for n, pairs in uses.items() if all(id(call) in owned_ids for call, _ in pairs)}
        return closed, uses.keys() - closed

    def _as_in_plan(self, call: Call) -> Call:
        """Return a call with one example, with the batch dimension of the planned use."""
        planned = all(call.use(s) in self.plan.uses.get(n, ()) for s, n in call.names.items())
        return call if planned or not call.may_turn else call.data_first()

    def _is_as_planned(self, name: str) -> bool:
        uses = self._uses.get(name, [])
        return (
            name in self.plan.uses
            and name not in self._elsewhere
            and tuple(call.use(slot) for call, slot in uses) == self.plan.uses[name]
            and all(call.parts > 0 for call, _ in uses)
            and not any(call.input_changed for call, _ in uses)
        )

    def _computing(self) -> AbstractContextManager[object]:
        """Record a graph if ``differentiable``, and compute in the types of the forward pass."""
        if not torch.is_autocast_enabled(self.x.device.type):
            as_wanted = torch.is_grad_enabled() == self._differentiable
            return nullcontext() if as_wanted else torch.set_grad_enabled(self._differentiable)
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self._differentiable))
        stack.enter_context(without_autocast(self.x.device))
        return stack

    def _check_names(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.weights:
                raise ConfigurationError(
                    f"There is no weight named {name!r}.{nearest(name, self.weights)}"
                )

    def _paths(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the names with closed forms, and names on the generic path. Others are unused."""
        self._check_names(names)
        closed = [name for name in names if self.is_closed(name)]
        if len(closed) == len(names):
            return closed, []
        # Demoted parameters count as used.
        used = self._uses.keys() | self._elsewhere | self.plan.demoted
        return closed, [name for name in names if name in used and name not in closed]

    def _unshared(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy rows that share memory, because both terms of a sum get the same gradient tensor."""
        columns = [] if self._kept is None else self._kept[1].values()
        gradients = [piece for c in columns if c is not None for piece in c.pieces]
        seen = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        unshared_rows = {}
        for name, row in rows.items():
            place = row.untyped_storage().data_ptr()
            unshared_rows[name] = row.clone() if place in seen else row
            seen.add(place)
        return unshared_rows

    def _closed_rows(
        self,
        gradients: Mapping[int, "_Columns | None"],
        names: Sequence[str],
        index: int | None = None,
    ) -> dict[str, Tensor]:
        """Return rows of all examples, or of one example, from the calls' output gradients."""
        rows: dict[str, Tensor] = {}
        for name in names:
            in_pieces = all(slot in call.rule.in_pieces for call, slot in self._uses[name])
            for call, slot, pieces in self._joined_uses(name, gradients, in_pieces=in_pieces):
                if index is not None:
                    call, pieces = call.datum(index), [p[index : index + 1] for p in pieces]
                parts = [call.rows(slot, piece) for piece in pieces]
                part = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
                rows[name] = rows[name] + part if name in rows else part
        return rows

    def _joined_uses(
        self,
        name: str,
        gradients: Mapping[int, "_Columns | None"],
        vectors: Float[Tensor, "m k C"] | None = None,
        *,
        in_pieces: bool = False,
    ) -> list[tuple[Call, str, Sequence[Tensor]]]:
        """Return the ``joined`` uses of a parameter, each with its gradients in one piece or more.

        Uses on which the outputs do not depend are omitted, or get zeros if ``vectors`` are given.
        Gradients may stay ``in_pieces`` of one row per example if they are only summed, because
        copying them into one piece would take longer than the sums.
        """
        (call, slot), *more = self._uses[name]
        columns = gradients[id(call)]
        if in_pieces and columns is not None and not more:
            return [(call, slot, columns.pieces)]
        uses = []
        for call, slot in self._uses[name]:
            columns = gradients[id(call)]
            if columns is not None:
                uses.append((call, slot, columns.stacked()))
            elif vectors is not None:
                shape = (*vectors.shape[:2], call.parts, *call.output_shape[1:])
                uses.append((call, slot, vectors.new_zeros(shape)))
        return [(call, slot, [gradient]) for call, slot, gradient in joined(uses)]

    def _gradients(self, vectors: Float[Tensor, "m k C"]) -> "dict[int, _Columns | None]":
        """Return the k rows' gradients with respect to the output of each call, by id(call)."""
        # One backward pass computes the gradients of all closed forms. The next request is mostly
        # for the same vectors.
        if self._kept is None or self._kept[0] is not vectors:
            names = [name for name in self.weights if self.is_closed(name)]
            self._kept = (vectors, self._pulled(vectors, names, self._differentiable))
        return self._kept[1]

    def _plain_gradients(self, vectors: Float[Tensor, "m k C"]) -> "dict[int, _Columns | None]":
        """Return ``_gradients`` without a graph."""
        if not self._differentiable:
            return self._gradients(vectors)
        names = [name for name in self.weights if self.is_closed(name)]
        return self._pulled(vectors.detach(), names, differentiable=False)

    def _pulled(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str], differentiable: bool
    ) -> "dict[int, _Columns | None]":
        """Return ``_gradients`` for calls of some parameters, by one backward pass per column."""
        calls = list({id(c): c for name in names for c, _ in self._uses[name]}.values())
        if not calls or not self._graph.requires_grad:
            return {id(call): None for call in calls}
        vectors = vectors if differentiable else vectors.detach()
        columns = [
            torch.autograd.grad(
                self._graph,
                [call.edge for call in calls],
                grad_outputs=vectors[:, j],
                retain_graph=True,
                create_graph=differentiable,
                allow_unused=True,
            )
            for j in range(vectors.shape[1])
        ]
        return {
            id(call): None
            if call_columns[0] is None
            else _Columns([call.by_example(gradient) for gradient in call_columns])
            for call, call_columns in zip(calls, zip(*columns, strict=True), strict=True)
        }

    def _generic_rows(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str]
    ) -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {}
        vectors = vectors if self._differentiable else vectors.detach()
        # Uses that are not in the plan take the loop, which does not need a plan.
        vectorised = [name for name in names if self._is_vectorised(name)]
        others = [name for name in names if name not in vectorised]
        for compute, subset in ((vmap_rows, vectorised), (loop_rows, others)):
            if subset:
                with model_run(self.model):
                    rows |= compute(
                        self.model, self.weights, subset, self.x, vectors, self._differentiable
                    )
        return rows

    def _is_vectorised(self, name: str) -> bool:
        return name in self.plan.vectorised and self.x.shape[1:] == self.plan.datum_shape


@dataclass
class _Columns:
    """The gradients of k rows with respect to the output of a call.

    Attributes:
        pieces: One tensor of all rows (m, k, F, *out), or k tensors of one row per example.
    """

    pieces: Sequence[Tensor]

    def stacked(self) -> Float[Tensor, "m k F *out"]:
        """Return the gradients as one tensor, which replaces the separate pieces in memory."""
        if len(self.pieces) > 1:
            self.pieces = [torch.cat(list(self.pieces), 1)]
        return self.pieces[0]
