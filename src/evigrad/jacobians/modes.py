"""Leaving a model and the global random state as they were."""

import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

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

# Random states, kernel switches and warning filters belong to the whole process: threads that
# change them take turns, pass by pass and epoch by epoch. Never held while a generator yields.
TURN = threading.RLock()


@contextmanager
def evaluation_mode(
    model: nn.Module, generator: torch.Generator | None
) -> Iterator[Callable[[], bool]]:
    """Evaluate a model without dropout or batch statistics, and restore it on the way out.

    Whatever the forward pass draws from the global generators is seeded from ``generator``; their
    states are restored. Other threads wait.

    Args:
        model: Any module.
        generator: A CPU generator, which advances by one draw. None for a model that draws nothing
            from the global generators, which are then left alone.

    Yields:
        A function that says whether PyTorch's or NumPy's global generators were used so far.
    """
    with TURN:
        training = [(module, module.training) for module in model.modules()]
        first = next(model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        if generator is None:
            seeds = nullcontext(lambda: False)
        else:
            seeds = seeded(int(torch.randint(2**62, (), generator=generator)), device)
        try:
            # Not model.eval(): an overridden ``train`` may have side effects, and modules in mixed
            # modes get their own mode back.
            for module, _ in training:
                module.training = False
            with seeds as has_drawn:
                yield has_drawn
        finally:
            for module, mode in training:
                module.training = mode


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Seed the global generators of PyTorch, Python and NumPy, and restore them on the way out.

    Other threads that do so wait.

    Args:
        seed: For all of them.
        device: Whose PyTorch generator is seeded beside that of the CPU.

    Yields:
        A function that says whether PyTorch's or NumPy's generators were used so far.
    """
    # Not torch.manual_seed: it would also reseed every other GPU and not put those back.
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])

    def has_drawn() -> bool:
        # Not Python's own generator: tools such as type checkers draw from it too.
        fresh = [torch.Generator(g.device).manual_seed(seed) for g in generators]
        as_seeded = [
            g.get_state().equal(f.get_state()) for g, f in zip(generators, fresh, strict=True)
        ]
        numpys, fresh_numpys = (
            np.random.get_state(),
            np.random.RandomState(seed % 2**32).get_state(),
        )
        return not all(as_seeded) or pickle.dumps(numpys) != pickle.dumps(fresh_numpys)

    with TURN:
        before = [generator.get_state() for generator in generators]
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            for generator in generators:
                generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield has_drawn
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def normalisation_layers(model: nn.Module) -> list[str]:
    """Names of the layers that make outputs invariant to the scale of other weights."""
    return [
        name for name, module in model.named_modules() if isinstance(module, _NORMALISATION_LAYERS)
    ]


def warn_of_normalisation(model: nn.Module) -> None:
    """Warn once of what normalisation layers mean for a Gaussian prior, if there are any."""
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
