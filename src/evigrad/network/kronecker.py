"""The inputs of a convolution's weight, for Kronecker factors."""

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import Gram, QuadraticForm, symmetric
from evigrad.core.curvature.kronecker import MatrixInputs
from evigrad.network.convolutions import Geometry, convolution_patches
from evigrad.network.patch_grams import patch_gram, patch_gram_pull, patch_sum


class PatchInputs(MatrixInputs):
    """The input patches of a convolution's weight. They are formed only when they are read.

    Args:
        x: Images, of all augmentation samples F of m examples.
        num_data: The number of examples, m.
        geometry: The sizes of the convolution.
    """

    def __init__(self, x: Float[Tensor, "mF c *space"], num_data: int, geometry: Geometry) -> None:
        self._x, self._num_data, self._geometry = x, num_data, geometry

    def matrices(self, dtype: torch.dtype) -> Float[Tensor, "m G FT i"]:
        x = self._x.to(dtype)
        return convolution_patches(x, len(x) // self._num_data, self._geometry).mT

    def gram(self, dtype: torch.dtype) -> Float[Tensor, "G i i"]:
        geometry = self._geometry
        return Gram.apply(
            self._x.to(dtype),
            lambda x: patch_gram(x, geometry),
            lambda x, c: patch_gram_pull(x, c, geometry),
        )

    def inner_gram(self, cotangent: Float[Tensor, "G i i"]) -> Float[Tensor, ""]:
        geometry = self._geometry
        return QuadraticForm.apply(
            self._x.to(cotangent.dtype),
            symmetric(cotangent),
            lambda x, c: patch_gram_pull(x, c, geometry),
        )

    def sum(self, dtype: torch.dtype) -> Float[Tensor, "m G i"]:
        sums = patch_sum(self._x.to(dtype), self._geometry)
        sums = sums.unflatten(0, (self._num_data, -1)).sum(1)
        return sums.reshape(self._num_data, self._geometry.groups, -1)

    def detach(self) -> MatrixInputs:
        return PatchInputs(self._x.detach(), self._num_data, self._geometry)
