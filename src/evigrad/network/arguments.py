"""Calling the model, and refusing models and arguments whose rows would be silently wrong."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from evigrad.errors import ConfigurationError, EvigradError, InputError, listed, nearest
from evigrad.inputs import Inputs, called, named_parameters

NO_DERIVATIVE = (
    "The model's outputs have no derivative in any weight: forward runs under torch.no_grad() or"
    " torch.inference_mode(), or uses .detach(), .data or .item(). Take that out of forward;"
    " weights that shall stay as they are have requires_grad=False."
)
# Each operation without a derivative that PyTorch's users meet, and what has one.
_WAYS_OUT = {
    "embedding_bag": "F.embedding, then .sum(-2), .mean(-2) or .amax(-2)",
    "cdist": "(a[..., :, None, :] - b[..., None, :, :]).norm(p, dim=-1)",
    "pdist": "(x[i] - x[j]).norm(p, dim=1) with i, j = torch.triu_indices(len(x), len(x), 1)",
    "segment_reduce": "Tensor.scatter_reduce or Tensor.index_add",
    "attention": "the kernel SDPBackend.MATH, which evigrad chooses if forward chooses none",
}
_MISSING = re.compile(
    r"derivative for '?(?:aten::)?_?(\w+?)(?:_for_cpu)?(_backward)?(?::[^']*)?'? is"
)


@contextmanager
def derivatives_named() -> Iterator[None]:
    """Make PyTorch's error of a missing derivative one that names the operation and a way out.

    Raises:
        ConfigurationError: If an operation inside has no derivative, or no second one.
        RuntimeError: Any other one, as it is.
    """
    try:
        yield
    except RuntimeError as error:
        refused = without_derivative(error)
        if refused is None:
            raise
        raise refused from error


def without_derivative(error: BaseException) -> ConfigurationError | None:
    """The error for an operation that has no derivative; None for other errors."""
    if not isinstance(error, RuntimeError) or isinstance(error, EvigradError):
        return None
    text = str(error)
    if "marked with @once_differentiable" in text:
        return ConfigurationError(
            "A custom function of the model cannot be differentiated twice: its backward is marked"
            " with @once_differentiable. Write the backward in differentiable operations without"
            " that mark, or leave the hyperparameters of the model fixed (requires_grad=False)."
        )
    match = _MISSING.search(text)
    if match is None:
        return None
    name, second = match[1], match[2] is not None
    way_out = next((way for part, way in _WAYS_OUT.items() if part in name), None)
    instead = f"Use instead: {way_out}." if way_out else "Use other operations instead."
    if second:
        return ConfigurationError(
            f"The model uses '{name}', which has no second derivative in PyTorch. The gradient in"
            " hyperparameters of the model needs it, and so does an exact Hessian."
            f" {instead} Or leave the hyperparameters of the model fixed (requires_grad=False)."
        )
    return ConfigurationError(
        f"The model uses '{name}', which has no derivative in PyTorch for this argument. {instead}"
        " Or let the argument depend on nothing that requires a gradient."
    )


def check_call(model: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor) -> None:
    """Raise unless x holds data and each weight is a parameter of the model with a gradient."""
    if x.dim() == 0 or len(x) == 0:
        raise InputError("There are no data: x must hold one example or more along dim 0.")
    if torch.is_inference_mode_enabled():
        raise ConfigurationError(
            "There are no gradients inside torch.inference_mode(). Leave it out; torch.no_grad()"
            " does no harm."
        )
    parameters = named_parameters(model)
    for name, p in weights.items():
        if parameters.get(name) is not p:
            raise ConfigurationError(
                f"{name!r} is not that parameter of this model, whose parameters may have been"
                f" replaced since.{nearest(name, parameters)}"
            )
        if not p.is_floating_point() or not p.requires_grad:
            raise ConfigurationError(
                f"{name!r} cannot be a weight of the evidence: it must be a real floating-point"
                " parameter that requires a gradient. Freeze it before, or let it require one."
            )
        if p._backward_hooks:
            raise ConfigurationError(
                f"A hook (register_hook) on {name!r} may change its gradient, which would make"
                " the curvature that of another function. Remove the hook, or keep it only"
                " for the training steps."
            )


def check_hooks(model: nn.Module) -> None:
    """Raise if a backward hook, which may change gradients, is on a module or on all of them."""
    # A hook that only reads gradients cannot be told from one that changes them.
    everywhere = (modules._global_backward_hooks, modules._global_backward_pre_hooks)
    hook_places = ["all modules"] if any(everywhere) else []
    hook_places += [
        f"{name!r}" if name else "the model"
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    if hook_places:
        raise ConfigurationError(
            f"A backward hook (register_full_backward_hook or alike) on {listed(hook_places)} may"
            " change gradients, which would make the curvature that of another function. Remove the"
            " hook, or keep it only for the training steps. Forward hooks are part of the function."
        )


def check_storage(weights: Mapping[str, nn.Parameter]) -> None:
    """Raise if two parameters share an entry in memory, which the evidence would count twice."""
    by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, p in weights.items():
        if p.layout == torch.strided and p.numel() > 0 and p.untyped_storage().data_ptr() != 0:
            by_storage.setdefault(p.untyped_storage().data_ptr(), []).append((name, p))
    for sharing in by_storage.values():
        for i, (name, p) in enumerate(sharing):
            for other, q in sharing[:i]:
                if np.shares_memory(_addresses(p), _addresses(q)):
                    raise ConfigurationError(
                        f"{other!r} and {name!r} are two parameters on the same memory, which"
                        " the evidence would count twice. To tie them, assign the same Parameter"
                        " to both (not its .data); else clone one of them."
                    )


def _addresses(p: Tensor) -> np.ndarray:
    """An array on the memory of a tensor of any type and device, which must not be read."""
    interface = {
        "version": 3,
        "data": (p.data_ptr(), True),
        "shape": tuple(p.shape),
        "strides": tuple(step * p.element_size() for step in p.stride()),
        "typestr": f"|V{p.element_size()}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def model_outputs(model: nn.Module, x: Inputs, positions: bool = False) -> Tensor:
    """f(x), checked by ``check_output``."""
    return check_output(called(model, x), len(x), positions)


def check_output(output: object, m: int, positions: bool = False) -> Tensor:
    """Return the model's output for m data; raise unless it is a dense float (m, […,] C) tensor."""
    if not isinstance(output, Tensor):
        raise InputError(
            f"The model returned a {type(output).__name__}; evigrad needs one tensor of shape"
            " (data, outputs), or an object whose .logits are one. Say where they are, as in"
            " evigrad.Outputs(model, output=0) or output='scores'."
        )
    if output.layout != torch.strided or output.is_nested:
        raise InputError(
            f"The model returned a {output.layout} tensor; evigrad needs a dense one: return"
            " f.to_dense()."
        )
    if output.is_meta:
        raise InputError(
            "The model returned a tensor on meta, which holds no numbers: make it on the inputs'"
            " device, as with device=x.device."
        )
    if output.dim() < 2 or output.shape[0] != m or (output.dim() > 2 and not positions):
        if output.dim() == 0 or output.shape[0] != m:
            hint = "Dim 0 of inputs and outputs must count the data."
        elif output.dim() == 1:
            hint = "Give a single output a dimension of its own, as in f[:, None]."
        else:
            hint = "It must return one shape for inputs of one shape."
        raise InputError(
            f"For {m} data the model returned a tensor of shape {tuple(output.shape)}; evigrad"
            f" needs ({m}, C), or ({m}, …, C) with a target at each position. {hint}"
        )
    if not output.is_floating_point():
        hint = (
            "return real and imaginary parts as outputs, as torch.view_as_real(f).flatten(1)"
            if output.is_complex()
            else "return the scores, before any argmax, comparison or rounding"
        )
        raise InputError(
            f"The model returned outputs of type {output.dtype}; evigrad needs floating-point"
            f" numbers, which have derivatives: {hint}."
        )
    return output
