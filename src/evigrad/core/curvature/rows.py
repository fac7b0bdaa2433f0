"""The rows of one parameter in a block, and their products without a second copy.

Each micro-batch's rows are stored in the requested type and on the requested device. They are read
in slabs of columns, so there is never a second copy of all rows. The derivative of ℓ with respect
to the rows can overwrite the rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from evigrad.core.algebra import first_order_only, sum_of_grams

# Bytes of a slab of columns: enough for fast matrix products, and little compared with the rows.
SLAB_BYTES = 2**25
# Up to this many entries, a copy of all Gram matrices takes less time than a call for each.
_FEW_NUMBERS = 2**14


class Rows(ABC):
    """The rows A (R, n) of one parameter, without prior and scale.

    The precision of a parameter is one number, or one number for each of its n elements. Products
    (``fast.contraction``) take precisions along one axis instead, with as many axes as the
    parameter.
    """

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The number of rows, R."""

    @abstractmethod
    def gram(self, like: Tensor, precision: Tensor | None = None) -> Float[Tensor, "R R"]:
        """Return A Aᵀ without a graph, or A P0^{-1} Aᵀ if ``precision`` is given.

        The result has the dtype and device of ``like``.
        """

    @abstractmethod
    def differentiable_gram(self, like: Tensor, precision: Tensor) -> Float[Tensor, "R R"]:
        """Return A P0^{-1} Aᵀ, differentiable in the precision and the rows."""

    @abstractmethod
    def write_cotangent(self, cotangent: Float[Tensor, "R R"], precision: Tensor) -> Tensor:
        """Return ∂c/∂P0 of a function c, and overwrite the rows A with ∂c/∂A.

        ``cotangent`` is the symmetric derivative of c with respect to A P0^{-1} Aᵀ. The result has
        the shape of ``precision``.
        """

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tensors with respect to which derivatives are taken, in a fixed order."""

    @abstractmethod
    def with_tensors(self, tensors: Iterator[Tensor]) -> Self:
        """Return the rows with ``tensors()`` replaced by the next tensors of an iterator."""

    @abstractmethod
    def part(self, rows: slice, data: slice) -> Self:
        """Return the slice ``rows`` as one micro-batch, whose examples are the slice ``data``."""

    @abstractmethod
    def stored(self, store: Callable[[Tensor], Tensor]) -> "Rows":
        """Return the rows with each tensor stored by the function ``store``."""

    @abstractmethod
    def dense(self) -> "DenseRows":
        """Return the rows as one matrix per micro-batch."""

    @abstractmethod
    def __add__(self, other: "Rows") -> "Rows":
        """Return all rows, with the rows of ``other`` below the rows of this object."""


@dataclass(frozen=True, eq=False)
class DenseRows(Rows):
    """Rows in ``chunks``, with one matrix (R_i, n) for each micro-batch."""

    chunks: tuple[Tensor, ...]

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.chunks))

    def __add__(self, other: Rows) -> "DenseRows":
        return DenseRows(self.chunks + other.dense().chunks)

    def tensors(self) -> list[Tensor]:
        return list(self.chunks)

    def with_tensors(self, tensors: Iterator[Tensor]) -> "DenseRows":
        return DenseRows(tuple(next(tensors) for _ in self.chunks))

    def part(self, rows: slice, data: slice) -> "DenseRows":
        return DenseRows((between(self.chunks, rows),))

    def stored(self, store: Callable[[Tensor], Tensor]) -> "DenseRows":
        # Contiguous, because expanded tensors cannot be overwritten.
        return DenseRows(tuple(store(chunk.contiguous()) for chunk in self.chunks))

    def dense(self) -> "DenseRows":
        return self

    def gram(self, like: Tensor, precision: Tensor | None = None) -> Float[Tensor, "R R"]:
        varies = precision is not None and precision.numel() > 1
        root = precision.reshape(-1).to(like).rsqrt() if precision is not None and varies else None
        gram = sum_of_grams(
            slab if root is None else slab * root[columns]
            for columns, slab in slabs(self.chunks, like)
        )
        return gram if precision is None or varies else gram / precision.to(gram)

    def grams_along(self, axis: int, shape: torch.Size, like: Tensor) -> Float[Tensor, "G R R"]:
        """Return the Gram of the entries at each position along an axis of the parameter."""
        chunks = [chunk.view(len(chunk), *shape) for chunk in self.chunks]
        grams = like.new_empty(shape[axis], self.num_rows, self.num_rows)
        for position, gram in enumerate(grams):
            parts = [c.select(axis + 1, position).reshape(len(c), -1).to(like) for c in chunks]
            rows = parts[0] if len(parts) == 1 else torch.cat(parts)
            torch.mm(rows, rows.mT, out=gram)
        return grams

    def differentiable_gram(self, like: Tensor, precision: Tensor) -> Float[Tensor, "R R"]:
        return RowsGram.apply(like, precision.reshape(-1), *self.chunks)

    def write_cotangent(self, cotangent: Float[Tensor, "R R"], precision: Tensor) -> Tensor:
        inverse = precision.detach().reshape(-1).to(cotangent).reciprocal()
        precision_cotangent = torch.zeros_like(inverse)
        for columns, slab in slabs(self.chunks, cotangent):
            # S = A P0^{-1} Aᵀ: the cotangent S̄ gives 2 S̄ A P0^{-1} for A. For the precision δ of
            # column a, it gives −aᵀ S̄ a / δ².
            product = 2 * (cotangent @ slab)
            weight = part_of(inverse, columns)
            add_part(precision_cotangent, columns, -0.5 * weight**2 * (product * slab).sum(0))
            product *= weight
            # The slab has been read, so its columns can be overwritten.
            for chunk, part in zip(
                self.chunks, product.split([*map(len, self.chunks)]), strict=True
            ):
                if chunk.device == part.device:
                    chunk[:, columns] = part
                else:  # by columns, which are contiguous there
                    chunk.mT[columns] = part.mT.to(chunk.dtype).contiguous().to(chunk.device)
        return precision_cotangent.reshape(precision.shape)


@dataclass(frozen=True, eq=False)
class DeferredRows(Rows):
    """Rows that are computed each time they are read, to save memory.

    The gradients with respect to the outputs of the layers are already computed.

    Attributes:
        form: Function that returns the matrix (R, n). It keeps the forward pass in memory.
        count: The number of rows, R.
    """

    form: Callable[[], Tensor]
    count: int

    @property
    def num_rows(self) -> int:
        return self.count

    def dense(self) -> DenseRows:
        return DenseRows((self.form(),))

    def gram(self, like: Tensor, precision: Tensor | None = None) -> Float[Tensor, "R R"]:
        return self.dense().gram(like, precision)

    def stored(self, store: Callable[[Tensor], Tensor]) -> DenseRows:
        return self.dense().stored(store)

    def tensors(self) -> list[Tensor]:
        return []

    def differentiable_gram(self, like: Tensor, precision: Tensor) -> Float[Tensor, "R R"]:
        return self.dense().differentiable_gram(like, precision)

    def __add__(self, other: Rows) -> DenseRows:
        return self.dense() + other

    def write_cotangent(self, cotangent: Float[Tensor, "R R"], precision: Tensor) -> Tensor:
        raise NotImplementedError("Deferred rows cannot be overwritten. Call stored() first.")

    def with_tensors(self, tensors: Iterator[Tensor]) -> Self:
        return self

    def part(self, rows: slice, data: slice) -> Self:
        raise NotImplementedError("Deferred rows have no parts. Call stored() first.")


def slabs(chunks: Sequence[Tensor], like: Tensor) -> Iterator[tuple[slice, Float[Tensor, "R _"]]]:
    """Yield slices of columns and the entries of all rows in these columns.

    The entries have the dtype and device of ``like``.
    """
    num_rows, width = sum(len(chunk) for chunk in chunks), chunks[0].shape[1]
    step = max(1, SLAB_BYTES // max(1, num_rows * like.element_size()))
    for start in range(0, max(width, 1), step):
        columns = slice(start, min(start + step, width))
        # A slice of all columns would take longer than a small product.
        parts = [(chunk if width <= step else chunk[:, columns]).to(like) for chunk in chunks]
        yield columns, parts[0] if len(parts) == 1 else torch.cat(parts)


def part_of(values: Float[Tensor, " n"], columns: slice) -> Tensor:
    """Return the values of these columns, or the single value that applies to all columns."""
    return values[columns] if values.numel() > 1 else values


def add_part(values: Float[Tensor, " n"], columns: slice, part: Tensor) -> None:
    """Add ``part`` to ``values`` in place, which is the adjoint of ``part_of``."""
    if values.numel() > 1:
        values[columns] += part
    else:
        values += part.sum()


def between(chunks: Sequence[Tensor], span: slice) -> Tensor:
    """Return the rows in ``span`` of concatenated chunks, as a view if one chunk contains them."""
    parts, start = [], 0
    for chunk in chunks:
        stop = start + len(chunk)
        first, last = max(span.start, start), min(span.stop, stop)
        if first < last:
            parts.append(chunk[first - start : last - start])
        start = stop
    if not parts:
        return chunks[0][:0]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# ------------------------------------------------------------ derivatives without copies


def mixed_grams(weights: Float[Tensor, " L"], grams: Sequence[Tensor]) -> Float[Tensor, "R R"]:
    """Return the sum of Gram matrices with these weights, differentiable in the weights."""
    if len(grams) * grams[0].numel() <= _FEW_NUMBERS:
        return (weights[:, None, None] * torch.stack(list(grams))).sum(0)
    return _MixedGrams.apply(weights, *grams)


class _MixedGrams(Function):
    """Autograd function for a weighted sum of Gram matrices, without scaled copies of them.

    With the weights 1/δ_g and the Gram matrices G_g of the rows of group g, the sum is S. The
    gradient of log|I + S| is tr[(I + S)⁻¹ G_g] for the weight of group g. Multiplied by 1/δ_g and
    the block's scale, it is γ_g, the group's effective number of parameters (docs/theory.md).
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *grams: Tensor) -> Tensor:
        ctx.save_for_backward(*grams)
        total = weights[0] * grams[0]
        for weight, gram in zip(weights[1:], grams[1:], strict=True):
            total.addcmul_(weight, gram)
        return total

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        flat = cotangent.reshape(-1)
        products = [torch.dot(gram.reshape(-1), flat) for gram in ctx.saved_tensors]
        return torch.stack(products), *[None] * len(products)


