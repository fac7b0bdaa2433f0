"""The result of an evaluation of the evidence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Estimate:
    """One estimate of the log evidence of the whole data set, in nats.

    ``log_evidence = log_likelihood + log_prior - log_det / 2``: the linearised Laplace
    approximation with all constants in (DESIGN section 1; the paper's Algorithm 1).

    Attributes:
        log_evidence: Estimate of log q(D|h).
        log_likelihood: Estimate of (1/T) log p(D|w,h).
        log_prior: −½ wᵀP0w, exact. (The rest of log p(w|h) cancels in the determinant.)
        log_det: Estimate of ℓ(I) = log|I + S|, scaled to the whole data set.
        log_hyperprior: Log density of the hyperparameters, not part of ``log_evidence``.
        is_bound: Whether the expectation of ``log_evidence`` is a lower bound on the log evidence
            of the same curvature; a single estimate can be above it.
        num_data: N.
        estimator: Canonical name of the estimator.
        entropies: ℓ(Z) of the anchors and ℓ(B_b|Z) of each drawn part of an anchored block, in
            nats; empty for other blocks.
    """

    log_evidence: float
    log_likelihood: float
    log_prior: float
    log_det: float
    log_hyperprior: float
    is_bound: bool
    num_data: int
    estimator: str
    entropies: tuple[float, ...] = ()

    @property
    def per_datum(self) -> float:
        """The log evidence divided by N, in nats per datum."""
        return self.log_evidence / self.num_data


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of independent values; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    return float(torch.tensor(values, dtype=torch.float64).std()) / len(values) ** 0.5
