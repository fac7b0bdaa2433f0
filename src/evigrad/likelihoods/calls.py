"""Calls to the methods of a likelihood. Errors name the class and method of the likelihood."""

import math
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from evigrad.core.algebra import is_finite
from evigrad.errors import (
    ConfigurationError,
    EvigradError,
    InputError,
    NotFiniteOutputError,
    raised_in,
    shape_or_type,
)
from evigrad.inputs import check_dense, refuse_where
from evigrad.likelihoods.base import Likelihood

# Outputs of at most this size do not overflow in the density of a target that it allows.
_MODERATE = 10.0
_SHOWN = 5  # numbers of a target or output in an error


def check_targets(
    likelihood: Likelihood, f_shape: Sequence[int], y: object, device: torch.device
) -> None:
    """Check the targets, and the likelihood's weights for them.

    Raises:
        ConfigurationError: If ``weights`` does not return one number per example or output.
        InputError: If the targets are invalid, or not on the device of the outputs, or if a weight
            is negative or not finite.
    """
    name, shape = type(likelihood).__name__, tuple(f_shape)
    if isinstance(y, Tensor) and (y.is_nested or y.layout != torch.strided):
        check_dense("Targets", y)
    if isinstance(y, Tensor) and y.device != device:
        raise InputError(
            f"Targets must be on the same device as the outputs ({device}), got {y.device}. Move"
            " the targets or the model."
        )
    with raised_in(lambda: f"validate of {name}, {_given(f_shape, y)},"):
        likelihood.validate(f_shape, y)  # pyright: ignore[reportArgumentType]
    if not isinstance(y, Tensor):
        return
    with raised_in(lambda: f"weights of {name}, {_given(f_shape, y)},"):
        weights = likelihood.weights(y)
    if weights is None:
        return
    shapes = (shape[:1], (*shape[:1], 1), shape)
    if not isinstance(weights, Tensor) or tuple(weights.shape) not in shapes:
        raise ConfigurationError(
            f"weights of {name} must return a tensor of shape {shape[:1]} or {shape}, with one"
            f" factor per example or per output, got {shape_or_type(weights)}."
        )
    wrong = ~(weights >= 0) | weights.isinf()
    refuse_where(wrong, weights, f"from weights of {name} must be finite and at least 0", "Weight")


def lacks_a_column(likelihood: Likelihood, shape: Sequence[int], y: Tensor) -> bool:
    """Return whether targets (m,) are valid only in the shape (m, 1)."""
    if y.ndim != 1 or len(shape) != 1:
        return False
    for targets, is_column in ((y, False), (y.unsqueeze(1), True)):
        with suppress(EvigradError):
            check_targets(likelihood, (len(y), *shape), targets, y.device)
            return is_column
    return False  # a check of the targets explains why neither fits


def in_columns(likelihood: Likelihood, shape: Sequence[int], y: Tensor) -> Tensor:
    """Return the targets, in the shape (m, 1) if they are valid only in this shape."""
    is_tensor = isinstance(y, Tensor)
    return y.unsqueeze(1) if is_tensor and lacks_a_column(likelihood, shape, y) else y


def _given(f_shape: Sequence[int], y: object) -> str:
    """Return the shapes that a likelihood got, in words."""
    m, what = f_shape[:1], type(y).__name__
    if isinstance(y, Tensor):
        what = f"{_shape(y.shape, m)} of {y.dtype}"
    return f"given outputs {_shape(f_shape, m)} and targets {what}"


def _shape(shape: Sequence[int], m: Sequence[int]) -> str:
    """Return a shape in words, with "m" for the number of examples ``m[0]``.

    This number may be the size of a first trial, which would confuse users.
    """
    sizes = ["m" if tuple(shape[:1]) == tuple(m) else str(n) for n in shape[:1]]
    sizes += [str(n) for n in shape[1:]]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def check_finite(what: str, value: Tensor) -> None:
    """Raise a NotFiniteOutputError if an entry is NaN or infinite. Dimension 0 indexes examples."""
    if is_finite(value):
        return
    finite = torch.isfinite(value).flatten(1).all(1)
    if finite.any():
        raise NotFiniteOutputError(
            f"{what} contain NaN or infinite values for only {int((~finite).sum())} of"
            f" {len(finite)} examples. Fix the inputs of these examples, or remove the examples."
            " (If a mask hides an entire example, its mean or softmax is NaN.)"
        )
    raise NotFiniteOutputError(
        f"{what} contain NaN or infinite values for all examples, so training has diverged."
        " Lower the learning rate."
    )


