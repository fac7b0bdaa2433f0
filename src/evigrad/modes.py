"""Leaving a model and the global random state as they were."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from evigrad.errors import EvigradWarning

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
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    seed = int(torch.randint(2**62, (), generator=generator))
    try:
        for module, _ in training:
            module.training = False
        with seeded(seed, device):
            yield
    finally:
        for module, mode in training:
            module.training = mode


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed what a model draws from the global generators, and restore them on the way out.

    Args:
        seed: Seed of PyTorch's generators of the CPU and the device, of Python's and of NumPy's.
        device: The model's device.
    """
    # Not torch.manual_seed: it would also reseed every other GPU and not put those back.
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        for generator in generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def normalisation_layers(model: nn.Module) -> list[str]:
    """Names of the modules that make the function invariant to the scale of other weights."""
    return [
        name for name, module in model.named_modules() if isinstance(module, _NORMALISATION_LAYERS)
    ]


def warn_of_normalisation(model: nn.Module) -> None:
    """One warning about what normalisation layers mean for a Gaussian prior, if there are any."""
    layers = normalisation_layers(model)
    if not layers:
        return
    named = ", ".join(layers[:3]) + (", …" if len(layers) > 3 else "")
    warnings.warn(
        f"The model has normalisation layers ({named}). They make the function invariant to the"
        " scale of the weights before them, so a Gaussian prior on those weights and its learned"
        " precision mean little; networks without normalisation (Fixup initialisation) suit the"
        " evidence better. Estimates use these layers in evaluation mode.",
        EvigradWarning,
        stacklevel=3,  # the caller of Evidence
    )
