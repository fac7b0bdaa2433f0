"""The exact Hessian of the negative log likelihood, for small networks.

Unlike the GGN it is not positive semidefinite: away from a maximum of the posterior
I + P0^{-1/2} H P0^{-1/2} may have no log-determinant, and ``log_det`` then says so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.curvature.base import Statistic, Structure
from evigrad.jacobians.arguments import model_outputs
from evigrad.jacobians.state import model_run

StatisticT = TypeVar("StatisticT", bound=Statistic)


class ExactHessian:
    """The Hessian of a scalar in the weights, one row per backward pass.

    Args:
        value: The scalar, with a graph into the weights.
        weights: What it is differentiated in.
        differentiable: Whether the Hessian itself carries a graph.
    """

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
        """The dense block of some parameters, in their order, symmetrised.

        Args:
            names: The parameters.

        Returns:
            As many rows and columns as these parameters have elements.
        """
        rows = [
            torch.cat([part.reshape(-1) for part in self._row(element, names)])
            for name in names
            for element in self._gradients[name].reshape(-1)
        ]
        matrix = torch.stack(rows)
        return 0.5 * (matrix + matrix.mT)

    def diagonal(self, name: str) -> Float[Tensor, " n"]:
        """The diagonal of one parameter.

        Args:
            name: The parameter.

        Returns:
            One number for each of its elements.
        """
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


def hessian_statistic(
    structure: Structure[StatisticT],
    statistic: StatisticT | None,
    model: nn.Module,
    weights: Mapping[str, Tensor],
    x: Tensor,
    negative_log_likelihood: Callable[[Tensor], Tensor],
    differentiable: bool = False,
) -> StatisticT:
    """Add the exact Hessian of a micro-batch, −∇²_w (1/T) log p(y|f(x)), to a statistic.

    As many backward passes as there are weights. Neither the weights' ``.grad`` nor anything else
    of the model is touched.

    Args:
        structure: One made of blocks of H: full, blockdiag or diag.
        statistic: What was accumulated so far, None at the start.
        model: In evaluation mode.
        weights: Its weights, by name.
        x: Inputs, (m, ...).
        negative_log_likelihood: From the outputs (m, C) to −(1/T) Σ_n log p(y_n|f_n), in nats.
        differentiable: Whether the statistic carries a graph into hyperparameters, of the model's
            forward pass or of the likelihood.

    Returns:
        The statistic of everything so far.

    Raises:
        ConfigurationError: The structure is made of rows (ntk, kfac).
    """
    with model_run(model), torch.enable_grad():
        # In the model's own parameters: replaced ones miss what a module holds by reference.
        value = negative_log_likelihood(model_outputs(model, x))
        hessian = ExactHessian(value, weights, differentiable)
        return structure.accumulate_hessian(statistic, hessian)
