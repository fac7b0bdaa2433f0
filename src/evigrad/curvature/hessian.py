"""The exact Hessian of the negative log likelihood, for small networks.

Unlike the GGN it is not positive semidefinite: away from a maximum of the posterior
I + P0^{-1/2} H P0^{-1/2} may have no log-determinant, and ``log_det`` then raises.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.jacobians import model_outputs, model_run


class ExactHessian:
    """The Hessian of a scalar in the weights, one row per backward pass.

    It leaves the weights' ``.grad`` alone. The scalar ``value`` has a graph into the weights; with
    ``differentiable`` that into what else it depends on is kept.
    """

    def __init__(
        self, value: Float[Tensor, ""], weights: Mapping[str, Tensor], differentiable: bool
    ) -> None:
        self._weights = dict(weights)
        self._differentiable = differentiable
        gradients = torch.autograd.grad(
            value,
            list(weights.values()),
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        self._gradients = dict(zip(weights, gradients, strict=True))

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


@contextmanager
def exact_hessian(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    x: Tensor,
    negative_log_likelihood: Callable[[Tensor], Tensor],
    differentiable: bool = False,
) -> Iterator[ExactHessian]:
    """Yield the Hessian −∇²_w (1/T) log p(y|f(x)) of inputs x (m, ...), for ``accumulate_hessian``.

    It takes as many backward passes as there are weights, inside the context. The model is in
    evaluation mode; ``negative_log_likelihood`` maps its outputs (m, C) to −(1/T) Σ_n log
    p(y_n|f_n), in nats; ``differentiable`` keeps a graph into hyperparameters of model or
    likelihood.

    Yields:
        The Hessian.
    """
    with model_run(model), torch.enable_grad():
        # Not with substituted parameters: a module may hold its own by reference elsewhere.
        value = negative_log_likelihood(model_outputs(model, x))
        yield ExactHessian(value, weights, differentiable)
