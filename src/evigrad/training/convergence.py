"""Warnings at the end of a training run: weights far from the mode, and residuals with heavy tails.

The log evidence assumes weights at a mode of the log joint density. A Gaussian likelihood assumes
residuals without outliers. If there are outliers, the network fits the largest ones first, and the
learned noise grows with them.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evigrad.errors import EvigradError, EvigradWarning, RankError
from evigrad.evidence import Evidence
from evigrad.likelihoods import Gaussian, StudentT
from evigrad.likelihoods.noisy import Noisy
from evigrad.likelihoods.positions import flattened
from evigrad.measure.metrics import evaluate, hyperparameter_values, probe_outputs
from evigrad.network.network import PROBE_SIZE
from evigrad.posterior import NewtonStep, newton_step
from evigrad.posterior.posterior import curvature_of_posterior
from evigrad.training.data import RunData
from evigrad.training.data_checks import are_discrete, frequent_value

# A mode gap of at most this many nats, over all examples, changes hyperparameters little. One
# nat for each effective parameter means that the mode is √2 posterior standard deviations away, in
# each direction that the data determine. Kinks alone cause smaller gaps (docs/fit.md).
_FEW_NATS = 1.0
# Factors by which a step toward the mode must change a precision or the noise to be worth a warning
# (docs/fit.md).
_PRECISION, _NOISE = 1.5, 1.1
# Factor of the number of epochs that the warning suggests.
_MORE = 4
# A rough approximation is enough to show that a gap is at most this many nats per example.
_ROUGH = 0.1
# With at most this many rows of the data, their kernel gives the exact gap.
_FEW_ROWS = 1000
# Otherwise as many rows give an upper bound, in a hundredth of the time of training. On images it
# is 1.1 to 1.3 times the exact gap. On 10,000 rows with little noise it is 30 times as large.
_ROWS = 400
# Kronecker factors of at most this many outputs then take about as long.
_MOST_OUTPUTS = 16
# Residuals of this many examples show their tails, and fewer than that show none.
_RESIDUALS, _FEWEST = 1000, 50
# Student's t must gain this many nats per number to be worth a warning. On training
# residuals, it gained 0.16 to 0.20 on heavy noise, and lost 0.02 to 0.03 on normal noise.
_TAIL_GAIN = 0.05
# This many examples give the same Kronecker factors up to a few per cent. On 10,000 digits, the gap
# was 369 nats instead of 372, in a third of the time.
_EXAMPLES = 2000
# Beyond this many numbers in the rows, Kronecker factors take less memory.
_MOST_NUMBERS = 2**27


def steps_to_mode(evidence: Evidence, data: RunData) -> list[NewtonStep]:
    """Return Newton steps toward the mode by better and better approximations of the curvature.

    There are several if the first approximation cannot show that the mode gap is small. The list is
    empty if a step cannot be computed, for instance if memory runs out.

    Raises:
        RankError: If another rank fails.
    """
    steps = list[NewtonStep]()
    try:
        for approximation in approximations(evidence, data):
            steps.append(_newton_step(evidence, data, approximation, steps))
            if steps[-1].gap <= _ROUGH * evidence.num_data:
                break
    except RankError:
        raise
    except EvigradError:
        return []
    return steps


def mode_gap(evidence: Evidence, steps: Sequence[NewtonStep]) -> float | None:
    """Return the mode gap in nats per example, or None without steps.

    The gap is exact for small data sets. For larger data sets it is an upper bound, or an estimate
    with Kronecker factors of some examples.
    """
    return min((step.gap / evidence.num_data for step in steps), default=None)


def approximations(evidence: Evidence, data: RunData) -> list[dict[str, Any]]:
    """Return arguments of a posterior for one or two approximations of H, the best one last."""
    num_weights = sum(weight.numel() for weight in evidence.weights().values())
    num_outputs = probe_outputs(evidence.model, data.first(PROBE_SIZE)[0]).shape[-1]
    num_rows = evidence.num_data * num_outputs
    rows = None if num_rows <= _FEW_ROWS else _ROWS
    needs_all = curvature_of_posterior(evidence.problem) != "ggn"  # no anchored rows
    by_factors = {"structure": "kfac"}
    if needs_all or (rows or num_rows) * num_weights > _MOST_NUMBERS:
        return [by_factors]
    by_rows = {"structure": "ntk", "rows": rows}
    return [by_rows] if rows is None or num_outputs > _MOST_OUTPUTS else [by_rows, by_factors]


def _newton_step(
    evidence: Evidence, data: RunData, approximation: dict[str, Any], others: Sequence[NewtonStep]
) -> NewtonStep:
    # Fewer examples with rows would not give an upper bound.
    examples = None if approximation["structure"] == "ntk" else _EXAMPLES
    other = others[-1] if others else None
    with torch.no_grad(), evidence.problem.restored_on_error():
        return newton_step(evidence.problem, data, examples=examples, other=other, **approximation)


def warn_of_tails(evidence: Evidence, data: RunData) -> None:
    """Warn if Student's t fits the residuals much better than the Gaussian likelihood does."""
    likelihood = evidence.likelihood
    if type(likelihood) is not Gaussian:
        return
    x, y = data.spread(_RESIDUALS)
    f, y = flattened(likelihood, probe_outputs(evidence.model, x), y)
    if len(f) < _FEWEST or are_discrete(y) or frequent_value(y):  # with their own warnings
        return
    gain = tail_gain(y.to(f) - f)
    if gain > _TAIL_GAIN:
        warnings.warn(
            "The residuals of the training data have heavy tails: Student's t fits them"
            f" {gain:.2g} nats per residual better than a Gaussian. A Gaussian adapts the network"
            ' to the largest errors. Try likelihood="student-t" (evigrad.likelihoods.StudentT), and'
            " compare both on held-out data.",
            EvigradWarning,
            stacklevel=5,  # the caller of fit
        )


