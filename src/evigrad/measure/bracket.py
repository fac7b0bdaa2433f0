"""The exact log evidence between two bounds, for the cost of a few estimates.

With anchors Z, a partition of the other rows into blocks B_m, and all rows I,

    max_m ℓ(Z ∪ B_m)  ≤  ℓ(I)  ≤  ℓ(Z) + Σ_m ℓ(B_m|Z).

The left side holds for any choice of blocks. The sum on the right is exact over all blocks, and
estimated from some of them.
"""

import time
from dataclasses import dataclass
from statistics import mean
from typing import Any

from evigrad.blocks.anchors import Anchoring
from evigrad.blocks.sources import as_source
from evigrad.core.names import Estimator
from evigrad.core.types import standard_error
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.network.network import PROBE_SIZE
from evigrad.passes.checks import check_count
from evigrad.passes.settings import Memory

# Share of a block's rows that are anchors.
_SHARE = 0.75


@dataclass(frozen=True)
class Bracket:
    """Bounds on the log evidence of the linearised Laplace approximation, in nats of all the data.

    Attributes:
        lower: A lower bound, or an estimate of one from some of the blocks.
        lower_error: Standard error of ``lower``; 0 where all blocks were used.
        upper: An upper bound.
        num_data: N.
        rows: Rows of a block, anchors included.
        blocks: Number of blocks that were used.
        seconds: Time of the computation.
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
        """The lower bound divided by N."""
        return self.lower / self.num_data

    @property
    def upper_per_datum(self) -> float:
        """The upper bound divided by N."""
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
    """Bounds on the exact log evidence of a model under its present hyperparameters.

    Both bounds are on the value of ``full-N-C``, for any estimator of ``evidence``. Where the model
    draws random transforms, the bounds are given these transforms, and the likelihood is that of
    one draw for each datum.

    Args:
        evidence: The model's evidence; it is not changed.
        data: All N training data.
        rows: Rows of a block: more rows bring the bounds together, and all rows are exact.
        blocks: Number of blocks to use; None uses the whole partition, which has no standard error.
        root: Root of the likelihood's curvature, fisher or eigen.
        anchoring: How many rows are anchors, and how they are chosen. Default: three quarters,
            fewer than where one block is drawn, as all blocks of a partition share the anchors.
        memory: Sizes and types of passes. Default: the micro-batches of ``evidence``.
        seed: Seed of everything that is drawn.

    Returns:
        The bounds.

    Raises:
        ConfigurationError: If a number is not positive, or there are no rows to be anchors.
        InputError: If the data do not fit.
        MemoryBudgetError: If the rows would not fit the free memory.
    """
    start = time.perf_counter()
    check_count("rows", rows)
    if blocks is not None:
        check_count("blocks", blocks)
    check_bracket(evidence.spec)
    source = as_source(data)
    x, _ = source.first(PROBE_SIZE)
    rows = min(rows, len(source) * evidence.num_outputs(x))
    other = evidence.with_estimator(
        f"ntk-{rows}-rows-anchored",
        root=root,
        anchoring=anchoring or Anchoring(share=_SHARE),
        memory=memory,
        generator=seed,
    )
    log_likelihood = other.refresh_anchors(source)
    stream = other.blocks(source)
    conditional_entropies: list[float] = []
    together: list[float] = []
    of_anchors = log_prior = 0.0
    for block in stream.epoch() if blocks is None else stream.take(blocks):
        estimate = other.estimate(block)
        log_prior = estimate.log_prior
        of_anchors, *of_parts = estimate.entropies
        # All blocks give the sum itself, some of them an estimate of it.
        anchored = None if blocks is None else block.anchored
        weights = [1.0] * len(of_parts) if anchored is None else anchored.weights
        conditional_entropies.append(
            sum(w * part for w, part in zip(weights, of_parts, strict=True))
        )
        together.append(of_anchors + sum(of_parts))
        if not of_parts:  # every row is an anchor
            break
    count = len(conditional_entropies)
    conditional = sum(conditional_entropies) if blocks is None else mean(conditional_entropies)
    error = 0.0 if blocks is None else standard_error(conditional_entropies)
    log_joint = log_likelihood + log_prior
    return Bracket(
        lower=log_joint - 0.5 * (of_anchors + conditional),
        lower_error=0.5 * error,
        upper=log_joint - 0.5 * max(together),
        num_data=evidence.num_data,
        rows=rows,
        blocks=count,
        seconds=time.perf_counter() - start,
    )


def check_bracket(spec: Estimator) -> None:
    """Raise ConfigurationError for curvatures other than the GGN, which the bounds are on."""
    if spec.curvature != "ggn":
        raise ConfigurationError(
            f"{spec.name}: the bounds of a bracket are on the evidence of the GGN, and this one has"
            f" the curvature '{spec.curvature}'."
        )
