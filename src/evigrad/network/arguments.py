"""Call the model and raise errors if its Jacobian rows would be silently wrong."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from evigrad.errors import ConfigurationError, EvigradError, InputError, listed, nearest
from evigrad.inputs import Inputs, called, named_parameters, sequence_first

NO_DERIVATIVE = (
    "No weight has a derivative of the model's outputs. The forward method runs under"
    " torch.no_grad() or torch.inference_mode(), or uses .detach(), .data or .item(). Remove these"
    " from forward. To fix single weights, set requires_grad=False for them."
)
# Common operations without a derivative, and their replacements.
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
    """Turn PyTorch's error about a missing derivative into an error that suggests an alternative.

    Raises:
        ConfigurationError: If an operation in this context has no derivative, or no second
            derivative.
        RuntimeError: If another RuntimeError occurs. It is raised unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        refused = without_derivative(error)
        if refused is None:
            raise
        raise refused from error


def without_derivative(error: BaseException) -> ConfigurationError | None:
    """Return an error that explains a missing derivative, or None if that is not the cause."""
    if not isinstance(error, RuntimeError) or isinstance(error, EvigradError):
        return None
    text = str(error)
    if "marked with @once_differentiable" in text:
        return ConfigurationError(
            "A custom function of the model cannot be differentiated twice, because its backward"
            " is marked with @once_differentiable. Write the backward in differentiable operations"
            " without that mark, or fix the model's hyperparameters (requires_grad=False)."
        )
    match = _MISSING.search(text)
    if match is None:
        return None
    name, second = match[1], match[2] is not None
    way_out = next((way for part, way in _WAYS_OUT.items() if part in name), None)
    instead = f"Use instead: {way_out}." if way_out else "Use other operations instead."
    if second:
        return ConfigurationError(
            f"The model uses '{name}', which has no second derivative in PyTorch. Gradients for"
            " hyperparameters of the model and for inputs of a prediction, and an exact Hessian,"
            f" need second derivatives. {instead} Or set requires_grad=False for hyperparameters or"
            " inputs."
        )
    return ConfigurationError(
        f"The model uses '{name}', which has no derivative in PyTorch for this argument. {instead}"
        " Or pass an argument that does not depend on anything that requires a gradient."
    )


def check_call(model: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor) -> None:
    """Raise an error if ``x`` is empty, or if the weights cannot have correct gradients."""
    if x.dim() == 0 or len(x) == 0:
        raise InputError("x is empty or a scalar. Pass at least one example along dimension 0.")
    check_mode()
    parameters = dict(model.named_parameters())
    if any(parameters.get(name) is not p for name, p in weights.items()):  # the model is wrapped
        parameters = named_parameters(model)
    for name, p in weights.items():
        if parameters.get(name) is not p:
            raise ConfigurationError(
                f"The weight {name!r} is not the model's current parameter of this name. The"
                " parameter may have been replaced or removed. Pass the model's current"
                f" parameters.{nearest(name, parameters)}"
            )
        if not p.is_floating_point() or not p.requires_grad:
            raise ConfigurationError(
                f"{name!r} cannot be a weight of the evidence, because it is not a real"
                " floating-point parameter that requires a gradient. To train this parameter, call"
                " its requires_grad_() method. Otherwise, freeze it before you create the evidence."
            )
        if p._backward_hooks:
            raise ConfigurationError(
                f"A hook on {name!r}, set by register_hook, may change this parameter's gradient."
                " The curvature would then correspond to a different function. Remove the hook, or"
                " register it only for training steps."
            )


def check_mode() -> None:
    """Raise an error inside of a context in which PyTorch cannot compute gradients."""
    if torch.is_inference_mode_enabled():
        raise ConfigurationError(
            "Gradients cannot be enabled inside torch.inference_mode(). Remove this context, or"
            " use torch.no_grad(), in which evigrad enables gradients where it needs them."
        )


