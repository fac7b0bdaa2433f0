"""Define closed forms of Jacobian rows: one rule for each function that layers call.

A rule computes the rows of each parameter of a function call. It needs the call's input and the
gradients with respect to the call's output. Rules apply to functions, not to modules.
``F.linear(x, w)`` in a forward method is treated like ``nn.Linear``.

To add a layer type, write a ``Rule`` with ``match`` and ``rows``, and add it to ``RULES``. Every
plan compares the rule's rows with plain autograd (``verification.Reference``), and does not use the
rule if they differ. For rules from outside the package, it also compares ``inner``, ``factors`` and
``products`` with the rows, and warns with the reason if it does not use the rule. The tests loop
over ``RULES`` and need arguments for the function (``tests/network/calls.py``). To save time, add
``inner``, ``kronecker`` with ``factors``, and ``matrix``. If the tests report that ``ownership``
does not know the function's autograd node, add a step for this node to ``ownership``. Without the
step, earlier layers take additional backward passes.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from inspect import signature
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import dot
from evigrad.core.curvature.kronecker import KroneckerUse
from evigrad.fast.contraction import MatrixUse
from evigrad.network.convolutions import (
    Geometry,
    convolution_inner,
    convolution_rows,
    fixed_convolution,
)
from evigrad.network.kronecker import PatchInputs
from evigrad.network.paths import JacobianPlan, Use


@dataclass(frozen=True)
class Match:
    """A function call with a closed form.

    Attributes:
        input: The tensor on which the parameters act, such as a padded input. It is an argument of
            the call, or is computed from the arguments. It has F consecutive entries per example in
            dimension 0. It is checked for in-place changes, cast under autocast, and split into
            single examples.
        slots: The call's parameters by role, such as "weight" or "bias".
        settings: All other settings on which the rows depend. They must be the same in every batch.
        computed: Function that returns another tensor on which the rows depend, or None. Dimension
            0 of this tensor has the same length as in ``input``. The function is called when rows
            are formed.
    """

    input: Tensor
    slots: dict[str, Tensor]
    settings: dict[str, Any] = field(default_factory=dict)
    computed: Callable[[], Tensor] | None = None

    @cached_property
    def settings_text(self) -> str:
        """The settings as text."""
        return repr(self.settings)


class Rule(ABC):
    """The closed form of one function.

    Dimension 0 of the input counts m examples times F consecutive parts of each example, such as
    augmentation samples or patches. F is 1 if each example has one part. Output gradients have
    separate dimensions for examples and parts. The rows of an example are sums over its parts.

    Attributes:
        name: Name in ``JacobianPlan.describe()``.
        kronecker: Slots for which ``factors`` and ``matrix`` are defined, such as "weight".
        in_pieces: Slots whose rows take no more work one at a time than all at once.
        at_positions: Whether the function acts separately on each entry of the dimensions between
            the first and the last. Several calls are then equivalent to one call with more entries.
        transposed: Whether the weight has the shape (in, out) instead of (out, in).
    """

    name: str
    kronecker: frozenset[str] = frozenset()
    in_pieces: frozenset[str] = frozenset({"bias"})
    at_positions: bool = False
    transposed: bool = False

    @abstractmethod
    def match(self, *args: Any, **kwargs: Any) -> Match | None:
        """Return the match for a call's arguments, or None if the call has no closed form.

        The signature must equal the function's signature. Signatures differ between rules, so a
        rule must not inherit from another rule. Instead, it can store the other rule and call that
        rule's methods.
        """

    def data_second(self, match: Match) -> bool:
        """Return whether the examples may be in dimension 1 of input and output instead of 0."""
        return self.at_positions

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call the function, or a faster equivalent. The parameters are already detached."""
        return function(*args, **kwargs)

    @abstractmethod
    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        """Return the rows (m, k, *parameter shape) of one parameter, given the output gradients."""

    def inner(
        self,
        slot: str,
        match: Match,
        gradient: Float[Tensor, "m k F *out"],
        cotangent: Float[Tensor, "m k *parameter"],
    ) -> Float[Tensor, ""]:
        """Return Σ cotangent · rows for one parameter. The cotangent gets no gradient.

        This default forms the rows. Override it for slots whose rows are much larger than the
        inputs and the gradients.
        """
        parts, numel = gradient.shape[2], prod(cotangent.shape[2:])
        if parts > 1 and numel <= prod(gradient.shape[3:]):
            # Treat each part as an example, so that the derivative in the gradients, which has a
            # few numbers per part, is never expanded in memory.
            gradient = gradient.transpose(1, 2).flatten(0, 1).unsqueeze(2)
            cotangent = cotangent.repeat_interleave(parts, dim=0)
        return dot(self.rows(slot, match, gradient), cotangent)

    def factors(self, match: Match, gradient: Float[Tensor, "m k F *out"]) -> KroneckerUse:
        """Return the Kronecker factors of the weight's rows."""
        raise NotImplementedError(f"{self.name} has no Kronecker factors. Call rows(...) instead.")

    def matrix(self, use: Use, shape: Sequence[int]) -> MatrixUse | None:
        """Return the sizes of a use that applies the weight as a single matrix, or else None."""
        del use, shape
        return None

    def products(
        self, match: Match, gradient: Float[Tensor, "m k F *out"]
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs (m, T, i) and gradients (m, k, T, o) whose products are the rows.

        If the function looks up rows of a matrix, return the row numbers (m, T) instead of inputs,
        and gradients (m, k, T, i).
        """
        use = self.factors(match, gradient)
        return use.inputs[:, 0], use.gradients[:, :, 0]


def aligned(values: Tensor, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
    """Return values (m F, ...) with the shape (m, 1, F, ...), to broadcast with the gradients."""
    return values.unflatten(0, (gradient.shape[0], gradient.shape[2]))[:, None]


def given(**slots: Tensor | None) -> dict[str, Tensor]:
    """Return the slots whose value is not None."""
    return {slot: tensor for slot, tensor in slots.items() if tensor is not None}


def sum_to(
    values: Float[Tensor, "m k F *out"], shape: Sequence[int]
) -> Float[Tensor, "m k *parameter"]:
    """Return values summed over dimensions along which a parameter of this shape was broadcast."""
    out = values.shape[2:]
    sizes = list(shape)[-len(out) :]
    sizes = [1] * (len(out) - len(sizes)) + sizes
    dims = [2 + i for i, (a, b) in enumerate(zip(sizes, out, strict=True)) if a == 1 and b != 1]
    if dims:
        values = values.sum(dims)
    return values.reshape(*values.shape[:2], *shape)


def sum_to_channels(values: Float[Tensor, "m k F c *space"]) -> Float[Tensor, "m k c"]:
    """Return the values of each row and channel, summed over parts and spatial dimensions."""
    return values.sum((2, *range(4, values.dim())))


class Linear(Rule):
    """The rule for z = x Wᵀ + b. Any number of dimensions may precede the features."""

    name = "linear"
    kronecker = frozenset({"weight"})
    at_positions = True

    def match(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Match | None:
        if input.dim() < 2 or weight.dim() != 2:
            return None
        return Match(input, given(weight=weight, bias=bias))

    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        a, g = self.positions(match, gradient)
        if slot == "bias":
            return g.sum(2)
        m, k, positions, out = g.shape
        if positions == 1:
            return g.transpose(2, 3) * a[:, None]
        return (g.transpose(2, 3).reshape(m, k * out, positions) @ a).reshape(m, k, out, -1)

    def inner(
        self,
        slot: str,
        match: Match,
        gradient: Float[Tensor, "m k F *out"],
        cotangent: Float[Tensor, "m k *parameter"],
    ) -> Float[Tensor, ""]:
        if slot == "bias":
            return super().inner(slot, match, gradient, cotangent)
        a, g = self.positions(match, gradient)
        m, k, positions, out = g.shape
        products = a @ cotangent.flatten(1, 2).mT  # each example's input with its own weights
        return dot(products.reshape(m, positions, k, out).transpose(1, 2), g)

    def factors(
        self, match: Match, gradient: Float[Tensor, "m k F *out"], transposed: bool = False
    ) -> KroneckerUse:
        a, g = self.positions(match, gradient)
        return KroneckerUse(a[:, None], g[:, :, None], transposed=transposed)

    def matrix(self, use: Use, shape: Sequence[int]) -> MatrixUse | None:
        return MatrixUse(use.parts * prod(use.input[:-1]), shape[1], shape[0])

    @staticmethod
    def positions(
        match: Match, gradient: Float[Tensor, "m k F *out"]
    ) -> tuple[Float[Tensor, "m T i"], Float[Tensor, "m k T o"]]:
        """Return the inputs and the gradients at all T positions of each example.

        Each part of an example contributes its positions.
        """
        a, (m, k, parts) = match.input, gradient.shape[:3]
        positions = parts * prod(a.shape[1:-1])
        a = a.reshape(m, positions, a.shape[-1])
        return a, gradient.reshape(m, k, positions, gradient.shape[-1])


class Product(Rule):
    """The rule for z = x W and z = b + x W, linear layers whose weight has the shape (in, out).

    Args:
        name: The name of the rule.
        arguments: Function that takes the call's arguments and returns the operands (x, W) or (x,
            W, b). It returns an empty tuple if the call has no closed form.
    """

    kronecker = frozenset({"weight"})
    at_positions = True
    transposed = True

    def __init__(self, name: str, arguments: Callable[..., tuple[Any, ...]]) -> None:
        self.name = name
        self._arguments, self._linear = arguments, Linear()

    def match(self, *args: Any, **kwargs: Any) -> Match | None:
        operands = self._arguments(*args, **kwargs)
        if not operands or not all(isinstance(operand, Tensor) for operand in operands):
            return None
        x, weight, *bias = operands
        if x.dim() < 2 or weight.dim() != 2 or any(b.dim() != 1 for b in bias):
            return None
        return Match(x, given(weight=weight, bias=bias[0] if bias else None))

    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        if slot == "bias":
            return self._linear.rows(slot, match, gradient)
        a, g = self._linear.positions(match, gradient)
        return a.mT[:, None] @ g

    def inner(
        self,
        slot: str,
        match: Match,
        gradient: Float[Tensor, "m k F *out"],
        cotangent: Float[Tensor, "m k *parameter"],
    ) -> Float[Tensor, ""]:
        cotangent = cotangent if slot == "bias" else cotangent.mT
        return self._linear.inner(slot, match, gradient, cotangent)

    def factors(self, match: Match, gradient: Float[Tensor, "m k F *out"]) -> KroneckerUse:
        return self._linear.factors(match, gradient, self.transposed)

    def matrix(self, use: Use, shape: Sequence[int]) -> MatrixUse | None:
        return self._linear.matrix(use, shape[::-1])


def _addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1
) -> tuple[Any, ...]:
    return (mat1, mat2, input) if beta == alpha == 1 else ()


def _matmul(input: Any, other: Any) -> tuple[Any, ...]:
    return input, other


_geometry = lru_cache(Geometry)  # cached, because settings are the same in every pass


class Convolution(Rule):
    """The rule for convolutions with 1 to 3 spatial dimensions."""

    kronecker = frozenset({"weight"})

    def __init__(self, dimensions: int) -> None:
        self.name = f"conv{dimensions}d"
        self.dimensions = dimensions

    def match(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Match | None:
        if input.dim() != self.dimensions + 2:  # one example without a batch dimension
            return None
        kernel, dilation = tuple(weight.shape[2:]), self._each(dilation)
        if padding == "same":
            spans = [d * (size - 1) for size, d in zip(kernel, dilation, strict=True)]
            padding = tuple(span // 2 for span in spans)
            if any(span % 2 for span in spans):  # one more zero at the end
                input = F.pad(input, [z for s in reversed(spans) for z in (0, s % 2)])
        # For padding modes other than zeros, the input is already padded.
        pads = self._each(0 if isinstance(padding, str) else padding)
        geometry = _geometry(kernel, self._each(stride), pads, dilation, groups)
        return Match(input, given(weight=weight, bias=bias), {"geometry": geometry})

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        match = self.match(*args, **kwargs)
        if match is None or any(p.requires_grad for p in match.slots.values()):
            return function(*args, **kwargs)
        slots, geometry = match.slots, match.settings["geometry"]
        return fixed_convolution(match.input, slots["weight"], slots.get("bias"), geometry)

    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        if slot == "bias":
            return sum_to_channels(gradient)
        return convolution_rows(match.input, gradient, match.settings["geometry"])

    def inner(
        self,
        slot: str,
        match: Match,
        gradient: Float[Tensor, "m k F *out"],
        cotangent: Float[Tensor, "m k *parameter"],
    ) -> Float[Tensor, ""]:
        if slot == "bias":
            return super().inner(slot, match, gradient, cotangent)
        return convolution_inner(match.input, gradient, cotangent, match.settings["geometry"])

    def factors(self, match: Match, gradient: Float[Tensor, "m k F *out"]) -> KroneckerUse:
        geometry: Geometry = match.settings["geometry"]
        # (m, k, F, o, *positions) → (m, k, G, F T, o')
        g = gradient.flatten(4).unflatten(3, (geometry.groups, -1))
        g = g.permute(0, 1, 3, 2, 5, 4).flatten(3, 4)
        return KroneckerUse(PatchInputs(match.input, len(g), geometry), g)

    def matrix(self, use: Use, shape: Sequence[int]) -> MatrixUse | None:
        """See ``Rule.matrix``. The result is None for several channel groups."""
        if shape[1] != use.input[0]:
            return None
        return MatrixUse(use.parts * prod(use.output[1:]), prod(shape[1:]), shape[0])

    def _each(self, setting: int | Sequence[int]) -> tuple[int, ...]:
        values = (setting,) if isinstance(setting, int) else tuple(setting)
        return values * self.dimensions if len(values) == 1 else values


class Embedding(Rule):
    """The rule for z = W[indices]. The padding index gets no gradient."""

    name = "embedding"

    def match(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Match | None:
        # max_norm changes the weight, and scale_grad_by_freq changes its gradient.
        if max_norm is not None or scale_grad_by_freq or input.dim() == 0:
            return None
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        return Match(input, {"weight": weight}, {"padding_idx": padding_idx})

    def data_second(self, match: Match) -> bool:
        return True

    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        weight = match.slots["weight"]
        (m, k), (entries, size) = gradient.shape[:2], weight.shape
        indices, gradient = self.products(match, gradient)
        indices = indices[:, None]
        # The tables of all rows form one long table, which takes a single scatter operation.
        table = entries * torch.arange(m * k, device=indices.device).reshape(m, k, 1)
        rows = gradient.new_zeros(m * k * entries, size)
        rows = rows.index_add(0, (indices + table).flatten(), gradient.flatten(0, 2))
        return rows.reshape(m, k, entries, size)

    def matrix(self, use: Use, shape: Sequence[int]) -> MatrixUse | None:
        return MatrixUse(use.parts * prod(use.input), shape[1], shape[0], looked_up=True)

    def products(
        self, match: Match, gradient: Float[Tensor, "m k F *out"]
    ) -> tuple[Tensor, Tensor]:
        (m, k), size = gradient.shape[:2], match.slots["weight"].shape[1]
        indices = match.input.reshape(m, -1)
        gradient = gradient.reshape(m, k, indices.shape[1], size)
        padding_idx = match.settings["padding_idx"]
        if padding_idx is not None:
            gradient = gradient * (indices != padding_idx)[:, None, :, None]
        return indices, gradient


class Normalisation(Rule):
    """The rule for z = w ⊙ x̂ + b, where x̂ is the normalized input.

    Args:
        function: Function that normalizes its first argument. Its parameters are ``weight`` and
            possibly ``bias``.
        channels: Whether parameters have one number per channel, as in group norm. Otherwise, they
            have the trailing dimensions of the output, as in layer norm.
    """

    def __init__(self, function: Callable[..., Tensor], channels: bool) -> None:
        self.name = function.__name__
        self._function, self._signature = function, signature(function)
        self._channels = channels

    def match(self, *args: Any, **kwargs: Any) -> Match | None:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        slots = given(weight=arguments.pop("weight"), bias=arguments.pop("bias", None))
        # Examples mix, or the call would update the running statistics.
        if arguments.get("training") or (
            arguments.get("use_input_stats") and arguments["running_mean"] is not None
        ):
            return None
        # Trailing dimensions that include dimension 0 leave no dimension for the examples.
        trailing = 1 if self._channels else max(p.dim() for p in slots.values())
        if arguments["input"].dim() <= trailing:
            return None
        return Match(arguments["input"], slots, computed=lambda: self._function(**arguments))

    def data_second(self, match: Match) -> bool:
        return not self._channels

    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        if slot == "weight":
            assert match.computed is not None
            gradient = gradient * aligned(match.computed(), gradient)
        if self._channels:
            return sum_to_channels(gradient)
        return sum_to(gradient, match.slots[slot].shape)


class PReLU(Rule):
    """The rule for z = max(x, 0) + w min(x, 0), with a single w or one w per channel."""

    name = "prelu"

    def match(self, input: Tensor, weight: Tensor) -> Match | None:
        if input.dim() < (1 if weight.numel() == 1 else 2):
            return None
        return Match(input, {"weight": weight})

    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        values = gradient * aligned(match.input.clamp(max=0), gradient)
        shape = match.slots["weight"].shape
        return sum_to(values, shape) if shape.numel() == 1 else sum_to_channels(values)


class Elementwise(Rule):
    """The rule for a parameter that is combined with a tensor element by element.

    The parameter is broadcast over the examples.

    Args:
        name: The name of the rule.
        derivatives: Functions by the parameter's slot, "input" for the left operand or "other" for
            the right operand. Each takes the tensor, the parameter and alpha. It returns the
            result's derivative with respect to the parameter, as a number or a tensor that
            broadcasts.
    """

    in_pieces = frozenset({"input", "other"})

    def __init__(
        self, name: str, derivatives: Mapping[str, Callable[[Tensor, Tensor, Any], Any]]
    ) -> None:
        self.name = name
        self._derivatives = derivatives

    def match(self, input: Any, other: Any, *, alpha: Any = 1) -> Match | None:
        if not isinstance(input, Tensor) or not isinstance(other, Tensor):
            return None
        slot = "input" if isinstance(input, torch.nn.Parameter) else "other"
        tensor, parameter = (other, input) if slot == "input" else (input, other)
        # The parameter must not have a batch dimension, nor replace a missing one.
        room = tensor.dim() - parameter.dim()
        if tensor.dim() == 0 or room < 0 or (room == 0 and parameter.shape[0] != 1):
            return None
        return Match(tensor, {slot: parameter}, {"alpha": alpha})

    def data_second(self, match: Match) -> bool:
        return all(match.input.dim() - p.dim() > 1 for p in match.slots.values())

    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        parameter = match.slots[slot]
        # Detached: rows have no graph into the weights.
        derivative = self._derivatives[slot](
            match.input, parameter.detach(), match.settings["alpha"]
        )
        if isinstance(derivative, Tensor):
            return sum_to(gradient * aligned(derivative, gradient), parameter.shape)
        rows = sum_to(gradient, parameter.shape)
        return rows if derivative == 1 else rows * derivative


class Expand(Rule):
    """The rule for a parameter that is repeated for each example, such as a class token."""

    name = "expand"

    def match(self, input: Tensor, *sizes: Any) -> Match | None:
        shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
        room = len(shape) - input.dim()
        if not shape or shape[0] < 0 or (room == 0 and input.shape[0] != 1):
            return None
        # The parameter acts on no tensor. This one only counts the examples.
        return Match(input.new_empty(shape[0], 0), {"input": input})

    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        return sum_to(gradient, match.slots[slot].shape)


_ADD = Elementwise("add", {"input": lambda x, p, alpha: 1, "other": lambda x, p, alpha: alpha})
_SUB = Elementwise("sub", {"input": lambda x, p, alpha: 1, "other": lambda x, p, alpha: -alpha})
_MUL = Elementwise("mul", {"input": lambda x, p, alpha: x, "other": lambda x, p, alpha: x})
_DIV = Elementwise(
    "div", {"input": lambda x, p, alpha: 1 / x, "other": lambda x, p, alpha: -x / p**2}
)

_MATMUL = Product("matmul", _matmul)

# Every function with a closed form, as reported to ``__torch_function__``. ``F.x`` and ``torch.x``
# are mostly one object, and an operator and its method always are.
RULES: dict[Callable[..., Any], Rule] = {
    F.linear: Linear(),
    torch.addmm: Product("addmm", _addmm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm), _MATMUL),
    torch.conv1d: Convolution(1),
    torch.conv2d: Convolution(2),
    torch.conv3d: Convolution(3),
    F.embedding: Embedding(),
    F.layer_norm: Normalisation(F.layer_norm, channels=False),
    F.rms_norm: Normalisation(F.rms_norm, channels=False),
    F.group_norm: Normalisation(F.group_norm, channels=True),
    F.batch_norm: Normalisation(F.batch_norm, channels=True),
    F.instance_norm: Normalisation(F.instance_norm, channels=True),
    torch.prelu: PReLU(),
    Tensor.expand: Expand(),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _ADD),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), _SUB),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _MUL),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), _DIV),
}


def is_custom(rule: Rule) -> bool:
    """Return whether the rule is not from this package."""
    return not type(rule).__module__.startswith("evigrad.")


def has_closed_forms(uses: Sequence[Use]) -> bool:
    """Return whether ``uses`` is not empty and every use names an existing closed form."""
    names = {rule.name for rule in RULES.values()}
    return bool(uses) and all(use.rule in names for use in uses)


def matrix_uses(
    plan: JacobianPlan, weights: Mapping[str, Tensor]
) -> dict[str, tuple[MatrixUse, ...]]:
    """Return the matrix sizes of each use of each weight, by name.

    The result includes only weights that are always used as a single matrix. A tied weight has
    several uses.
    """
    rules = {rule.name: rule for rule in RULES.values()}
    uses_of_weights: dict[str, tuple[MatrixUse, ...]] = {}
    for name, uses in plan.uses.items():
        use_rules = [rules[use.rule] for use in uses]
        matrices = all(isinstance(rule, Linear | Embedding) for rule in use_rules)
        if any(use.slot != "weight" for use in uses) or not (matrices or len(uses) == 1):
            continue
        sizes: list[MatrixUse | None] = []
        for use, times in Counter(uses).items():
            rule, size = rules[use.rule], rules[use.rule].matrix(use, weights[name].shape)
            if size is not None and rule.at_positions:  # as in ``recorder.joined``
                size, times = replace(size, positions=times * size.positions), 1
            sizes += [size] * times
        matrix_sizes = tuple(size for size in sizes if size is not None)
        if len(matrix_sizes) == len(sizes):
            uses_of_weights[name] = matrix_sizes
    return uses_of_weights