class RowsGram(Function):
    """Autograd function for A P0^{-1} Aᵀ, with one parameter's rows A in several chunks.

    Only the inputs are kept for the backward pass, not a scaled copy of all rows. The backward pass
    reads the rows once for the gradients of both precision and rows.
    """

    @staticmethod
    def forward(ctx: Any, like: Tensor, precision: Tensor, *chunks: Tensor) -> Tensor:
        ctx.like = like
        ctx.save_for_backward(precision, *chunks)
        num_rows = sum(map(len, chunks))
        gram = like.new_zeros(num_rows, num_rows)
        for columns, slab in slabs(chunks, like):
            slab = slab * part_of(precision.to(like), columns).rsqrt()
            gram += slab @ slab.mT
        return gram

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        precision, *chunks = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        inverse = precision.to(ctx.like).reciprocal()
        precision_cotangent = torch.zeros_like(inverse) if needs_grad[1] else None
        chunk_cotangents = [
            torch.empty_like(c) if needs else None
            for c, needs in zip(chunks, needs_grad[2:], strict=True)
        ]
        for columns, slab in slabs(chunks, ctx.like):
            weight = part_of(inverse, columns)
            # ⟨S̄, A P0^{-1} Aᵀ⟩ has the cotangent (S̄ + S̄ᵀ) A P0^{-1} for A.
            product = ((cotangent + cotangent.mT) @ slab).mul_(weight)
            if precision_cotangent is not None:
                add_part(precision_cotangent, columns, -0.5 * weight * (product * slab).sum(0))
            parts = product.split([len(chunk) for chunk in chunks])
            for chunk, part in zip(chunk_cotangents, parts, strict=True):
                if chunk is not None:
                    chunk[:, columns] = part.to(chunk)
        precision_cotangent = (
            None if precision_cotangent is None else precision_cotangent.to(precision.dtype)
        )
        return None, precision_cotangent, *chunk_cotangents
