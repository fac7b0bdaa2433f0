"""The exact Hessian of the negative log likelihood, for small networks.

Unlike the GGN it is not positive semidefinite: away from a maximum of the posterior
I + P0^{-1/2} H P0^{-1/2} may have no log-determinant, and ``log_det`` then raises.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from evigrad.curvature.base import StatisticT, Structure
from evigrad.jacobians import ExactHessian, model_outputs, model_run


def hessian_statistic(
    structure: Structure[StatisticT],
    statistic: StatisticT | None,
    model: nn.Module,
    weights: Mapping[str, Tensor],
    x: Tensor,
    negative_log_likelihood: Callable[[Tensor], Tensor],
    differentiable: bool = False,
) -> StatisticT:
    """Return a statistic with the Hessian −∇²_w (1/T) log p(y|f(x)) of a micro-batch added.

    It takes as many backward passes as there are weights, and leaves the model's ``.grad`` alone.

    Args:
        structure: One made of blocks of H: full, blockdiag or diag.
        statistic: The sum so far, None at the start.
        model: In evaluation mode.
        weights: Its weights, by name.
        x: Inputs, (m, ...).
        negative_log_likelihood: From the outputs (m, C) to −(1/T) Σ_n log p(y_n|f_n), in nats.
        differentiable: Whether to keep a graph into hyperparameters of the model or likelihood.

    Raises:
        ConfigurationError: The structure is made of rows (ntk, kfac).
    """
    with model_run(model), torch.enable_grad():
        # Not with substituted parameters: a module may hold its own by reference elsewhere.
        value = negative_log_likelihood(model_outputs(model, x))
        hessian = ExactHessian(value, weights, differentiable)
        return structure.accumulate_hessian(statistic, hessian)
