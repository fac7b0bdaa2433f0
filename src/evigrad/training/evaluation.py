"""What is evaluated of trained models: their log evidence, a bound along a hyperparameter, times.

Runs with different estimators show different bounds while they train, which cannot be compared.
After training, one estimator near the exact value serves for all of them.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evigrad.blocks.sources import as_source
from evigrad.engine.evaluation import standard_error
from evigrad.engine.settings import Memory
from evigrad.errors import ConfigurationError
from evigrad.estimators import EstimatorSpec
from evigrad.evidence import Evidence
from evigrad.invariances import Averaged
from evigrad.priors import GaussianPrior
from evigrad.training.data import derived_seed
from evigrad.training.files import replacing
from evigrad.training.metrics import probe_outputs

# Operations per second of one core, for the exact value and for kernels of subsets; and the most
# operations, and numbers in memory at once.
_EXACT_RATE, _SUBSET_RATE = 2e10, 5e10
_MAX_OPERATIONS = 2e12
_MAX_NUMBERS = 2e8
_NUMBERS_IN_A_PASS = 2.5e7
# The hyperparameter that is no range of an invariance: one precision for all weights.
PRECISION = "precision"
_SAVE_EVERY = 15.0  # seconds
# Repetitions of one step stop after so many seconds, or so many of them.
SECONDS = 2.0
_MOST_REPETITIONS = 20


@dataclass(frozen=True)
class EvidenceValue:
    """The log evidence of a trained model, averaged over blocks of a partition.

    Attributes:
        per_datum: Log evidence in nats per datum.
        sem: Standard error of the mean over the blocks; 0 for one block. Where all blocks of a
            partition were used, it says how far a single draw would be off.
        log_likelihood: The data term, nats per datum.
        log_prior: The term −½ (w−w₀)ᵀP0(w−w₀), nats per datum.
        log_det_term: The term −½ ℓ, nats per datum.
        estimator: Name of the estimator.
        blocks: Number of blocks.
        is_bound: Whether the value is a lower bound on the log evidence.
        seconds: Time of the evaluation.
    """

    per_datum: float
    sem: float
    log_likelihood: float
    log_prior: float
    log_det_term: float
    estimator: str
    blocks: int
    is_bound: bool
    seconds: float


def tight_estimator(
    num_weights: int, num_data: int, num_outputs: int, seconds: float = math.inf
) -> str:
    """Return the name of the tightest estimator that evaluates all the data within a given time.

    ``full-N-C`` and ``ntk-N-C`` both compute the exact log-determinant; the sizes P, N and C decide
    which is cheaper. Where neither is affordable, it is the estimator with all outputs on the
    largest subsets of which a whole partition is affordable. ``seconds`` are those of one core, by
    a rough count of operations; default, and most: a minute or two.
    """
    most, most_of_subsets = (
        min(_MAX_OPERATIONS, rate * seconds) for rate in (_EXACT_RATE, _SUBSET_RATE)
    )
    p, n, c = float(num_weights), float(num_data), float(num_outputs)
    full = (2 * n * c * p**2 + p**3 / 3, 3 * p**2)
    ntk = (2 * (n * c) ** 2 * p + (n * c) ** 3 / 3, n * c * p + 3 * (n * c) ** 2)
    affordable = [
        (work, name)
        for name, (work, numbers) in (("full-N-C", full), ("ntk-N-C", ntk))
        if work <= most and numbers <= _MAX_NUMBERS
    ]
    if affordable:
        return min(affordable)[1]
    subset = int(min(n, most_of_subsets / (2 * n * c**2 * p), _MAX_NUMBERS / (c * p)))
    # A round number is easier to type.
    size = max(1, subset)
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

    The estimate is averaged over all blocks of one random partition, unless ``blocks`` asks for
    fewer: this is the bound for that partition. With ``N`` and ``C`` in the name it is the exact
    log evidence of the structure.

    Args:
        evidence: The trained model's evidence, as ``FitResult.evidence``; it is not changed.
        data: All training data, on the model's device.
        estimator: Name of the estimator.
        seed: Seed of the partition.
        blocks: Number of its blocks that are used, at most. Default: all.
        memory: Sizes and types of passes. Default: as many data at once as keep the rows of a pass
            below 100 MB.
        **options: Other keywords of ``Evidence``: root, sharing, parameter_partition, and more.

    Returns:
        The mean and its terms.

    Raises:
        ConfigurationError: If there is no such estimator.
        InputError: If the data do not fit.
        MemoryBudgetError: If it would not fit the free memory.
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
    """In words, as ``"full-N-C, exact"`` or ``"ntk-400-C, mean over 4 blocks of a partition"``."""
    spec = EstimatorSpec.parse(estimator)
    if blocks > 1:
        return f"{spec.name}, mean over the {blocks} blocks of a partition"
    exact = spec.facts.log_det == "exact" and spec.curvature in ("ggn", "hessian")
    whole = spec.subset is None and spec.outputs is None
    return f"{spec.name}, exact" if exact and whole else spec.name


def default_memory(evidence: Evidence, data: Any) -> Memory:
    """As many data in a pass, at least one, as keep its Jacobian rows below 100 MB."""
    x, _ = as_source(data).first(2)
    num_outputs = probe_outputs(evidence.model, x).shape[-1]
    num_weights = sum(w.numel() for w in evidence.weights().values())
    return Memory(micro_batch=max(1, int(_NUMBERS_IN_A_PASS / (num_outputs * num_weights))))


def evidence_along(
    evidence: Evidence,
    data: tuple[Tensor, Tensor],
    estimator: str,
    hyperparameter: str,
    grid: Sequence[float],
    *,
    seed: int = 0,
    blocks: int | None = None,
    partial: Path | None = None,
) -> dict[str, Any]:
    """Evaluate all blocks of one partition at each point of a grid.

    The partition, and the random transforms of each of its blocks, are the same at all points.

    Args:
        evidence: The evidence of a trained model; left as it is.
        data: All training data, on the model's device.
        estimator: Name of the bound.
        hyperparameter: ``precision``, one for all weights, or the name of a range of the model's
            invariance.
        grid: Its values.
        seed: Seed of the partition.
        blocks: How many of its blocks are looked at, at most. Default: all.
        partial: File that keeps the blocks that are done, so that an interrupted call goes on to
            the same numbers. Default: none.

    Returns:
        ``grid``; for each point the ``mean`` over the blocks and its standard error ``sem``, in
        nats per datum; and the number of ``blocks``.

    Raises:
        ConfigurationError: If there is no such hyperparameter.
    """
    is_precision = hyperparameter == PRECISION
    one = evidence.with_estimator(
        estimator,
        prior=GaussianPrior("scalar", mean=evidence.prior.means()) if is_precision else None,
        memory=default_memory(evidence, data),
        generator=seed,
    )
    found: dict[str, list[float]] = {}
    if partial is not None and partial.exists():
        found = json.loads(partial.read_text(encoding="utf-8"))
    drawn = list(one.blocks(data).epoch())[:blocks]
    saved = time.monotonic()
    with _kept_ranges(evidence.model):
        for number, block in enumerate(drawn):
            if str(number) in found:
                continue
            values, kept = [], None
            for value in grid:
                set_hyperparameter(one, hyperparameter, value)
                # Of its own for each block, so that an interruption changes no draw.
                one.generator.manual_seed(derived_seed(seed, "evidence", number + 1))
                if is_precision:
                    kept = kept or one.collect(block, wrt="prior")
                values.append(one.estimate(kept or block).per_datum)
            found[str(number)] = values
            if partial is not None and time.monotonic() - saved > _SAVE_EVERY:
                with replacing(partial) as file:
                    file.write(json.dumps(found).encode())
                saved = time.monotonic()
    columns = list(zip(*(found[str(number)] for number in range(len(drawn))), strict=True))
    if partial is not None:
        partial.unlink(missing_ok=True)
    return {
        "grid": list(grid),
        "mean": [fmean(column) for column in columns],
        "sem": [standard_error(column) for column in columns],
        "blocks": len(drawn),
    }


def make_grid(start: float, stop: float, count: int, log: bool = False) -> list[float]:
    """``count`` values, with six digits, that a curve is drawn over; refuses what is no grid."""
    if count < 2:
        raise ConfigurationError(f"A grid has 2 points or more, not {count}.")
    if not math.isfinite(start) or not math.isfinite(stop) or not start < stop:
        raise ConfigurationError(f"A grid goes up, not from {start:g} to {stop:g}.")
    if log and start <= 0:
        raise ConfigurationError(f"A logarithmic grid begins above 0, not at {start:g}.")
    values = np.geomspace(start, stop, count) if log else np.linspace(start, stop, count)
    return [float(f"{value:.6g}") for value in values]


def set_hyperparameter(evidence: Evidence, name: str, value: float) -> None:
    """Set ``precision``, of a scalar prior, or a range of the model's transforms by its name."""
    with torch.no_grad():
        if name == PRECISION:
            assert evidence.prior.log_precision is not None
            evidence.prior.log_precision.fill_(math.log(value))
            return
        model = evidence.model
        known = model.invariance.named_ranges() if isinstance(model, Averaged) else {}
        if name not in known:
            raise ConfigurationError(
                f"A curve is along {PRECISION}, or a range of the model's invariance"
                f" ({', '.join(known) or 'it has none'}), not '{name}'."
            )
        getattr(model.invariance, name).fill_(value)


