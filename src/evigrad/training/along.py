"""A bound on the log evidence along one hyperparameter, the weights being fixed."""

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evigrad.engine.estimate import standard_error
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.invariances import Averaged
from evigrad.priors import GaussianPrior
from evigrad.training.compare import default_memory
from evigrad.training.files import replacing
from evigrad.training.randomness import derived_seed

# The hyperparameter that is no range of an invariance: one precision for all weights.
PRECISION = "precision"
_SAVE_EVERY = 15.0  # seconds


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
        evidence: Of a trained model; left as it is.
        data: All training data, on the model's device.
        estimator: Name of the bound.
        hyperparameter: ``precision``, one for all weights, or the name of a range of the model's
            invariance.
        grid: Its values.
        seed: Of the partition.
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
        prior=GaussianPrior("scalar") if is_precision else None,
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
        "mean": [statistics.fmean(column) for column in columns],
        "sem": [standard_error(column) for column in columns],
        "blocks": len(drawn),
    }


def make_grid(start: float, stop: float, count: int, log: bool = False) -> list[float]:
    """Values that a curve is drawn over.

    Args:
        start: The first one.
        stop: The last one.
        count: How many.
        log: Whether they are evenly spaced on a logarithmic scale.

    Returns:
        The values, with six digits.

    Raises:
        ConfigurationError: If they make no sense.
    """
    if count < 2:
        raise ConfigurationError(f"A grid has 2 points or more, not {count}.")
    if not math.isfinite(start) or not math.isfinite(stop) or not start < stop:
        raise ConfigurationError(f"A grid goes up, not from {start:g} to {stop:g}.")
    if log and start <= 0:
        raise ConfigurationError(f"A logarithmic grid begins above 0, not at {start:g}.")
    values = np.geomspace(start, stop, count) if log else np.linspace(start, stop, count)
    return [float(f"{value:.6g}") for value in values]


def set_hyperparameter(evidence: Evidence, name: str, value: float) -> None:
    """Set what a curve is drawn along.

    Args:
        evidence: With a scalar prior, or a model with ranges.
        name: ``precision``, or the name of a range.
        value: Its value.

    Raises:
        ConfigurationError: If there is no such hyperparameter.
    """
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
