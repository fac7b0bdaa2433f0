"""Compare autograd's derivatives with finite differences.

All other checks compare autograd with autograd. They cannot detect a custom function whose backward
is wrong or is not differentiable. This module has three checks for such functions, each on a few
examples:

- ``check_outputs`` compares derivatives of outputs with respect to the weights when a plan is made,
  if the model has custom functions or hooks on tensors. Differences are often intended, as in
  straight-through estimators, and cause a warning. Differences caused by a hook raise an error.
- ``check_rows`` compares derivatives of rows with respect to hyperparameters of the model and to
  cotangents, before the first gradient that needs them. Differences raise an error, because the
  gradient would be silently wrong.
- ``refuse_once_differentiable`` finds functions marked with ``@once_differentiable`` in the
  autograd graph.

Finite differences are computed in float64 if possible, on a copy of the model. Its weights are
perturbed, because an output layer initialized to zero would hide errors in all layers before it.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from evigrad.errors import (
    ConfigurationError,
    EvigradWarning,
    is_out_of_memory,
    listed,
)
from evigrad.network.arguments import derivatives_named, model_outputs, without_derivative
from evigrad.network.generic import dense
from evigrad.network.modes import evaluation_run, without_autocast
from evigrad.network.recorder import graph_nodes
from evigrad.network.verification import moved_copy

# Number of examples on which derivatives are compared.
CHECKED_EXAMPLES = 2

# Step relative to a tensor's size, and largest accepted relative difference. Steps in float64 are
# small enough not to cross the kinks of activations.
_SETTINGS = {torch.float64: (1e-5, 1e-4)}
_COARSE_SETTINGS = (3e-3, 2e-2)
# Values are sums of many terms, whose rounding error is this many units of the largest sum.
_ROUNDING = 100.0
# An error counts only if it exceeds the difference between both sides of a point by this factor.
# The sides differ at a kink, or if rounding dominates.
_SIDES = 10.0


_Result = TypeVar("_Result")


def refuse_scaled_gradients(nodes: Iterable[Node]) -> None:
    """Raise an error if an embedding divides its gradient by the counts of its indices."""
    if any(getattr(node, "_saved_scale_grad_by_freq", False) for node in nodes):
        raise ConfigurationError(
            "The model calls F.embedding or F.embedding_bag with scale_grad_by_freq=True. The"
            " gradient and the curvature would correspond to a different function. Omit the"
            " argument, or use an nn.Embedding, for which evigrad switches this flag off."
        )


def refuse_once_differentiable(
    model: nn.Module, weights: Mapping[str, nn.Parameter], learned: Sequence[str], x: Tensor
) -> None:
    """Raise an error if the graph of the rows has a function marked ``once_differentiable``.

    Args:
        model: The model.
        weights: Weights by name.
        learned: Names of the hyperparameters whose gradient needs derivatives of the rows. If there
            are none, the derivatives are for the exact Hessian.
        x: A few inputs.

    Raises:
        ConfigurationError: If there is such a function.
    """
    with evaluation_run(model), torch.enable_grad():
        nodes = _nodes_of_rows(model_outputs(model, x), weights.values())
    names = sorted({name for node in nodes if (name := _once_differentiable(node))})
    if names:
        needed = f"The gradient for {listed(learned)}" if learned else "The exact Hessian"
        raise ConfigurationError(
            f"{listed(names)} cannot be differentiated twice, because the backward method is marked"
            f" with @once_differentiable. {needed} needs a second derivative and would be silently"
            " wrong. Write the backward method with differentiable operations and without this"
            " mark, or fix the model's hyperparameters (requires_grad=False)."
        )


# The code of every function that the decorator returns.
_ONCE = once_differentiable(lambda *_: None).__code__


def _once_differentiable(node: Node) -> str:
    """Return the name of a custom function that is not differentiable twice, or an empty string."""
    function = getattr(node, "_forward_cls", None)
    code = getattr(getattr(function, "backward", None), "__code__", None)
    return function.__name__ if function is not None and code is _ONCE else ""


def _nodes_of_rows(outputs: Tensor, weights: Iterable[Tensor]) -> set[Node]:
    """Return the nodes of the outputs' graph from which a weight can be reached."""
    nodes = graph_nodes(outputs)
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        for before, _ in node.next_functions:
            if before is not None:
                users.setdefault(before, []).append(node)
    leaves = {id(w) for w in weights}
    stack = [node for node in nodes if id(getattr(node, "variable", None)) in leaves]
    leading = set(stack)
    while stack:
        for user in users.get(stack.pop(), ()):
            if user not in leading:
                leading.add(user)
                stack.append(user)
    return leading


