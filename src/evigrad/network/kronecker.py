"""The inputs of a convolution's weight, for Kronecker factors."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import Gram, QuadraticForm, symmetric
from evigrad.core.curvature.kronecker import MatrixInputs
from evigrad.network.convolutions import Geometry, convolution_patches
from evigrad.network.patch_grams import patch_gram, patch_gram_pull, patch_sum


@dataclass(frozen=True, eq=False)
class PatchInputs(MatrixInputs):
    """The input patches of a convolution's weight. They are formed only when they are read.

    Attributes:
        values: Images (m F, c, *space), of all F augmentation samples of m examples.
        num_data: The number of examples, m.
        geometry: The sizes of the convolution.
    """

    values: Float[Tensor, "mF c *space"]
    num_data: int
    geometry: Geometry

    def matrices(self, dtype: torch.dtype) -> Float[Tensor, "m G FT i"]:
        x = self.values.to(dtype)
        return convolution_patches(x, len(x) // self.num_data, self.geometry).mT

    def gram(self, dtype: torch.dtype) -> Float[Tensor, "G i i"]:
        geometry = self.geometry
        return Gram.apply(
            self.values.to(dtype),
            lambda x: patch_gram(x, geometry),
            lambda x, c: patch_gram_pull(x, c, geometry),
        )

    def inner_gram(self, cotangent: Float[Tensor, "G i i"]) -> Float[Tensor, ""]:
        geometry = self.geometry
        return QuadraticForm.apply(
            self.values.to(cotangent.dtype),
            symmetric(cotangent),
            lambda x, c: patch_gram_pull(x, c, geometry),
        )

    def sum(self, dtype: torch.dtype) -> Float[Tensor, "m G i"]:
        sums = patch_sum(self.values.to(dtype), self.geometry)
        sums = sums.unflatten(0, (self.num_data, -1)).sum(1)
        return sums.reshape(self.num_data, self.geometry.groups, -1)

    def detach(self) -> MatrixInputs:
        return PatchInputs(self.values.detach(), self.num_data, self.geometry)
