"""Calls of a likelihood that may be the user's own: errors in its code say so."""

from collections.abc import Sequence

import torch
from torch import Tensor

from evigrad.errors import ConfigurationError, InputError, NotFiniteOutputError, raised_in
from evigrad.likelihoods.base import Likelihood


def check_targets(
    likelihood: Likelihood, f_shape: Sequence[int], y: object, device: torch.device
) -> None:
    """Refuse targets on another device than the outputs, or that ``validate`` refuses."""
    if isinstance(y, Tensor) and y.device != device:
        raise InputError(f"Targets are on {y.device}, outputs on {device}: move one of them.")
    with raised_in(f"validate of {type(likelihood).__name__}, {_given(f_shape, y)},"):
        likelihood.validate(f_shape, y)  # pyright: ignore[reportArgumentType]


def _given(f_shape: Sequence[int], y: object) -> str:
    """The shapes that a likelihood was given, in words."""
    what = f"{tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
    return f"given outputs {tuple(f_shape)} and targets {what}"


def check_finite(what: str, value: Tensor) -> None:
    """Refuse NaN and infinite values; dim 0 counts data."""
    if torch.isfinite(value).all():
        return
    finite = torch.isfinite(value).flatten(1).all(1)
    if finite.any():
        raise NotFiniteOutputError(
            f"{what} hold NaN or infinite values for {int((~finite).sum())} of {len(finite)}"
            " examples only: fix their inputs or omit them (a mask may leave nothing of an example,"
            " and a mean or a softmax over nothing is NaN)."
        )
    raise NotFiniteOutputError(f"{what} hold NaN or infinite values: training has diverged.")


def log_probabilities(
    likelihood: Likelihood, f: Tensor, y: Tensor, *, alone: bool = True
) -> Tensor:
    """Return log p(y_n|f_n) of each datum, (m,), in nats.

    ``alone`` evaluates the first datum alone too, and compares: targets of a wrong shape can
    broadcast against the other data without an error.

    Raises:
        ConfigurationError: If the density does not return one number for each datum.
        InputError: If it depends on the other data, or raises an exception.
        NotFiniteOutputError: If the outputs are not finite.
    """
    with raised_in(f"log_prob of {type(likelihood).__name__}, {_given(f.shape, y)},"):
        log_prob = likelihood.log_prob(f, y)
    if log_prob.shape != (len(f),):
        raise ConfigurationError(
            f"log_prob of {type(likelihood).__name__} must return one number for each datum,"
            f" ({len(f)},), not {tuple(log_prob.shape)}: sum over the outputs, as in .sum(1)."
        )
    if alone and not f.isfinite().all():
        raise NotFiniteOutputError(
            "The model's outputs hold NaN or infinite values for these inputs. Mend the weights"
            " (one may be NaN, or training may have diverged), or the inputs."
        )
    # Targets of a wrong shape can broadcast against the other data without an error.
    if alone and len(f) > 1:
        with torch.no_grad():
            first = likelihood.log_prob(f[:1], y[:1])[0]
        if not torch.isclose(first, log_prob[0].detach(), rtol=1e-3, atol=1e-3):
            raise InputError(
                f"log_prob of {type(likelihood).__name__} is {log_prob[0].item():.4g} for a datum"
                f" among others and {first.item():.4g} for it alone: targets of shape"
                f" {tuple(y.shape)} broadcast against outputs {tuple(f.shape)}. Give them the"
                " outputs' shape, as y.unsqueeze(1), or mend log_prob."
            )
    return log_prob


def summed_metrics(likelihood: Likelihood, f: Tensor, y: Tensor) -> dict[str, float]:
    """Return the likelihood's ``metrics`` of some data as plain numbers."""
    with raised_in(f"metrics of {type(likelihood).__name__}, {_given(f.shape, y)},"):
        return {name: float(value) for name, value in likelihood.metrics(f, y).items()}


def class_probabilities(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Return probabilities of classes at outputs (m, C), or raise ConfigurationError for none."""
    name = type(likelihood).__name__
    with raised_in(f"probabilities of {name}"):
        is_other = "probabilities" in likelihood._inherited
        probabilities = None if is_other else likelihood.probabilities(f)
    if probabilities is None:
        raise ConfigurationError(
            f"{name} has no probabilities of classes. Regression has mean and std, and every"
            " likelihood has log_prob(y); one of your own for classes needs a method"
            " probabilities(f)."
        )
    return probabilities.detach()


def noise_variance(likelihood: Likelihood, f: Tensor) -> Tensor | None:
    """The variance of normal noise on outputs (m, C); None for all other densities."""
    if "noise_variance" in likelihood._inherited:
        return None
    with raised_in(f"noise_variance of {type(likelihood).__name__}"):
        variance = likelihood.noise_variance(f)
    return None if variance is None else variance.detach()


def moments(
    likelihood: Likelihood, f: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Mean of y, variance of E[y|f] and noise for uncertain outputs; None where y has none."""
    noise = noise_variance(likelihood, f)
    if noise is not None:
        return f, covariance.diagonal(dim1=1, dim2=2).clamp(min=0.0), noise
    if "moments" in likelihood._inherited:
        return None
    with raised_in(f"moments of {type(likelihood).__name__}"):
        target_moments = likelihood.moments(f, covariance)
    if target_moments is None:
        return None
    mean, epistemic, noise = (moment.detach() for moment in target_moments)
    return mean, epistemic, noise
