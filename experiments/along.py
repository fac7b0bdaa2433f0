"""Bounds along a hyperparameter for fixed weights, as in Figures 3 to 6 of the paper.

Along a hyperparameter of the model, each estimator needs one pass over the data per point. The Gram
matrix of any block is R K Rᵀ. K is the kernel of all outputs of all data under the prior, and R
holds roots of Λ at the data of the block. If K is formed anyway, one pass and one K per point serve
every estimator that uses rows.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.blocks import Block
from evigrad.core.curvature import RoundingError, rounding_refused
from evigrad.core.curvature.base import working_dtype
from evigrad.core.curvature.linalg import log_det_identity_plus
from evigrad.core.curvature.rows import DenseRows
from evigrad.core.model import standard_error
from evigrad.core.names import Estimator
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.files import replacing
from evigrad.invariances import Averaged
from evigrad.likelihoods import Gaussian
from evigrad.measure.judging import default_memory
from evigrad.measure.metrics import probe_outputs
from evigrad.passes.memory import run_if_it_fits
from evigrad.priors import GaussianPrior
from evigrad.training.data import derived_seed

# The hyperparameter that is not a range of an invariance: one precision for all weights.
PRECISION = "precision"
# The estimator that forms the kernel of all rows.
_WHOLE = "ntk-N-C"
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
    """Return the log evidence by all blocks of one partition at each point of a grid.

    The partition and the random transforms of each block are equal at all points.

    Args:
        evidence: Evidence of a trained model. It does not change.
        data: All training data, on the device of the model.
        estimator: Name of the bound.
        hyperparameter: ``precision``, one for all weights, or the name of a range of the model's
            invariance.
        grid: Values of the hyperparameter.
        seed: Seed of the partition.
        blocks: Maximum number of blocks to evaluate. Default: all.
        partial: File for finished blocks. An interrupted call resumes from it, with equal numbers.
            Default: none.

    Returns:
        The ``grid``, the ``mean`` over the blocks in nats per example and its standard error
        ``sem`` for each point, and the number of ``blocks``.

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
    values_by_block: dict[str, list[float]] = {}
    if partial is not None and partial.exists():
        values_by_block = json.loads(partial.read_text(encoding="utf-8"))
    drawn = list(one.blocks(data).epoch())[:blocks]
    saved = time.monotonic()
    with _kept_ranges(evidence.model):
        for number, block in enumerate(drawn):
            if str(number) in values_by_block:
                continue
            values, kept = [], None
            for value in grid:
                set_hyperparameter(one, hyperparameter, value)
                # Each block has its own generator, so an interruption changes no draw.
                one.generator.manual_seed(derived_seed(seed, "evidence", number + 1))
                if is_precision:
                    kept = kept or one.collect(block, wrt="prior")
                    estimate = one.estimate_kept(kept)
                else:
                    estimate = one.estimate(block)
                values.append(estimate.per_datum)
            values_by_block[str(number)] = values
            if partial is not None and time.monotonic() - saved > _SAVE_EVERY:
                _write(partial, values_by_block)
                saved = time.monotonic()
    in_order = [values_by_block[str(number)] for number in range(len(drawn))]
    columns = list(zip(*in_order, strict=True))
    if partial is not None:
        partial.unlink(missing_ok=True)
    return {
        "grid": list(grid),
        "mean": [fmean(column) for column in columns],
        "sem": [standard_error(column) for column in columns],
        "blocks": len(drawn),
    }


def make_grid(start: float, stop: float, count: int, log: bool = False) -> list[float]:
    """Return ``count`` values with six digits. Raise ConfigurationError for an invalid grid."""
    if count < 2:
        raise ConfigurationError(f"A grid must have at least 2 points, got {count}.")
    if not math.isfinite(start) or not math.isfinite(stop) or not start < stop:
        raise ConfigurationError(f"A grid must increase, got start={start:g} and stop={stop:g}.")
    if log and start <= 0:
        raise ConfigurationError(f"A logarithmic grid must start above 0, got {start:g}.")
    values = np.geomspace(start, stop, count) if log else np.linspace(start, stop, count)
    return [float(f"{value:.6g}") for value in values]


def set_hyperparameter(evidence: Evidence, name: str, value: float) -> None:
    """Set the ``precision`` of a scalar prior, or a range of the model's transforms."""
    with torch.no_grad():
        if name == PRECISION:
            assert evidence.prior.log_precision is not None
            evidence.prior.log_precision.fill_(math.log(value))
            return
        model = evidence.model
        ranges = model.invariance.named_ranges() if isinstance(model, Averaged) else {}
        if name not in ranges:
            raise ConfigurationError(
                f"A curve is along {PRECISION}, or a range of the model's invariance"
                f" ({', '.join(ranges) or 'it has none'}), not '{name}'."
            )
        getattr(model.invariance, name).fill_(value)


@contextmanager
def _kept_ranges(model: nn.Module) -> Iterator[None]:
    """Restore the ranges of a model at the end."""
    tensors = [*model.parameters(), *model.buffers()]
    small = [(t, t.detach().clone()) for t in tensors if t.dim() == 0]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in small:
                tensor.copy_(value)


