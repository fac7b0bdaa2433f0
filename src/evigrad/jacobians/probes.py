"""What a plan is checked on: data that differ, and weights off their initial values."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.jacobians.recorder import graph_nodes, reachable
from evigrad.jacobians.state import held_tensors, model_run

# Equal data are made different by shrinking each entry by up to this part: towards zero, where
# indices stay in range and positive numbers positive.
_SHRINK = 0.2
# The entries' size where all are zero.
_SMALL = 0.01
# Name of the graph's node for a reentrant checkpoint.
_REENTRANT = "CheckpointFunctionBackward"
# How far weights are moved, relative to their root mean square.
_MOVE = 0.1


def distinct_probe(model: nn.Module, x: Tensor, size: int) -> tuple[Tensor, bool]:
    """``size`` inputs, different where possible, and whether no two of them are equal."""
    # Among equal data a layer that sorts or mixes them goes unnoticed.
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
    # Half of the entries move, to anything between zero and their value.
    return torch.where(part > 0.5, x, (x * (2 * part)).to(x.dtype))


def _runs(model: nn.Module, x: Tensor) -> bool:
    try:
        with model_run(model), torch.no_grad():
            output = model(x.clone())
    except Exception:  # the caller then uses the given data, which show whose error it is
        return False
    return isinstance(output, Tensor) and bool(output.isfinite().all())


def moved_copy(
    model: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor
) -> tuple[nn.Module, dict[str, nn.Parameter]] | None:
    """A copy with its weights moved off their initial values, and these; None where it fails."""
    # A head that starts at zero makes all rows before it zero; two ways to compute them then agree
    # whether they are right or not.
    learnable = {name for name, p in model.named_parameters() if p.requires_grad}
    for names in (learnable, set(weights)):
        # Second try with the weights alone: a hyperparameter may have a domain.
        try:
            with model_run(model):
                memo = {id(t): t.detach().clone() for t in held_tensors(model) if not t.is_leaf}
                moved = copy.deepcopy(model, memo)
            own = dict(moved.named_parameters())
            _move([own[name] for name in sorted(names)])
            with model_run(moved), torch.enable_grad():
                outputs = moved(x.clone())
        except Exception:  # any error means that there is no such copy
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
    """Raise if a reentrant checkpoint, which has no gradient in chosen parameters, is used."""
    x = x.clone()
    if x.is_floating_point():  # without a gradient in its input the checkpoint leaves no node
        x = x.requires_grad_().clone()
    try:
        with model_run(model), torch.enable_grad():
            output = model(x)
    except Exception:  # the model cannot take such an input; other calls will report real errors
        return
    if any(node.name() == _REENTRANT for node in graph_nodes(output)):
        raise ConfigurationError(
            "The model uses torch.utils.checkpoint with use_reentrant=True, which cannot give the"
            " gradient in chosen parameters. Pass use_reentrant=False, which computes the same."
        )