class TensorHooks(TorchFunctionMode):
    """Record whether a hook is registered on a tensor. If ``ignore``, skip the registration."""

    def __init__(self, ignore: bool = False) -> None:
        super().__init__()
        self._ignore = ignore
        self.registered = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, or return a handle without registering a hook."""
        if func is Tensor.register_hook:
            self.registered = True
            if self._ignore:
                return RemovableHandle({})
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------ finite differences


def check_outputs(
    moved: nn.Module,
    weights: Collection[nn.Parameter],
    x: Tensor,
    nodes: Collection[Node],
    hooked: bool,
) -> None:
    """Compare autograd's ∂outputs/∂weights with finite differences, and warn if they differ.

    Models with neither custom functions nor hooks are skipped. In such models, only detached
    tensors can cause a difference, and detaching is usually intended.

    Args:
        moved: A copy of the model, with perturbed weights.
        weights: The weights of the copy.
        x: Inputs. Only a few of them are used.
        nodes: The nodes of the outputs' autograd graph.
        hooked: Whether the forward pass registers hooks on tensors.

    Raises:
        ConfigurationError: If the derivatives differ because of a hook.
    """
    functions = _custom_functions(nodes)
    if not functions and not hooked:
        return
    x = x[:CHECKED_EXAMPLES]
    verdict = _first_result(lambda dtype: _outputs_verdict(_copied(moved, weights, dtype), x))
    if verdict is None or not verdict.differs:
        return
    numbers = (
        f"Along a random direction in the weights, autograd's derivative of the outputs is"
        f" {verdict.autograd:.4g}, and a finite difference of the outputs is"
        f" {verdict.difference:.4g}."
    )
    if hooked:
        with TensorHooks(ignore=True):
            plain = _first_result(lambda dtype: _outputs_verdict(_copied(moved, weights, dtype), x))
        if plain is None or plain.autograd != verdict.autograd:
            raise ConfigurationError(
                f"A hook on a tensor, set by register_hook in forward, changes gradients. {numbers}"
                " The curvature would correspond to a different function. Remove the hook, or"
                " register it only if self.training."
            )
    if functions:
        warnings.warn(
            f"The backward of {listed(functions)} is not the derivative of the forward, or a tensor"
            f" is detached. {numbers} The curvature uses autograd's derivative. This is correct for"
            " straight-through estimators, but not for reversed or scaled gradients. Use those only"
            " if self.training.",
            EvigradWarning,
            stacklevel=2,
        )


def check_rows(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    learned: Mapping[str, nn.Parameter],
    names: Sequence[str],
    x: Tensor,
    varies: bool,
) -> None:
    """Compare autograd's derivatives of the rows with finite differences.

    If autograd's derivative of the outputs with respect to a hyperparameter differs from the finite
    difference, warn and skip this hyperparameter. The model then defines custom derivatives, which
    finite differences cannot check.

    Args:
        model: The model, which is not changed.
        weights: Weights by name.
        learned: The model's hyperparameters that need a gradient, by name.
        names: Names of all hyperparameters that need a gradient, including the likelihood's.
        x: Inputs. Only a few of them are used.
        varies: Whether the rows' cotangents depend on these hyperparameters.

    Raises:
        ConfigurationError: If the derivatives differ, or an operation has no second derivative.
    """
    x = x[:CHECKED_EXAMPLES].detach()
    paths = {id(p): path for path, p in model.named_parameters()}
    with derivatives_named():
        refuse_once_differentiable(model, weights, names, x)

        def undefined(dtype: torch.dtype | None) -> list[str]:
            with evaluation_run(model):
                moved = moved_copy(model, weights, x) or _plain_copy(model, weights)
            copied = _copied(moved[0], moved[1].values(), dtype)
            if varies:
                _check_cotangents(copied, x, names)
            parameters = dict(copied[0].named_parameters())
            chosen = {name: parameters[paths[id(p)]] for name, p in learned.items()}
            return [name for name, p in chosen.items() if not _check_row(name, copied, p, x)]

        undefined_in = _first_result(undefined)
    if undefined_in:
        warnings.warn(
            f"Autograd's derivative of the outputs with respect to {listed(undefined_in)} differs"
            " from a finite difference. Straight-through estimators and detached tensors cause"
            " this. The gradient of the evidence uses autograd's derivative.",
            EvigradWarning,
            stacklevel=2,
        )


# ------------------------------------------------------------ copies, sums and verdicts

_Copy = tuple[nn.Module, list[nn.Parameter]]


def _first_result(compute: Callable[[torch.dtype | None], _Result]) -> _Result | None:
    """Return the result in float64 or in the model's type, or None if both fail."""
    for dtype in (torch.float64, None):
        try:
            return compute(dtype)
        except Exception as error:  # any other error means that the copy cannot run
            if isinstance(error, ConfigurationError) or is_out_of_memory(error):
                raise
            if without_derivative(error) is not None:
                raise
    return None


