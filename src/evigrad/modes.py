"""Leaving a model and the global random state as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_NORMALISATION_LAYERS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


@contextmanager
def evaluation_mode(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Evaluate a model without dropout or batch statistics, and restore it on the way out.

    The flags are set one by one rather than by ``model.eval()``, so that modules in mixed modes
    get their own mode back and overridden ``train`` methods have no side effects. Whatever the
    forward pass draws from the global generators is seeded from ``generator``; their states are
    restored.

    Args:
        model: Any module.
        generator: A CPU generator; advances by one draw.
    """
    training = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    seed = int(torch.randint(2**62, (), generator=generator))
    try:
        for module, _ in training:
            module.training = False
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield
    finally:
        for module, mode in training:
            module.training = mode


def normalisation_layers(model: nn.Module) -> list[str]:
    """Names of the modules that make the function invariant to the scale of other weights."""
    return [
        name for name, module in model.named_modules() if isinstance(module, _NORMALISATION_LAYERS)
    ]