def check_hooks(model: nn.Module) -> None:
    """Raise an error if a module has a backward hook, because the hook may change gradients."""
    # Hooks that only read gradients cannot be distinguished from hooks that change them.
    everywhere = (modules._global_backward_hooks, modules._global_backward_pre_hooks)
    names = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    if names or any(everywhere):
        places = "all modules" if any(everywhere) else listed(names)
        raise ConfigurationError(
            f"A backward hook on {places} may change gradients. The curvature would"
            " then correspond to a different function. Remove the hook, or register it only for"
            " training steps. Forward hooks are allowed."
        )


def check_storage(weights: Mapping[str, nn.Parameter]) -> None:
    """Raise an error if two parameters share memory, because shared entries would count twice."""
    by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, p in weights.items():
        if p.layout == torch.strided and p.numel() > 0 and p.untyped_storage().data_ptr() != 0:
            by_storage.setdefault(p.untyped_storage().data_ptr(), []).append((name, p))
    for sharing in by_storage.values():
        for i, (name, p) in enumerate(sharing):
            for other, q in sharing[:i]:
                if np.shares_memory(_addresses(p), _addresses(q)):
                    raise ConfigurationError(
                        f"{other!r} and {name!r} are two parameters that share memory, so"
                        " the evidence would count their entries twice. To tie them, assign the"
                        " same Parameter object to both names. Otherwise, clone one of the"
                        " parameters."
                    )


def _addresses(p: Tensor) -> np.ndarray:
    """Return an array that shares a tensor's memory, only for comparing addresses."""
    interface = {
        "version": 3,
        "data": (p.data_ptr(), True),
        "shape": tuple(p.shape),
        "strides": tuple(step * p.element_size() for step in p.stride()),
        "typestr": f"|V{p.element_size()}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def model_outputs(model: nn.Module, x: Inputs, positions: bool = False) -> Tensor:
    """Call the model, check the outputs with ``check_output``, and return them."""
    return check_output(called(model, x), len(x), positions, model)


def check_output(
    output: object, m: int, positions: bool = False, model: nn.Module | None = None
) -> Tensor:
    """Return the outputs for m examples.

    If ``positions``, the shape (m, …, C) is also allowed. Errors name layers of the ``model`` that
    may have caused a wrong shape.

    Raises:
        InputError: If the outputs are not a dense floating-point tensor (m, C).
    """
    if not isinstance(output, Tensor):
        raise InputError(
            f"The model returned a {type(output).__name__}, but evigrad needs one tensor of shape"
            " (examples, outputs), or an object whose .logits attribute is this tensor. To select"
            " the outputs, use evigrad.Outputs(model, output=0) or output='scores'. For the heads"
            " of a Joint likelihood, use output=['depth', 'kind'], in the order of the heads."
        )
    if output.layout != torch.strided or output.is_nested:
        raise InputError(
            f"The model returned a {output.layout} tensor, but evigrad needs a dense tensor."
            " Convert the outputs with .to_dense()."
        )
    if output.is_meta:
        raise InputError(
            "The model returned a tensor on the meta device, which has no values. Create the"
            " tensor on the inputs' device, for example with device=x.device."
        )
    if output.dim() < 2 or output.shape[0] != m or (output.dim() > 2 and not positions):
        if output.dim() == 0 or output.shape[0] != m:
            hint = "Dimension 0 of inputs and outputs must be the example (batch) dimension."
            hint += "" if model is None else sequence_first(model)
        elif output.dim() == 1:
            hint = "Add a dimension for the single output, such as f[:, None]."
        else:
            hint = "It must return the same shape for inputs of the same shape."
        raise InputError(
            f"The model, given {m} examples, must return a tensor of shape ({m}, C), or"
            f" ({m}, …, C) with a target at each position, got {tuple(output.shape)}. {hint}"
        )
    if not output.is_floating_point():
        hint = (
            "Return real and imaginary parts as outputs: torch.view_as_real(f).flatten(1)."
            if output.is_complex()
            else "Return the scores, before any argmax, comparison or rounding."
        )
        raise InputError(
            f"The model returned outputs of type {output.dtype}, but evigrad needs floating-point"
            f" numbers, which have derivatives. {hint}"
        )
    return output
