"""Find quantiles of targets from their cumulative probabilities, and differentiate them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods.targets import as_numbers


def check_levels(name: str, values: Any) -> Tensor:
    """Return one probability or several of them, or raise InputError."""
    levels = as_numbers(values)
    is_inside = (levels > 0) & (levels < 1)
    if levels.ndim > 1 or not levels.numel() or not bool(is_inside.all()):
        raise InputError(
            f"{name} must be a probability between 0 and 1, or several of them, got {values!r}."
        )
    return levels


def smallest(
    cdf: Callable[[Tensor], Tensor], levels: Tensor, start: Tensor, is_whole: bool
) -> Tensor:
    """Return the smallest y with cdf(y) ≥ level, for each entry of ``start``.

    Whole numbers are found by bisection. For real numbers, secants join the ends of a bracket in
    probits of cdf(y), which are nearly linear in y. If an end does not move twice, its value is
    halved (the Illinois method). Every fourth step is a bisection, because secants can be slow.

    Raises:
        ConfigurationError: If the probabilities do not rise from 0 to 1.
    """
    limits, probits = torch.finfo(levels.dtype), torch.special.ndtri(levels)

    def excess(y: Tensor) -> Tensor:
        p = cdf(y).clamp(limits.tiny, 1.0 - 0.5 * limits.eps)
        return torch.special.ndtri(p) - probits

    low, high, at_low, at_high = start, start, probits, probits
    for step in range(200):
        low, high = start - 2.0**step, start + 2.0**step
        at_low, at_high = excess(low), excess(high)
        if bool(((at_low < 0) & (at_high >= 0)).all()):
            break
    else:
        raise ConfigurationError(
            "Quantiles must be finite, got probabilities that do not rise from 0 to 1 between"
            f" {float(low.min()):.2g} and {float(high.max()):.2g}. Use prediction.plug_in, or fix"
            " the cdf of the likelihood."
        )
    y, at_y, was_low = high, at_high, at_low > 0
    # Probabilities have errors of about eps, and probits have errors of eps divided by the density.
    resolution = 1e-12 + 10.0 * limits.eps * (0.5 * probits.square()).exp()
    for step in range(200):
        is_done = high - low <= 1.0 if is_whole else at_y.abs() <= resolution
        if bool(is_done.all()):
            break
        is_half = is_whole or step % 4 == 3
        x = low + (high - low) * (0.5 if is_half else at_low / (at_low - at_high))
        x = x.floor() if is_whole else x
        at_x = excess(x)
        is_low, is_better = at_x < 0, at_x.abs() < at_y.abs()
        weight = torch.where(is_low == was_low, 0.5, 1.0)
        low, at_low = torch.where(is_low, x, low), torch.where(is_low, at_x, weight * at_low)
        high, at_high = torch.where(is_low, high, x), torch.where(is_low, weight * at_high, at_x)
        y, at_y = torch.where(is_better, x, y), torch.where(is_better, at_x, at_y)
        was_low = is_low
    return high if is_whole else y


def differentiable(cdf: Callable[[Tensor], Tensor], quantiles: Tensor) -> Tensor:
    """Return quantiles y of real numbers with a graph to what ``cdf`` depends on.

    The derivative of cdf(y) = level is cdf′(y) ∂y + ∂cdf(y) = 0.
    """
    p = cdf(quantiles)
    (density,) = torch.autograd.grad(cdf(y := quantiles.detach().requires_grad_()).sum(), y)
    return quantiles - (p - p.detach()) / density
