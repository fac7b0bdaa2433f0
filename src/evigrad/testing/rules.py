"""The conformance suite for layer rules."""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evigrad.core.curvature.kronecker import KroneckerUse
from evigrad.errors import ConformanceError, InputError
from evigrad.network.layers import Match, Rule
from evigrad.network.paths import Use
from evigrad.testing.comparison import agree, doubled, leaves, random, same_gradients


def check_rule(
    rule: Rule,
    function: Callable[..., Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    parts: int = 1,
) -> None:
    """Check that a rule computes the closed form of a function.

    The suite compares ``rows``, ``inner``, ``factors``, ``products`` and ``call`` with automatic
    differentiation, for several rows per example, for all examples and for a single one. It
    also compares derivatives with respect to the inputs and the gradients of the output.

    Args:
        rule: The rule.
        function: The function, which is the rule's key in ``RULES``.
        args: Positional arguments of a call with a closed form. The weights are ``nn.Parameter``
            objects. The examples are in dimension 0 of the output and of every other tensor that is
            as long as the input. The suite uses copies in float64.
        kwargs: Keyword arguments of the call.
        parts: Number of consecutive entries in dimension 0 for each example.

    Raises:
        InputError: If the arguments contain no parameter, or dimension 0 is not a multiple of
            ``parts``.
        ConformanceError: If a result is wrong. The message states what differs, and by how much.

    Examples:
        >>> import torch
        >>> from evigrad.network.layers import Linear
        >>> from evigrad.testing import check_rule
        >>> layer = torch.nn.Linear(3, 2)
        >>> call = (torch.randn(4, 3), layer.weight, layer.bias)
        >>> check_rule(Linear(), torch.nn.functional.linear, call)

    See also: docs/supported.md.
    """
    args = [doubled(argument) for argument in args]
    kwargs = {name: doubled(argument) for name, argument in (kwargs or {}).items()}
    _check_dispatch(rule, function, args, kwargs)
    match = _matched(rule, args, kwargs)
    length = len(match.input)
    if length % parts:
        raise InputError(
            f"The input has {length} entries in dimension 0, which is not a multiple of {parts}"
            " parts."
        )

    def cut(size: int, argument: Any) -> Any:
        is_cut = isinstance(argument, Tensor) and argument.shape[:1] == (length,)
        if not is_cut or isinstance(argument, nn.Parameter):
            return argument
        return argument[:size].detach().requires_grad_(argument.is_floating_point())

    for size, k in ((length, 2), (length, 1), (parts, 2)):
        part = [cut(size, argument) for argument in args]
        named = {name: cut(size, argument) for name, argument in kwargs.items()}
        call = _Call(rule, function, part, named, parts)
        if call.match.settings_text != match.settings_text:
            raise ConformanceError(
                f"match of {rule.name}: settings must be the same in every batch, got"
                f" {match.settings_text} for {length} entries and {call.match.settings_text} for"
                f" {size}."
            )
        call.check(k)


class _Reported(TorchFunctionMode):
    """The functions that PyTorch reports."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = list[Callable[..., Any]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def _check_dispatch(
    rule: Rule, function: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    with _Reported() as reported:
        function(*args, **kwargs)
    # PyTorch reports its operators, possibly by another name.
    if isinstance(function, FunctionType) and function not in reported.functions:
        name = getattr(function, "__name__", repr(function))
        raise ConformanceError(
            f"PyTorch does not report calls of {name}, so the rule {rule.name} has no effect. Wrap"
            " the function with torch.overrides.wrap_torch_function."
        )


def _matched(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Match:
    match, words = rule.match(*args, **kwargs), f"match of {rule.name}"
    if not isinstance(match, Match):
        raise ConformanceError(f"{words} must return a Match for these arguments, got {match!r}.")
    parameters = [a for a in (*args, *kwargs.values()) if isinstance(a, nn.Parameter)]
    if not parameters:
        raise InputError("The arguments must contain the weights as nn.Parameter, got none.")
    if {id(p) for p in match.slots.values()} != {id(p) for p in parameters}:
        raise ConformanceError(
            f"{words}: slots must be the {len(parameters)} parameters of the call themselves, got"
            f" {sorted(match.slots)}."
        )
    return match


class _Call:
    """A call of the function for m examples, its gradients, and the right rows."""

    def __init__(
        self,
        rule: Rule,
        function: Callable[..., Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: int,
    ) -> None:
        self.rule, self.function, self.args, self.kwargs = rule, function, args, kwargs
        self.match = _matched(rule, args, kwargs)
        self.arguments = leaves([*args, *kwargs.values()])
        self.output = function(*args, **kwargs)
        self.parts, self.num_data = parts, len(self.match.input) // parts

    def check(self, k: int) -> None:
        """Check every method, with k rows per example."""
        rule, match, output = self.rule, self.match, self.output
        self._check_call()
        shape = (self.num_data, k, self.parts, *output.shape[1:])
        gradient = random(*shape).requires_grad_()
        arguments = {**self.arguments, "the gradient": gradient}
        right = self._right_rows(gradient)
        for slot, expected in right.items():
            words = f"{rule.name}, slot {slot!r}"
            self._check_form(
                f"rows of {words}", rule.rows(slot, match, gradient), expected, arguments
            )
            cotangent = random(*expected.shape, seed=1)
            inner, value = (
                rule.inner(slot, match, gradient, cotangent),
                (cotangent * expected).sum(),
            )
            agree(f"inner of {words}", inner, value)
            same_gradients(f"inner of {words}", inner, value, arguments)
        for slot in rule.kronecker:
            if slot != "weight" or slot not in right:
                raise ConformanceError(
                    f"kronecker of {rule.name} must contain only the slot 'weight', got {slot!r}."
                )
            rows = _kronecker_rows(rule.factors(match, gradient), right[slot])
            self._check_form(f"factors of {rule.name}", rows, right[slot], arguments)
        if "weight" in right:
            self._check_products(gradient, right["weight"], arguments)

    def _check_call(self) -> None:
        """Compare ``call``, to which parameters are passed without gradients."""
        words = f"call of {self.rule.name}"

        def detached(argument: Any) -> Any:
            return argument.detach() if isinstance(argument, nn.Parameter) else argument

        args = [detached(a) for a in self.args]
        kwargs = {name: detached(a) for name, a in self.kwargs.items()}
        output = self.rule.call(self.function, args, kwargs)
        agree(words, output, self.output)
        probe = random(*output.shape, seed=2)
        pair = (probe * output).sum(), (probe * self.output).sum()
        same_gradients(words, *pair, self.arguments)

    def _right_rows(self, gradient: Float[Tensor, "m k F *out"]) -> dict[str, Tensor]:
        """Return rows by automatic differentiation, one by one, with a graph."""
        m, k = gradient.shape[:2]
        rows: dict[str, list[Tensor]] = {slot: [] for slot in self.match.slots}
        for n in range(m):
            for j in range(k):
                chosen = torch.zeros(m, dtype=gradient.dtype, device=gradient.device)
                chosen[n] = 1.0
                cotangent = gradient[:, j] * chosen.view(-1, *[1] * (gradient.ndim - 2))
                slopes = torch.autograd.grad(
                    self.output,
                    list(self.match.slots.values()),
                    cotangent.flatten(0, 1),
                    create_graph=True,
                )
                for slot, slope in zip(rows, slopes, strict=True):
                    rows[slot].append(slope)
        return {s: torch.stack(r).unflatten(0, (m, k)) for s, r in rows.items()}

    def _check_form(
        self, what: str, rows: Tensor, expected: Tensor, arguments: Mapping[str, Tensor]
    ) -> None:
        agree(what, rows, expected)
        probe = random(*expected.shape, seed=3)
        same_gradients(what, (probe * rows).sum(), (probe * expected).sum(), arguments)

    def _check_products(
        self, gradient: Tensor, expected: Tensor, arguments: Mapping[str, Tensor]
    ) -> None:
        """Compare ``products`` with rows, and with the sizes that ``matrix`` returns."""
        rule, match = self.rule, self.match
        shapes = tuple(match.input.shape[1:]), tuple(self.output.shape[1:])
        use = Use(rule.name, "weight", self.parts, 1, *shapes, match.settings_text)
        size = rule.matrix(use, expected.shape[2:])
        if size is None:
            return
        inputs, gradients = rule.products(match, gradient)
        positions, width = inputs.shape[1], gradients.shape[3]
        if size.looked_up:
            rows = torch.einsum(
                "mkti,mtv->mkvi",
                gradients,
                nn.functional.one_hot(inputs, expected.shape[2]).to(gradients),
            )
            sizes = (positions, width, expected.shape[2])
        else:
            rows = torch.einsum("mkto,mti->mkoi", gradients, inputs)
            sizes = (positions, inputs.shape[2], width)
            rows = rows.mT if rule.transposed else rows
        self._check_form(
            f"products of {rule.name}", rows.reshape(expected.shape), expected, arguments
        )
        agree(
            f"matrix of {rule.name}",
            torch.tensor((size.positions, size.inputs, size.outputs), device="cpu"),
            torch.tensor(sizes, device="cpu"),
        )


def _kronecker_rows(use: KroneckerUse, like: Tensor) -> Tensor:
    """Return the rows that Kronecker factors stand for."""
    rows = torch.einsum("nkgto,ngti->nkgoi", use.gradients, use.inputs)
    rows = rows.mT if use.transposed else rows
    return rows.reshape(like.shape) if rows.numel() == like.numel() else rows
