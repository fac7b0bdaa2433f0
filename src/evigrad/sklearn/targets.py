"""Likelihoods that the estimators accept, and the units of their targets."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import xlogy
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, InputError, nearest
from evigrad.likelihoods import (
    LIKELIHOODS,
    Conditional,
    Gaussian,
    HeteroscedasticGaussian,
    Joint,
    KnownNoise,
    Likelihood,
    Ordinal,
    Weighted,
    make_likelihood,
)
from evigrad.likelihoods.calls import class_probabilities, moments
from evigrad.likelihoods.noisy import Noisy
from evigrad.likelihoods.poisson import Counts
from evigrad.likelihoods.targets import as_numbers

CLASS_NAMES = ("categorical", "ordinal")
NUMBER_NAMES = tuple(name for name, kind in LIKELIHOODS.items() if not kind.is_classification)
# Likelihoods that use an argument of ``EvidenceRegressor.fit``.
_USERS = {"noise": '"gaussian"', "exposure": '"poisson" or "negative-binomial"'}


def for_classes(likelihood: object, num_classes: int) -> tuple[Likelihood, int]:
    """Return a new likelihood of labels 0 … K − 1, and the number of outputs that it needs.

    Raises:
        ConfigurationError: If the likelihood is not one of single labels, or not of K classes.
    """
    if isinstance(likelihood, str) and likelihood == "ordinal":
        return Ordinal(num_classes), 1
    likelihood = _new(likelihood, CLASS_NAMES)
    name = type(likelihood).__name__
    if not likelihood.has_labels:
        raise ConfigurationError(
            f"likelihood must be a likelihood of single labels, got {name}. Use"
            ' likelihood="categorical", or EvidenceRegressor for numbers.'
        )
    num_outputs = num_classes
    if isinstance(likelihood, Ordinal):
        num_outputs = 1
        if likelihood.num_classes != num_classes:
            raise ConfigurationError(
                f"likelihood must have as many classes as y, {num_classes}, got"
                f' Ordinal({likelihood.num_classes}). Use likelihood="ordinal" to count them.'
            )
    class_probabilities(likelihood, torch.zeros(1, num_outputs, device="cpu"))  # raises if none
    return likelihood, num_outputs


def for_numbers(
    likelihood: object, num_targets: int, conditions: Collection[str]
) -> tuple[Likelihood, int]:
    """Return a new likelihood of D numbers per row, and the number of outputs that it needs.

    ``conditions`` names the conditions with values in the table. Counts always have exposures,
    which contain the unit of the rates.

    Raises:
        ConfigurationError: If the likelihood is not one of D numbers, predicts no mean, or does not
            match the conditions.
    """
    likelihood = _new(likelihood, NUMBER_NAMES)
    name = type(likelihood).__name__
    if likelihood.is_classification:
        raise ConfigurationError(
            f"likelihood must be a likelihood of numbers, got {name}. Use EvidenceClassifier."
        )
    if isinstance(likelihood, Noisy):
        _one_noise_each(likelihood, num_targets)
    if type(likelihood) is Gaussian and "noise" in conditions:
        noise = likelihood.log_noise
        likelihood = KnownNoise(noise.detach().exp(), learnable=noise.requires_grad)
    needed = set(likelihood.conditions) if isinstance(likelihood, Conditional) else set[str]()
    used = {"exposure"} if isinstance(likelihood, Counts) else needed
    for condition in conditions:
        if condition not in used:
            raise ConfigurationError(
                f"fit() must not get {condition} with {name}, which does not use it. Omit"
                f" {condition}, or use likelihood={_USERS[condition]}."
            )
    for condition in needed.difference(conditions):
        fix = f"Use fit(X, y, {condition}=...)." if condition in _USERS else "Use evigrad.fit."
        raise ConfigurationError(f"{name} needs the {condition} of each row, got none. {fix}")
    if isinstance(likelihood, Counts):
        likelihood.conditions = {"exposure": 1.0}
    num_outputs = num_targets * (2 if isinstance(likelihood, HeteroscedasticGaussian) else 1)
    f = torch.zeros(1, num_outputs, device="cpu")
    if moments(likelihood, f, f.diag_embed()) is None:
        raise ConfigurationError(
            f"likelihood must predict means, but {name} does not define moments(f, covariance)."
            " Define this method, or use evigrad.fit."
        )
    return likelihood, num_outputs


def _new(likelihood: object, names: Sequence[str]) -> Likelihood:
    """Return a copy of a likelihood, because training changes it, or a likelihood by its name."""
    is_combined = isinstance(likelihood, Joint | Weighted)
    if isinstance(likelihood, Likelihood) and not is_combined:
        return copy.deepcopy(likelihood)
    if isinstance(likelihood, str) and likelihood in names:
        return make_likelihood(likelihood)
    hint = nearest(likelihood, names) if isinstance(likelihood, str) else ""
    others = CLASS_NAMES if names is NUMBER_NAMES else NUMBER_NAMES
    if isinstance(likelihood, str) and likelihood in others:
        hint = f" Use {'EvidenceClassifier' if names is NUMBER_NAMES else 'EvidenceRegressor'}."
    elif isinstance(likelihood, Weighted):
        hint = " Pass the weights to fit(X, y, sample_weight=...)."
    elif isinstance(likelihood, Joint):
        hint = " For heads, use evigrad.fit."
    what = type(likelihood).__name__ if is_combined else repr(likelihood)
    raise ConfigurationError(
        f"likelihood must be one of {', '.join(names)}, or a Likelihood for single targets, got"
        f" {what}.{hint}"
    )


def _one_noise_each(likelihood: Noisy, num_targets: int) -> None:
    """Give the likelihood one noise per target, because each target has its own unit."""
    log_noise = likelihood.log_noise
    if log_noise.numel() not in (1, num_targets):
        raise ConfigurationError(
            f"likelihood must have one noise, or one per target ({num_targets}), got"
            f" {log_noise.numel()}."
        )
    shape = () if num_targets == 1 else (num_targets,)
    values = log_noise.detach().expand(shape) if log_noise.ndim == 0 else log_noise.detach()
    likelihood.log_noise = nn.Parameter(
        values.reshape(shape).clone(), requires_grad=log_noise.requires_grad
    )


@dataclass(frozen=True)
class Units:
    """The units of D targets inside the network: (targets − shift) / scale.

    Real targets with noise are standardized. Counts are not, but exposures are multiplied by
    ``rate``, the mean rate of the table, so that log rates are near zero.
    """

    shift: np.ndarray
    scale: np.ndarray
    rate: np.ndarray

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        columns: np.ndarray,
        exposures: np.ndarray | None,
        weights: np.ndarray | None,
    ) -> "Units":
        """Return the units for targets (n, D) of a training table."""
        one = np.ones(columns.shape[1])
        if isinstance(likelihood, Noisy | HeteroscedasticGaussian):
            scaler = StandardScaler().fit(columns, sample_weight=weights)
            return cls(np.asarray(scaler.mean_), np.asarray(scaler.scale_), one)
        if not isinstance(likelihood, Counts):
            return cls(0 * one, one, one)
        total = np.average(columns, axis=0, weights=weights)
        over = one if exposures is None else np.average(exposures, axis=0, weights=weights)
        # Without any event, the rate of half an event.
        return cls(0 * one, one, np.where(total > 0, total, 0.5 / len(columns)) / over)

    def targets(
        self, likelihood: Likelihood, columns: np.ndarray, condition: np.ndarray | None
    ) -> Tensor:
        """Return targets (n, D), with known noise or exposures, in the likelihood's format."""
        y = torch.as_tensor((columns - self.shift) / self.scale, device="cpu")
        if isinstance(likelihood, Counts):
            exposures = np.ones_like(columns) if condition is None else condition
            return likelihood.targets(y, exposure=exposures * self.rate)
        if isinstance(likelihood, KnownNoise):
            assert condition is not None
            return likelihood.targets(y, noise=condition / self.scale)
        return y

    def fix_noise(self, likelihood: Likelihood) -> None:
        """Convert a fixed noise from the units of the targets. A learned noise only starts."""
        if isinstance(likelihood, Noisy) and not likelihood.log_noise.requires_grad:
            logs = torch.as_tensor(np.log(self.scale), device="cpu").to(likelihood.log_noise)
            likelihood.log_noise.data -= logs.reshape(likelihood.log_noise.shape)


