"""Gram matrices and quadratic forms, with their derivatives written out."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from evigrad.errors import ConfigurationError

# A Gram matrix is symmetric: four strips need five eighths of the products. Strips of fewer than 64
# rows would multiply below full speed.
_STRIPS, _STRIP = 4, 64


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward pass of an autograd function, refusing ``create_graph=True``.

    ``once_differentiable`` would let it pass silently where no cotangent has a graph.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "Log-determinants and sums of Kronecker factors have first derivatives only: leave"
                " out create_graph=True."
            )
        return backward(ctx, *cotangents)

    return wrapped


def is_finite(value: Tensor) -> bool:
    """Whether no entry is NaN or infinite."""
    # A sum reads the entries once. ``isfinite`` fills four tensors of their size, but is needed if
    # the sum of finite entries overflows.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def dot(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    """Σ a b for tensors of one shape, in single precision at least."""
    if a.dtype.itemsize < torch.float32.itemsize:
        a, b = a.float(), b.float()
    # Not (a * b).sum(), which fills a tensor of their size first.
    return torch.dot(a.reshape(-1), b.reshape(-1))


def add_gram(gram: Float[Tensor, "G n n"], rows: Float[Tensor, "G n R"]) -> None:
    """Add rows rowsᵀ above the diagonal; ``mirrored`` completes the sum of several."""
    for strip in _strips(gram.shape[1]):
        columns = slice(strip.start, None)
        gram[:, strip, columns].baddbmm_(rows[:, strip], rows[:, columns].mT)


def mirrored(gram: Float[Tensor, "G n n"]) -> Float[Tensor, "G n n"]:
    """The sum of ``add_gram`` with what is above the diagonal copied below it, in place."""
    for strip in _strips(gram.shape[1]):
        gram[:, strip.stop :, strip] = gram[:, strip, strip.stop :].mT
    return gram


def _strips(size: int) -> Iterator[slice]:
    step = max(_STRIP, -(-size // _STRIPS))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


# A Gram matrix is quadratic in the inputs x, so ⟨C, gram(x)⟩ with symmetric C is ⟨x, pull(x, C)⟩
# for a linear map of x that is symmetric too, and its gradient is twice pull(x, C).
Pull = Callable[[Tensor, Tensor], Tensor]


def symmetric(matrix: Float[Tensor, "G i i"]) -> Float[Tensor, "G i i"]:
    """The symmetric part, without a graph."""
    return (matrix + matrix.mT).detach() / 2


def outer_gram(a: Float[Tensor, "G R i"]) -> Float[Tensor, "G i i"]:
    """Σ aᵀ a over the rows."""
    return a.mT @ a


def outer_gram_pull(a: Float[Tensor, "G R i"], matrix: Float[Tensor, "G i i"]) -> Tensor:
    """Half of the gradient of ⟨matrix, ``outer_gram``⟩."""
    return a @ matrix


class Gram(Function):
    """A Gram matrix gram(x) with one product in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gram: Callable[[Tensor], Tensor], pull: Pull) -> Tensor:
        """Return gram(x)."""
        ctx.save_for_backward(x)
        ctx.pull = pull
        return gram(x)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """The derivative in x."""
        (x,) = ctx.saved_tensors
        return 2 * ctx.pull(x, symmetric(cotangent)), None, None


class QuadraticForm(Function):
    """⟨C, gram(x)⟩ = ⟨x, pull(x, C)⟩ for a symmetric matrix C.

    The forward pass computes pull(x, C), half of the gradient: both cost one product together.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, pull: Pull) -> Tensor:
        """Return ⟨x, pull(x, C)⟩."""
        pulled = pull(x, matrix)
        ctx.save_for_backward(pulled)
        return dot(x, pulled)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """The derivative in x."""
        (pulled,) = ctx.saved_tensors
        return 2 * cotangent * pulled, None, None


def inner_gram(rows: Float[Tensor, "G R i"], cotangent: Float[Tensor, "G i i"]) -> Tensor:
    """⟨cotangent, rowsᵀ rows⟩; once differentiable in the rows."""
    return QuadraticForm.apply(rows, symmetric(cotangent), outer_gram_pull)


def add_outer_products(
    matrix: Float[Tensor, "n n"] | None, rows: Float[Tensor, "R n"]
) -> Float[Tensor, "n n"]:
    """A new tensor, matrix + rowsᵀ rows."""
    return rows.mT @ rows if matrix is None else torch.addmm(matrix, rows.mT, rows)
