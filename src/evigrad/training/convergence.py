"""Warnings at the end of a training run: weights far from a mode, and residuals with heavy tails.

The log evidence assumes weights at a mode of the log joint density. A Gaussian likelihood assumes
residuals without outliers. If there are outliers, the network fits the largest ones first, and the
learned noise grows with them.
"""

import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evigrad.errors import EvigradError, EvigradWarning, RankError
from evigrad.likelihoods import Gaussian, StudentT
from evigrad.likelihoods.positions import flattened
from evigrad.measure.metrics import probe_outputs
from evigrad.posterior.posterior import curvature_of_posterior
from evigrad.training.data_checks import are_discrete
from evigrad.training.history import Row

if TYPE_CHECKING:
    from evigrad.training.trainer import Trainer

# A larger distance from the mode than this causes a warning, in nats per example.
TOLERANCE = 0.1
# With at most this many rows of the data, their kernel gives the exact distance.
_FEW_ROWS = 1000
# Otherwise as many rows give an upper bound, in a hundredth of the time of training. On images it
# is 1.1 to 1.3 times the exact distance. On 10,000 rows with little noise it is 30 times as large.
_ROWS = 400
# Kronecker factors of at most this many outputs then take about as long.
_MOST_OUTPUTS = 16
# Residuals of this many examples show their tails, and fewer than that show none.
_RESIDUALS, _FEWEST = 1000, 50
# Student's t must gain this many nats per number to be worth a warning. On training
# residuals, it gained 0.16 to 0.20 on heavy noise, and lost 0.02 to 0.03 on normal noise.
_TAIL_GAIN = 0.05
# Beyond this many numbers in the rows, Kronecker factors take less memory.
_MOST_NUMBERS = 2**27


def mode_columns(trainer: "Trainer", epoch: int) -> Row:
    """Return the distance from the mode as a history column, in nats per example.

    The distance is computed after the last epoch of a cycle and is None in other epochs. It is
    exact for small data sets. For larger data sets it is an upper bound, or an estimate with
    Kronecker factors. It is also None if its computation fails, for instance because memory runs
    out. If epochs use only a part of the data, the distance is not computed, because it requires a
    pass over all data. Without an estimator, there is no column.

    Raises:
        RankError: If another rank fails.
    """
    if trainer.learner is None:
        return {}
    num_data = len(trainer.data)
    if epoch < trainer.epochs or trainer.schedule.data_in_epoch(num_data) < num_data:
        return {"mode_gap": None}
    try:
        return {"mode_gap": _mode_gap(trainer)}
    except RankError:
        raise
    except EvigradError:
        return {"mode_gap": None}


def _mode_gap(trainer: "Trainer") -> float:
    evidence, data = trainer.evidence, trainer.data
    num_weights = sum(weight.numel() for weight in evidence.weights().values())
    num_outputs = probe_outputs(evidence.model, trainer.probe).shape[-1]
    num_rows = evidence.num_data * num_outputs
    rows = None if num_rows <= _FEW_ROWS else _ROWS
    needs_all = curvature_of_posterior(evidence.problem) != "ggn"  # no anchored rows
    if needs_all or (rows or num_rows) * num_weights > _MOST_NUMBERS:
        return evidence.mode_gap(data, structure="kfac")
    gap = evidence.mode_gap(data, structure="ntk", rows=rows)
    if rows is None or gap <= TOLERANCE or num_outputs > _MOST_OUTPUTS:
        return gap
    return min(gap, evidence.mode_gap(data, structure="kfac"))


def warn_of_tails(trainer: "Trainer") -> None:
    """Warn if Student's t fits the residuals much better than the Gaussian likelihood does."""
    likelihood = trainer.evidence.likelihood
    if type(likelihood) is not Gaussian or trainer.learner is None:
        return
    x, y = trainer.data.spread(_RESIDUALS)
    f, y = flattened(likelihood, probe_outputs(trainer.evidence.model, x), y)
    if len(f) < _FEWEST or are_discrete(y):  # which has its own warning
        return
    gain = tail_gain(y.to(f) - f)
    if gain > _TAIL_GAIN:
        warnings.warn(
            "The residuals of the training data have heavy tails: Student's t fits them"
            f" {gain:.2g} nats per residual better than a Gaussian. A Gaussian adapts the network"
            ' to the largest errors. Use likelihood="student-t" (evigrad.likelihoods.StudentT).',
            EvigradWarning,
            stacklevel=3,
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


def warn_of_distance(gap: float | None) -> None:
    """Warn if the weights are so far from the mode that the log evidence is too low."""
    if gap is not None and gap > TOLERANCE:
        warnings.warn(
            f"The weights are not at the mode: a Newton step of the linearized model would gain"
            f" {gap:.2g} nats per example, so the log evidence is too low by this amount. Train"
            " for more epochs (Schedule.epochs). A network with kinks, such as ReLU, may never"
            " reach a mode. SiLU and tanh have no kinks.",
            EvigradWarning,
            stacklevel=3,
        )