def beside(
    likelihood: Likelihood, y: Any, condition: str, values: Any
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return targets and a condition side by side, (n, 2D), and the shape of a row's targets.

    Raises:
        InputError: If a value is out of range, or the shapes do not match.
    """
    y = np.asarray(y)
    columns = y.reshape(len(y), -1)
    spread = in_columns(condition, values, y.shape)
    assert isinstance(likelihood, Conditional)
    likelihood.targets(np.zeros(columns.shape), **{condition: spread})  # checks the values
    return np.concatenate([columns, spread], axis=1), y.shape[1:]


def in_columns(condition: str, values: Any, shape: Sequence[int]) -> np.ndarray:
    """Return a condition of each target, (n, D), for targets of this ``shape``, (n,) or (n, D).

    Raises:
        InputError: If there is neither one number, nor one per row or target.
    """
    array = as_numbers(values).double().cpu().numpy()
    if array.shape not in {(), (shape[0],), tuple(shape), (shape[0], 1)}:
        raise InputError(
            f"{condition} must have one value per row or per target, got the shape {array.shape}"
            f" for targets of shape {tuple(shape)}."
        )
    columns = array.reshape(-1, 1) if array.ndim < 2 else array
    return np.broadcast_to(columns, (shape[0], int(np.prod(shape[1:]))))


def deviance_explained(
    y: np.ndarray, means: np.ndarray, exposures: np.ndarray, weights: np.ndarray
) -> float:
    """Return D², the share of the Poisson deviance of counts (n, D) that means explain.

    The baseline predicts the mean rate of the table for all rows. Shares are averaged over the D
    targets, and they are 0 for targets without any event.
    """
    weights = weights[:, None]

    def deviance(means: np.ndarray) -> np.ndarray:
        return (weights * (xlogy(y, y / means) - y + means)).sum(0)

    rates = (weights * y).sum(0) / (weights * exposures).sum(0)
    baseline = deviance(exposures * np.where(rates > 0, rates, 1.0))
    shares = np.where(rates > 0, 1.0 - deviance(means) / baseline, 0.0)
    return float(shares.mean())
