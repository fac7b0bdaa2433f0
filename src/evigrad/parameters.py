"""Which parameters of a model are weights, and which are hyperparameters."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, nearest


def call_fixed(module: nn.Module, fixed: Mapping[str, nn.Parameter], *args: Tensor) -> Tensor:
    """Call a module with some of its parameters held constant.

    Args:
        module: Any module.
        fixed: The parameters, by their names in it, that get no gradient.
        *args: Arguments of its forward pass.

    Returns:
        What the module returns.
    """
    if not fixed:
        return module(*args)
    detached = {name: p.detach() for name, p in fixed.items()}
    return torch.func.functional_call(module, detached, args)


def trainable(model: nn.Module, excluded: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, each shared one once, without the excluded.

    Args:
        model: Any module.
        excluded: Parameters that are hyperparameters.

    Returns:
        The weights by name, in the model's order.

    Raises:
        ConfigurationError: If none is left.
    """
    ids = {id(p) for p in excluded.values()}
    weights = {
        name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in ids
    }
    if not weights:
        raise ConfigurationError("The model has no trainable weights beside hyperparameters.")
    return weights


def select(model: nn.Module, prefixes: Sequence[str]) -> dict[str, nn.Parameter]:
    """The trainable parameters under the given names or prefixes, each shared one once.

    Args:
        model: Any module.
        prefixes: Names of parameters or of modules.

    Returns:
        The parameters by name.

    Raises:
        ConfigurationError: If a prefix names nothing that is trainable.
    """
    if isinstance(prefixes, str):
        raise ConfigurationError("hyperparameters is a list of names, as ['invariance'].")
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix in prefixes:
        found = {n: p for n, p in named.items() if n == prefix or n.startswith(f"{prefix}.")}
        if not found:
            known = [*named, *sorted({n.split(".")[0] for n in named})]
            raise ConfigurationError(
                f"No parameter of the model is named '{prefix}' or lies below it."
                f"{nearest(prefix, known)}"
            )
        if not any(p.requires_grad for p in found.values()):
            raise ConfigurationError(f"The hyperparameters '{prefix}' do not require a gradient.")
        for name, parameter in found.items():
            if parameter.requires_grad:
                chosen.setdefault(id(parameter), (name, parameter))
    return dict(chosen.values())
