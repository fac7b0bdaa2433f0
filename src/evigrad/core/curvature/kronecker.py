"""Kronecker factors of one use of a weight: the inputs, the gradients and their Gram matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import (
    Gram,
    QuadraticForm,
    inner_gram,
    outer_gram,
    outer_gram_pull,
    symmetric,
)


@dataclass(frozen=True, eq=False)
class MatrixInputs:
    """The inputs of a weight that is used as a matrix, at T positions of m examples.

    Attributes:
        values: The inputs of G channel groups, or in a subclass what they are computed from.
    """

    values: Float[Tensor, "m G T i"]

    def matrices(self, dtype: torch.dtype) -> Float[Tensor, "m G T i"]:
        """Return the inputs, in ``dtype``."""
        return self.values.to(dtype)

    def gram(self, dtype: torch.dtype) -> Float[Tensor, "G i i"]:
        """Return Σ a aᵀ over the inputs a of all examples and positions, differentiable once."""
        return Gram.apply(self._flat(dtype), outer_gram, outer_gram_pull)

    def inner_gram(self, cotangent: Float[Tensor, "G i i"]) -> Float[Tensor, ""]:
        """Return ⟨cotangent, ``gram``⟩ in the cotangent's type, differentiable once."""
        return inner_gram(self._flat(cotangent.dtype), cotangent)

    def sum(self, dtype: torch.dtype) -> Float[Tensor, "m G i"]:
        """Return the inputs summed over positions."""
        return self.matrices(dtype).sum(2)

    def detach(self) -> "MatrixInputs":
        """Return the inputs without a graph."""
        return MatrixInputs(self.values.detach())

    def _flat(self, dtype: torch.dtype) -> Float[Tensor, "G mT i"]:
        return self.values.to(dtype).transpose(0, 1).flatten(1, 2)


class KroneckerUse:
    """One use of a weight as a matrix that multiplies inputs at T positions.

    The Jacobian rows of the weight, reshaped to (G, out, in), are sums of gradients ⊗ inputs over
    positions. G is the number of channel groups, whose blocks are stacked along dimension 0 of the
    weight.

    Args:
        inputs: Inputs of the matrix, possibly in a narrower type than the gradients.
        gradients: Gradients with respect to the matrix's outputs, one for each row and position.
            They come in pieces, each with some of the rows.
        transposed: Whether the weight is (in, out).
    """

    def __init__(
        self,
        inputs: Float[Tensor, "m G T i"] | MatrixInputs,
        *gradients: Float[Tensor, "m k G T o"],
        transposed: bool = False,
    ) -> None:
        self.source = MatrixInputs(inputs) if isinstance(inputs, Tensor) else inputs
        self.pieces, self.transposed = gradients, transposed

    @property
    def gradients(self) -> Float[Tensor, "m k G T o"]:
        """The gradients of all rows, concatenated if they come in several pieces."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces, 1)

    @property
    def inputs(self) -> Float[Tensor, "m G T i"]:
        """The inputs of the matrix, in the type of the gradients."""
        return self.source.matrices(self.pieces[0].dtype)

    @property
    def num_data(self) -> int:
        """The number of examples, m."""
        return self.pieces[0].shape[0]

    @property
    def positions(self) -> int:
        """The number of positions of an example, T."""
        return self.pieces[0].shape[3]

    @property
    def num_rows(self) -> int:
        """The number of outer products in ``gradient_gram``, m k T."""
        return self.num_data * self.positions * sum(piece.shape[1] for piece in self.pieces)

    def gradient_gram(self) -> Float[Tensor, "G o o"]:
        """Return Σ g gᵀ over the gradients g of all examples, rows and positions."""
        return reduce(torch.add, [(c @ c.mT).sum(0) for c in self._gradient_columns()])

    def inner_gradient_gram(self, cotangent: Float[Tensor, "G o o"]) -> Float[Tensor, ""]:
        """Return ⟨cotangent, ``gradient_gram``⟩, differentiable once in the gradients."""
        matrix = symmetric(cotangent)
        forms = [
            QuadraticForm.apply(columns, matrix, lambda g, m: m @ g)
            for columns in self._gradient_columns()
        ]
        return torch.stack(forms).sum()

    def scaled(self, scale: Float[Tensor, "m k"] | None, dtype: torch.dtype) -> "KroneckerUse":
        """Return this use with gradients in ``dtype``, multiplied by the scale of each row."""
        pieces = [piece.to(dtype) for piece in self.pieces]
        if scale is not None:
            scales = scale.to(dtype)[:, :, None, None, None].split([p.shape[1] for p in pieces], 1)
            pieces = [piece * part for piece, part in zip(pieces, scales, strict=True)]
        return self.with_gradients(pieces)

    def with_gradients(self, pieces: Sequence[Float[Tensor, "m k G T o"]]) -> "KroneckerUse":
        """Return this use with ``pieces`` as its gradients."""
        return KroneckerUse(self.source, *pieces, transposed=self.transposed)

    def detach(self) -> "KroneckerUse":
        """Return this use without a graph."""
        pieces = [piece.detach() for piece in self.pieces]
        return KroneckerUse(self.source.detach(), *pieces, transposed=self.transposed)

    def _gradient_columns(self) -> "list[Float[Tensor, 'b G o R']]":
        """Return batches of matrices whose columns are all the gradients.

        The gradients of a convolution have their positions last in memory, so one matrix per row
        needs no copy. Its Gram is at most as large as the gradients, and short sums round less.
        Other gradients form one matrix.
        """
        piece = self.pieces[0]
        if piece.stride(3) == 1 and self.positions >= piece.shape[4] > 1:
            return [piece.flatten(0, 1).mT for piece in self.pieces]
        return [self.gradients.permute(2, 0, 1, 3, 4).flatten(1, 3).mT[None]]
