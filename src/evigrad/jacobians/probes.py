"""What a plan is checked on: data that differ, and weights that are none of them special."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.jacobians.recorder import graph_nodes, reachable
from evigrad.jacobians.state import held_tensors, model_run

# Equal data are made different by taking each entry down by up to this part of it: towards zero,
# where indices stay in their range and positive numbers positive.
_SHRINK = 0.2
# What stands in for the entries' size where all are zero.
_SMALL = 0.01
# Name of the graph's node for a reentrant checkpoint.
_REENTRANT = "CheckpointFunctionBackward"
# How far weights are moved, relative to their root mean square.
_MOVE = 0.1


def distinct_probe(model: nn.Module, x: Tensor, size: int) -> tuple[Tensor, bool]:
    """So many inputs, all of them different where this is possible.

    Among equal data a layer that sorts or mixes them goes unnoticed.

    Args:
        model: Takes the inputs.
        x: The inputs given, one or more.
        size: How many are needed.

    Returns:
        The inputs, and whether no two of them are equal.
    """
    given = x.detach()[torch.arange(size, device=x.device) % len(x)]
    if _all_differ(given):
        return given, True
    varied = _varied(given)
    if _all_differ(varied) and _runs(model, varied):
        return varied, True
    return given, False


def _all_differ(x: Tensor) -> bool:
    return all(not torch.equal(x[i], x[j]) for i in range(len(x)) for j in range(i))


def _varied(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    part = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    if x.dtype == torch.bool:
        return x & (part > 0.5)
    if x.is_complex() or x.is_floating_point():
        if not x.any():
            return (_SMALL * part).to(x.dtype)
        return (x * (1 - _SHRINK * part)).to(x.dtype)
    # Half of the entries, down to anything from zero on.
    return torch.where(part > 0.5, x, (x * (2 * part)).to(x.dtype))


def _runs(model: nn.Module, x: Tensor) -> bool:
    try:
        with model_run(model), torch.no_grad():
            output = model(x.clone())
    except Exception:  # the given data shall tell whether it is the model or this probe
        return False
    return isinstance(output, Tensor) and bool(output.isfinite().all())


def moved_copy(
    model: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor
) -> tuple[nn.Module, dict[str, nn.Parameter]] | None:
    """A copy of the model with its weights moved off their initial values.

    A head that starts at zero makes all rows in front of it zero; two ways to compute them then
    agree whether they are right or not.

    Args:
        model: Any module.
        weights: Name → parameter of it.
        x: Inputs on which the copy must work.

    Returns:
        The copy and its own weights; None where the model cannot be copied, or the copy's
        outputs are not finite or still depend on the original's parameters.
    """
    learnable = {name for name, p in model.named_parameters() if p.requires_grad}
    for names in (learnable, set(weights)):
        # A hyperparameter may have a domain that it must not leave, hence the second try.
        try:
            with model_run(model):
                memo = {id(t): t.detach().clone() for t in held_tensors(model) if not t.is_leaf}
                moved = copy.deepcopy(model, memo)
            own = dict(moved.named_parameters())
            _move([own[name] for name in sorted(names)])
            with model_run(moved), torch.enable_grad():
                outputs = moved(x.clone())
        except Exception:  # of whatever kind: there is no such copy
            continue
        foreign = reachable(outputs, dict(model.named_parameters()))
        if outputs.isfinite().all() and not foreign:
            return moved, {name: own[name] for name in weights}
    return None


@torch.no_grad()
def _move(parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in parameters:
        if p.is_floating_point() and p.numel() > 0:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            size = _MOVE * p.square().mean().sqrt()
            p.add_(noise * torch.where(size > 0, size, torch.full_like(size, _SMALL)))


def refuse_reentrant(model: nn.Module, x: Tensor) -> None:
    """Refuse reentrant checkpoints, which have no gradient in chosen parameters.

    Args:
        model: Any module.
        x: Inputs for it.

    Raises:
        ConfigurationError: If there is such a checkpoint in the graph of the outputs.
    """
    x = x.clone()
    if x.is_floating_point():  # without a gradient in its input the checkpoint leaves no node
        x = x.requires_grad_().clone()
    try:
        with model_run(model), torch.enable_grad():
            output = model(x)
    except Exception:  # a model that minds such an input; it will be heard of elsewhere
        return
    if any(node.name() == _REENTRANT for node in graph_nodes(output)):
        raise ConfigurationError(
            "The model uses torch.utils.checkpoint with use_reentrant=True, which cannot give the"
            " gradient in chosen parameters. Pass use_reentrant=False, which computes the same."
        )
