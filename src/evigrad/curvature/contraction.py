"""Gram matrices of a layer's rows without forming the rows.

The rows of a matrix-like weight are Σ_t g_(n,j,t) ⊗ a_(n,t) over its positions t. Their inner
products Σ_(t,t') (a_(n,t)·a_(n',t')) (g_(n,j,t)·g_(n',j',t')) are, for few positions and a large
matrix, far cheaper than the rows, in operations and in memory. *Jacobian contraction* and
*NTK-vector products by structured derivatives* in Novak, Sohl-Dickstein, Schoenholz (2022), *Fast
Finite Width Neural Tangent Kernel*; the choice by operation count is theirs too.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.jacobians import MatrixUse


def contracted(
    uses: Mapping[str, MatrixUse], num_data: int, rows_per_datum: int
) -> dict[str, MatrixUse]:
    """The weights whose Gram takes fewer multiplications without forming the rows."""
    cheap = {}
    for name, use in uses.items():
        rows = num_data * rows_per_datum
        size = use.inputs * use.outputs
        formed = rows * size * use.positions + rows**2 * size
        pairs = (rows * use.positions) ** 2
        by_pairs = (num_data * use.positions) ** 2 * use.inputs + pairs * (use.outputs + 1)
        if by_pairs < formed:
            cheap[name] = use
    return cheap


def contraction_gram(
    inputs: Float[Tensor, "m T i"], gradients: Float[Tensor, "m k T o"]
) -> Float[Tensor, "R R"]:
    """The Gram of the rows Σ_t gradients ⊗ inputs; R = m k, the rows of a datum side by side."""
    (m, k), positions = gradients.shape[:2], inputs.shape[1]
    gram = inputs.new_zeros(m * k, m * k)
    for t in range(positions):
        for u in range(positions):
            left = _spread(inputs[:, t] @ inputs[:, u].mT, k)
            gram = gram + left * (gradients[:, :, t].flatten(0, 1) @ _flat(gradients, u).mT)
    return gram


def contraction_cotangents(
    inputs: Float[Tensor, "m T i"],
    gradients: Float[Tensor, "m k T o"],
    cotangent: Float[Tensor, "R R"],
) -> tuple[Float[Tensor, "m T i"], Float[Tensor, "m k T o"]]:
    """Cotangents of the inputs and gradients of ``contraction_gram``; the Gram's is symmetric."""
    (m, k), positions = gradients.shape[:2], inputs.shape[1]
    twice = 2 * cotangent
    of_inputs, of_gradients = torch.zeros_like(inputs), torch.zeros_like(gradients)
    for t in range(positions):
        for u in range(positions):
            left = _spread(inputs[:, t] @ inputs[:, u].mT, k)
            of_gradients[:, :, t] += ((twice * left) @ _flat(gradients, u)).unflatten(0, (m, k))
            right = twice * (_flat(gradients, t) @ _flat(gradients, u).mT)
            of_inputs[:, t] += right.reshape(m, k, m, k).sum((1, 3)) @ inputs[:, u]
    return of_inputs, of_gradients


def _flat(gradients: Float[Tensor, "m k T o"], position: int) -> Float[Tensor, "R o"]:
    return gradients[:, :, position].flatten(0, 1)


def _spread(products: Float[Tensor, "m m"], k: int) -> Float[Tensor, "R R"]:
    """Repeat the number of each pair of data for each pair of their rows."""
    if k == 1:
        return products
    return products.repeat_interleave(k, 0).repeat_interleave(k, 1)
