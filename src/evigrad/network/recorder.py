"""Record a forward pass for the closed forms.

A ``TorchFunctionMode`` intercepts all calls of functions with a closed form. If an argument is a
tracked parameter, the call runs with the parameter *detached* and is recorded as a ``Call``. Other
uses of the parameter, such as views, parametrizations, scripted modules or custom functions, remain
in the autograd graph of the outputs. ``reachable`` finds them there, so no use is silently missed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from evigrad.core.curvature.kronecker import KroneckerUse
from evigrad.invariances.noise import current_samples
from evigrad.network.layers import RULES, Match, Rule, is_custom
from evigrad.network.paths import Use
from evigrad.network.written_out import WRITTEN_OUT

_PLAIN_TENSORS = (Tensor, nn.Parameter)

# Functions by which the values of some examples can determine the computation for other examples.
# Functions that return values to Python:
_TO_PYTHON = (
    "__array__ __bool__ __complex__ __contains__ __dlpack__ __float__ __index__ __int__ allclose"
    " equal is_nonzero item numpy tolist"
)
# Functions that count, sort, select or place entries by value:
_BY_NUMBERS = """
    _pack_padded_sequence argsort argwhere bincount bucketize cummax cummin embedding_bag gather
    histc index_add index_copy index_fill index_put index_reduce index_select kthvalue
    masked_scatter masked_select median mode msort nanmedian nanquantile nonzero quantile scatter
    scatter_add scatter_reduce searchsorted segment_reduce sort take take_along_dim tensor_split
    topk unique unique_consecutive
