"""The exact Hessian of a scalar in the weights, for small networks."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor


class ExactHessian:
    """The Hessian of a scalar in the weights, one row per backward pass."""

    def __init__(
        self, value: Float[Tensor, ""], weights: Mapping[str, Tensor], differentiable: bool
    ) -> None:
        self._weights = dict(weights)
        self._differentiable = differentiable
        found = torch.autograd.grad(
            value,
            list(weights.values()),
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        self._gradients = dict(zip(weights, found, strict=True))

    def block(self, names: Sequence[str]) -> Float[Tensor, "n n"]:
        """The dense block of some parameters, in their order, symmetrised."""
        rows = [
            torch.cat([part.reshape(-1) for part in self._row(element, names)])
            for name in names
            for element in self._gradients[name].reshape(-1)
        ]
        matrix = torch.stack(rows)
        return 0.5 * (matrix + matrix.mT)

    def diagonal(self, name: str) -> Float[Tensor, " n"]:
        """The diagonal of one parameter."""
        elements = self._gradients[name].reshape(-1)
        return torch.stack(
            [self._row(element, [name])[0].reshape(-1)[i] for i, element in enumerate(elements)]
        )

    def _row(self, element: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
        targets = [self._weights[name] for name in names]
        if not element.requires_grad:  # the scalar is linear in this weight
            return [torch.zeros_like(target) for target in targets]
        return torch.autograd.grad(
            element,
            targets,
            retain_graph=True,
            create_graph=self._differentiable,
            allow_unused=True,
            materialize_grads=True,
        )
