"""Compute Kronecker factors for a convolution's weight."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import Gram, QuadraticForm, symmetric
from evigrad.core.curvature.kronecker import KroneckerUse
from evigrad.network.convolutions import Geometry, convolution_patches
from evigrad.network.patch_grams import patch_gram, patch_gram_pull, patch_sum


class ConvolutionUse(KroneckerUse):
    """One use of a convolution's weight. Input patches are formed only when they are read."""

    def __init__(
        self,
        x: Float[Tensor, "mF c *space"],
        gradients: Float[Tensor, "m k G FT o"],
        geometry: Geometry,
    ) -> None:
        super().__init__(None, gradients)
        self._x, self._geometry = x, geometry

    @property
    def inputs(self) -> Float[Tensor, "m G T i"]:
        """The input patches, computed each time this property is read."""
        x = self._x.to(self.pieces[0].dtype)
        return convolution_patches(x, len(x) // self.num_data, self._geometry).mT

    def input_gram(self, dtype: torch.dtype) -> Float[Tensor, "G i i"]:
        geometry = self._geometry
        return Gram.apply(
            self._x.to(dtype),
            lambda x: patch_gram(x, geometry),
            lambda x, c: patch_gram_pull(x, c, geometry),
        )

    def inner_input_gram(self, cotangent: Float[Tensor, "G i i"]) -> Float[Tensor, ""]:
        geometry = self._geometry
        return QuadraticForm.apply(
            self._x.to(cotangent.dtype),
            symmetric(cotangent),
            lambda x, c: patch_gram_pull(x, c, geometry),
        )

    def input_sum(self) -> Float[Tensor, "m G i"]:
        sums = patch_sum(self._x.to(self.pieces[0].dtype), self._geometry)
        sums = sums.unflatten(0, (self.num_data, -1)).sum(1)
        return sums.reshape(self.num_data, self._geometry.groups, -1)

    def detach(self) -> KroneckerUse:
        use = copy.copy(self)
        use._x = self._x.detach()
        return use.with_gradients([piece.detach() for piece in self.pieces])
