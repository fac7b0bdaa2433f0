"""The linearized model, a pass over a block, and an estimate of the log evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.block import Block, Conditioning, MicroBatch
from evigrad.core.curvature.base import Curvature
from evigrad.core.names import Estimator
from evigrad.core.protocols import Density, Linearization, Prior
from evigrad.core.roots import RootRows, checked_rows
from evigrad.errors import raised_in

LikelihoodT = TypeVar("LikelihoodT", bound=Density, covariant=True)
PriorT = TypeVar("PriorT", bound=Prior, covariant=True)


@dataclass(frozen=True, eq=False)
class LinearizedModel(Generic[LikelihoodT, PriorT]):
    """The weights of a linearized network, a density and a prior, which define the evidence.

    The network itself is not part of it.

    Attributes:
        weights: Current weights by name.
        likelihood: Density of the targets.
        prior: Prior of the weights.
        estimator: The parsed estimator name, which determines the rows of a block and the
            curvature of the outputs.
        num_data: Number of examples, N.
        temperature: The temperature T. The likelihood p is raised to the power 1/T.
        root: How the curvature of an example is split into rows. One of ``ROOTS``.
        log_det_weight: Weight c of the log-determinant. It is 1 for the log evidence.
    """

    weights: Mapping[str, Tensor]
    likelihood: LikelihoodT
    prior: PriorT
    estimator: Estimator
    num_data: int
    temperature: float
    root: str
    log_det_weight: float

    def log_likelihood(self, log_probabilities: Tensor, weights: Tensor) -> Float[Tensor, ""]:
        """Return (1/T) Σ_n w_n log p(y_n|f_n) in float64, for weights w_n."""
        weighted = weights.to(log_probabilities) * log_probabilities
        return weighted.sum().double() / self.temperature

    def cotangents(self, f: Float[Tensor, "m C"], batch: MicroBatch) -> RootRows:
        """Return the cotangents of a micro-batch's rows at outputs f, including the temperature.

        They keep the graphs of f and of the likelihood's parameters.
        """
        likelihood = self.likelihood.at(batch.y)
        name = type(likelihood).__name__
        methods = "root or hessian" if self.estimator.curvature == "ggn" else "score or log_prob"
        with raised_in(f"{methods} of {name}"):
            if self.estimator.curvature == "ef":
                root = RootRows(likelihood.score(f, batch.y)[:, None, :], None)
            elif self.estimator.curvature == "mc":
                root = sampled_rows(likelihood, f, batch.labels)
            else:
                columns = None if batch.columns is None else batch.columns.to(f.device)
                root = checked_rows(likelihood.root(f, columns, self.root), f, columns, name)
                if columns is not None and (columns < 0).any():
                    root = replace(root, present=columns >= 0)
            weights = likelihood.weights(batch.y)
        # The likelihood's parameters may have a wider type than the outputs.
        vectors = root.vectors.to(f)
        if vectors is not root.vectors:
            root = replace(root, vectors=vectors)
        if weights is not None:
            factor = weights.to(f).sqrt().view(len(f), 1, -1)  # of examples, or also of outputs
            root = replace(root, vectors=root.vectors * factor)
        if self.temperature == 1.0:
            return root
        return replace(root, scale=root.factors * self.temperature**-0.5)


def sampled_rows(likelihood: Density, f: Tensor, labels: Sequence[Tensor]) -> RootRows:
    """Return rows from scores of sampled labels. The expected sum of their outer products is Λ."""
    scores = torch.stack([likelihood.score(f, label) for label in labels], dim=1)
    log_prob = torch.stack([likelihood.log_prob(f, label) for label in labels], dim=1)
    # The ratio is 1. Its derivative accounts for the label distribution, so the gradient of H is
    # unbiased although the sampled labels are fixed.
    ratio = (0.5 * (log_prob - log_prob.detach())).exp()
    return RootRows(scores * len(labels) ** -0.5, ratio)


# ------------------------------------------------------------ results


@dataclass(frozen=True, eq=False)
class Pass:
    """The results of one pass over a block, from which the log evidence follows for any prior.

    Attributes:
        model: The model.
        curvature: The curvature of the statistic.
        block: The block, without inputs and targets.
        statistic: The statistic of all rows of the block.
        log_likelihood: (1/T) log p(D|w,h), scaled to the whole data set, in nats.
        log_probabilities: log p(y|w,h) of each example of the block, (m,).
        num_outputs: Number of outputs, C.
        outputs: Micro-batches without inputs, each with its outputs, for steps on the likelihood's
            parameters. Empty by default.
        linearized: The linearization and the cotangents of a micro-batch that has all rows, with a
            graph for the second pass. None by default.
    """

    model: LinearizedModel[Density, Prior]
    curvature: Curvature[Any]
    block: Block
    statistic: Any
    log_likelihood: Tensor
    log_probabilities: Tensor
    num_outputs: int
    outputs: Sequence[tuple[MicroBatch, Tensor]] = ()
    linearized: tuple[Linearization, RootRows] | None = None

    @cached_property
    def conditioning(self) -> Conditioning | None:
        """Which rows are anchors, and which are in drawn parts. None without anchors."""
        columns, anchored = self.block.columns, self.block.anchored
        if anchored is None or columns is None:
            return None
        return Conditioning(anchored.labels[columns >= 0], anchored.weights)

    @cached_property
    def is_bound(self) -> bool:
        """Whether the expected scaled log-determinant is at least the exact log-determinant."""
        columns = self.block.columns
        splits_outputs = (
            columns is not None
            and bool(columns.numel())
            and (columns.shape[1] < self.num_outputs or bool((columns < 0).any()))
        )
        coupled = self.model.likelihood.couples_outputs and splits_outputs
        # ℓ is never negative, so a larger weight lowers the value, and a smaller one raises it.
        return self.model.log_det_weight >= 1 and self.model.estimator.is_bound(
            self.model.root, coupled
        )


@dataclass(frozen=True)
class Estimate:
    """One estimate of the log evidence of the whole data set, in nats.

    ``log_evidence = log_likelihood + log_prior - log_det_weight * log_det / 2``. With a weight of
    1, this is the linearized Laplace approximation, including all constants (Algorithm 1 of the
    paper).

    Attributes:
        log_evidence: Estimate of log q(D|h), with the weight of the log-determinant.
        log_likelihood: Estimate of (1/T) log p(D|w,h).
        log_prior: −½ (w−w₀)ᵀP0(w−w₀), exact. ``log_det`` includes the normalizer of the prior.
        log_det: Estimate of ℓ = log|I + S| for the whole data set, with the Gram matrix S.
        log_hyperprior: Log density of the hyperparameters, which ``log_evidence`` excludes.
        is_bound: Whether the expectation of ``log_evidence`` is a lower bound on the log evidence
            with the same curvature and weight 1. A single estimate can exceed the log evidence. No
            estimate with a weight below 1 is a bound.
        num_data: Number of examples, N.
        estimator: Canonical name of the estimator.
        at_mode: The log evidence of the linearized model at its own mode, if you
            requested it from ``estimate``. None by default.
        log_det_weight: Weight c of the log-determinant.
        entropies: For an anchored block, ℓ(Z) of the anchors and ℓ(B_b|Z) of each drawn part, in
            nats. Empty for other blocks.

    See also: docs/trainers.md.
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
    at_mode: float | None = None
    log_det_weight: float = 1.0

    @property
    def per_datum(self) -> float:
        """The log evidence per example, in nats."""
        return self.log_evidence / self.num_data


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values, or 0 for one value."""
    if len(values) < 2:
        return 0.0
    return float(torch.tensor(values, dtype=torch.float64, device="cpu").std()) / len(values) ** 0.5
