"""Evaluation of the log evidence and the computation time of trained models.

Runs with different estimators record different bounds during training, and these bounds cannot be
compared. After training, evaluate all runs with one estimator that is close to the exact value.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from evigrad.blocks.sources import as_source
from evigrad.core.model import standard_error
from evigrad.core.names import Estimator
from evigrad.evidence import Evidence
from evigrad.measure.metrics import probe_outputs
from evigrad.passes.settings import Memory

# Operations per second of one core, for the exact value and for kernels of subsets; and limits on
# operations and on numbers in memory at once.
_EXACT_RATE, _SUBSET_RATE = 2e10, 5e10
_MAX_OPERATIONS = 2e12
_MAX_NUMBERS = 2e8
_NUMBERS_IN_A_PASS = 2.5e7
# Repetitions of one step stop after this many seconds, or this many repetitions.
SECONDS = 2.0
_MOST_REPETITIONS = 20


@dataclass(frozen=True)
class EvidenceValue:
    """The log evidence of a trained model, averaged over blocks of a partition.

    Attributes:
        per_datum: Log evidence in nats per example.
        sem: Standard error of the mean over the blocks, or 0 for one block. If all blocks of a
            partition were used, it measures the spread of the estimates, not an error of the mean.
        log_likelihood: Log likelihood in nats per example.
        log_prior: Term −½ (w−w₀)ᵀP0(w−w₀) in nats per example.
        log_det_term: Log-determinant of the curvature times −½, in nats per example.
        estimator: Name of the estimator.
        blocks: Number of blocks.
        is_bound: Whether the value is a lower bound on the log evidence.
        seconds: Evaluation time in seconds.
    """

    per_datum: float
    sem: float
    log_likelihood: float
    log_prior: float
    log_det_term: float
    estimator: str
    blocks: int
    is_bound: bool  # a lower bound on the log evidence
    seconds: float


def tight_estimator(
    num_weights: int, num_data: int, num_rows: int, seconds: float = math.inf
) -> str:
    """Return the name of the tightest estimator that evaluates all data within a given time.

    ``full-N-C`` and ``ntk-N-C`` both compute the exact log-determinant. If both take too much time
    or memory, the result is ``ntk-k-C`` with the largest affordable number k of examples per block.
    ``num_rows`` is the number of rows per example. ``seconds`` is the time limit on one core.
    Without this limit, the evaluation takes at most about two minutes.
    """
    most, most_of_subsets = (
        min(_MAX_OPERATIONS, rate * seconds) for rate in (_EXACT_RATE, _SUBSET_RATE)
    )
    p, n, c = float(num_weights), float(num_data), float(num_rows)
    full = (2 * n * c * p**2 + p**3 / 3, 3 * p**2)
    ntk = (2 * (n * c) ** 2 * p + (n * c) ** 3 / 3, n * c * p + 3 * (n * c) ** 2)
    affordable = [
        (work, name)
        for name, (work, numbers) in (("full-N-C", full), ("ntk-N-C", ntk))
        if work <= most and numbers <= _MAX_NUMBERS
    ]
    if affordable:
        return min(affordable)[1]
    size = max(1, int(min(n, most_of_subsets / (2 * n * c**2 * p), _MAX_NUMBERS / (c * p))))
    # A round number is easier to type.
    rounded = 10 ** (len(str(size)) - 1)
    return f"ntk-{size // rounded * rounded}-C"


def evaluate_evidence(
    evidence: Evidence,
    data: Any,
    estimator: str,
    *,
    seed: int = 0,
    blocks: int | None = None,
    memory: Memory | None = None,
    **options: Any,
) -> EvidenceValue:
    """Evaluate the log evidence of a trained model with another estimator.

    The estimate is averaged over the blocks of one random partition. If the estimator's name
    contains both ``N`` and ``C``, the partition has a single block with all rows, so the estimate
    has no sampling error.

    Args:
        evidence: Evidence of the trained model, such as ``FitResult.evidence``. It is not changed.
        data: All training data, on the model's device.
        estimator: Name of the estimator.
        seed: Seed of the partition.
        blocks: Maximum number of blocks to use. Default: all blocks of the partition.
        memory: Batch sizes and data types of passes. Default: micro-batches that keep the rows of a
            pass below 100 MB in float32.
        **options: Other keyword arguments of ``Evidence``, such as root, sharing and
            parameter_partition.

    Returns:
        The mean estimate and its terms.

    Raises:
        ConfigurationError: If the estimator does not exist.
        InputError: If the data are invalid for the model or the likelihood.
        MemoryBudgetError: If the rows would not fit into free memory.
    """
    start = time.perf_counter()
    other = evidence.with_estimator(
        estimator,
        memory=memory or default_memory(evidence, data),
        generator=seed,
        **options,
    )
    drawn = islice(other.blocks(data).epoch(), blocks)
    estimates = [other.estimate(block) for block in drawn]
    values = [e.per_datum for e in estimates]
    return EvidenceValue(
        per_datum=fmean(values),
        sem=standard_error(values),
        log_likelihood=fmean(e.log_likelihood / e.num_data for e in estimates),
        log_prior=fmean(e.log_prior / e.num_data for e in estimates),
        log_det_term=fmean(-0.5 * e.log_det_weight * e.log_det / e.num_data for e in estimates),
        estimator=other.estimator.name,
        blocks=len(estimates),
        is_bound=estimates[0].is_bound,
        seconds=time.perf_counter() - start,
    )


def describe_estimator(estimator: str, blocks: int) -> str:
    """Return the estimator's name and, where it applies, the number of blocks or "exact"."""
    spec = Estimator.parse(estimator)
    if blocks > 1:
        return f"{spec.name}, mean over {blocks} blocks of a partition"
    exact = spec.structure_type.log_det_is == "exact" and spec.curvature == "ggn"
    whole = spec.subset is None and spec.outputs is None
    return f"{spec.name}, exact" if exact and whole else spec.name


def default_memory(evidence: Evidence, data: Any) -> Memory:
    """Return a memory setting that keeps the Jacobian rows of a pass below 100 MB in float32."""
    x, _ = as_source(data).first(2)
    num_outputs = probe_outputs(evidence.model, x).shape[-1]
    num_weights = sum(w.numel() for w in evidence.weights().values())
    return Memory(micro_batch=max(1, int(_NUMBERS_IN_A_PASS / (num_outputs * num_weights))))


def step_seconds(evidence: Evidence, x: Tensor, y: Tensor) -> float:
    """Return the median time in seconds of the training loss and its gradient for a batch."""
    weights, grad = list(evidence.weights().values()), torch.autograd.grad
    return median_seconds(
        lambda: grad(evidence.map_loss(x, y), weights, allow_unused=True), x.device
    )


def median_seconds(action: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of a call in seconds, over several calls after a warm-up call."""
    action()  # the first call allocates and plans
    times: list[float] = []
    while len(times) < 3 or (sum(times) < SECONDS and len(times) < _MOST_REPETITIONS):
        _wait(device)
        start = time.perf_counter()
        action()
        _wait(device)
        times.append(time.perf_counter() - start)
        if times[0] > SECONDS:
            break
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
