"""Kronecker factors of one use of a weight: its inputs, its gradients and their sums."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import Gram, inner_gram, outer_gram, outer_gram_pull


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

    def input_gram(self, dtype: torch.dtype) -> Float[Tensor, "G i i"]:
        """Σ a aᵀ over data and positions, summed in this type; once differentiable."""
        return Gram.apply(self._flat(dtype), outer_gram, outer_gram_pull)

    def inner_input_gram(self, cotangent: Float[Tensor, "G i i"]) -> Float[Tensor, ""]:
        """⟨cotangent, ``input_gram``⟩ in the cotangent's type; once differentiable in inputs."""
        return inner_gram(self._flat(cotangent.dtype), cotangent)

    def input_sum(self) -> Float[Tensor, "m G i"]:
        """The inputs summed over positions."""
        return self.inputs.sum(2)

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

    def _flat(self, dtype: torch.dtype) -> Float[Tensor, "G mT i"]:
        assert self._inputs is not None
        return self._inputs.to(dtype).transpose(0, 1).flatten(1, 2)
