"""Calibrate predictions of classes on held-out data.

The outputs keep their distribution up to two factors: a on the mean, which is an inverse
temperature, and c on the covariance. Both maximize the log likelihood of the held-out data.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods.targets import as_numbers, precisely
from evigrad.posterior.predictive import Predictive

# Starts of the square root of c. The likelihood may have several modes.
_STARTS = (1.0, 0.3, 0.1)
# Held-out data without errors would make a infinite.
_LARGEST = 20.0
_EVALUATIONS = 60


def best_scales(prediction: Predictive, y: Any, weights: Any = None) -> tuple[float, float]:
    """Return the factors a and c that maximize the mean ``log_prob`` of held-out targets.

    Raises:
        ConfigurationError: If the targets are not classes.
        InputError: If the targets do not match the prediction.
    """
    if not prediction.likelihood.is_classification:
        raise ConfigurationError(
            "calibrate needs a classification likelihood, got"
            f" {type(prediction.likelihood).__name__}. Its noise is learned from the training data."
        )
    device = prediction.outputs.device
    y = as_numbers(y).to(device)
    outputs, covariance = (precisely(t) for t in (prediction.outputs, prediction.covariance))
    shares = None if weights is None else as_numbers(weights).to(outputs)
    if shares is not None and shares.shape != outputs.shape[:-1]:
        raise InputError(
            f"weights must have one number per target, {tuple(outputs.shape[:-1])}, got"
            f" {tuple(shares.shape)}."
        )

    def factors(scales: Tensor) -> tuple[Tensor, Tensor]:
        return scales[0].clamp(1.0 / _LARGEST, _LARGEST), scales[1].square()

    def loss(scales: Tensor) -> Tensor:
        a, c = factors(scales)
        scaled = replace(prediction, outputs=a * outputs, covariance=c * covariance)
        log_prob = scaled.log_prob(y)
        return -(log_prob if shares is None else log_prob * shares / shares.mean()).nanmean()

    with torch.enable_grad():
        starts = [torch.tensor([1.0, s], dtype=outputs.dtype, device=device) for s in _STARTS]
        scales = min(starts, key=lambda start: float(loss(start))).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [scales], max_eval=_EVALUATIONS, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(scales)
            (scales.grad,) = torch.autograd.grad(value, scales)
            return value

        optimizer.step(closure)
    a, c = factors(scales.detach())
    return float(a), float(c)
