"""Running a model without leaving traces in it, on kernels that can be differentiated."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_CONTAINERS = (dict, list, set)
_MISSING = object()


@contextmanager
def model_run(model: nn.Module) -> Iterator[None]:
    """Everything that a forward or backward pass of rows is wrapped in.

    Attributes and buffers of the model that a pass sets are put back, also after an exception.
    Fused kernels that lack a (second) derivative are replaced by plain ones.

    Args:
        model: Any module.
    """
    with ExitStack() as stack:
        stack.enter_context(_unchanged_attributes(model))
        stack.enter_context(_unchanged_buffers(model))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if "torch._dynamo" in sys.modules:  # which importing takes seconds
            # A compiled model's graph is a black box, and was made for other inputs.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_no_fused_attention_layers())
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(_no_cudnn())
        yield


def _contents(container: Any) -> list[Any]:
    """The entries, to be compared by identity."""
    if isinstance(container, dict):
        return [entry for item in container.items() for entry in item]
    return list(container)


def _put_back(container: Any, entries: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(entries)


@contextmanager
def _unchanged_attributes(model: nn.Module) -> Iterator[None]:
    """Put back what modules hold; a tensor of a graph, for one, could not be deep-copied."""
    before = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    containers = [
        (value, value.copy())
        for _, attributes in before
        for value in attributes.values()
        if isinstance(value, _CONTAINERS) and hasattr(value, "copy")
    ]
    try:
        yield
    finally:
        for container, copy in containers:
            now, then = _contents(container), _contents(copy)
            if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                _put_back(container, copy)
        for attributes, copy in before:
            for key in [key for key in attributes if key not in copy]:
                del attributes[key]
            for key, value in copy.items():
                if attributes.get(key, _MISSING) is not value:
                    attributes[key] = value


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
    """Switch off the inference kernels of ``nn.TransformerEncoderLayer``; they have no gradient."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _no_cudnn() -> Iterator[None]:
    """Use PyTorch's own recurrent kernels.

    Those of cuDNN have no gradient in evaluation mode and no second one.
    """
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled
