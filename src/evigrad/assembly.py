"""One pass over a block of data: its log likelihood, and the statistic of its curvature.

Data flows one way: micro-batch → outputs → cotangents of the likelihood's root → rows of the
Gram (``jacobians``) → statistic → log-determinant (``curvature``).
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.checks import (
    called,
    check_finite,
    check_inputs,
    check_outputs,
    log_probabilities,
)
from evigrad.curvature import (
    ParameterPartition,
    Structure,
    check_memory,
    hessian_statistic,
    make_structure,
)
from evigrad.errors import EvigradWarning, InputError
from evigrad.estimators import EstimatorSpec
from evigrad.groups import listed
from evigrad.jacobians import (
    JacobianPlan,
    demote,
    linearize,
    model_run,
    plan,
    spot_check,
)
from evigrad.likelihoods import Likelihood, RootRows
from evigrad.modes import evaluation_mode
from evigrad.partitions import Block, Partition
from evigrad.priors import GaussianPrior

# Planning tells the batch from other dimensions by two batch sizes, two and three.
PROBE_SIZE = 3

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Prepared:
    """What depends on the shape of the inputs, made once for each."""

    plan: JacobianPlan
    structure: Structure
    partition: Partition


@dataclass(frozen=True, eq=False)
class Collected:
    """One pass over a block: all that the log evidence needs of the data, whatever the prior.

    Attributes:
        owner: The assembly that made it.
        prepared: The structure that the statistic belongs to.
        log_likelihood: (1/T) log p(D|w,h), scaled to the whole data set, in nats.
        statistic: Of the structure.
        scale: What the statistic's log-determinant is multiplied with.
        splits_outputs: Whether the block holds some of a datum's rows only.
        weight_versions: Of the weights that it was made with.
    """

    owner: "Assembly"
    prepared: Prepared
    log_likelihood: Tensor
    statistic: Any
    scale: float
    splits_outputs: bool
    weight_versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Terms:
    """The data-dependent parts of the log evidence, with a graph where one was asked for.

    Attributes:
        log_likelihood: (1/T) log p(D|w,h), scaled to the whole data set.
        log_det: ℓ(I), scaled to the whole data set.
        is_bound: Whether the expectation of ``log_det`` is at least ℓ(I).
    """

    log_likelihood: Tensor
    log_det: Tensor
    is_bound: bool


@dataclass(frozen=True)
class _Chunk:
    """A micro-batch and its share of the block."""

    x: Tensor
    y: Tensor
    columns: Tensor | None
    likelihood_weights: Tensor
    sampled_labels: Sequence[Tensor]


@dataclass(frozen=True)
class Settings:
    """How an evidence computes; see ``Evidence`` for each."""

    spec: EstimatorSpec
    num_data: int
    root: str
    sharing: str
    parameter_partition: ParameterPartition
    temperature: float
    micro_batch: int | None
    gram_dtype: torch.dtype | None


class Assembly:
    """Turns batches and a block into the terms of the log evidence."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        likelihood: Likelihood,
        prior: GaussianPrior,
        settings: Settings,
        generator: torch.Generator,
    ) -> None:
        self.model = model
        self.weights = dict(weights)
        self.likelihood = likelihood
        self.prior = prior
        self.settings = settings
        self.generator = generator
        self.device = next(iter(self.weights.values())).device
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._passes = 0

    def prepare(self, x: Tensor) -> Prepared:
        """Plan the derivatives and build the structure for inputs of this shape, once."""
        key = (x.shape[1:], x.dtype, x.device)
        if key in self._prepared:
            return self._prepared[key]
        probe = x[:PROBE_SIZE].detach()
        # Planning happens once, so it draws from a generator of its own.
        with evaluation_mode(self.model, torch.Generator().manual_seed(0)), model_run(self.model):
            with torch.no_grad():
                f = called(self.model, probe)
            check_outputs(f, probe)
            made = plan(self.model, self.weights, probe)
        partition = Partition(self.settings.spec, self.settings.num_data, f.shape[1])
        self._prepared[key] = Prepared(made, self._structure(made), partition)
        return self._prepared[key]

    def _structure(self, made: JacobianPlan) -> Structure[Any]:
        settings = self.settings
        return make_structure(
            settings.spec.structure,
            self.weights,
            made,
            precision_groups=self.prior.constant_groups(),
            parameter_partition=settings.parameter_partition,
            sharing=settings.sharing,
            gram_dtype=settings.gram_dtype,
        )

    def latest(self) -> Prepared | None:
        """What was prepared last, if anything."""
        return next(reversed(self._prepared.values()), None)

    def collect(
        self, prepared: Prepared, batches: Iterable[Batch], block: Block, differentiable: bool
    ) -> Collected:
        """One pass over a block's data, everything but the prior.

        Args:
            prepared: For inputs of this shape.
            batches: The block's data, in its order.
            block: Columns and scale factors.
            differentiable: Whether the rows need a graph into the model's hyperparameters.

        Returns:
            The log likelihood and the curvature's statistic.

        Raises:
            InputError: If batches and block do not fit, or outputs are not finite.
        """
        self._check_memory(prepared, block)
        versions = self.weight_versions()
        statistic: Any = None
        log_likelihood = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluation_mode(self.model, self.generator), model_run(self.model):
            for chunk in self._chunks(batches, block):
                if statistic is None and self._check_is_due():
                    prepared = self._spot_checked(prepared, chunk.x)
                if self.settings.spec.curvature == "hessian":
                    statistic, f = self._add_hessian(prepared, statistic, chunk, differentiable)
                else:
                    statistic, f = self._add_rows(prepared, statistic, chunk, differentiable)
                log_prob = log_probabilities(self.likelihood, f, chunk.y)
                weighted = chunk.likelihood_weights.to(log_prob) * log_prob
                log_likelihood = log_likelihood + weighted.sum() / self.settings.temperature
        splits = block.columns is not None and _splits(block.columns, prepared.partition)
        return Collected(self, prepared, log_likelihood, statistic, block.scale, splits, versions)

    def terms(self, collected: Collected) -> Terms:
        """The data-dependent parts of the log evidence, under the present prior.

        Args:
            collected: From ``collect``.

        Returns:
            Log likelihood and log-determinant of the whole data set, in nats.
        """
        prepared = collected.prepared
        log_det = prepared.structure.log_det(collected.statistic, self.prior.precisions())
        coupled = self.likelihood.couples_outputs and collected.splits_outputs
        is_bound = self.settings.spec.is_bound(self.settings.root, coupled)
        return Terms(collected.log_likelihood, collected.scale * log_det, is_bound)

    def weight_versions(self) -> tuple[tuple[int, int], ...]:
        """Numbers that change with a weight, unless it is changed through ``.data``."""
        return tuple((w.data_ptr(), w._version) for w in self.weights.values())

    def _check_memory(self, prepared: Prepared, block: Block) -> None:
        size = len(block.indices)
        width = prepared.partition.num_outputs if block.columns is None else block.columns.shape[1]
        pass_bytes = 0
        if self.settings.spec.structure != "ntk" and self.settings.spec.curvature != "hessian":
            formed = [w for n, w in self.weights.items() if not self._is_factored(prepared, n)]
            rows = min(self.settings.micro_batch or size, size) * width
            pass_bytes = rows * sum(w.numel() * w.element_size() for w in formed)
        check_memory(prepared.structure, size * width, self.device, pass_bytes)

    def _is_factored(self, prepared: Prepared, name: str) -> bool:
        return self.settings.spec.structure == "kfac" and name in prepared.plan.kronecker

    def _check_is_due(self) -> bool:
        """At passes 1, 2, 4, 8, …: what a plan could not see, the first data and weights show."""
        self._passes += 1
        is_due = self._passes & (self._passes - 1) == 0
        return is_due and self.settings.spec.curvature != "hessian"

    def _spot_checked(self, prepared: Prepared, x: Tensor) -> Prepared:
        """One datum of the pass against plain automatic differentiation of it alone."""
        linearization = linearize(self.model, self.weights, x, prepared.plan, False)
        own = torch.Generator().manual_seed(self._passes)  # the evidence's draws are not shifted
        f = linearization.outputs
        vectors = torch.randn(len(f), 1, f.shape[1], generator=own).to(f)
        index = int(torch.randint(len(f), (), generator=own))
        wrong = spot_check(
            self.model, self.weights, x, prepared.plan, linearization, vectors, index
        )
        if not wrong:
            return prepared
        warnings.warn(
            f"The fast derivatives of {listed(sorted(wrong))} are wrong for this model (it may"
            " reorder its data, or use a weight in an unusual way): from here on they are"
            " computed one datum at a time. Earlier estimates of this evidence may be wrong.",
            EvigradWarning,
            stacklevel=2,
        )
        made = demote(prepared.plan, wrong)
        better = Prepared(made, self._structure(made), prepared.partition)
        for key, old in self._prepared.items():
            if old is prepared:
                self._prepared[key] = better
        return better

    def _add_rows(
        self, prepared: Prepared, statistic: Any, chunk: _Chunk, differentiable: bool
    ) -> tuple[Any, Tensor]:
        """Add a micro-batch's rows to the statistic; also its outputs."""
        x = chunk.x
        linearization = linearize(self.model, self.weights, x, prepared.plan, differentiable)
        check_finite("The model's outputs", linearization.outputs)
        root = self._root_rows(linearization.outputs, chunk)
        if root.vectors.requires_grad and not differentiable:
            # The cotangents themselves depend on the likelihood's hyperparameters (a score, or a
            # likelihood that does not separate a scale): the rows then need a graph.
            linearization = linearize(self.model, self.weights, x, prepared.plan, True)
        statistic = prepared.structure.accumulate(statistic, linearization, root)
        return statistic, linearization.outputs

    def _add_hessian(
        self, prepared: Prepared, statistic: Any, chunk: _Chunk, differentiable: bool
    ) -> tuple[Any, Tensor]:
        """Add a micro-batch's exact Hessian to the statistic; also its outputs."""

        def negative_log_likelihood(f: Tensor) -> Tensor:
            return -self.likelihood.log_prob(f, chunk.y).sum() / self.settings.temperature

        with torch.set_grad_enabled(differentiable):
            f = self.model(chunk.x.clone())
        check_finite("The model's outputs", f)
        learnable = any(p.requires_grad for p in self.likelihood.parameters())
        graph = torch.is_grad_enabled() and (differentiable or learnable)
        statistic = hessian_statistic(
            prepared.structure,
            statistic,
            self.model,
            self.weights,
            chunk.x,
            negative_log_likelihood,
            graph,
        )
        return statistic, f

    def _root_rows(self, f: Tensor, chunk: _Chunk) -> RootRows:
        """The cotangents whose vector-Jacobian products are the rows, temperature included."""
        curvature, columns = self.settings.spec.curvature, chunk.columns
        if curvature == "ef":
            root = RootRows(self.likelihood.score(f, chunk.y)[:, None, :], None)
        elif curvature == "mc":  # outer products of sampled labels' scores average to Λ
            labels = chunk.sampled_labels
            scores = torch.stack([self.likelihood.score(f, label) for label in labels], dim=1)
            log_prob = torch.stack([self.likelihood.log_prob(f, label) for label in labels], dim=1)
            # One, with the gradient that the labels' distribution has in f and in the noise: the
            # labels are held fixed, and the gradient of H stays unbiased.
            ratio = (0.5 * (log_prob - log_prob.detach())).exp()
            root = RootRows(scores * len(labels) ** -0.5, ratio)
        else:
            columns = None if columns is None else columns.to(f.device)
            root = self.likelihood.root(f, columns, self.settings.root)
            if columns is not None and (columns < 0).any():
                root = replace(root, present=columns >= 0)
        if self.settings.temperature == 1.0:
            return root
        cooling = self.settings.temperature**-0.5
        scale = torch.ones_like(root.vectors[:, :, 0]) if root.scale is None else root.scale
        return replace(root, scale=scale * cooling)

    def _sample_labels(self, batches: Sequence[Batch], samples: int) -> list[Tensor]:
        """Labels drawn from the model, once for the block: micro-batches change no draw."""
        with torch.no_grad():
            f = torch.cat([part for x, _ in batches for part in self._outputs(x)])
        return [self.likelihood.sample(f, self.generator) for _ in range(samples)]

    def _outputs(self, x: Tensor) -> Iterator[Tensor]:
        for part in x.split(self.settings.micro_batch or len(x)):
            yield self.model(part.clone())  # a model may change its input in place

    def _chunks(self, batches: Iterable[Batch], block: Block) -> Iterator[_Chunk]:
        """Micro-batches with their share of the block."""
        samples: list[Tensor] = []
        if self.settings.spec.curvature == "mc":
            batches = list(batches)
            samples = self._sample_labels(batches, self.settings.spec.outputs or 1)
        expected = len(block.indices)
        start = 0
        for x, y in batches:
            check_inputs(x, self.device)
            stop = start + len(x)
            if stop > expected:
                raise InputError(f"The batches hold more than the {expected} data expected.")
            size = self.settings.micro_batch or len(x)
            for i in range(0, len(x), size):
                part = slice(start + i, min(start + i + size, stop))
                yield _Chunk(
                    x=x[i : i + size],
                    y=y[i : i + size],
                    columns=None if block.columns is None else block.columns[part],
                    likelihood_weights=block.likelihood_weights[part],
                    sampled_labels=[labels[part] for labels in samples],
                )
            start = stop
        if start != expected:
            raise InputError(
                f"The batches hold {start} data, but {self.settings.spec.name} needs all"
                f" {expected}."
            )


def _splits(columns: Tensor, partition: Partition) -> bool:
    return columns.shape[1] < partition.num_outputs or bool((columns < 0).any())
