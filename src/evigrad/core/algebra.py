"""Gram matrices and quadratic forms with explicit derivatives."""

import cmath
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from evigrad.errors import ConfigurationError

# A Gram matrix is symmetric, so four strips need five eighths of the products. Strips of fewer than
# 64 rows would multiply slowly.
_STRIPS, _STRIP = 4, 64


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``backward``, wrapped to raise an error if ``create_graph=True``.

    PyTorch's ``once_differentiable`` raises no error if no cotangent has a graph.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "Log-determinants and sums of Kronecker factors can be differentiated only once."
                " Omit create_graph=True."
            )
        return backward(ctx, *cotangents)

    return wrapped


def is_finite(value: Tensor) -> bool:
    """Return whether all entries are finite."""
    # A sum reads the entries once. ``isfinite`` fills four tensors of their size, but is needed if
    # the sum of finite entries overflows.
    return cmath.isfinite(value.sum().item()) or bool(value.isfinite().all())


def widened(value: Tensor) -> Tensor:
    """Return the tensor in float32 or wider."""
    return value.float() if value.dtype.itemsize < torch.float32.itemsize else value


def dot(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    """Return the dot product of two tensors of the same shape, in float32 or wider."""
    a, b = widened(a), widened(b)
    # (a * b).sum() would first allocate a tensor of the same size.
    return torch.dot(a.reshape(-1), b.reshape(-1))


def sum_of_grams(parts: Iterable[Float[Tensor, "*G n R"]]) -> Float[Tensor, "*G n n"]:
    """Return the sum of the Gram matrices ``part @ part.mT``. There must be at least one part."""
    gram, strips = None, list[slice]()
    for part in parts:
        if gram is None:
            gram = part.new_zeros(*part.shape[:-1], part.shape[-2])
            strips = _strips(part.shape[-2])
        if len(strips) == 1:  # slices would take longer than the product
            _add_product(gram, part, part.mT)
            continue
        # Only the upper triangle, until all parts are added.
        for strip in strips:
            rows, columns = part[..., strip, :], part[..., strip.start :, :]
            _add_product(gram[..., strip, strip.start :], rows, columns.mT)
    assert gram is not None
    for strip in strips[:-1]:
        gram[..., strip.stop :, strip] = gram[..., strip, strip.stop :].mT
    return gram


def _add_product(matrix: Tensor, left: Tensor, right: Tensor) -> None:
    # In place, because autocast would compute the product ``left @ right`` in a narrower type.
    (matrix.baddbmm_ if matrix.dim() == 3 else matrix.addmm_)(left, right)


def _strips(size: int) -> list[slice]:
    step = max(_STRIP, -(-size // _STRIPS))
    return [slice(start, min(start + step, size)) for start in range(0, max(size, 1), step)]


# A Gram matrix is quadratic in its input x. So ⟨C, gram(x)⟩ with symmetric C is ⟨x, pull(x, C)⟩ for
# a symmetric linear map of x, and its gradient is 2 pull(x, C).
Pull = Callable[[Tensor, Tensor], Tensor]


def symmetric(matrix: Float[Tensor, "G i i"]) -> Float[Tensor, "G i i"]:
    """Return the symmetric part (M + Mᵀ) / 2 of each matrix M, without a graph."""
    return (matrix + matrix.mT).detach() / 2


def outer_gram(a: Float[Tensor, "G R i"]) -> Float[Tensor, "G i i"]:
    """Return the Gram matrix aᵀ a of each matrix a in a batch."""
    return a.mT @ a


def outer_gram_pull(a: Float[Tensor, "G R i"], matrix: Float[Tensor, "G i i"]) -> Tensor:
    """Return half the gradient of ⟨M, ``outer_gram(a)``⟩ with respect to ``a``.

    ``matrix`` is the symmetric matrix M.
    """
    return a @ matrix


class Gram(Function):
    """Autograd function for a Gram matrix gram(x). Its backward pass needs one matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gram: Callable[[Tensor], Tensor], pull: Pull) -> Tensor:
        ctx.save_for_backward(x)
        ctx.pull = pull
        return gram(x)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return 2 * ctx.pull(x, symmetric(cotangent)), None, None


class QuadraticForm(Function):
    """Autograd function for q(x) = ⟨C, gram(x)⟩ with a symmetric matrix C.

    Half the gradient of q is pull(x, C), and q(x) = ⟨x, pull(x, C)⟩. The forward and backward
    passes therefore share one matrix product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, pull: Pull) -> Tensor:
        pulled = pull(x, matrix)
        ctx.save_for_backward(pulled)
        return dot(x, pulled)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (pulled,) = ctx.saved_tensors
        return 2 * cotangent * pulled, None, None


def inner_gram(rows: Float[Tensor, "G R i"], cotangent: Float[Tensor, "G i i"]) -> Tensor:
    """Return ⟨cotangent, rowsᵀ rows⟩, differentiable once in the rows."""
    return QuadraticForm.apply(rows, symmetric(cotangent), outer_gram_pull)


def add_outer_products(
    matrix: Float[Tensor, "n n"] | None, rows: Float[Tensor, "R n"]
) -> Float[Tensor, "n n"]:
    """Return matrix + rowsᵀ rows in a new tensor. A ``matrix`` of None stands for zeros."""
    return rows.mT @ rows if matrix is None else torch.addmm(matrix, rows.mT, rows)


def is_one_number(scale: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return whether all entries of ``scale`` are equal for all values of the parameters."""
    if not bool((scale == scale[0]).all()):
        return False
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    if not scale.requires_grad or not learned:
        return True
    # Different parameters with equal values have different derivatives.
    dtype, rounding = torch.promote_types(scale.dtype, torch.float32), torch.finfo(scale.dtype).eps
    weights = torch.arange(1, len(scale) + 1, device=scale.device, dtype=dtype) / len(scale)
    rtol = max(1e-3, 8 * rounding)
    whole, single = (
        torch.autograd.grad(value, learned, retain_graph=True, allow_unused=True)
        for value in ((weights * scale).sum(), weights.sum() * scale[0])
    )
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.allclose(a, b, rtol))
        for a, b in zip(whole, single, strict=True)
    )