def tail_gain(residuals: Tensor) -> float:
    """Return how much better Student's t fits residuals than a Gaussian, in nats per residual.

    Both densities have the best scale for each output.

    Args:
        residuals: Errors of shape (m, C).
    """
    errors = residuals.double()
    scale = errors.square().mean(0).sqrt()
    if not bool((scale > 0).all()):
        return 0.0
    unit = errors / scale
    normal = -0.5 * math.log(2 * math.pi) - 0.5
    scales = torch.logspace(-1.5, 0.2, 50, dtype=torch.float64, device=errors.device)
    nu = StudentT().degrees
    constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    means = torch.stack(
        [constant - s.log() - 0.5 * (nu + 1) * ((unit / s).square() / nu).log1p() for s in scales]
    ).mean(1)
    return float((means.amax(0) - normal).mean())


def warn_of_mode(
    evidence: Evidence,
    data: RunData,
    gap: float | None,
    epochs: int,
    steps: Sequence[NewtonStep] = (),
) -> None:
    """Warn if training has not converged, so that more epochs change the hyperparameters."""
    nats = 0.0 if gap is None else gap * evidence.num_data
    if nats <= _FEW_NATS:
        return
    determined = sum(size for name, size in _sizes(evidence, data).items() if name != "noise")
    reason = f"The mode gap is {nats:.3g} nats for {determined:.3g} effective parameters"
    if nats <= determined:
        changes = [
            f"{name} from {before:.3g} to {after:.3g}"
            for name, (before, after) in changes_at_mode(evidence, data, steps).items()
            if abs(math.log(after / before)) > math.log(_NOISE if name == "noise" else _PRECISION)
        ]
        if not changes:
            return
        reason = f"One step toward the mode would already change {' and '.join(changes)}"
    warnings.warn(
        "Training has not converged, so do not use the learned hyperparameters and the log evidence"
        f" yet. {reason}. Train for more epochs, such as epochs={_MORE * epochs}.",
        EvigradWarning,
        stacklevel=5,  # the caller of fit
    )


def changes_at_mode(
    evidence: Evidence, data: RunData, steps: Sequence[NewtonStep] = ()
) -> dict[str, tuple[float, float]]:
    """Return learned precisions and noise, now and for the weights after a step toward the mode.

    A precision is inversely proportional to the squares of its weights, and a noise is proportional
    to the residuals. Precisions of weights that the data do not determine, with less than one
    effective parameter, are omitted. After the step, fewer parameters than one count as one. The
    result is empty if nothing is learned, or if the step cannot be computed. ``steps`` are steps by
    the first approximations, which are not computed again.

    Raises:
        RankError: If another rank fails.
    """
    now, prior = hyperparameter_values(evidence), evidence.prior
    names = prior.learned_groups()
    learns_prior = "prior.log_precision" in evidence.hyperparameters()
    learned = {"noise", *(f"precision/{name}" for name in names if learns_prior)}
    try:
        better = approximations(evidence, data)[len(steps) :]
        step = _newton_step(evidence, data, better[-1], steps) if better else steps[-1]
        before = _sizes(evidence, data)
        with torch.no_grad(), step.taken():
            after = _sizes(evidence, data)
    except RankError:
        raise
    except EvigradError:
        return {}
    changes = dict[str, tuple[float, float]]()
    for name, size in before.items():
        if name in learned & now.keys() and min(size, after[name]) > 0:
            if name == "noise":
                changes[name] = now[name], now[name] * (after[name] / size) ** 0.5
            elif size >= 1.0:
                changes[name] = now[name], now[name] * size / max(after[name], 1.0)
    return changes


def _sizes(evidence: Evidence, data: RunData) -> dict[str, float]:
    """Return δ ‖w − w₀‖² of each prior group, and the mean squared error if a noise is learned.

    At the fixed point, δ ‖w − w₀‖² is c times the effective number of parameters γ, where c is the
    weight of the log-determinant. The result is divided by c.
    """
    prior, likelihood = evidence.prior, evidence.likelihood
    precisions, sizes = prior.precisions(), dict[str, float]()
    for name, deviation in prior.deviations(evidence.weights()).items():
        group = f"precision/{prior.group_name(name)}"
        size = float((precisions[name] * deviation.square()).sum().detach())
        size /= evidence.log_det_weight
        sizes[group] = sizes.get(group, 0.0) + size
    if isinstance(likelihood, Noisy) and likelihood.log_noise.requires_grad:
        metrics = evaluate(evidence.model, likelihood, data, ranks=evidence.ranks)
        sizes["noise"] = metrics["squared_error"]
    return sizes