@contextmanager
def _kept_ranges(model: nn.Module) -> Iterator[None]:
    """Put the ranges of a model back on the way out."""
    tensors = [*model.parameters(), *model.buffers()]
    small = [(t, t.detach().clone()) for t in tensors if t.dim() == 0]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in small:
                tensor.copy_(value)


@dataclass(frozen=True)
class StepTimes:
    """Median times in seconds.

    Attributes:
        estimate: An estimate with its gradient, and its share of the draw.
        draw: The start of a round of estimates, as drawing a partition or choosing anchors.
        step: A step of the weights on a batch, without the optimiser.
    """

    estimate: float
    draw: float
    step: float


def time_steps(
    evidence: Evidence, data: tuple[Tensor, Tensor], batch_size: int, steps: int
) -> StepTimes:
    """Return the times of what a training repeats, in rounds of ``steps`` that share a draw.

    The gradients of ``evidence`` change.
    """
    x, y = data
    stream = evidence.blocks(data)
    blocks = iter(stream)

    def draw() -> None:
        for _ in range(stream.period):
            next(iter(stream))

    drawn = median_seconds(draw, x.device) / stream.period
    estimate = median_seconds(lambda: evidence.backward(next(blocks)), x.device)
    step = step_seconds(evidence, x[:batch_size], y[:batch_size])
    return StepTimes(estimate + drawn / steps, drawn, step)


def step_seconds(evidence: Evidence, x: Tensor, y: Tensor) -> float:
    """Median time of the training loss of a batch and its gradient."""
    weights = list(evidence.weights().values())

    def step() -> None:
        torch.autograd.grad(evidence.map_loss(x, y), weights, allow_unused=True)

    return median_seconds(step, x.device)


def median_seconds(action: Callable[[], Any], device: torch.device) -> float:
    """Median of three calls or more after an uncounted one; of one call where it takes long."""
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