def _plain_copy(
    model: nn.Module, weights: Mapping[str, nn.Parameter]
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return a copy without perturbation, for weights that cannot be perturbed."""
    copied = copy.deepcopy(model)
    parameters = dict(copied.named_parameters())
    return copied, {name: parameters[name] for name in weights}


def _copied(model: nn.Module, weights: Iterable[nn.Parameter], dtype: torch.dtype | None) -> _Copy:
    """Return a copy of a model in ``dtype``, and the weights of the copy."""
    names = {id(p): name for name, p in model.named_parameters()}
    copied = copy.deepcopy(model)
    copied = copied if dtype is None else copied.to(dtype)
    parameters = dict(copied.named_parameters())
    return copied, [parameters[names[id(w)]] for w in weights]


class _Verdict(NamedTuple):
    """A comparison of autograd with a finite difference along a random direction.

    Attributes:
        differs: Whether autograd's derivative is wrong, or None if this is unclear.
        autograd: Autograd's derivative.
        difference: The finite difference.
    """

    differs: bool | None
    autograd: float
    difference: float


class _RandomSums:
    """Random sums of a copy's outputs and of a row's entries, with the sums of their magnitudes."""

    def __init__(self, copied: _Copy, x: Tensor, seed: int) -> None:
        self.model, self.weights = copied
        first = next(self.model.parameters())
        self.x = x.to(first.dtype) if x.is_floating_point() else x
        self._generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.vectors = self._random(self._outputs()).requires_grad_()
        self._factors = [self._random(w) for w in self.weights]

    def of_outputs(self, differentiable: bool) -> tuple[Tensor, float]:
        """Return a random weighted sum of the outputs, and the sum of the terms' magnitudes."""
        terms = self.vectors.detach() * self._outputs()
        return terms.sum(), float(terms.detach().abs().sum())

    def of_row(self, differentiable: bool) -> tuple[Tensor, float]:
        """Return a random weighted sum of a row's entries, and the sum of the terms' magnitudes.

        The weighted sum is linear in the cotangents ``vectors``.
        """
        value = (self.vectors * self._outputs()).sum()
        row = torch.autograd.grad(
            value, self.weights, create_graph=differentiable, allow_unused=True
        )
        terms = [
            factor * dense(gradient)
            for factor, gradient in zip(self._factors, row, strict=True)
            if gradient is not None
        ]
        sizes = [float(term.detach().abs().sum()) for term in terms]
        return torch.stack([term.sum() for term in terms]).sum(), sum(sizes)

    def verdict(
        self, function: Callable[[bool], tuple[Tensor, float]], tensors: Sequence[nn.Parameter]
    ) -> _Verdict:
        """Return a comparison of autograd's derivative of a sum with a finite difference.

        ``function`` computes the sum. The derivative is taken along a random direction in the
        ``tensors``, whose values are changed and then restored.
        """
        value, size = function(True)
        directions = [self._random(p) * _root_mean_square(p) for p in tensors]
        gradients: Sequence[Tensor | None] = [None] * len(tensors)
        if value.requires_grad:
            gradients = torch.autograd.grad(value, list(tensors), allow_unused=True)
        pairs = zip(gradients, directions, strict=True)
        autograd = sum(float((dense(g) * d).sum()) for g, d in pairs if g is not None)

        step, tolerance = _SETTINGS.get(value.dtype, _COARSE_SETTINGS)
        starts = [p.detach().clone() for p in tensors]

        def at(place: float) -> float:
            with torch.no_grad():
                for p, start, direction in zip(tensors, starts, directions, strict=True):
                    p.copy_(start + place * direction)
            return float(function(False)[0].detach())

        before, after, here = at(-step), at(step), at(0.0)
        left, right = (here - before) / step, (after - here) / step
        difference = (left + right) / 2
        error, sides = abs(autograd - difference), abs(right - left)
        allowed = tolerance * max(abs(autograd), abs(difference))
        allowed += _ROUNDING * torch.finfo(value.dtype).eps * size / step
        differs = False if error <= allowed else True if error > allowed + _SIDES * sides else None
        return _Verdict(differs, autograd, difference)

    def _outputs(self) -> Tensor:
        with evaluation_run(self.model):  # equal draws in each pass
            return model_outputs(self.model, self.x)

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(
            like.shape, generator=self._generator, dtype=torch.float64, device="cpu"
        ).to(like)


def _root_mean_square(p: Tensor) -> float:
    """Return the root mean square of the entries, or 1 if they are zero."""
    return float(p.detach().square().mean().sqrt()) or 1.0


@contextmanager
def _computing(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Run forward and backward passes, including checkpoints' passes, in the same mode."""
    with evaluation_run(model), torch.enable_grad(), without_autocast(x.device):
        yield


def _verdict(copied: _Copy, x: Tensor, function: str, tensors: Sequence[nn.Parameter]) -> _Verdict:
    """Return the verdict of ``_RandomSums``. A difference must occur for two seeds."""
    with _computing(copied[0], x):
        sums = _RandomSums(copied, x, seed=0)
        first = sums.verdict(getattr(sums, function), tensors)
        if not first.differs:
            return first
        sums = _RandomSums(copied, x, seed=1)
        second = sums.verdict(getattr(sums, function), tensors)
    return second if second.differs else second._replace(differs=None)


def _outputs_verdict(copied: _Copy, x: Tensor) -> _Verdict:
    """Return the verdict for the outputs' derivative with respect to all weights of their graph."""
    model, weights = copied
    with _computing(model, x):
        nodes = graph_nodes(model_outputs(model, _RandomSums(copied, x, 0).x))
    leaves = {id(getattr(node, "variable", None)) for node in nodes}
    return _verdict(copied, x, "of_outputs", [w for w in weights if id(w) in leaves])


def _check_row(name: str, copied: _Copy, p: nn.Parameter, x: Tensor) -> bool:
    """Return False if autograd's derivative of the outputs is wrong for a parameter.

    Raises:
        ConfigurationError: If it is correct, but the derivative of a row is wrong.
    """
    if p.numel() == 0 or p.layout != torch.strided or not p.is_floating_point():
        return True
    first = _verdict(copied, x, "of_outputs", [p])
    if first.differs is not False:
        return not first.differs
    second = _verdict(copied, x, "of_row", [p])
    if second.differs:
        raise ConfigurationError(
            f"The gradient for {name!r} would be wrong, because the derivative of Jacobian rows is"
            f" wrong. Along a random direction, autograd's derivative is {second.autograd:.4g}, but"
            f" a finite difference is {second.difference:.4g}. {_culprits(copied, x)} Write this"
            " backward method with differentiable operations on its inputs and saved tensors, or"
            f" fix {name!r} (requires_grad=False)."
        )
    return True


def _check_cotangents(copied: _Copy, x: Tensor, learned: Sequence[str]) -> None:
    """Raise an error if autograd's derivative of a row with respect to its cotangents is wrong."""
    with _computing(copied[0], x):
        sums = _RandomSums(copied, x, 0)
        value, size = sums.of_row(True)
        gradient = None
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value, [sums.vectors], allow_unused=True)
    derivative = 0.0 if gradient is None else float((gradient * sums.vectors.detach()).sum())
    tolerance = _SETTINGS.get(value.dtype, _COARSE_SETTINGS)[1]
    if abs(derivative - float(value.detach())) > tolerance * size:
        raise ConfigurationError(
            f"The gradient for {listed(learned)} would be wrong. A Jacobian row is linear in its"
            " cotangents, so the row's derivative along the cotangents must equal the row. A random"
            f" weighted sum of a row's entries is {float(value.detach()):.4g}, but autograd's"
            f" derivative of this sum is {derivative:.4g}. {_culprits(copied, x)} Write this"
            " backward method with differentiable operations on its inputs and saved tensors, or"
            " fix these hyperparameters (requires_grad=False)."
        )


def _culprits(copied: _Copy, x: Tensor) -> str:
    """Return a sentence that names the custom functions in the graph of the rows."""
    model, weights = copied
    with _computing(model, x):
        nodes = _nodes_of_rows(model_outputs(model, _RandomSums(copied, x, 0).x), weights)
    names = _custom_functions(nodes)
    of_whom = f"The backward of {listed(names)}" if names else "A backward method of the model"
    return f"{of_whom} treats something as a constant, for example by detaching it."


def _custom_functions(nodes: Iterable[Node]) -> list[str]:
    """Return the names of the ``autograd.Function`` classes among nodes."""
    functions = (getattr(node, "_forward_cls", None) for node in nodes)
    return sorted({function.__name__ for function in functions if function is not None})
