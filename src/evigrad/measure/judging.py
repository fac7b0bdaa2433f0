"""Evaluation of trained models: their log evidence and times.

Runs with different estimators record different bounds during training, which cannot be
compared. After training, one estimator close to the exact value evaluates all of the runs.
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
from evigrad.core.names import Estimator
from evigrad.core.types import standard_error
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
            partition were used, it measures the spread of the blocks, not an error of their mean.
        log_likelihood: Log likelihood in nats per example.
        log_prior: Term −½ (w−w₀)ᵀP0(w−w₀) in nats per example.
        log_det_term: Term −½ ℓ in nats per example.
        estimator: Name of the estimator.
        blocks: Number of blocks.
        is_bound: Whether the value is a lower bound on the log evidence.
        seconds: Time of the evaluation in seconds.
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

    ``full-N-C`` and ``ntk-N-C`` both compute the exact log-determinant. If neither is affordable,
    the function returns the estimator with all outputs on the largest subsets for which a whole
    partition is affordable. ``seconds`` is the time limit on one core. By default there is no
    limit, but the evaluation takes at most about two minutes.
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

    The estimate is averaged over all blocks of one random partition, or over ``blocks`` of them. If
    the name has ``N`` and ``C``, the estimate is the exact log evidence of the structure.

    Args:
        evidence: Evidence of the trained model, such as ``FitResult.evidence``. It is not changed.
        data: All training data, on the model's device.
        estimator: Name of the estimator.
        seed: Seed of the partition.
        blocks: Maximum number of blocks that are used. Default: all.
        memory: Batch sizes and data types of passes. Default: micro-batches that keep the rows of a
            pass below 100 MB.
        **options: Other keyword arguments of ``Evidence``, such as root, sharing and
            parameter_partition.

    Returns:
        The mean and its terms.

    Raises:
        ConfigurationError: If the estimator does not exist.
        InputError: If the data do not fit the model or the likelihood.
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
        log_det_term=fmean(-0.5 * e.log_det / e.num_data for e in estimates),
        estimator=other.spec.name,
        blocks=len(estimates),
        is_bound=estimates[0].is_bound,
        seconds=time.perf_counter() - start,
    )


def describe_estimator(estimator: str, blocks: int) -> str:
    """Return words such as ``"full-N-C, exact"`` or ``"ntk-400-C, mean over 4 blocks ..."``."""
    spec = Estimator.parse(estimator)
    if blocks > 1:
        return f"{spec.name}, mean over {blocks} blocks of a partition"
    exact = spec.kind.log_det_is == "exact" and spec.curvature == "ggn"
    whole = spec.subset is None and spec.outputs is None
    return f"{spec.name}, exact" if exact and whole else spec.name


def default_memory(evidence: Evidence, data: Any) -> Memory:
    """Return a memory setting that keeps the Jacobian rows of a pass below 100 MB."""
    x, _ = as_source(data).first(2)
    num_outputs = probe_outputs(evidence.model, x).shape[-1]
    num_weights = sum(w.numel() for w in evidence.weights().values())
    return Memory(micro_batch=max(1, int(_NUMBERS_IN_A_PASS / (num_outputs * num_weights))))


def step_seconds(evidence: Evidence, x: Tensor, y: Tensor) -> float:
    """Return the median time of the training loss of a batch and its gradient, in seconds."""
    weights, grad = list(evidence.weights().values()), torch.autograd.grad
    return median_seconds(
        lambda: grad(evidence.map_loss(x, y), weights, allow_unused=True), x.device
    )


def median_seconds(action: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of at least three calls, or of one long call, after a warm-up call."""
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
