"""A model's inputs and outputs: trees of tensors, positions of outputs, and calls of the model.

Inputs are one tensor, or a tree of tensors: nested dictionaries, tuples or lists. The first
dimension of each tensor counts examples.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from evigrad.errors import ConfigurationError, InputError, listed, raised_in

_DATA_MIX = (
    "The model's output for an example changes from call to call, or with the other examples of"
    " the batch, so its Jacobian is not defined."
)
_MIX_CAUSES = (
    " Make sure that the forward pass is deterministic in evaluation mode and keeps no state, such"
    " as a hidden state, for the next call. Also make sure that no layer, such as normalization"
    " with batch statistics, mixes examples (track_running_stats=True helps)."
)
# PyTorch's message if a batch of one has no statistics.
_BATCH_STATISTICS = "Expected more than 1 value per channel"
# Numbers of other types reach a model as float64, which can hold integers up to this one.
_LARGEST_INTEGER = 2**53
# Minimum number of dimensions of outputs (m, …, C).
_WITH_POSITIONS = 3
# Names of the model in a wrapper: torch.compile, activation checkpointing, and DataParallel or
# DistributedDataParallel.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "module")
# Attribute of a module around a model that holds the model.
_MODEL = "_evigrad_model"


class _Joined:
    """Tensors that move together like one tensor."""

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the name and value of each tensor (n, ...), in a fixed order."""
        raise NotImplementedError

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same containers, with ``function`` applied to each tensor."""
        raise NotImplementedError

    def leaves(self) -> list[Tensor]:
        """Return the tensors (n, ...), in a fixed order."""
        return [leaf for _, leaf in self.named()]

    @property
    def device(self) -> torch.device:
        """Return the device of all tensors."""
        return self.leaves()[0].device

    def to(self, device: torch.device) -> Self:
        """Return a copy on ``device``."""
        return self.map(lambda leaf: leaf.to(device))

    def clone(self) -> Self:
        """Return a copy in its own memory."""
        return self.map(Tensor.clone)

    def detach(self) -> Self:
        """Return the same containers, with each tensor detached from its graph."""
        return self.map(Tensor.detach)


class Tree(_Joined):
    """Nested dictionaries, tuples or lists of tensors whose dimension 0 counts examples."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def named(self) -> list[tuple[str, Tensor]]:
        return [(name, leaf) for name, leaf in _leaves(self.value, "") if leaf is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(mapped(function, self.value))

    def with_leaves(self, leaves: Sequence[Tensor]) -> "Tree":
        """Return the same containers with ``leaves`` as their tensors."""
        leaf_iterator = iter(leaves)
        return self.map(lambda _: next(leaf_iterator))

    def __len__(self) -> int:
        return len(self.leaves()[0])

    def __getitem__(self, index: Any) -> "Tree":
        """Return some examples, by a slice or by positions (m,)."""
        if isinstance(index, Tensor):
            index = index.to(self.device)
        return self.map(lambda leaf: leaf[index])


class AtPositions(_Joined):
    """Inputs for single positions of outputs (m, …, C). Each position counts as one example.

    ``whole`` contains each input once. ``data`` (n,) contains the index of the input for each
    position, or is None if each position has its own input. ``positions`` (n,) contains indices
    into the outputs' middle dimensions, flattened. ``count`` is the number of positions per input,
    if known.
    """

    def __init__(
        self, whole: Tensor | Tree, data: Tensor | None, positions: Tensor, count: int | None = None
    ) -> None:
        self.whole, self.data, self.positions, self.count = whole, data, positions, count

    @classmethod
    def every(cls, whole: Tensor | Tree, count: int) -> "AtPositions":
        """Return all ``count`` positions of each input in ``whole``."""
        number = torch.arange(len(whole) * count, device=whole.device)
        return cls(whole, number // count, number % count)

    def separate(self) -> "AtPositions":
        """Return the same positions, with a separate copy of the input for each position."""
        if self.data is None:
            return self
        return AtPositions(self.whole[self.data], None, self.positions, self.count)

    def named(self) -> list[tuple[str, Tensor]]:
        whole = self.separate().whole
        named = [("x", whole)] if isinstance(whole, Tensor) else whole.named()
        return [*named, ("position", self.positions)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        whole = function(self.whole) if isinstance(self.whole, Tensor) else self.whole.map(function)
        data = None if self.data is None else function(self.data)
        return type(self)(whole, data, function(self.positions), self.count)

    def with_leaves(self, leaves: Sequence[Tensor]) -> "AtPositions":
        """Return the same containers with ``leaves`` as their tensors."""
        whole = with_tensors(self.whole, leaves[:-1])
        return AtPositions(whole, None, leaves[-1], self.count)

    def of_outputs(self, f: object) -> Float[Tensor, "n C"]:
        """Return the outputs at these positions, given the model's outputs ``f`` for ``whole``."""
        if (
            not isinstance(f, Tensor)
            or f.dim() < _WITH_POSITIONS
            or len(f) != len(self.whole)
            or self.count not in (None, prod(f.shape[1:-1]))
        ):
            description = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise InputError(
                "The model must always return the same shape for inputs of the same shape. It"
                f" returned outputs (m, …, C) before, and now {description} for {len(self.whole)}"
                " examples."
            )
        f = f.flatten(1, -2)
        if self.data is not None:
            return f[self.data, self.positions]
        # Not an index, because this is known to mix no examples.
        return f.gather(1, self.positions.view(-1, 1, 1).expand(-1, 1, f.shape[2])).squeeze(1)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: Any) -> "AtPositions":
        """Return some positions, by a slice or by numbers (n,)."""
        if isinstance(index, Tensor):
            index = index.to(self.positions.device)
        if self.data is None:
            return AtPositions(self.whole[index], None, self.positions[index], self.count)
        return AtPositions(self.whole, self.data[index], self.positions[index], self.count)

    @property
    def device(self) -> torch.device:
        """Return the device of all tensors."""
        return self.positions.device


Inputs = Tensor | Tree | AtPositions


def check_dense(what: str, value: Tensor) -> None:
    """Raise an InputError if a tensor of data is sparse or nested."""
    if value.is_nested:
        raise InputError(
            f"{what} must be dense, got a nested tensor. Use torch.nested.to_padded_tensor(value,"
            " padding), and mask the padding."
        )
    if value.layout != torch.strided:
        raise InputError(f"{what} must be dense, got a sparse tensor. Call to_dense() on it.")


def as_inputs(value: Any) -> Inputs:
    """Return a tensor unchanged. Check containers of tensors and return them as a ``Tree``."""
    if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
        check_dense("Inputs", value)
    if isinstance(value, Inputs):
        return value
    if not isinstance(value, Mapping | tuple | list):
        raise InputError(
            "Inputs must be a tensor, or dictionaries, tuples or lists of tensors, got"
            f" {type(value).__name__}."
        )
    # Plain dictionaries replace other mappings, such as a tokenizer's batch.
    tree = Tree(mapped(lambda part: part, value))
    parts = tree.named()
    for name, part in parts:
        if not isinstance(part, Tensor):
            raise InputError(
                f"{name} of the inputs must be a tensor, got {type(part).__name__}. Convert or"
                " remove it."
            )
        check_dense(f"{name} of the inputs", part)
        if part.dim() == 0:
            raise InputError(
                f"{name} of the inputs must have a first dimension that counts examples, got a"
                " 0-dimensional tensor. Pass one value per example."
            )
        if part.is_complex():
            raise InputError(
                f"{name} of the inputs must be real, got complex numbers. Pass the result of"
                " torch.view_as_real, and call torch.view_as_complex in forward."
            )
    if not parts:
        raise InputError("Inputs must contain at least one tensor, got none. Pass a tensor.")
    (first, one), *other_parts = parts
    for name, part in other_parts:
        if len(part) != len(one):
            raise InputError(
                f"All parts of the inputs must have the same number of examples, got {len(one)} in"
                f" {first} and {len(part)} in {name}. The first dimension must count examples."
            )
        if part.device != one.device:
            raise InputError(
                f"All parts of the inputs must be on the same device, got {one.device} for {first}"
                f" and {part.device} for {name}. Move all parts to one device."
            )
    return tree


def tensors_of(x: Inputs) -> list[Tensor]:
    """Return all tensors of the inputs."""
    return [x] if isinstance(x, Tensor) else x.leaves()


def each_once(x: Inputs) -> Tensor | Tree:
    """Return the inputs, with each input only once even if it has several positions."""
    return x.whole if isinstance(x, AtPositions) else x


def with_tensors(x: Tensor | Tree, tensors: Sequence[Tensor]) -> Tensor | Tree:
    """Return ``x`` with its tensors replaced by ``tensors``."""
    return tensors[0] if isinstance(x, Tensor) else x.with_leaves(tensors)


def layout(x: Inputs) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return the name, the shape per example, and the data type of each tensor."""
    if isinstance(x, AtPositions):
        return [*layout(x.whole), ("position", (), torch.int64)]
    named = [("x", x)] if isinstance(x, Tensor) else x.named()
    return [(name, tuple(part.shape[1:]), part.dtype) for name, part in named]


def stacked(values: list[Any], what: str) -> Any:
    """Stack items into a tensor or containers of tensors. ``what`` names the items in errors."""
    if all(isinstance(value, Tensor) for value in values):
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise InputError(
                f"All {what} must have the same shape to be stacked, got {sorted(shapes)[:3]}. Pad"
                " them, or pass a DataLoader whose collate_fn pads them."
            )
        return torch.stack(values)
    first = values[0]
    if isinstance(first, Mapping) and all(_alike(first, value) for value in values):
        return {name: stacked([value[name] for value in values], what) for name in first}
    if isinstance(first, tuple | list) and all(_alike(first, value) for value in values):
        return _made(first, (stacked(list(parts), what) for parts in zip(*values, strict=True)))
    if all(value is None for value in values):
        return None
    raise InputError(
        f"All {what} must have the same structure, such as the same dictionary keys. Check the"
        " items of the data set."
    )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys()
    return isinstance(other, tuple | list) and len(one) == len(other)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{name}[{key!r}]" if name else repr(key))
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{name}[{index}]" if name else f"part {index}")
    else:
        yield name, value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested containers with ``function`` applied to each part except None."""
    if isinstance(value, Mapping):
        return {key: mapped(function, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return _made(value, (mapped(function, part) for part in value))
    return None if value is None else function(value)


def _made(like: Any, parts: Any) -> Any:
    """Return a container of the same kind. A named tuple takes its fields one by one."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


# Errors about labels end with this advice.
MISSING_LABELS = (
    "If a label is missing, remove the example. At positions of outputs (m, …, C) and in heads of a"
    " Joint likelihood, mark missing labels with the likelihood's ignore_index, -100"
)
MISSING_TARGETS = (
    f'{MISSING_LABELS}. Mark other missing targets with NaN and set missing="nan" in the likelihood'
)


_indices: ContextVar[Tensor | None] = ContextVar("indices", default=None)


@contextmanager
def numbered(indices: Tensor | None) -> Iterator[None]:
    """Let errors about targets of a batch show ``indices`` (m,) in the data set, if not None."""
    token = _indices.set(indices)
    try:
        yield
    finally:
        _indices.reset(token)


def refuse_where(wrong: Tensor, y: Tensor, words: str, what: str = "Target") -> None:
    """Raise an InputError for the first target that ``wrong`` marks, if any."""
    if bool(wrong.any()):
        where = [int(i) for i in wrong.nonzero()[0]]
        value, indices = y[tuple(where)].item(), _indices.get()
        if indices is not None and len(indices) == len(y):
            where[0] = int(indices[where[0]])
        raise InputError(
            f"{what} {value} at index {where[0] if len(where) == 1 else where} {words}."
        )


def refuse_cells(targets: Any) -> None:
    """Raise an InputError for the first target in a list or array that is None or a string."""
    for index, cell in enumerate(np.asarray(targets, dtype=object).ravel().tolist()):
        if cell is None or isinstance(cell, str):
            advice = MISSING_TARGETS if cell is None else "Number the classes from 0"
            raise InputError(f"Target {cell!r} at index {index} is not a number. {advice}.")


def check_integers(x: Inputs) -> None:
    """Raise InputError if a tree contains integers that conversion to float64 would round."""
    x = each_once(x)
    for name, part in [] if isinstance(x, Tensor) else x.named():
        if part.dtype in (torch.int64, torch.uint64) and bool(
            (part.abs() > _LARGEST_INTEGER).any()
        ):
            raise InputError(
                f"{name} of the inputs must not contain integers above 2^53, because conversion to"
                " float64 would round them. If the integers are categories, number them from 0."
            )


# ------------------------------------------------------------ calls of a model


_wanted: ContextVar[AtPositions | None] = ContextVar("wanted", default=None)


def called(model: nn.Module, x: Inputs) -> object:
    """Call the model with a copy of the inputs and return the outputs."""
    if isinstance(x, AtPositions):
        return x.of_outputs(called(model, x.whole))
    if isinstance(model, Outputs):
        return _part(model, _result(inside(model), x))
    return scores_of(_result(model, x))


def _result(model: nn.Module, x: Tensor | Tree) -> Any:
    if isinstance(x, Tensor):
        words = f"{len(x)} examples of shape {tuple(x.shape[1:])} and type {x.dtype}"
        with _raised_by(model, f"The model, given {words},"):
            return model(x.clone())
    positional, named = arguments(model, x.clone().value)
    words = ", ".join(
        f"{name} {shape} {str(dtype).removeprefix('torch.')}" for name, shape, dtype in layout(x)
    )
    how = "keyword arguments" if named else f"{len(positional)} positional arguments"
    how = "one argument" if len(positional) == 1 else how
    with _raised_by(model, f"The model, given {len(x)} examples of {words} as {how},"):
        return model(*positional, **named)


@contextmanager
def _raised_by(model: nn.Module, whose: str) -> Iterator[None]:
    """Act as ``raised_in``, with a special error for batch statistics in evaluation mode."""
    with raised_in(whose):
        try:
            yield
        except ValueError as error:
            if model.training or _BATCH_STATISTICS not in str(error):
                raise
            raise ConfigurationError(mixes_data(model)) from error


def mixes_data(model: nn.Module) -> str:
    """Return the error for outputs that depend on other calls or examples, with likely causes."""
    return _DATA_MIX + sequence_first(model) + _MIX_CAUSES


def sequence_first(model: nn.Module) -> str:
    """Return advice about layers that take examples along dimension 1, or ""."""
    layers = [
        f"{name or 'model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if getattr(module, "batch_first", True) is False
    ]
    if not layers:
        return ""
    return (
        f" Layers with batch_first=False take the examples along dimension 1: {listed(layers)}. If"
        " your inputs have the examples along dimension 0, set batch_first=True."
    )


@contextmanager
def noted_calls(
    modules: Iterable[nn.Module], note: Callable[[nn.Module, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Call ``note`` after each call of one of the modules, with module, arguments and result."""
    handles = [module.register_forward_hook(note) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def output_layer(model: nn.Module, x: Tensor | Tree) -> tuple[object, nn.Linear | None]:
    """Return the outputs, and the linear layer that computes them in a single call, or None."""
    seen: dict[nn.Linear, list[tuple[int, Any]]] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        assert isinstance(module, nn.Linear)
        seen.setdefault(module, []).append((len(inputs), output))

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with noted_calls(layers, note):
        f = called(model, x)
    for layer, ((count, output), *more) in seen.items():
        if count == 1 and not more and output is f:
            return f, layer
    return f, None


def called_at(model: nn.Module, layer: nn.Linear, x: AtPositions) -> object:
    """Apply the output layer ``layer`` only at the positions and return the outputs (n, C)."""

    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
        if (at_positions := _wanted.get()) is None:  # a call in another thread
            return None
        return at_positions.of_outputs(inputs[0])

    token = _wanted.set(x)
    handle = layer.register_forward_pre_hook(gather)
    try:
        return called(model, x.whole)
    finally:
        handle.remove()
        _wanted.reset(token)


def scores_of(output: object) -> Any:
    """Return ``output.logits`` if it is a tensor, or else ``output``."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def arguments(model: nn.Module, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional arguments and keyword arguments of ``forward`` for a ``Tree``'s value.

    A dictionary becomes keyword arguments if ``forward`` accepts all of its keys. A tuple or list
    becomes positional arguments if ``forward`` requires the same number of arguments. Any other
    value becomes a single argument.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {parameter.name: parameter.kind for parameter in parameters}
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
    """A wrapper module that shares the model's parameters, buffers, submodules and mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # The model's own tables: replacing a parameter here replaces it there.
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self.__dict__[_MODEL] = model  # not registered, or every name would get a prefix

    @property
    def training(self) -> bool:
        """Return whether the model is in training mode."""
        return inside(self).training

    @training.setter
    def training(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, mode: bool
    ) -> None:
        if _MODEL in self.__dict__:  # not yet while this module is initialized
            inside(self).training = mode


def inside(module: Transparent) -> nn.Module:
    """Return the model inside a wrapper."""
    return module.__dict__[_MODEL]


def bare_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return each name without the parts that wrappers such as ``DataParallel`` add.

    ``names`` are names of a model's parameters, buffers or modules. The model may be wrapped, or
    contain wrapped modules.

    Returns:
        A dictionary from each name to the name without these parts.
    """
    # By paths, because a custom submodule may have the name ``module`` too.
    wrapped = {
        f"{path}.{part}" if path else part
        for path, module in model.named_modules(remove_duplicate=False)
        for part in _WRAPPED
        if part in module._modules and (part != "module" or _is_parallel(module))
    }

    def bare(name: str) -> str:
        parts = name.split(".")
        paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
        return ".".join(
            part for part, path in zip(parts, paths, strict=True) if path not in wrapped
        )

    return {name: bare(name) if wrapped else name for name in names}


def _is_parallel(module: nn.Module) -> bool:
    while isinstance(module, Transparent):
        module = inside(module)
    return isinstance(module, DataParallel | DistributedDataParallel)


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Return a model's parameters by bare name. By default, include shared parameters once."""
    named = dict(model.named_parameters(remove_duplicate=remove_duplicate))
    bare = bare_names(model, named)
    return {bare[name]: parameter for name, parameter in named.items()}


def with_bare_names(model: nn.Module, state: Any) -> Any:
    """Return ``state`` with each name of a wrapped model replaced by its bare name."""
    buffers = (name for name, _ in model.named_buffers(remove_duplicate=False))
    names = bare_names(model, [*model.state_dict(), *buffers])
    if all(name == bare for name, bare in names.items()):
        return state

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            return names.get(value, value)
        if isinstance(value, Mapping):
            return {renamed(key): renamed(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(renamed, value))
        return value

    return renamed(state)


class Outputs(Transparent):
    """Select outputs from what a model returns, move their channel dimension to the end, or both.

    Pass this wrapper instead of the model to ``fit`` and ``Evidence``. The wrapper has the model's
    parameters and buffers under the same names. Apply other wrappers, such as ``Averaged``, around
    ``Outputs``: ``Averaged(Outputs(model), ...)``.

    Args:
        model: Any module.
        output: Part of the model's result to use: the name of an attribute, a key, an index, or a
            function of the result. With a list of these, the parts are concatenated along the
            channels, for the heads of a ``Joint`` likelihood. Default: the result itself, or its
            ``logits`` if it has them.
        channel_dim: Dimension of the C outputs, such as 1 for images (m, C, height, width).
            Default: −1, the last.

    Raises:
        ConfigurationError: If ``output`` or ``channel_dim`` has the wrong type, or ``channel_dim``
            is 0.

    Examples:
        >>> import torch
        >>> from evigrad import Outputs
        >>> model = Outputs(torch.nn.Conv2d(1, 5, 1), channel_dim=1)
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 8, 8, 5])

    See also: docs/inputs.md.
    """

    def __init__(
        self,
        model: nn.Module,
        output: str | int | Sequence[str | int] | Callable[[Any], Any] | None = None,
        channel_dim: int = -1,
    ) -> None:
        super().__init__(model)
        if not (output is None or isinstance(output, str | int | list | tuple) or callable(output)):
            raise ConfigurationError(
                f"output must be a name, an index, a list of these, or a function, got {output!r}."
            )
        if not isinstance(channel_dim, int) or channel_dim == 0:
            raise ConfigurationError(
                "channel_dim must be a dimension of the outputs other than dimension 0, which"
                f" indexes the examples, got {channel_dim!r}. Use 1 or -1, for example."
            )
        # Not registered, because a module that is given as a function belongs elsewhere.
        self.__dict__["_output"], self.__dict__["_channel_dim"] = output, channel_dim

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Return the selected outputs of the model for these arguments."""
        return _part(self, inside(self)(*positional, **named))


def _part(module: Outputs, result: Any) -> Any:
    output, dim = module.__dict__["_output"], module.__dict__["_channel_dim"]
    if isinstance(output, list | tuple):
        parts = [_selected(result, name, dim) for name in output]
        with raised_in(f"output={output!r} of a {type(result).__name__}"):
            return torch.cat(parts, -1)
    return _selected(result, output, dim)


def _selected(result: Any, output: Any, dim: int) -> Any:
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
            f"channel_dim must be a dimension of the outputs of shape {tuple(result.shape)}, got"
            f" {dim}."
        )
    return result.movedim(dim, -1)
