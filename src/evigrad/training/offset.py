"""Start a regression with outputs around the targets.

If targets are far from zero, the output bias must grow to their mean, which takes many steps.
Meanwhile, other weights learn a part of the mean, such as a common shift of all embeddings. Their
precisions then become too small. The log evidence that this costs is a few nats in total.
"""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import EvigradWarning
from evigrad.evidence import Evidence
from evigrad.inputs import Inputs
from evigrad.likelihoods import (
    HeteroscedasticGaussian,
    Joint,
    Likelihood,
    NaturalGaussian,
    Weighted,
)
from evigrad.likelihoods.noisy import Noisy
from evigrad.likelihoods.positions import flattened
from evigrad.measure.metrics import probe_outputs
from evigrad.training.data import RunData

# Number of examples that determine the mean, if they are in memory or are read for it.
_COMPARED, _READ = 1000, 100
# A mean residual beyond this many standard deviations of the targets is far from zero. Half a
# standard deviation did not change the learned precisions, but two did.
_FAR = 0.5
# Beyond this many, a model without an output bias is worth a warning.
_WORTH_A_WARNING = 1.0


def center_outputs(evidence: Evidence, data: RunData) -> None:
    """Shift the output bias, so that outputs have the mean of targets far from zero.

    The bias is the last weight of shape (C,) that shifts all outputs by its change. If there is
    none, warn, unless all precisions are fixed. Outputs whose mean is near the targets' mean do
    not change.
    """
    parts = evidence.likelihood.modules()
    if not any(isinstance(part, Noisy | HeteroscedasticGaussian) for part in parts):
        return
    x, y = data.spread(_COMPARED if data.is_held else _READ)
    f, y = flattened(evidence.likelihood, probe_outputs(evidence.model, x), y)
    residuals = _residuals(evidence.likelihood, f, y)
    mean, targets = residuals.nanmean(0), residuals + f
    spread = (targets - targets.nanmean(0)).square().nanmean(0).sqrt()
    shift = torch.where(mean.abs() > _FAR * spread, mean, 0.0)  # 0 where the mean is NaN
    if not bool(shift.any()) or _move_bias(evidence, x, shift):
        return
    far = (shift.abs() > _WORTH_A_WARNING * spread) & (spread > 0)
    learns_precisions = any(name.startswith("prior.") for name in evidence.hyperparameters())
    if learns_precisions and bool(far.any()):
        first = int(far.nonzero()[0])
        distance, deviation = float(shift[first]), float(spread[first])
        warnings.warn(
            f"Output {first} starts {abs(distance):.3g} {'below' if distance > 0 else 'above'} the"
            f" mean of its targets, whose standard deviation is {deviation:.3g}, but the model has"
            " no output bias that could start there. Other weights learn this difference, so their"
            " precisions become too small. Standardize the targets: set scaling ="
            " evigrad.data.Scaling.of(y) and train on (x, scaling(y)). Or add a bias to the last"
            " layer.",
            EvigradWarning,
            stacklevel=5,  # the caller of fit
        )


def _residuals(likelihood: Likelihood, f: Tensor, y: Tensor) -> Float[Tensor, "n C"]:
    """Return targets minus outputs. They are NaN for missing targets, and if f is not a mean."""
    if isinstance(likelihood, Weighted):
        return _residuals(likelihood.likelihood, f, likelihood.split(y)[0])
    nan = torch.full_like(f, torch.nan)
    if isinstance(likelihood, Joint):
        parts = list[Tensor]()
        for head, head_outputs, targets, counts in likelihood.by_head(f, y):
            part = _residuals(head.likelihood, head_outputs, targets)
            parts.append(part if counts is None else torch.where(counts[:, None], part, torch.nan))
        return torch.cat(parts, 1)
    if isinstance(likelihood, Noisy):
        return likelihood.plain_targets(y).to(f) - f
    if isinstance(likelihood, HeteroscedasticGaussian):
        if isinstance(likelihood, NaturalGaussian):  # outputs are means times precisions
            return nan
        mean, log_variance = f.chunk(2, dim=1)
        return torch.cat([y.to(f) - mean, torch.full_like(log_variance, torch.nan)], 1)
    return nan


def _move_bias(evidence: Evidence, x: Inputs, shift: Float[Tensor, " C"]) -> bool:
    """Add a shift to the output bias. Return False, without a change, if there is none."""
    before = probe_outputs(evidence.model, x)
    for weight in reversed(evidence.weights().values()):
        if weight.shape == shift.shape and weight.dtype == shift.dtype:
            saved = weight.detach().clone()
            with torch.no_grad():
                weight.add_(shift)
            moved = probe_outputs(evidence.model, x)
            if torch.allclose(
                moved, before + shift, rtol=1e-3, atol=1e-3 * float(shift.abs().max())
            ):
                evidence.ranks.share([weight])
                return True
            with torch.no_grad():
                weight.copy_(saved)
    return False