def log_probabilities(
    likelihood: Likelihood, f: Tensor, y: Tensor, *, compare: bool = True, allowed: bool = True
) -> Tensor:
    """Return log p(y_n|f_n) of each example, (m,), in nats.

    If ``compare`` is True, the first example is also evaluated by itself, and the two results are
    compared. This check finds targets with a wrong shape that broadcasts against other examples.
    If ``allowed`` is True, the density must allow the targets, as it must for training data.

    Raises:
        ConfigurationError: If the density does not return one number per example.
        InputError: If the density of an example depends on other examples, ``log_prob`` raises
            an exception, or the density does not allow a target.
        NotFiniteOutputError: If ``compare`` is True and the outputs are not finite.
    """
    m = f.shape[:1]
    name = type(likelihood).__name__
    with raised_in(lambda: f"log_prob of {name}, {_given(f.shape, y)},"):
        log_prob = likelihood.log_prob(f, y)
    if log_prob.shape != (len(f),):
        raise ConfigurationError(
            f"log_prob of {type(likelihood).__name__} must return one number per example, in the"
            f" shape (m,) for outputs {_shape(f.shape, m)}, got {_shape(log_prob.shape, m)}. Sum"
            " over the outputs, as in .sum(1)."
        )
    if compare and not is_finite(f):
        raise NotFiniteOutputError(
            "The model's outputs contain NaN or infinite values for these inputs. Check the"
            " weights (training may have diverged) and the inputs."
        )
    # Targets of a wrong shape can broadcast against the other data without an error.
    if compare and len(f) > 1:
        with torch.no_grad():
            by_itself = likelihood.log_prob(f[:1], y[:1])[0]
        first, in_batch = torch.stack([by_itself, log_prob[0].detach()]).tolist()
        differs = not math.isclose(first, in_batch, rel_tol=1e-3, abs_tol=1e-3)
        if differs and not (math.isnan(first) and math.isnan(in_batch)):
            raise InputError(
                f"log_prob of {type(likelihood).__name__} must not depend on other examples, got"
                f" {in_batch:.4g} for an example in a batch and {first:.4g} for"
                f" the same example by itself. Targets of shape {_shape(y.shape, m)} broadcast"
                f" against outputs {_shape(f.shape, m)}. Use targets with the outputs' shape, such"
                " as y.unsqueeze(1), or fix log_prob."
            )
    if allowed and not is_finite(log_prob):
        _check_density(likelihood, f.detach(), y, log_prob)
    return log_prob


def _check_density(likelihood: Likelihood, f: Tensor, y: Tensor, log_prob: Tensor) -> None:
    """Raise an InputError if a log density is not finite, and huge outputs are not the cause."""
    if not is_finite(f):
        return
    with torch.no_grad():
        moderate = likelihood.log_prob(f.clamp(-_MODERATE, _MODERATE), y)
    wrong = ~(log_prob.isfinite() | moderate.isfinite())
    if not wrong.any():
        return
    first = int(wrong.int().argmax())
    target, outputs = (t[first].flatten()[:_SHOWN].tolist() for t in (y, f))
    raise InputError(
        f"log_prob of {type(likelihood).__name__} must be finite at finite outputs, got NaN or"
        f" infinite values for {int(wrong.sum())} of {len(f)} targets. The first of them is"
        f" {', '.join(f'{v:.4g}' for v in target)}, for outputs"
        f" {', '.join(f'{v:.4g}' for v in outputs)}. Remove or transform targets that the density"
        " does not allow, or fix log_prob."
    )


