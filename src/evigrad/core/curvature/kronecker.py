"""Kronecker factors of one use of a weight: its inputs, its gradients and their sums."""

import copy

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


class KroneckerUse:
    """One use of a weight as a matrix, the same matrix at T positions.

    The rows of the weight, reshaped to (G, out, in), are Σ_T gradients ⊗ inputs; G is the number
    of channel groups, whose blocks are stacked along the weight's dim 0.

    Args:
        inputs: The factors that the matrix multiplies; may have a lower precision.
        gradients: Gradients of the rows in the product.
        transposed: Whether the weight is (in, out).
    """

    gradients: Float[Tensor, "m k G T o"]

    def __init__(
        self,
        inputs: Float[Tensor, "m G T i"] | None,
        gradients: Float[Tensor, "m k G T o"],
        transposed: bool = False,
    ) -> None:
        self._inputs = inputs
        self.gradients, self.transposed = gradients, transposed

    @property
    def inputs(self) -> Float[Tensor, "m G T i"]:
        """The factors that the matrix multiplies, in the gradients' type."""
        assert self._inputs is not None
        return self._inputs.to(self.gradients.dtype)

    @property
    def num_data(self) -> int:
        """The number of data, m."""
        return self.gradients.shape[0]

    @property
    def positions(self) -> int:
        """The number of positions of a datum, T."""
        return self.gradients.shape[3]

    @property
    def num_rows(self) -> int:
        """The number of outer products in ``gradient_gram``, m k T."""
        return self.gradients.shape[0] * self.gradients.shape[1] * self.gradients.shape[3]

    def input_gram(self, dtype: torch.dtype) -> Float[Tensor, "G i i"]:
        """Σ a aᵀ over data and positions, summed in this type; once differentiable."""
        return Gram.apply(self._flat(dtype), outer_gram, outer_gram_pull)

    def inner_input_gram(self, cotangent: Float[Tensor, "G i i"]) -> Float[Tensor, ""]:
        """⟨cotangent, ``input_gram``⟩ in the cotangent's type; once differentiable in inputs."""
        return inner_gram(self._flat(cotangent.dtype), cotangent)

    def input_sum(self) -> Float[Tensor, "m G i"]:
        """The inputs summed over positions."""
        return self.inputs.sum(2)

    def gradient_rows(self) -> Float[Tensor, "G R o"]:
        """The gradients of all data, rows and positions as one matrix."""
        return self.gradients.permute(2, 0, 1, 3, 4).flatten(1, 3)

    def gradient_gram(self) -> Float[Tensor, "G o o"]:
        """Σ g gᵀ over data, rows and positions."""
        if self._positions_last:
            columns = self._gradient_columns()
            return (columns @ columns.mT).sum(0)
        rows = self.gradient_rows()
        return rows.mT @ rows

    def inner_gradient_gram(self, cotangent: Float[Tensor, "G o o"]) -> Float[Tensor, ""]:
        """⟨cotangent, ``gradient_gram``⟩; once differentiable in the gradients."""
        if self._positions_last:
            columns = self._gradient_columns()
            return QuadraticForm.apply(columns, symmetric(cotangent), lambda g, c: c @ g)
        return inner_gram(self.gradient_rows(), cotangent)

    def scaled(self, scale: Float[Tensor, "m k"] | None, dtype: torch.dtype) -> "KroneckerUse":
        """The same use, with gradients in this type and times the scale of each row (None: 1)."""
        scaled_use = copy.copy(self)
        scaled_use.gradients = self.gradients.to(dtype)
        if scale is not None:
            scaled_use.gradients = scaled_use.gradients * scale.to(dtype)[:, :, None, None, None]
        return scaled_use

    def detach(self) -> "KroneckerUse":
        """The same factors without a graph."""
        return KroneckerUse(self.inputs.detach(), self.gradients.detach(), self.transposed)

    @property
    def _positions_last(self) -> bool:
        """Whether a product for each row takes less time than a copy with channels last.

        The gradients of a convolution lie in memory with their positions last. The products are
        then no larger than the gradients, and summing few numbers at a time rounds less.
        """
        return self.gradients.stride(3) == 1 and self.positions >= self.gradients.shape[4] > 1

    def _gradient_columns(self) -> Float[Tensor, "mk G o T"]:
        return self.gradients.flatten(0, 1).mT

    def _flat(self, dtype: torch.dtype) -> Float[Tensor, "G mT i"]:
        assert self._inputs is not None
        return self._inputs.to(dtype).transpose(0, 1).flatten(1, 2)
