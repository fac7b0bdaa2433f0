"""The hyperparameters as a few named numbers, for tables and figures."""

import torch
from torch import Tensor

from evigrad.evidence import Evidence
from evigrad.invariances.ranges import range_values, ranged_modules
from evigrad.training.metrics import Row


def hyperparameter_values(evidence: Evidence) -> Row:
    """The present hyperparameters of model, prior and likelihood.

    Returns:
        ``precision/GROUP`` for each group of the prior (with a diagonal prior the geometric mean
        over each parameter tensor), ``noise`` or ``noise/OUTPUT`` for a Gaussian likelihood's
        standard deviation, ``range/NAME`` for the ranges of transforms, learned or fixed, and
        ``model/NAME`` for each other hyperparameter of the model: its value, or its Euclidean norm
        where it has several entries.
    """
    row: Row = {}
    for name, precision in evidence.prior.precisions().items():
        # All tensors of a group have one value; within a diagonal prior each is its own group.
        group = evidence.prior.group_name(name)
        row.setdefault(f"precision/{group}", float(precision.detach().double().log().mean().exp()))
    log_noise = getattr(evidence.likelihood, "log_noise", None)
    if isinstance(log_noise, Tensor):
        noise = log_noise.detach().exp()
        row |= _named("noise", noise)
    row |= {f"range/{name}": value for name, value in range_values(evidence.model).items()}
    transforms = ranged_modules(evidence.model).values()
    in_ranges = {id(p) for module in transforms for p in module.parameters()}
    for name, value in evidence.hyperparameters().items():
        kind, _, rest = name.partition(".")
        if kind == "model" and id(value) not in in_ranges:
            value = value.detach()
            single = value.numel() == 1
            row[f"model/{rest}"] = float(value if single else torch.linalg.vector_norm(value))
    return row


def _named(name: str, values: Tensor) -> Row:
    if values.ndim == 0:
        return {name: float(values)}
    return {f"{name}/{i}": float(value) for i, value in enumerate(values)}
