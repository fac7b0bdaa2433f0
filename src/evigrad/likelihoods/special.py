"""A special function that PyTorch lacks, and values with known derivatives."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _WithDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, derivative: Tensor) -> Tensor:
        ctx.save_for_backward(derivative)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None, None


def with_derivative(x: Tensor, value: Tensor, derivative: Callable[[], Tensor]) -> Tensor:
    """Return the value of a function of x entry by entry, with its derivative if x has a graph."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return value
    result = _WithDerivative.apply(x, value.detach(), derivative().detach())
    assert isinstance(result, Tensor)
    return result


@torch.no_grad()
def betainc(a: Tensor | float, b: Tensor | float, x: Tensor, complement: Tensor) -> Tensor:
    """Return the regularized incomplete beta function I_x(a, b), where ``complement`` is 1 − x.

    All terms of its power series x^a (1−x)^b / (a B(a, b)) Σ_n (a+b)_n / (a+1)_n x^n are positive.
    The series of I_x(a, b) or of 1 − I_{1−x}(b, a) is used, whichever needs fewer terms.
    """
    a, b = (torch.zeros_like(x) + value for value in (a, b))
    eps = torch.finfo(x.dtype).eps

    def num_terms(a: Tensor, b: Tensor, x: Tensor, complement: Tensor) -> Tensor:
        largest = ((x * (a + b) - a - 1.0) / complement).clamp(min=0.0)
        return largest + (math.log(eps) / x.log()).abs()

    # If x is 1, the number of terms is infinite or NaN.
    swapped = ~(num_terms(a, b, x, complement) <= num_terms(b, a, complement, x))
    a, b = torch.where(swapped, b, a), torch.where(swapped, a, b)
    x, complement = torch.where(swapped, complement, x), torch.where(swapped, x, complement)
    above, below, term, total = a + b, a + 1.0, torch.ones_like(x), torch.ones_like(x)
    scale = torch.lgamma(above) - torch.lgamma(below) - torch.lgamma(b)
    for n in range(100_000):
        total += term.mul_(x).mul_(above).div_(below)
        above, below = above.add_(1.0), below.add_(1.0)
        if n % 8 == 7 and not bool((term > eps * total).any()):
            break
    # If the sum overflows, its logarithm is infinite, and the result is 1.
    value = (scale + a * x.log() + b * complement.log() + total.log()).exp().clamp(max=1.0)
    return torch.where(swapped, 1.0 - value, value)
