"""The optimizers of weights and hyperparameters, and how their learning rates fall."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from evigrad.errors import ConfigurationError, listed
from evigrad.training.plan import planned
from evigrad.training.settings import Optimization

MOMENTUM = 0.9  # of sgd
# Learning rate of Fixup's scalar biases and multipliers, relative to the other weights
# (Zhang et al., 2019).
SCALAR_RATE = 0.1
NEGLIGIBLE = 1e-30  # numbers below 1.2e-38 are subnormal in float32


def cosine(progress: float, start: float, end: float) -> float:
    """Return the value of a cosine schedule from ``start`` (``progress`` 0) to ``end`` (1)."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * progress))


def make_weight_optimizer(
    weights: Mapping[str, nn.Parameter],
    settings: Optimization,
    scalars: Collection[nn.Parameter] = (),
) -> Optimizer:
    """Return a checked optimizer of the weights. Its learning rate is lower for ``scalars``."""
    if isinstance(settings.optimizer, str):
        slow, rate = {id(p) for p in scalars}, planned(settings.lr)
        groups: list[dict[str, Any]] = [
            {"params": [w for w in weights.values() if id(w) not in slow], "lr": rate}
        ]
        if slow:
            slow_weights = [w for w in weights.values() if id(w) in slow]
            groups.append({"params": slow_weights, "lr": rate * SCALAR_RATE})
        is_adam = settings.optimizer == "adam"
        optimizer = Adam(groups, lr=rate) if is_adam else SGD(groups, lr=rate, momentum=MOMENTUM)
    else:
        optimizer = settings.optimizer(weights)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if sorted(held) != sorted(id(p) for p in weights.values()):
        raise ConfigurationError(
            "The optimizer must contain exactly the named weights that its function receives, each"
            " of them once. Pass all of these weights to the optimizer."
        )
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ConfigurationError(
            "The optimizer must not have weight decay, because the prior in the loss already"
            " applies it. Set weight_decay=0, and set the precision of the prior instead."
        )
    # Adam turns weights in half precision into NaN with its first step, at any learning rate.
    eps = min((group["eps"] for group in optimizer.param_groups if "eps" in group), default=1.0)
    names = [name for name, weight in weights.items() if weight.dtype == torch.float16]
    if names and torch.tensor(eps, dtype=torch.float16, device="cpu") == 0:
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot train weights in torch.float16: {listed(names)}."
            f" Its ε of {eps:g} and squares of small gradients become zero in this type. Call"
            " model.float() or model.bfloat16(). For faster estimates in float32, use"
            ' Memory(autocast="bfloat16").'
        )
    return optimizer


def make_hyper_optimizer(hyperparameters: Mapping[str, nn.Parameter], s: Optimization) -> Optimizer:
    """Return Adam for all hyperparameters, except precisions that the fixed point sets."""
    kinds = ("likelihood.",) if s.prior_update == "fixed_point" else ("prior.", "likelihood.")
    rates = ((kinds, s.prior_lr, s.prior_lr_min), (("model.",), s.hyper_lr, s.hyper_lr_min))
    groups: list[dict[str, Any]] = []
    for starts, first, last in rates:
        params = [p for name, p in hyperparameters.items() if name.startswith(starts)]
        groups.append({"params": params, "lr": first, "lr_first": first, "lr_last": last})
    return Adam(groups, lr=s.prior_lr, weight_decay=0.0)


@torch.no_grad()
def clear_negligible(optimizer: Optimizer) -> None:
    """Set weights and states of the optimizer below 1e-30 to zero.

    Weight decay shrinks the weights of inactive units until they are subnormal. Many processors
    compute with subnormal numbers so slowly that an epoch can take several times as long
    (benchmarks/README.md). The flag of ``torch.set_flush_denormal`` applies to a single thread.
    """
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        for tensor in (weight, *optimizer.state.get(weight, {}).values()):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.masked_fill_(tensor.abs() < NEGLIGIBLE, 0.0)
