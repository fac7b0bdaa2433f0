"""Calls of a model with inputs of any kind, and what of its result are the outputs."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from evigrad.errors import ConfigurationError, InputError, raised_in
from evigrad.inputs.trees import AtPositions, Inputs, Tree, layout

# Where a module around a model has it.
_MODEL = "_evigrad_model"

_wanted: ContextVar[AtPositions | None] = ContextVar("wanted", default=None)


def called(model: nn.Module, x: Inputs) -> object:
    """Return what the model returns for a copy of some inputs, which it may change in place.

    A dictionary goes in as keyword arguments where ``forward`` takes all of its keys, and a tuple
    as positional ones where ``forward`` asks for as many; else each is one argument. Of an object
    that has ``logits``, as a Hugging Face model returns it, these are the outputs.

    Raises:
        InputError: If the model raises an exception, or has no outputs at positions.
    """
    if isinstance(x, AtPositions):
        return x.of_outputs(called(model, x.whole))
    if isinstance(model, Outputs):
        return _part(model, _result(inside(model), x))
    return scores_of(_result(model, x))


def _result(model: nn.Module, x: Tensor | Tree) -> Any:
    """What the model returns for a copy of some inputs."""
    if isinstance(x, Tensor):
        with raised_in(f"The model, given inputs of shape {tuple(x.shape)} and type {x.dtype},"):
            return model(x.clone())
    positional, named = arguments(model, x.clone().value)
    words = ", ".join(
        f"{name} {shape} {str(dtype).removeprefix('torch.')}" for name, shape, dtype in layout(x)
    )
    how = "keyword arguments" if named else f"{len(positional)} positional arguments"
    how = "one argument" if len(positional) == 1 else how
    with raised_in(f"The model, given {len(x)} data of {words} as {how},"):
        return model(*positional, **named)


@contextmanager
def noted_calls(
    modules: Iterable[nn.Module], note: Callable[[nn.Module, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Give each call of one of the modules inside, its arguments and its result, to ``note``."""
    handles = [module.register_forward_hook(note) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def output_layer(model: nn.Module, x: Tensor | Tree) -> tuple[object, nn.Linear | None]:
    """Call a model, and find the linear layer whose result it returns.

    Args:
        model: Any.
        x: Inputs.

    Returns:
        What the model returns, and the layer, which it calls once with one argument; or None.
    """
    seen: dict[nn.Linear, list[tuple[int, Any]]] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        assert isinstance(module, nn.Linear)
        seen.setdefault(module, []).append((len(inputs), output))

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with noted_calls(layers, note):
        f = called(model, x)
    made = [
        layer
        for layer, ((count, output), *more) in seen.items()
        if count == 1 and not more and output is f
    ]
    return f, made[0] if made else None


def called_at(model: nn.Module, layer: nn.Linear, x: AtPositions) -> object:
    """The outputs (n, C) where ``layer`` makes them, which acts on the positions alone."""

    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
        if (wanted := _wanted.get()) is None:  # a call in another thread
            return None
        return wanted.of_outputs(inputs[0])

    token = _wanted.set(x)
    handle = layer.register_forward_pre_hook(gather)
    try:
        return called(model, x.whole)
    finally:
        handle.remove()
        _wanted.reset(token)


def scores_of(output: object) -> Any:
    """The ``logits`` of an object that has them; anything else as it is."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def arguments(model: nn.Module, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of ``forward`` for the value of a ``Tree``."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {each.name: each.kind for each in parameters}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        if takes_any or all(kinds.get(key) in by_name for key in value):
            return (), dict(value)
    if isinstance(value, tuple | list):
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        asked = [p for p in parameters if p.kind in by_place and p.default is p.empty]
        if len(asked) == len(value) > 1:
            return tuple(value), {}
    return (value,), {}


# ------------------------------------------------------------ modules around the model


class Transparent(nn.Module):
    """A module around a model, with its parameters, buffers, submodules and mode, by its names.

    Args:
        model: Any.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # The model's own tables: replacing a parameter here replaces it there.
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self.__dict__[_MODEL] = model  # not registered, or every name would get a prefix

    @property
    def training(self) -> bool:
        """The model's own mode."""
        return inside(self).training

    @training.setter
    def training(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, mode: bool
    ) -> None:
        if _MODEL in self.__dict__:  # not yet while this module is initialised
            inside(self).training = mode


def inside(module: Transparent) -> nn.Module:
    """Return the model.

    This is no attribute of the module: a submodule of the model may have any name.
    """
    return module.__dict__[_MODEL]


class Outputs(Transparent):
    """A model whose outputs are a part of what it returns, or have their channels elsewhere.

    Its parameters and buffers are the model's own, by the same names. Take it in the place of the
    model, in ``fit``, ``Evidence`` and everywhere else. What draws or averages, as ``Averaged``,
    goes around it.

    Args:
        model: Any module.
        output: Which part of the result: the name of an attribute or a key, an index, or a function
            of the result. Default: the result itself, or its ``logits`` where it has them.
        channel_dim: The dimension that counts the C outputs, as 1 for images (m, C, height, width).

    Raises:
        ConfigurationError: If ``output`` or ``channel_dim`` is something else.
    """

    def __init__(
        self,
        model: nn.Module,
        output: str | int | Callable[[Any], Any] | None = None,
        channel_dim: int = -1,
    ) -> None:
        super().__init__(model)
        if not (output is None or isinstance(output, str | int) or callable(output)):
            raise ConfigurationError(f"output is a name, an index or a function, not {output!r}.")
        if not isinstance(channel_dim, int) or channel_dim == 0:
            raise ConfigurationError(
                f"channel_dim is a dimension of the outputs, not {channel_dim!r}; dim 0 counts the"
                " data."
            )
        # Not registered: a module given as a function has its own place in the model.
        self.__dict__["_output"], self.__dict__["_channel_dim"] = output, channel_dim

    def forward(self, *positional: Any, **named: Any) -> Any:
        """The outputs for arguments of the model."""
        return _part(self, inside(self)(*positional, **named))


def _part(module: Outputs, result: Any) -> Any:
    """The outputs in what the model returned."""
    output, dim = module.__dict__["_output"], module.__dict__["_channel_dim"]
    with raised_in(f"output={output!r} of a {type(result).__name__}"):
        if output is None:
            result = scores_of(result)
        elif callable(output):
            result = output(result)
        elif isinstance(output, str) and not isinstance(result, Mapping):
            result = getattr(result, output)
        else:
            result = result[output]
    if not isinstance(result, Tensor) or dim == -1:
        return result
    if not -result.dim() <= dim < result.dim():
        raise InputError(
            f"channel_dim={dim} is no dimension of outputs of shape {tuple(result.shape)}."
        )
    return result.movedim(dim, -1)