def curves_along(
    evidence: Evidence,
    data: tuple[Tensor, Tensor],
    estimators: Sequence[str],
    hyperparameter: str,
    grid: Sequence[float],
    *,
    seed: int = 0,
    partial: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the curves of several estimators, each on all blocks of one partition.

    One kernel per point serves the estimators of ``served_together``, with equal random transforms.
    ``evidence_along`` evaluates all others.

    Args:
        evidence: Evidence of a trained model.
        data: All training data.
        estimators: Names of the bounds.
        hyperparameter: Name of the hyperparameter.
        grid: Values of the hyperparameter.
        seed: Seed of the partitions.
        partial: File for the results so far. Further files hold unfinished curves.

    Returns:
        The results of ``evidence_along`` by name of the estimator.

    Raises:
        ConfigurationError: If there is no such hyperparameter.
    """
    together = served_together(evidence, data, estimators, hyperparameter)
    shared = None if partial is None else partial.with_name(f"together-{partial.name}")
    curves: dict[str, dict[str, Any]] = {}
    if partial is not None and partial.exists():
        curves = json.loads(partial.read_text(encoding="utf-8"))
    for name in estimators:
        if name in curves:
            continue
        if name in together:
            curves |= _of_kernels(evidence, data, together, hyperparameter, grid, seed, shared)
        else:
            curve_file = None if partial is None else partial.with_name(f"{name}-{partial.name}")
            curves[name] = evidence_along(
                evidence, data, name, hyperparameter, grid, seed=seed, partial=curve_file
            )
        if partial is not None:
            _write(partial, curves)
    if partial is not None:
        partial.unlink()
    return {name: curves[name] for name in estimators}


def served_together(
    evidence: Evidence,
    data: tuple[Tensor, Tensor],
    estimators: Sequence[str],
    hyperparameter: str,
) -> list[str]:
    """Return the estimators that ``curves_along`` evaluates from one kernel.

    Along a hyperparameter of the model, these are all estimators by ``ntk``, ``full`` and
    ``blockdiag`` with the GGN and without anchors. They must include ``ntk-N-C``, which forms the
    kernel anyway. There are none if a precision varies inside a tensor or if outputs have
    positions. If one partition refines another, its bound is then lower at every point, and not
    only in expectation.

    Args:
        evidence: Evidence of the model.
        data: All training data.
        estimators: Names of the bounds.
        hyperparameter: Name of the hyperparameter.
    """
    specs = {name: Estimator.parse(name) for name in estimators}
    row_estimators = [name for name, spec in specs.items() if _is_of_rows(spec)]
    if hyperparameter == PRECISION or _WHOLE not in {specs[name].name for name in row_estimators}:
        return []
    is_one_number = all(p.ndim == 0 for p in evidence.prior.precisions().values())
    has_positions = probe_outputs(evidence.model, data[0][:2]).ndim > 2
    return row_estimators if is_one_number and not has_positions else []


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(content).encode())


def _is_of_rows(spec: Estimator) -> bool:
    """Return whether its log-determinants come from Gram matrices of listed rows."""
    is_exact = spec.structure in ("ntk", "full", "blockdiag")
    return is_exact and spec.curvature == "ggn" and not spec.anchored


def _of_kernels(
    evidence: Evidence,
    data: tuple[Tensor, Tensor],
    estimators: Sequence[str],
    hyperparameter: str,
    grid: Sequence[float],
    seed: int,
    partial: Path | None,
) -> dict[str, dict[str, Any]]:
    """Return the results of estimators that one kernel per point serves."""
    drawn: dict[str, tuple[Estimator, list[Block]]] = {}
    for name in estimators:
        one = evidence.with_estimator(name, generator=seed)
        blocks = one.blocks(data).epoch()
        drawn[name] = one.estimator, [replace(block, inputs=None, targets=None) for block in blocks]
    by_tensor = any(spec.structure == "blockdiag" for spec, _ in drawn.values())

    def estimates(dtype: torch.dtype | None = None) -> dict[str, list[float]]:
        return _Kernels.of(evidence, data, seed, by_tensor, dtype).estimates(drawn)

    estimates_by_value: dict[str, dict[str, list[float]]] = {}
    if partial is not None and partial.exists():
        estimates_by_value = json.loads(partial.read_text(encoding="utf-8"))
    with _kept_ranges(evidence.model), torch.no_grad():
        for value in grid:
            if repr(value) in estimates_by_value:
                continue
            set_hyperparameter(evidence, hyperparameter, value)
            try:
                with rounding_refused():
                    values = estimates()
            except RoundingError:
                wide = run_if_it_fits(lambda: estimates(torch.float64))
                values = wide[0] if wide else estimates()
            estimates_by_value[repr(value)] = values
            if partial is not None:
                _write(partial, estimates_by_value)
    points = [estimates_by_value[repr(value)] for value in grid]
    if partial is not None:
        partial.unlink(missing_ok=True)
    return {
        name: {
            "grid": list(grid),
            "mean": [fmean(point[name]) for point in points],
            "sem": [standard_error(point[name]) for point in points],
            "blocks": len(drawn[name][1]),
        }
        for name in estimators
    }


@dataclass(frozen=True, eq=False)
class _Kernels:
    """The kernel of all outputs of all data, under the present prior and hyperparameters.

    Attributes:
        evidence: Evidence of the model.
        outputs: Outputs f.
        targets: Targets y.
        whole: Kernel J P0^{-1} Jᵀ.
        of_tensors: Term of each parameter tensor. For a narrow tensor, the rows J P0^{-1/2}
            instead. Empty if no estimator needs them.
    """

    evidence: Evidence
    outputs: Float[Tensor, "N C"]
    targets: Tensor
    whole: Float[Tensor, "N C N C"]
    of_tensors: Sequence[Float[Tensor, "N C N C"] | Float[Tensor, "N C n"]]

    @classmethod
    def of(
        cls,
        evidence: Evidence,
        data: tuple[Tensor, Tensor],
        seed: int,
        by_tensor: bool,
        dtype: torch.dtype | None = None,
    ) -> "_Kernels":
        """Return the kernels after one pass over the data. ``seed`` sets the model's draws."""
        (x, y), weights = data, list(evidence.weights().values())
        shape, first = torch.Size((len(x), evidence.problem.plan_of(x[:2]).num_outputs)), weights[0]
        weights_dtype = reduce(torch.promote_types, (w.dtype for w in weights))
        dtype = dtype or working_dtype(weights_dtype, None)
        # Under unit noise, the rows are the rows of the Jacobian.
        unit = evidence.with_estimator(
            _WHOLE,
            likelihood=Gaussian(1.0),
            prior=GaussianPrior("layerwise"),
            temperature=1.0,
            memory=replace(default_memory(evidence, data), gram_dtype=dtype),
            generator=seed,
        )
        changing = [name for name in unit.hyperparameters() if not name.startswith("model.")]
        kept = unit.collect(x, first.new_zeros(shape), wrt=changing)
        outputs = torch.cat([f for _, f in kept.outputs])
        whole, of_tensors = first.new_zeros(*shape, *shape, dtype=dtype), list[Tensor]()
        for name, precision in evidence.prior.precisions().items():
            gram = kept.statistic.taken_gram([name], whole).div_(precision).reshape(whole.shape)
            whole += gram
            if by_tensor:
                rows = kept.statistic.rows.get(name)
                if isinstance(rows, DenseRows) and rows.chunks[0].shape[1] < shape.numel() / 2:
                    gram = torch.cat(rows.chunks).to(dtype).div_(precision.sqrt())
                    gram = gram.reshape(*shape, -1)
                of_tensors.append(gram)
        return cls(evidence, outputs, y, whole, of_tensors)

    def estimates(
        self, drawn: Mapping[str, tuple[Estimator, Sequence[Block]]]
    ) -> dict[str, list[float]]:
        """Return the log evidence per example by each block of each estimator."""
        evidence, estimates = self.evidence, dict[str, list[float]]()
        log_prior = -0.5 * evidence.prior.quadratic(evidence.weights())
        for name, (spec, blocks) in drawn.items():
            kernels = self.of_tensors if spec.structure == "blockdiag" else [self.whole]
            totals = [log_prior + self._of_data(spec, block, kernels) for block in blocks]
            estimates[name] = [float(total) / evidence.num_data for total in totals]
        return estimates

    def _of_data(self, spec: Estimator, block: Block, kernels: Sequence[Tensor]) -> Tensor:
        """Return the log evidence by a block without the log prior, in nats."""
        evidence, likelihood = self.evidence, self.evidence.likelihood
        data = block.indices.to(self.outputs.device)
        f, y = self.outputs[data], self.targets[data]
        columns = None if block.columns is None else block.columns.to(f.device)
        rows = likelihood.root(f, columns, spec.default_root).scaled
        factors = likelihood.weights(y)
        if factors is not None:
            rows = rows * factors.to(f).sqrt()[:, None, None]
        rows = rows.to(kernels[0].dtype) * evidence.temperature**-0.5
        log_det = sum(_log_det(kernel, data, rows) for kernel in kernels)
        weights = block.likelihood_weights.to(f.device)
        log_likelihood = (weights * likelihood.log_prob(f, y).double()).sum()
        return log_likelihood / evidence.temperature - 0.5 * block.scale * log_det


def _log_det(kernel: Tensor, data: Tensor, rows: Float[Tensor, "m k C"]) -> Float[Tensor, ""]:
    """Return log|I + R K Rᵀ| for the rows of a block, from K or its factor."""
    if kernel.ndim == 3:
        factor = (rows @ kernel[data]).flatten(0, 1)
        small = factor.mT @ factor if factor.shape[1] < factor.shape[0] else factor @ factor.mT
        return log_det_identity_plus(small)
    m, k, c = rows.shape
    left = (rows @ kernel[data][:, :, data].flatten(2)).reshape(m * k, m, c)
    return log_det_identity_plus((left.transpose(0, 1) @ rows.mT).transpose(0, 1).flatten(1))