def summed_metrics(likelihood: Likelihood, f: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
    """Return the sums of the likelihood's ``metrics`` for these examples, and their counts."""
    name = type(likelihood).__name__
    with raised_in(lambda: f"metrics of {name}, {_given(f.shape, y)},"):
        sums = likelihood.metrics(f, y)
        pairs = {name: e if isinstance(e, tuple) else (e, len(f)) for name, e in sums.items()}
        return {name: (float(value), float(count)) for name, (value, count) in pairs.items()}


def class_probabilities(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Return class probabilities for outputs (m, C), or raise an error if there are none."""
    name = type(likelihood).__name__
    with raised_in(f"probabilities of {name}"):
        is_other = "probabilities" in likelihood._inherited
        probabilities = None if is_other else likelihood.probabilities(f)
    if probabilities is None:
        raise ConfigurationError(
            f"{name} has no class probabilities. For regression, use mean and std, or log_prob(y),"
            " which works for any likelihood. A custom classification likelihood must define"
            " probabilities(f)."
        )
    return of_outputs(probabilities, f)


def noise_variance(likelihood: Likelihood, f: Tensor) -> Tensor | None:
    """Return the variance of Gaussian noise for outputs (m, C), or None for other densities."""
    if "noise_variance" in likelihood._inherited:
        return None
    with raised_in(f"noise_variance of {type(likelihood).__name__}"):
        variance = likelihood.noise_variance(f)
    return None if variance is None else of_outputs(variance, f)


def moments(
    likelihood: Likelihood, f: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the mean of y, the variance of E[y|f] and the noise variance, or None if unknown."""
    noise = noise_variance(likelihood, f)
    if noise is not None:
        return f, covariance.diagonal(dim1=1, dim2=2).clamp(min=0.0), noise
    if "moments" in likelihood._inherited:
        return None
    with raised_in(f"moments of {type(likelihood).__name__}"):
        target_moments = likelihood.moments(f, covariance)
    if target_moments is None:
        return None
    mean, epistemic, noise = (of_outputs(moment, f) for moment in target_moments)
    return mean, epistemic, noise


def cumulative(likelihood: Likelihood, f: Tensor, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return P(target ≤ y | f) of each target, or raise an error if there are no such numbers."""
    name = type(likelihood).__name__
    with raised_in(f"cdf of {name}"):
        values = None if "cdf" in likelihood._inherited else likelihood.cdf(f, y)
    if values is None:
        fix = "Define it, or use sample_targets(n).quantile(q, dim=0)."
        if likelihood.is_classification:
            fix = "Use probabilities, or Ordinal if the classes have an order."
        raise ConfigurationError(
            f"{name} has no quantiles, intervals and cumulative probabilities, because it does not"
            f" define cdf(f, y) for its log_prob. {fix}"
        )
    if values.shape != shape:
        raise ConfigurationError(
            f"cdf of {name} must return one number per target, {shape}, got {tuple(values.shape)}."
        )
    if torch.is_grad_enabled() and f.requires_grad and not values.requires_grad:
        raise ConfigurationError(
            f"cdf of {name} has no derivative with respect to f, but the inputs of the prediction"
            " require a gradient. Predict under torch.no_grad(), or make cdf differentiable."
        )
    return of_outputs(values, f)


def sampled_targets(likelihood: Likelihood, f: Tensor, generator: torch.Generator) -> Tensor:
    """Return targets without conditions, drawn for outputs (m, C)."""
    name = type(likelihood).__name__
    if "sample" in likelihood._inherited or type(likelihood).sample is Likelihood.sample:
        raise ConfigurationError(
            f"{name} cannot draw targets, because it does not define sample(f, generator) for its"
            " log_prob. Define this method."
        )
    with raised_in(f"sample of {name}"):
        return likelihood.plain_targets(likelihood.sample(f, generator)).detach()


def of_outputs(value: Tensor, f: Tensor) -> Tensor:
    """Return a value with a graph only if the outputs have one, as parameters may have graphs."""
    return value if f.requires_grad else value.detach()
