"""Running a model without leaving traces in it, on kernels that have derivatives."""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evigrad.jacobians.modes import TURN

_CONTAINERS = (dict, list, set, deque)
# How deep nested containers are searched.
_DEPTH = 8


@contextmanager
def model_run(model: nn.Module) -> Iterator[None]:
    """The context of every forward or backward pass of rows.

    Attributes and buffers of the model that a pass sets are put back, also after an exception.
    Fused kernels that lack a (second) derivative are replaced by plain ones, in the whole process:
    other threads that run a model here wait.
    """
    with TURN, ExitStack() as stack:
        stack.enter_context(_unchanged_attributes(model))
        stack.enter_context(_unchanged_buffers(model))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if "torch._dynamo" in sys.modules:  # importing it takes seconds
            # A compiled model's graph is a black box, and was made for other inputs.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_no_fused_attention_layers())
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(_no_cudnn())
        yield


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch off the caller's autocast, if any."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


def _holders(model: nn.Module) -> list[Any]:
    """All containers that the model holds: attribute dictionaries, and containers in them."""
    found: list[Any] = []
    seen: set[int] = {id(module) for module in model.modules()}
    stack = [(module.__dict__, 0) for module in model.modules()]
    while stack:
        value, depth = stack.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            found.append(value)
        elif _is_plain_object(value):
            stack.append((value.__dict__, depth))
            continue
        elif not isinstance(value, tuple):
            continue
        entries = value.values() if isinstance(value, dict) else value
        stack.extend((entry, depth + 1) for entry in entries)
    return found


def _is_plain_object(value: Any) -> bool:
    """Whether it is an object of a user's class, or an unregistered module."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, type | Tensor) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    package = type(value).__module__.partition(".")[0]
    return package != "torch" and (package == "__main__" or package not in sys.stdlib_module_names)


def held_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors that a model keeps in attributes and containers, its parameters included."""
    return [
        entry
        for holder in _holders(model)
        for entry in (holder.values() if isinstance(holder, dict) else holder)
        if isinstance(entry, Tensor)
    ]


def _contents(container: Any) -> list[Any]:
    """The entries, to be compared by identity."""
    if isinstance(container, dict):
        return [entry for item in container.items() for entry in item]
    return list(container)


def _put_back(container: Any, contents: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(contents[::2], contents[1::2], strict=True))
    elif isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)


@contextmanager
def _unchanged_attributes(model: nn.Module) -> Iterator[None]:
    """Put back what modules hold: a tensor with a graph could not be deep-copied."""
    before = [(holder, _contents(holder)) for holder in _holders(model)]
    try:
        yield
    finally:
        for holder, then in before:
            now = _contents(holder)
            if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                _put_back(holder, then)


@contextmanager
def _unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Put back the values of buffers that were changed in place."""
    before = [(b, b.detach().clone(), b._version) for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy, version in before:
                if buffer._version != version:
                    buffer.copy_(copy)


@contextmanager
def _no_fused_attention_layers() -> Iterator[None]:
    """Switch off ``nn.TransformerEncoderLayer``'s inference kernels: they have no gradient."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _no_cudnn() -> Iterator[None]:
    """Use PyTorch's recurrent kernels: in evaluation mode cuDNN's have no gradient."""
    # cuDNN's have no second derivative in any mode.
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled
