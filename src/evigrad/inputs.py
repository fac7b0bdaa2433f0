"""Inputs of a model: one tensor, or a tree of tensors whose first dimension counts the data."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.errors import InputError, raised_in

# Numbers of other types travel through a model's inputs as float64, which holds these integers.
_LARGEST_INTEGER = 2**53


class Tree:
    """Dictionaries, tuples, named tuples and lists of tensors, nested, which share dim 0.

    It is indexed and moved as one tensor is. ``as_inputs`` makes one.

    Attributes:
        value: The containers and their tensors; None stays None.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def named(self) -> list[tuple[str, Tensor]]:
        """The tensors with words for their places, in a fixed order."""
        return [(name, leaf) for name, leaf in _leaves(self.value, "") if leaf is not None]

    def leaves(self) -> list[Tensor]:
        """The tensors, in a fixed order."""
        return [leaf for _, leaf in self.named()]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Tree":
        """The same containers with another tensor in the place of each."""
        return Tree(mapped(function, self.value))

    def with_leaves(self, leaves: Sequence[Tensor]) -> "Tree":
        """The same containers with these tensors."""
        rest = iter(leaves)
        return self.map(lambda _: next(rest))

    def __len__(self) -> int:
        return len(self.leaves()[0])

    def __getitem__(self, index: Any) -> "Tree":
        """Some of the data, by a slice or by positions (m,)."""
        if isinstance(index, Tensor):
            return self.map(lambda leaf: leaf[index.to(leaf.device)])
        return self.map(lambda leaf: leaf[index])

    @property
    def device(self) -> torch.device:
        """That of all tensors."""
        return self.leaves()[0].device

    def to(self, device: torch.device) -> "Tree":
        """The same on a device."""
        return self.map(lambda leaf: leaf.to(device))

    def clone(self) -> "Tree":
        """The same in memory of its own."""
        return self.map(Tensor.clone)

    def detach(self) -> "Tree":
        """The same without a graph."""
        return self.map(Tensor.detach)


Inputs = Tensor | Tree


def as_inputs(value: Any) -> Inputs:
    """A tensor as it is, and containers of tensors as a ``Tree``, checked to fit together."""
    if isinstance(value, Tensor | Tree):
        return value
    if not isinstance(value, Mapping | tuple | list):
        raise InputError(
            "Inputs must be a tensor, or dictionaries, tuples or lists of tensors, not"
            f" {type(value).__name__}."
        )
    tree = Tree(_plain(value))
    parts = tree.named()
    for name, part in parts:
        if not isinstance(part, Tensor):
            raise InputError(
                f"{name} of the inputs is a {type(part).__name__}, not a tensor: convert it, or"
                " leave it out."
            )
        if part.dim() == 0:
            raise InputError(f"{name} of the inputs has no dimension that counts the data.")
        if part.is_complex():
            raise InputError(
                f"{name} of the inputs is complex: give torch.view_as_real of it and put it"
                " together in forward."
            )
    if not parts:
        raise InputError("The inputs hold no tensor.")
    (first, one), *rest = parts
    for name, part in rest:
        if len(part) != len(one):
            raise InputError(
                f"{first} of the inputs holds {len(one)} data and {name} {len(part)}: the first"
                " dimension of all parts counts the data."
            )
        if part.device != one.device:
            raise InputError(
                f"{first} of the inputs is on {one.device} and {name} on {part.device}: move one."
            )
    return tree


def tensors_of(x: Inputs) -> list[Tensor]:
    """The tensors of some inputs."""
    return [x] if isinstance(x, Tensor) else x.leaves()


def with_tensors(x: Inputs, tensors: Sequence[Tensor]) -> Inputs:
    """The containers of ``x`` with other tensors."""
    return tensors[0] if isinstance(x, Tensor) else x.with_leaves(tensors)


def layout(x: Inputs) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """The place, the shape of a datum, and the type of each tensor."""
    named = [("x", x)] if isinstance(x, Tensor) else x.named()
    return [(name, tuple(part.shape[1:]), part.dtype) for name, part in named]


def stacked(values: list[Any], what: str) -> Any:
    """One tensor, or containers of tensors, of as many data; ``what`` are x or y, for errors."""
    if all(isinstance(value, Tensor) for value in values):
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise InputError(
                f"The {what} of different items have different shapes, {sorted(shapes)[:3]}: they"
                " cannot be stacked. Pad them, or give a DataLoader whose collate_fn does."
            )
        return torch.stack(values)
    first = values[0]
    if isinstance(first, Mapping) and all(_alike(first, value) for value in values):
        return {name: stacked([value[name] for value in values], what) for name in first}
    if isinstance(first, tuple | list) and all(_alike(first, value) for value in values):
        return _made(first, (stacked(list(each), what) for each in zip(*values, strict=True)))
    if all(value is None for value in values):
        return None
    raise InputError(f"The {what} of different items have different parts.")


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


def _plain(value: Any) -> Any:
    """Plain dictionaries in the place of other mappings, as of a tokenizer's batch."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return _made(value, map(_plain, value))
    return value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Containers with another part in the place of each; None stays None."""
    if isinstance(value, Mapping):
        return {key: mapped(function, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return _made(value, (mapped(function, part) for part in value))
    return None if value is None else function(value)


def _made(like: Any, parts: Any) -> Any:
    """A container of the same kind; a named tuple takes its fields one by one."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


# ------------------------------------------------------------ calling the model


def called(model: nn.Module, x: Inputs) -> object:
    """Return what the model returns for a copy of some inputs, which it may change in place.

    A dictionary goes in as keyword arguments where ``forward`` takes all of its keys, and a tuple
    as positional ones where ``forward`` asks for as many; else each is one argument. Of an object
    that has ``logits``, as a Hugging Face model returns it, these are the outputs.

    Raises:
        InputError: If the model raises an exception.
    """
    if isinstance(x, Tensor):
        with raised_in(f"The model, given inputs of shape {tuple(x.shape)} and type {x.dtype},"):
            return scores_of(model(x.clone()))
    positional, named = arguments(model, x.clone().value)
    words = ", ".join(
        f"{name} {shape} {str(dtype).removeprefix('torch.')}" for name, shape, dtype in layout(x)
    )
    how = "keyword arguments" if named else f"{len(positional)} positional arguments"
    how = "one argument" if len(positional) == 1 else how
    with raised_in(f"The model, given {len(x)} data of {words} as {how},"):
        return scores_of(model(*positional, **named))


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


def check_integers(x: Inputs) -> None:
    """Refuse integers that a packed tree would round."""
    for name, part in [] if isinstance(x, Tensor) else x.named():
        if part.dtype in (torch.int64, torch.uint64) and bool(
            (part.abs() > _LARGEST_INTEGER).any()
        ):
            raise InputError(
                f"{name} of the inputs holds integers beyond 2^53, which would be rounded: number"
                " the categories from 0 on."
            )
