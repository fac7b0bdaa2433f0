"""The terms of the log evidence of a block, and their gradient in two passes.

Data flows one way: micro-batch → outputs → cotangents of the likelihood's root → rows of the
Gram (``jacobians``) → statistic → log-determinant (``curvature``), and the same rows once more
for the derivative in whatever the forward pass depends on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evigrad.blocks import Block
from evigrad.blocks.anchors import AnchorBook, Anchoring
from evigrad.blocks.partitions import Partition
from evigrad.curvature import (
    RoundingError,
    Statistic,
    hessian_statistic,
    inner_product,
    rounding_refused,
)
from evigrad.engine.collected import Collected, conditioned, weighted_sum
from evigrad.engine.memory import check_memory
from evigrad.engine.passes import Batch, Chunk, Passes, Task
from evigrad.engine.preparation import Preparation, Prepared, Settings
from evigrad.errors import ConfigurationError, MemoryBudgetError
from evigrad.jacobians import linearize
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import check_derivatives, log_probabilities
from evigrad.priors import GaussianPrior

T = TypeVar("T")


class _NotClosed(Exception):
    """A pass in which a contracted weight has no closed form."""


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
        self.preparation = Preparation(model, weights, prior, settings)
        self.passes = Passes(self.preparation, likelihood, settings, self.device)

    def anchor_book(self) -> AnchorBook:
        """What chooses the anchors of an anchored estimator."""
        spec = self.settings.spec
        return AnchorBook(
            self.settings.anchoring or Anchoring(),
            self.settings.num_data,
            spec.subset or 0,
            self.settings.root,
            self.likelihood,
            self.preparation,
            self.generator,
        )

    def prepare(self, x: Tensor) -> Prepared:
        """See ``Preparation.prepare``."""
        return self.preparation.prepare(x)

    def task(
        self, prepared: Prepared, batches: Iterable[Batch], block: Block, condensed: bool
    ) -> Task:
        """See ``Passes.task``; what would not fit is refused before anything is drawn."""
        self._check_memory(prepared, block, condensed)
        return self.passes.task(prepared, batches, block, self.generator)

    def precisely(
        self,
        task: Task,
        work: Callable[[Task], T],
        trial: Callable[[T], object] | None = None,
    ) -> T:
        """Evaluate a block; where float32 would round too much away, once more in float64.

        Each evaluation begins anew, so that none depends on those before it.

        Args:
            task: The block.
            work: Evaluates it, and leaves nothing behind where it raises.
            trial: What to do with the result for the sake of its rounding alone, if anything.

        Returns:
            What ``work`` returns. Where the user chose ``gram_dtype``, or memory does not suffice,
            a warning tells of the rounding.
        """
        narrow = any(weight.dtype != torch.float64 for weight in self.weights.values())
        if self.settings.gram_dtype is not None or not narrow or self.device.type == "mps":
            return work(task)
        try:
            with rounding_refused():
                result = work(task)
                if trial is not None:
                    trial(result)
                return result
        except RoundingError:
            precise = self.preparation.in_float64(task.prepared)
        try:
            self._check_memory(precise, task.block, condensed=True)
        except MemoryBudgetError:
            return work(task)
        return work(replace(task, prepared=precise))

    # ------------------------------------------------------------ the first pass

    def collect(
        self,
        task: Task,
        differentiable: bool,
        keep_outputs: bool = False,
        condense: bool = False,
    ) -> Collected:
        """One pass over a block's data, everything but the prior.

        Args:
            task: The block.
            differentiable: Whether the rows need a graph into the model's hyperparameters.
            condense: Whether to keep no more than log-determinants need.
            keep_outputs: Whether to keep what steps on the likelihood's parameters need, and to
                leave the rows' scale to those.

        Returns:
            The log likelihood and the curvature's statistic.
        """
        statistic: Any = None
        log_likelihood = torch.zeros((), dtype=torch.float64, device=self.device)
        log_probs: list[Tensor] = []
        kept: list[tuple[Chunk, Tensor]] = []
        checks = self.preparation.check_is_due()
        task = replace(task, suspicious=checks)

        def work(chunk: Chunk) -> None:
            nonlocal statistic, log_likelihood, task, checks
            if checks:
                task, checks = self._spot_checked(task, chunk), False
            if chunk.columns is not None and not chunk.columns.shape[1]:
                # There for their likelihood alone, behind all that have rows.
                with torch.set_grad_enabled(differentiable):
                    added, f = statistic, self.passes.outputs(task, chunk)
            elif self.settings.spec.curvature == "hessian":
                added, f = self._add_hessian(task, statistic, chunk, differentiable)
            else:
                alone = condense and task.block.has_all_rows(chunk.data)
                added, f = self._add_rows(
                    task, statistic, chunk, differentiable, keep_outputs, alone
                )
            own = log_probabilities(self.likelihood, f, chunk.y)
            check_derivatives(self.likelihood, f, chunk.y, self.settings.spec.curvature)
            log_likelihood = log_likelihood + self._weighted(own, chunk)
            statistic = added
            log_probs.append(own.detach())
            if keep_outputs:
                # Not a view, which would hold the inputs in memory.
                kept.append((replace(chunk, x=chunk.x[:0].clone()), f.detach()))

        try:
            self.passes.run(task, "first", work)
        except _NotClosed:
            # Uses that depend on the data: from here on with all rows formed.
            prepared = self.preparation.without_contraction(task.prepared)
            task = replace(task, prepared=prepared)
            return self.collect(task, differentiable, keep_outputs, condense)
        block, structure = task.block, task.prepared.structure
        statistic = conditioned(structure, statistic, block)
        if condense:
            statistic = structure.condense(statistic)
        splits = block.columns is not None and _splits(block.columns, task.prepared.partition)
        return Collected(
            self,
            task.prepared,
            log_likelihood,
            statistic,
            replace(block, inputs=None, targets=None),
            splits,
            kept,
            torch.cat(log_probs),
        )

    def terms(self, collected: Collected) -> Terms:
        """The data-dependent parts of the log evidence, under the present prior.

        Args:
            collected: From ``collect``.

        Returns:
            Log likelihood and log-determinant of the whole data set, in nats.
        """
        structure, precisions = collected.prepared.structure, self.prior.precisions()
        statistic, log_likelihood = collected.statistic, collected.log_likelihood
        if collected.outputs:
            statistic, precisions = self._rescaled(collected, precisions)
            parts = [self._log_likelihood(f, chunk) for chunk, f in collected.outputs]
            log_likelihood = torch.stack(parts).sum()
        log_det = structure.log_det(statistic, precisions)
        return Terms(log_likelihood, collected.block.scale * log_det, self.is_bound(collected))

    def is_bound(self, collected: Collected) -> bool:
        """Whether the expectation of the log-determinant is at least ℓ(I)."""
        coupled = self.likelihood.couples_outputs and collected.splits_outputs
        return self.settings.spec.is_bound(self.settings.root, coupled)

    # ------------------------------------------------------------ the second pass

    def pull_back(
        self, task: Task, cotangent: Statistic, scale: float, arguments: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gradient of log likelihood − ½ scale · ℓ in what the forward pass depends on.

        Args:
            task: The block of the first pass.
            cotangent: Of ℓ in the statistic of that pass.
            scale: Factor of ℓ.
            arguments: Hyperparameters of the model and of the likelihood.

        Returns:
            One gradient for each.
        """
        gradients = [torch.zeros_like(argument) for argument in arguments]

        def work(chunk: Chunk) -> None:
            inner: Tensor | float
            if chunk.columns is not None and not chunk.columns.shape[1]:
                f, inner = self.passes.outputs(task, chunk), 0.0
            elif self.settings.spec.curvature == "hessian":
                part, f = self._add_hessian(task, None, chunk, True)
                inner = inner_product(cotangent, part)
            else:
                linearization = self.passes.linearized(task, chunk, differentiable=True)
                f = linearization.outputs
                root = self.passes.root_rows(f, chunk)
                structure = task.prepared.structure
                inner = structure.inner(cotangent, chunk.data, linearization, root)
            objective = self._log_likelihood(f, chunk) - 0.5 * scale * inner
            if not objective.requires_grad:
                return
            found = torch.autograd.grad(objective, list(arguments), allow_unused=True)
            with torch.no_grad():
                for total, gradient in zip(gradients, found, strict=True):
                    if gradient is not None:
                        total += gradient

        with torch.enable_grad():
            self.passes.run(task, "second", work)
        return gradients

    def rows_depend_on_likelihood(self, num_outputs: int) -> bool:
        """Whether a parameter of the likelihood is in the rows, and not only in their scale."""
        if not any(p.requires_grad for p in self.likelihood.parameters()):
            return False
        if self.settings.spec.curvature != "ggn":
            return True
        first = next(iter(self.weights.values()))
        with torch.enable_grad():
            f = first.new_zeros(1, num_outputs, dtype=first.dtype)
            return self.likelihood.root(f, None, self.settings.root).vectors.requires_grad

    def noise_differs_in_sums(self, num_outputs: int) -> bool:
        """Whether a structure that sums rows would sum some of different learnable noise."""
        spec = self.settings.spec
        one_output = spec.outputs == 1 and not spec.iid and not spec.rows
        if spec.structure == "ntk" or one_output or num_outputs == 1:
            return False
        learned = [p for p in self.likelihood.parameters() if p.requires_grad]
        first = next(iter(self.weights.values()))
        with torch.enable_grad():
            f = first.new_zeros(1, num_outputs, dtype=first.dtype)
            scale = self.likelihood.root(f, None, self.settings.root).scale
            return scale is not None and not _is_one_number(scale.flatten(), learned)

    # ------------------------------------------------------------ parts of a pass

    def _add_rows(
        self,
        task: Task,
        statistic: Any,
        chunk: Chunk,
        differentiable: bool,
        unscaled: bool,
        alone: bool,
    ) -> tuple[Any, Tensor]:
        """Add a micro-batch's rows to the statistic; also its outputs."""
        linearization = self.passes.linearized(task, chunk, differentiable)
        if not all(map(linearization.is_closed, task.prepared.structure.contracted)):
            raise _NotClosed
        root = self.passes.root_rows(linearization.outputs, chunk)
        if root.vectors.requires_grad and not differentiable:
            # The cotangents themselves depend on the likelihood's hyperparameters (a score, or a
            # likelihood that does not separate a scale): the rows then need a graph.
            linearization = self.passes.linearized(task, chunk, True)
        if unscaled:
            root = replace(root, scale=None)
        structure = task.prepared.structure
        if alone and not root.vectors.requires_grad:
            return structure.summarise(linearization, root), linearization.outputs
        return structure.accumulate(statistic, linearization, root), linearization.outputs

    def _add_hessian(
        self, task: Task, statistic: Any, chunk: Chunk, differentiable: bool
    ) -> tuple[Any, Tensor]:
        """Add a micro-batch's exact Hessian to the statistic; also its outputs."""
        prepared = task.prepared

        def negative_log_likelihood(f: Tensor) -> Tensor:
            return -self.likelihood.log_prob(f, chunk.y).sum() / self.settings.temperature

        with torch.set_grad_enabled(differentiable):
            f = self.passes.outputs(task, chunk)
        learnable = any(p.requires_grad for p in self.likelihood.parameters())
        graph = torch.is_grad_enabled() and (differentiable or learnable)
        statistic = hessian_statistic(
            prepared.structure,
            statistic,
            prepared.model,
            self.weights,
            chunk.x,
            negative_log_likelihood,
            graph,
        )
        return statistic, f

    def _log_likelihood(self, f: Tensor, chunk: Chunk) -> Tensor:
        """A micro-batch's share of (1/T) log p(D|w,h), scaled to the whole data set."""
        return self._weighted(log_probabilities(self.likelihood, f, chunk.y), chunk)

    def _weighted(self, log_probs: Tensor, chunk: Chunk) -> Tensor:
        return weighted_sum(chunk.likelihood_weights, log_probs) / self.settings.temperature

    def _rescaled(
        self, collected: Collected, precisions: Mapping[str, Tensor]
    ) -> tuple[Any, Mapping[str, Tensor]]:
        """Statistic and precisions with the rows' scale under the likelihood's parameters."""
        roots = [self.passes.root_rows(f, chunk) for chunk, f in collected.outputs]
        parts = []
        for root in roots:
            if root.scale is None:
                return collected.statistic, precisions
            parts.append(root.scale if root.present is None else root.scale[root.present])
        scale = torch.cat([part.flatten() for part in parts])
        if hasattr(collected.statistic, "with_scale"):
            return collected.statistic.with_scale(scale), precisions
        # r² H under the precisions P0 has the log-determinant of H under P0 / r².
        first = scale[0]
        if not _is_one_number(scale, list(self.likelihood.parameters())):
            raise ConfigurationError(
                f"{self.settings.spec.name} sums rows of different noise, so that a kept pass"
                " cannot follow the noise. Take one noise for all outputs, or an 'ntk' estimator."
            )
        return collected.statistic, {n: p / first.square().to(p) for n, p in precisions.items()}

    def _spot_checked(self, task: Task, chunk: Chunk) -> Task:
        prepared = task.prepared
        with torch.enable_grad():
            linearization = linearize(prepared.model, self.weights, chunk.x, prepared.plan, False)
        better = self.preparation.checked(prepared, linearization, chunk.x)
        return task if better is prepared else replace(task, prepared=better)

    def _check_memory(self, prepared: Prepared, block: Block, condensed: bool) -> None:
        structure, size = prepared.structure, len(block.indices)
        width = prepared.partition.num_outputs if block.columns is None else block.columns.shape[1]
        most = self.passes.most_at_once(prepared, block)
        at_once = min(most or 1, size) * width
        formed: list[Tensor] = []
        if len(block.draws) > 1:
            # Several micro-batches: the rows that are formed of one, beside all that are kept.
            at_once = min(at_once, prepared.partition.block_rows)
            formed = [w for n, w in self.weights.items() if n not in structure.contracted]
        elif not structure.keeps_rows and self.settings.spec.curvature != "hessian":
            formed = [w for n, w in self.weights.items() if not self._is_factored(prepared, n)]
        pass_bytes = at_once * sum(w.numel() * w.element_size() for w in formed)
        summarised = condensed and most is not None and most >= size
        rows = size * width if block.num_rows is None else block.num_rows
        check_memory(structure, rows, self.device, pass_bytes, summarised)

    def _is_factored(self, prepared: Prepared, name: str) -> bool:
        return self.settings.spec.structure == "kfac" and name in prepared.plan.kronecker


def _is_one_number(scale: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether all entries are the same, and stay so whatever the parameters become."""
    if not bool((scale == scale[0]).all()):
        return False
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    if not scale.requires_grad or not learned:
        return True
    # Two noises that happen to be equal are not one: their derivatives tell them apart.
    weights = torch.arange(1, len(scale) + 1, device=scale.device, dtype=scale.dtype)
    whole = torch.autograd.grad(
        (weights * scale).sum(), learned, retain_graph=True, allow_unused=True
    )
    alone = torch.autograd.grad(
        weights.sum() * scale[0], learned, retain_graph=True, allow_unused=True
    )
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.allclose(a, b, rtol=1e-3))
        for a, b in zip(whole, alone, strict=True)
    )


def _splits(columns: Tensor, partition: Partition) -> bool:
    return columns.shape[1] < partition.num_outputs or bool((columns < 0).any())