"""
_DECIDING = frozenset((*_TO_PYTHON.split(), *_BY_NUMBERS.split()))
# Functions that may reduce several examples to one number:
_REDUCTIONS = frozenset(
    (
        "all amax amin aminmax any argmax argmin count_nonzero logsumexp max mean min nanmean"
        " nansum norm prod std std_mean sum var var_mean vector_norm"
    ).split()
)


@dataclass(frozen=True)
class Call:
    """A recorded call of a function with a closed form.

    Attributes:
        rule: The closed form of the call.
        match: The arguments of the call.
        names: Names of the tracked parameters among the arguments, by slot.
        edge: The edge of the graph at which the output's gradients are taken, even after in-place
            changes.
        output_shape: Shape of the output.
        version: Number of in-place changes of the input before the call.
        num_data: m, the number of examples in the pass.
        samples: S, the number of augmentation samples of each example.
        turned: Whether dimension 1 of the output at ``edge`` counts the examples. In all other
            tensors of the call, dimension 0 counts them.
    """

    rule: Rule
    match: Match
    names: Mapping[str, str]
    edge: GradientEdge
    output_shape: torch.Size
    version: int
    num_data: int
    samples: int
    turned: bool = False

    @property
    def may_turn(self) -> bool:
        """Whether the examples may be in dimension 1 of input and output."""
        shapes = (self.match.input.shape, self.output_shape)
        fits = all(shape[1:2] == (self.num_data,) for shape in shapes)
        return fits and self.rule.data_second(self.match)

    def data_first(self) -> "Call":
        """Return this call with the examples moved from dimension 1 to dimension 0."""
        whole = self.match.computed
        computed = None if whole is None else lambda: whole().transpose(0, 1)
        match = replace(self.match, input=self.match.input.transpose(0, 1), computed=computed)
        positions, data, *trailing_shape = self.output_shape
        shape = torch.Size((data, positions, *trailing_shape))
        return replace(self, match=match, output_shape=shape, turned=True)

    @cached_property
    def parts(self) -> int:
        """F if dimension 0 of both input and output has F entries per example, and otherwise 0."""
        sizes = set(self.match.input.shape[:1] + self.output_shape[:1])
        size = sizes.pop() if len(sizes) == 1 else 0
        return 0 if size % self.num_data else size // self.num_data

    @property
    def input_changed(self) -> bool:
        """Whether the input was changed in place after the call."""
        return self.match.input._version != self.version

    def by_example(self, gradient: Tensor) -> Float[Tensor, "m 1 F *out"]:
        """Return a gradient with respect to the output at ``edge`` as one row per example."""
        gradient = gradient.transpose(0, 1) if self.turned else gradient
        return gradient.view(self.num_data, 1, self.parts, *gradient.shape[1:])

    def use(self, slot: str) -> Use:
        """Return the call's use of the parameter in a slot."""
        return Use(
            self.rule.name,
            slot,
            self.parts,
            self.samples,
            tuple(self.match.input.shape[1:]),
            tuple(self.output_shape[1:]),
            self.match.settings_text,
        )

    def rows(self, slot: str, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        """Return this call's contribution to a parameter's rows (m, k, *parameter shape)."""
        return self.rule.rows(slot, self._match_in(gradient), gradient).to(
            self.match.slots[slot].dtype
        )

    def inner(
        self,
        slot: str,
        gradient: Float[Tensor, "m k F *out"],
        cotangent: Float[Tensor, "m k *parameter"],
    ) -> Float[Tensor, ""]:
        """Return the inner product of cotangents and this call's contribution to the rows."""
        match = self._match_in(gradient)
        if cotangent.dtype == gradient.dtype:
            return self.rule.inner(slot, match, gradient, cotangent)
        # Cotangents may underflow in half precision. Relative to the largest entry they do not.
        scale = cotangent.abs().amax().clamp(min=torch.finfo(cotangent.dtype).tiny)
        relative = (cotangent / scale).to(gradient.dtype)
        return self.rule.inner(slot, match, gradient, relative).to(cotangent.dtype) * scale

    def datum(self, index: int) -> "Call":
        """Return the part of this call for a single example."""
        one, match = slice(index * self.parts, (index + 1) * self.parts), self.match
        whole = match.computed
        computed = None if whole is None else lambda: whole()[one]
        match = replace(match, input=match.input[one], computed=computed)
        shape = torch.Size((self.parts, *self.output_shape[1:]))
        return replace(self, match=match, output_shape=shape, num_data=1)

    def factors(
        self, pieces: Sequence[Float[Tensor, "m k F *out"]], *, average: bool
    ) -> KroneckerUse:
        """Return the Kronecker factors of this call's contribution to the rows.

        The gradients are ``pieces``, each with some of the rows. If ``average``, average the inputs
        and sum the gradients over each example's augmentation samples. Otherwise, samples count as
        positions.
        """
        match = self._match_in(pieces[0])
        if average and self.samples > 1 and self.parts % self.samples == 0:
            shape = (self.num_data, self.samples, self.parts // self.samples)
            match = replace(match, input=match.input.unflatten(0, shape).mean(1).flatten(0, 1))
            pieces = [gradient.unflatten(2, shape[1:]).sum(2) for gradient in pieces]
        dtype = self.match.slots["weight"].dtype
        uses = [self.rule.factors(match, gradient.to(dtype)) for gradient in pieces]
        return uses[0].with_gradients([gradients for use in uses for gradients in use.pieces])

    def products(self, gradient: Float[Tensor, "m k F *out"]) -> tuple[Tensor, Tensor]:
        """See ``Rule.products``. Augmentation samples count as positions."""
        return self.rule.products(
            self._match_in(gradient), gradient.to(self.match.slots["weight"].dtype)
        )

    def _match_in(self, gradient: Tensor) -> Match:
        """Return the arguments in the type of the output, to which autocast converted them."""
        a = self.match.input
        if a.dtype == gradient.dtype or not a.is_floating_point():
            return self.match
        return replace(self.match, input=a.to(gradient.dtype))


def joined(
    uses: Sequence[tuple[Call, str, Tensor]],
) -> list[tuple[Call, str, Tensor]]:
    """Return the uses of a parameter, with uses of the same kind joined into a single use.

    Uses are joined if their rule acts separately on each position, and if their slots, shapes and
    settings are equal. Examples are the time steps of a recurrent layer. The inputs and gradients
    of the joined uses are stacked along a new dimension of positions.
    """
    if len(uses) < 2:
        return list(uses)
    groups: dict[Any, list[tuple[Call, str, Tensor]]] = {}
    for call, slot, gradient in uses:
        key = call.use(slot) if call.rule.at_positions else id(call)
        groups.setdefault((key, slot), []).append((call, slot, gradient))
    joined_uses = []
    for group in groups.values():
        call, slot, gradient = group[0]
        if len(group) > 1:
            inputs = torch.stack([use.match.input for use, _, _ in group], 1)
            gradient = torch.stack([piece for _, _, piece in group], 3)
            rows, *trailing_shape = call.output_shape
            shape = torch.Size((rows, len(group), *trailing_shape))
            call = replace(call, match=replace(call.match, input=inputs), output_shape=shape)
        joined_uses.append((call, slot, gradient))
    return joined_uses


class Recorder(TorchFunctionMode):
    """A ``TorchFunctionMode`` that records calls of closed-form functions, in order.

    Args:
        weights: The tracked parameters. Only calls with such a parameter are recorded.
        num_data: m, the number of examples in the pass.
        repeated: Planned uses of embeddings by name. If an embedding looks up a single list of
            indices, such as positions, it is called with one copy of the list per example. The
            graph then shows the example of each row.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        num_data: int,
        repeated: Mapping[str, Sequence[Use]] | None = None,
    ) -> None:
        super().__init__()
        self._num_data = num_data
        self._repeated = {id(weights[name]): uses for name, uses in (repeated or {}).items()}
        self.calls: list[Call] = []
        # Why calls of custom rules were not recorded, by the name of a parameter of the call.
        self.refused: dict[str, str] = {}
        self._decides = False
        self._names = {id(p): name for name, p in weights.items()}
        # The plan was made without autocast, which may be on for the whole pass.
        self._mixed = any(torch.is_autocast_enabled(p.device.type) for p in weights.values())
        self._detached = {id(p): p.detach() for p in weights.values()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, and record the call if it has a closed form."""
        kwargs = kwargs or {}
        if func in WRITTEN_OUT and self._uses_weights(args):
            linear = partial(self.__torch_function__, F.linear, ())
            result = WRITTEN_OUT[func](lambda *operands: linear(operands), *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is F.embedding:
            args = self._for_each_datum(args)
        closed_form = self._match(func, args, kwargs)
        if closed_form is None:
            result = func(*args, **kwargs)
            self._decides = self._decides or _decides(func, args, kwargs, result)
            return result
        rule, match, names = closed_form
        try:
            output = rule.call(
                func,
                [self._detached.get(id(a), a) for a in args],
                {key: self._detached.get(id(a), a) for key, a in kwargs.items()},
            )
        except Exception as error:
            if not is_custom(rule):
                raise
            tracked = [id(match.slots[slot]) for slot in names]
            self._refuse(tracked, f"{rule.name}: call(...) raised {error!r}")
            return func(*args, **kwargs)
        # The types of output and parameters differ, for example by autocast within the model. A
        # plan could not distinguish rounding from errors.
        foreign = any(match.slots[slot].dtype != output.dtype for slot in names)
        if foreign and not self._mixed:
            return func(*args, **kwargs)
        if not output.requires_grad:
            # The result of a custom rule may be a tensor that the model keeps.
            output = _with_gradient(output.clone() if is_custom(rule) else output)
        edge = get_gradient_edge(output)
        self.calls.append(
            Call(
                rule,
                match,
                names,
                edge,
                output_shape=output.shape,
                version=match.input._version,
                num_data=self._num_data,
                samples=current_samples(),
            )
        )
        return output

    def may_mix(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether a function or a scripted module may have mixed examples."""
        if self._num_data == 1:
            return False
        return self._decides or any(
            isinstance(module, torch.jit.ScriptModule) for module in modules
        )

    def _uses_weights(self, args: Sequence[Any]) -> bool:
        """Return whether gradients are on and the arguments, or lists in them, hold parameters."""
        has_weight = any(
            id(p) in self._names for a in args for p in (a if isinstance(a, list | tuple) else [a])
        )
        return has_weight and torch.is_grad_enabled() and not _is_transformed()

    def _for_each_datum(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return an embedding's arguments, with indices (m, T) for all examples if repeated."""
        indices, weight, *settings = args
        if not isinstance(indices, Tensor) or id(weight) not in self._repeated:
            return args
        if indices.dim() > 1 and len(indices) == 1:
            return indices.expand(self._num_data, *indices.shape[1:]), weight, *settings
        # The plan determines whether indices are one list for all examples. During planning, m
        # indices count as one per example.
        planned = [use.input for use in self._repeated[id(weight)]]
        is_list = indices.shape in planned if planned else len(indices) != self._num_data
        if indices.dim() == 1 and is_list:
            return indices.expand(self._num_data, -1), weight, *settings
        return args

    def _match(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Rule, Match, dict[str, str]] | None:
        rule = RULES.get(func)
        # Inside a function transform, tensors are wrapped. Without gradients, there is nothing to
        # record, and nothing in the graph either.
        if rule is None or not torch.is_grad_enabled() or _is_transformed():
            return None
        tracked = {id(a) for a in (*args, *kwargs.values()) if id(a) in self._names}
        if not tracked:
            return None
        try:
            match = rule.match(*args, **kwargs)
        except Exception as error:
            if is_custom(rule):
                self._refuse(tracked, f"{rule.name}: match(...) raised {error!r}")
            elif not isinstance(error, TypeError):
                raise
            # An argument that the closed form does not have, such as ``out=``.
            return None
        if match is None:
            return None
        if isinstance(match, Match):
            plain = type(match.input) in _PLAIN_TENSORS and match.input.layout == torch.strided
            names = {
                slot: self._names[id(p)] for slot, p in match.slots.items() if id(p) in self._names
            }
            slot_ids = {id(match.slots[slot]) for slot in names}
            if plain and id(match.input) not in tracked and slot_ids == tracked:
                return rule, match, names
        if is_custom(rule):
            self._refuse(
                tracked,
                f"{rule.name}: the result of match(...) must be a Match with all parameters of the"
                " call as slots, and an input that is a dense tensor and not a parameter",
            )
        return None

    def _refuse(self, tracked: Iterable[int], reason: str) -> None:
        self.refused.update({self._names[p]: reason for p in tracked})


def _with_gradient(output: Tensor) -> Tensor:
    """Return a tensor that no one else uses, after a graph starts there. A view is copied first.

    The model may change the result in place, unlike a leaf. A copy of a leaf would take as much
    memory again.
    """
    output = output.clone() if output._is_view() else output
    return _GraphStart.apply(output, output.new_empty(()).requires_grad_())


class _GraphStart(torch.autograd.Function):
    """Autograd function that returns its first argument and starts a graph there."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, start: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _decides(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> bool:
    """Return whether the values of some examples may affect the computation for other examples."""
    name = getattr(func, "__name__", "")
    plain = name if name.startswith("__") else name.removesuffix("_")
    if plain in _DECIDING or "nested" in name:
        return True
    if plain in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else args[1:2]
        return any(isinstance(entry, Tensor | list) for entry in index)
    if plain == "repeat_interleave":
        return any(isinstance(argument, Tensor) for argument in (*args[1:], *kwargs.values()))
    if plain == "where":
        return len(args) + len(kwargs) == 1
    if plain not in _REDUCTIONS or not args or not isinstance(args[0], Tensor):
        return False
    result = result[0] if isinstance(result, tuple) else result
    return not isinstance(args[0], nn.Parameter) and result.shape[:1] != args[0].shape[:1]


def _is_transformed() -> bool:
    return peek_interpreter_stack() is not None


def graph_nodes(outputs: Tensor) -> set[Node]:
    """Return all nodes of the autograd graph of a tensor."""
    if outputs.grad_fn is None:
        return set()
    stack, seen = [outputs.grad_fn], {outputs.grad_fn}
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
    return seen


def reachable(
    outputs: Tensor, weights: Mapping[str, nn.Parameter], nodes: Collection[Node] | None = None
) -> set[str]:
    """Return the names of the parameters in the autograd graph of the outputs.

    ``nodes`` are the nodes of this graph, if they are already known.
    """
    names = {id(p): name for name, p in weights.items()}
    # Only the nodes of leaves have a variable.
    nodes = graph_nodes(outputs) if nodes is None else nodes
    leaves = (id(getattr(node, "variable", None)) for node in nodes)
    leaf_names = {names[leaf] for leaf in leaves if leaf in names}
    return leaf_names | {names[id(outputs)]} if id(outputs) in names else leaf_names
