"""A lower and an upper bound on the exact log evidence, at the cost of a few estimates.

Let I be the set of all Jacobian rows. It consists of anchors Z and of blocks B_m, which partition
the other rows. The log-determinant ℓ has the bounds

    max_m ℓ(Z ∪ B_m)  ≤  ℓ(I)  ≤  ℓ(Z) + Σ_m ℓ(B_m|Z),    ℓ(B_m|Z) = ℓ(Z ∪ B_m) − ℓ(Z).

The lower bound on ℓ also holds for the maximum over some of the blocks. A sum over some of the
blocks is scaled to estimate the sum over all blocks.
"""

import time
from dataclasses import dataclass
from statistics import mean
from typing import Any

from evigrad.blocks.anchors import Anchoring
from evigrad.blocks.sources import Source, as_source
from evigrad.core.model import standard_error
from evigrad.core.names import Estimator
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.network.network import PROBE_SIZE
from evigrad.passes.checks import check_count
from evigrad.passes.intake import CheckedSource
from evigrad.passes.settings import Memory

# Share of a block's rows that are anchors.
_SHARE = 0.75


@dataclass(frozen=True)
class Bracket:
    """Bounds on the log evidence of the linearized Laplace approximation, in nats for all data.

    Attributes:
        lower: Lower bound, or an estimate of the lower bound if only some blocks were used.
        lower_error: Standard error of ``lower``, or 0 if all blocks were used.
        upper: Upper bound.
        num_data: Number of examples N.
        rows: Number of rows in a block, including anchors.
        blocks: Number of blocks used.
        seconds: Computation time in seconds.

    See also: docs/theory.md.
    """

    lower: float
    lower_error: float
    upper: float
    num_data: int
    rows: int
    blocks: int
    seconds: float

    @property
    def lower_per_datum(self) -> float:
        """Return the lower bound divided by N."""
        return self.lower / self.num_data

    @property
    def upper_per_datum(self) -> float:
        """Return the upper bound divided by N."""
        return self.upper / self.num_data


def bracket(
    evidence: Evidence,
    data: Any,
    *,
    rows: int = 1000,
    blocks: int | None = 8,
    root: str = "eigen",
    anchoring: Anchoring | None = None,
    memory: Memory | None = None,
    seed: int = 0,
) -> Bracket:
    """Return bounds on the exact log evidence of a model at its current hyperparameters.

    The exact log evidence is the estimate by ``full-N-C``, whichever estimator ``evidence`` has,
    with the evidence's weight of the log-determinant. If the model draws random transforms, the
    bounds hold for one fixed draw per example.

    Args:
        evidence: Evidence of the model, which is not changed.
        data: All N training examples.
        rows: Number of rows in a block. With more rows, the bounds are closer together. With all
            rows, both bounds equal the exact value. Default: 1,000.
        blocks: Number of blocks to use. None uses all blocks, and the standard error is then 0.
            Default: 8.
        root: Root of the likelihood's curvature: fisher or eigen (default).
        anchoring: How many rows are anchors, and how they are chosen. Default: three quarters of
            the rows of a block.
        memory: Batch sizes and data types of passes. Default: the micro-batches of ``evidence``.
        seed: Seed of all random draws.

    Returns:
        The bounds.

    Raises:
        ConfigurationError: If a number is not positive, or the likelihood has no Jacobian rows.
        InputError: If the data are invalid for the model or the likelihood.
        MemoryBudgetError: If the rows would not fit into free memory.

    Examples:
        >>> import torch
        >>> from evigrad import Evidence, bracket
        >>> from evigrad.likelihoods import Gaussian
        >>> from evigrad.priors import GaussianPrior
        >>> x, model = torch.randn(20, 2), torch.nn.Linear(2, 1)
        >>> evidence = Evidence(
        ...     model, Gaussian(), GaussianPrior(), estimator="ntk-5-rows", num_data=20
        ... )
        >>> bounds = bracket(evidence, (x, x[:, :1]), rows=10)
        >>> bounds.lower <= bounds.upper
        True

    See also: docs/theory.md.
    """
    start = time.perf_counter()
    check_count("rows", rows)
    if blocks is not None:
        check_count("blocks", blocks)
    check_bracket(evidence.estimator)
    source = as_source(data)
    x, _ = source.first(PROBE_SIZE)
    rows = min(rows, len(source) * evidence.problem.plan_of(x).num_outputs)
    other = evidence.with_estimator(
        f"ntk-{rows}-rows-anchored",
        root=root,
        anchoring=anchoring or Anchoring(share=_SHARE),
        memory=memory,
        generator=seed,
    )
    log_likelihood = _choose_anchors(other, source)
    stream = other.blocks(source)
    conditional_entropies: list[float] = []
    together: list[float] = []
    anchor_entropy = log_prior = 0.0
    for block in stream.epoch() if blocks is None else stream.take(blocks):
        estimate = other.estimate(block)
        log_prior = estimate.log_prior
        anchor_entropy, *part_entropies = estimate.entropies
        # All blocks give the sum itself, some blocks an estimate of it.
        anchored = None if blocks is None else block.anchored
        weights = [1.0] * len(part_entropies) if anchored is None else anchored.weights
        conditional_entropies.append(
            sum(w * part for w, part in zip(weights, part_entropies, strict=True))
        )
        together.append(anchor_entropy + sum(part_entropies))
        if not part_entropies:  # every row is an anchor
            break
    count = len(conditional_entropies)
    conditional = sum(conditional_entropies) if blocks is None else mean(conditional_entropies)
    error = 0.0 if blocks is None else standard_error(conditional_entropies)
    log_joint, half = log_likelihood + log_prior, 0.5 * evidence.log_det_weight
    return Bracket(
        lower=log_joint - half * (anchor_entropy + conditional),
        lower_error=half * error,
        upper=log_joint - half * max(together),
        num_data=evidence.num_data,
        rows=rows,
        blocks=count,
        seconds=time.perf_counter() - start,
    )


def _choose_anchors(evidence: Evidence, source: Source) -> float:
    """Return log p(D|w,h) / T in nats. The anchors are chosen by the outputs of the same pass."""
    assert evidence.anchors is not None
    with evidence.ranks.together():
        log_likelihood = evidence.anchors.refresh(CheckedSource(evidence.problem, source))
    return log_likelihood / evidence.temperature


def check_bracket(spec: Estimator) -> None:
    """Raise ConfigurationError if the estimator's curvature is not the Gauss-Newton matrix."""
    if spec.curvature != "ggn":
        name = spec.name.removesuffix(f"-{spec.curvature}")
        raise ConfigurationError(
            f"The bounds need the GGN curvature, got '{spec.curvature}' in {spec.name}. Use"
            f" estimator='{name}', or evidence.with_estimator('{name}')."
        )
