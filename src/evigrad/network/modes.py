"""Run a model without changing the model or the global random state."""

import pickle
import random
import sys
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evigrad.errors import EvigradWarning

_NORMALISATION_LAYERS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)

# Models that a warning was issued for, by identity, because modules may not be hashable.
_WARNED_OF: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
# Modules whose passes need other settings.
_SPECIAL = (nn.RNNBase, nn.Embedding, nn.EmbeddingBag)

_CONTAINERS = (dict, list, set, deque)
_PLAIN_CONTAINERS = frozenset({dict, OrderedDict, list, set})
# Types of most entries, which contain no other objects. They are skipped to save time, because
# every pass searches the model.
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), Tensor, nn.Parameter})
# The depth to which nested containers are searched.
_DEPTH = 8

# The type of devices that may round factors of float32 products to TF32.
TF32_DEVICE = "cuda"

# Random states, kernel switches and warning filters are global to the process. Threads that change
# them take turns, pass by pass and epoch by epoch. The lock is never held while a generator yields.
TURN = threading.RLock()


@contextmanager
def evaluation_mode(
    model: nn.Module, generator: torch.Generator | None
) -> Iterator[Callable[[], bool]]:
    """Set a model to evaluation mode and restore its mode on exit.

    The global random generators are seeded from ``generator`` and restored on exit. On a CUDA
    device, TF32 is switched off. Other threads that call this function wait.

    Args:
        model: Any module.
        generator: A CPU generator, which advances by one draw. Pass None for a model that does not
            use the global generators, which are then left unchanged.

    Yields:
        A function that returns whether PyTorch's or NumPy's global generators have been used.
    """
    with TURN:
        training = [(module, module.training) for module in model.modules()]
        first = next(model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        if generator is None:
            seeds = nullcontext(lambda: False)
        else:
            seeds = seeded(int(torch.randint(2**62, (), generator=generator, device="cpu")), device)
        try:
            # Not model.eval(), because an overridden ``train`` may have side effects. This also
            # restores each module's mode if the modes differ.
            for module, _ in training:
                _set_mode(module, False)
            full = without_tf32() if device.type == TF32_DEVICE else nullcontext()
            with full, seeds as has_drawn:
                yield has_drawn
        finally:
            for module, mode in training:
                _set_mode(module, mode)


def _set_mode(module: nn.Module, training: bool) -> None:
    attributes = vars(module)
    # ``nn.Module.__setattr__`` takes 20 times as long.
    if "training" in attributes and type(module).__setattr__ is nn.Module.__setattr__:
        attributes["training"] = training
    else:
        module.training = training


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Seed the global generators of PyTorch, Python and NumPy, and restore them on exit.

    For PyTorch, this includes the generators of the CPU and of ``device``. Other threads that call
    this function wait.

    Yields:
        A function that returns whether PyTorch's or NumPy's generators have been used.
    """
    # Not torch.manual_seed, which would also reseed all other GPUs without restoring them.
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])

    def has_drawn() -> bool:
        # Python's generator is not compared, because tools such as type checkers use it too.
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


def warn_of_normalisation(model: nn.Module) -> None:
    """Warn once per model about normalization layers, which change the meaning of precisions."""
    if _WARNED_OF.get(id(model)) is model:
        return
    layers = [n for n, module in model.named_modules() if isinstance(module, _NORMALISATION_LAYERS)]
    if not layers:
        return
    _WARNED_OF[id(model)] = model
    named = ", ".join(layers[:3]) + (", …" if len(layers) > 3 else "")
    warnings.warn(
        f"The model has normalization layers ({named}), which undo the scale of the preceding"
        " weights. Train as usual, but judge the network by its predictions, not by the"
        " precisions of these weights. A prior with shape='g-prior' does not depend on the scale.",
        EvigradWarning,
        stacklevel=3,  # the caller of Evidence
    )


# ------------------------------------------------------------ passes of rows


@contextmanager
def model_run(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Set up the context for forward and backward passes that compute rows.

    Attributes and buffers that a pass changes are restored on exit, even after an exception. If the
    model may call fused kernels without a first or second derivative, they are replaced by plain
    kernels in the whole process. Other threads that call this function wait.
    ``scale_grad_by_freq`` of embeddings is switched off, because gradients would otherwise
    correspond to a different function.

    Yields:
        The modules of the model.
    """
    with TURN, ExitStack() as stack:
        modules = list(model.modules())
        if not _runs_only_layers(modules):
            stack.enter_context(_unchanged_attributes(modules))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:  # importing it takes seconds
                # The graph of a compiled model cannot be inspected, and was compiled for other
                # inputs.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            # The inference kernels of ``nn.TransformerEncoderLayer`` have no derivative.
            mha = torch.backends.mha
            stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
        stack.enter_context(_unchanged_buffers(modules))
        special = [module for module in modules if isinstance(module, _SPECIAL)]
        if any(isinstance(module, nn.RNNBase) for module in special):
            # cuDNN's recurrent kernels have no derivative in evaluation mode, and no second one.
            stack.callback(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)
            torch.backends.cudnn.enabled = False
        for module in special:
            if getattr(module, "scale_grad_by_freq", False):
                stack.callback(setattr, module, "scale_grad_by_freq", True)
                module.scale_grad_by_freq = False
        yield modules


@contextmanager
def evaluation_run(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Combine ``model_run`` and ``evaluation_mode`` with seed 0."""
    with evaluation_mode(model, torch.Generator().manual_seed(0)) as has_drawn, model_run(model):
        yield has_drawn


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch off autocast for this device type inside the context."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute products and convolutions on CUDA devices in full float32 inside the context.

    TF32 keeps 10 bits of the mantissa, but checks of rounding assume the 23 bits of float32. The
    settings are global, so other threads that call this function wait.
    """
    backends: Any = torch.backends
    cudnn, products = backends.cudnn, backends.cuda.matmul
    settings: list[Any] = [products, backends.mkldnn.matmul, cudnn.conv, cudnn.rnn]
    with TURN:
        before = [setting.fp32_precision for setting in settings]
        # PyTorch raises an error for older settings that contradict the newer ones.
        older: list[Callable[[], None]] = []
        with suppress(RuntimeError):
            precision = torch.get_float32_matmul_precision()
            older.append(partial(torch.set_float32_matmul_precision, precision))
        for backend in (cudnn, products):
            with suppress(RuntimeError):
                older.insert(0, partial(setattr, backend, "allow_tf32", backend.allow_tf32))
                backend.allow_tf32 = False
        try:
            for setting in settings:
                setting.fp32_precision = "ieee"
            yield
        finally:
            for restore in older:
                restore()
            for setting, precision in zip(settings, before, strict=True):
                setting.fp32_precision = precision


def _runs_only_layers(modules: Sequence[nn.Module]) -> bool:
    """Return whether a pass runs only PyTorch's layers, without attention and not compiled.

    Then it changes no attributes, and there is only one kernel for each layer.
    """
    hooks = nn.modules.module
    return not (hooks._global_forward_hooks or hooks._global_forward_pre_hooks) and all(
        type(module).__module__.startswith("torch.nn.modules.")
        and not isinstance(module, nn.MultiheadAttention)
        and module._compiled_call_impl is None
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        for module in modules
    )


def _holders(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the attribute dictionaries of all modules of a model, and all containers in them."""
    containers: list[Any] = []
    seen: set[int] = {id(module) for module in modules}
    stack = [(module.__dict__, 0) for module in modules]
    while stack:
        value, depth = stack.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            containers.append(value)
        elif _is_plain_object(value):
            stack.append((value.__dict__, depth))
            continue
        elif not isinstance(value, tuple):
            continue
        for entry in value.values() if isinstance(value, dict) else value:
            kind = type(entry)
            if kind in _PLAIN_CONTAINERS and not entry:  # such as most modules' hooks
                containers.append(entry)
            elif kind not in _ATOMS:
                stack.append((entry, depth + 1))
    return containers


def _is_plain_object(value: Any) -> bool:
    """Return whether a value is an instance of a user's class, or an unregistered module."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, type | Tensor) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    package = type(value).__module__.partition(".")[0]
    return package != "torch" and (package == "__main__" or package not in sys.stdlib_module_names)


def held_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors in a model's attributes and containers, including its parameters."""
    return [
        entry
        for holder in _holders(list(model.modules()))
        for entry in (holder.values() if isinstance(holder, dict) else holder)
        if isinstance(entry, Tensor)
    ]


def _contents(container: Any) -> list[Any]:
    """Return a container's entries, for comparing them by identity."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _put_back(container: Any, contents: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        half = len(contents) // 2
        container.update(zip(contents[:half], contents[half:], strict=True))
    elif isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)


@contextmanager
def _unchanged_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """On exit, restore what modules contain. Tensors with a graph cannot be deep-copied."""
    holders = _holders(modules)
    empty = [holder for holder in holders if not holder]
    before = [(holder, _contents(holder)) for holder in holders if holder]
    try:
        yield
    finally:
        for holder in filter(None, empty):
            holder.clear()
        for holder, then in before:
            now = _contents(holder)
            if len(now) != len(then) or not all(map(is_, now, then)):
                _put_back(holder, then)


@contextmanager
def _unchanged_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    buffers = {id(b): b for module in modules for b in module._buffers.values() if b is not None}
    before = [(b, b.detach().clone(), b._version) for b in buffers.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy, version in before:
                if buffer._version != version:
                    buffer.copy_(copy)
