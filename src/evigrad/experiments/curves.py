"""A bound on the log evidence along one hyperparameter, the weights being fixed."""

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.experiments.store import write_json
from evigrad.invariances import Averaged
from evigrad.priors import GaussianPrior
from evigrad.training.compare import default_micro_batch
from evigrad.training.randomness import derived_seed

# The hyperparameter that is no range of an invariance: one precision for all weights.
PRECISION = "precision"
_PARTIAL = "partial.json"
_SAVE_EVERY = 15.0  # seconds


def curve(
    evidence: Evidence, data: tuple[Tensor, Tensor], config: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Evaluate all blocks of one partition at each point of a grid.

    The partition, and the random transforms of each of its blocks, are the same at all points.

    Args:
        evidence: Of a trained model; left as it is.
        data: All training data.
        config: ``estimator``, ``hyperparameter`` (``precision`` or the name of a range), ``grid``,
            ``blocks`` (at most so many, None for all) and ``seed``.
        folder: Where what is done so far is kept.

    Returns:
        For each point the mean over the blocks and its standard error, in nats per datum.

    Raises:
        ConfigurationError: If there is no such hyperparameter.
    """
    name, grid, seed = config["hyperparameter"], config["grid"], config["seed"]
    one = evidence.with_estimator(
        config["estimator"],
        prior=GaussianPrior("scalar") if name == PRECISION else None,
        micro_batch=default_micro_batch(evidence, data),
        generator=seed,
    )
    found = _Partial(folder / _PARTIAL)
    blocks = list(one.blocks(data).epoch())[: config["blocks"]]
    with restored(evidence.model):
        for number, block in enumerate(blocks):
            if number in found.rows:
                continue
            values = []
            kept = None
            for value in grid:
                set_hyperparameter(one, name, value)
                # Of its own for each block, so that an interruption changes no draw.
                one.generator.manual_seed(derived_seed(seed, "evidence", number + 1))
                if name == PRECISION:
                    kept = kept or one.collect(block, wrt="prior")
                values.append(one.estimate(kept or block).per_datum)
            found.add(number, values)
    rows = [found.rows[number] for number in range(len(blocks))]
    columns = list(zip(*rows, strict=True))
    many = len(rows) > 1
    found.remove()
    return {
        "grid": grid,
        "mean": [statistics.fmean(column) for column in columns],
        "sem": [
            statistics.stdev(column) / math.sqrt(len(rows)) if many else 0.0 for column in columns
        ],
        "blocks": len(rows),
    }


class _Partial:
    """The blocks that are done, on the disk every few seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[int, list[float]] = {}
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.rows = {int(number): values for number, values in kept.items()}
        self._saved = time.monotonic()

    def add(self, number: int, values: list[float]) -> None:
        self.rows[number] = values
        if time.monotonic() - self._saved > _SAVE_EVERY:
            write_json(self._path, {str(n): v for n, v in self.rows.items()})
            self._saved = time.monotonic()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


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
def restored(model: nn.Module) -> Iterator[None]:
    """Put the ranges of a model back on the way out.

    Args:
        model: Any.
    """
    tensors = [*model.parameters(), *model.buffers()]
    small = [(t, t.detach().clone()) for t in tensors if t.dim() == 0]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in small:
                tensor.copy_(value)
