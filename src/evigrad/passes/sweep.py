"""Take a block through the network in consecutive micro-batches.

One seed for each block determines all random numbers of its passes. They do not depend on the pass
or on the size of micro-batches.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from evigrad.core.block import Block, MicroBatch
from evigrad.core.curvature import Curvature, check_log_det
from evigrad.core.protocols import Purpose
from evigrad.errors import InputError
from evigrad.inputs import Inputs
from evigrad.invariances.noise import Noise
from evigrad.likelihoods.calls import check_finite, log_probabilities
from evigrad.network import (
    Linearization,
    Recorder,
    check_separate,
    model_outputs,
    refuse_once_differentiable,
)
from evigrad.network.modes import evaluation_mode, model_run
from evigrad.network.network import InputPlan
from evigrad.passes.memory import check_memory, run_if_it_fits
from evigrad.passes.problem import Problem
from evigrad.passes.replicas import total_over_ranks

Batch = tuple[Inputs, Tensor]
State = TypeVar("State")

# Number of examples in a check, large enough that a permutation rarely leaves one in its place.
_CHECKED = 8
# Largest size of a graph that stays in memory between two passes, in numbers (128 MiB in float32).
# It contains the activations of a micro-batch, and their gradients for each row.
_HELD_NUMBERS = 2**25
# With this number of outputs, they may belong to positions.
_MANY_OUTPUTS = 1000
_POSITIONS_HINT = (
    "If outputs belong to positions (pixels, words), return the shape (m, …, C). Then only drawn"
    " positions go through the last layer."
)


@dataclass(frozen=True, eq=False)
class PlannedBatch(MicroBatch):
    """A micro-batch, with the plan for its inputs.

    The plan is None if the micro-batch follows the plan of the sweep.
    """

    plan: InputPlan | None = None


@dataclass(frozen=True, eq=False)
class MicroBatchSweep:
    """A block, its data, and everything drawn for it, shared by all passes.

    Attributes:
        problem: The model, and how its evidence is computed.
        plan: The plan for the inputs.
        curvature: The curvature that collects the rows.
        batches: The block's data in the block's order, the same in every iteration.
        block: The block, with its columns and scale factors.
        seed: Seed for models that draw from the global random generators.
        noise: Random numbers that modules draw through the evidence.
        labels: Sampled labels of all examples, one tensor for each sample (curvature ``mc``).
        purpose: See ``Sweep.purpose``.
        learned: Names of the hyperparameters for which a second pass computes gradients.
    """

    problem: Problem
    plan: InputPlan
    curvature: Curvature[Any]
    batches: Iterable[Batch]
    block: Block
    seed: int
    noise: Noise
    labels: Sequence[Tensor] = ()
    purpose: Purpose = Purpose.VALUE
    learned: Collection[str] = ()

    # ------------------------------------------------------------ methods of ``Sweep``

    def fold(
        self,
        step: Callable[[State, MicroBatch], State],
        start: State,
        *,
        graph: bool = False,
        label: str = "first",
    ) -> State:
        """Return the final state (``Sweep.fold``). If memory is too small, halve the micro-batches.

        Args:
            step: Function that takes a state and a micro-batch, and returns the next state.
            start: The first state.
            graph: Whether ``step`` needs autograd graphs.
            label: Kind of pass. Passes with the same label need the same amount of memory.

        Raises:
            InputError: If the batches contain too few or too many examples.
        """
        if graph:
            self._check_second_derivatives()
            label = "second"
        problem, plan, block, state = self.problem, self.plan, self.block, start
        expected, first = len(block.indices), 0
        cuts = [] if problem.model.estimator.structure_type.counts_data else block.cuts()
        with self._evaluating():
            for x, y in self.batches:
                if first + len(x) > expected:
                    raise InputError(
                        f"The batches contain more than the expected {expected} examples. Set"
                        " num_data to the number of examples, and pass each example once."
                    )
                other = None if plan.fits(x) else problem.plan_of(x)
                done = 0
                while done < len(x):
                    part = partial(self._batch, (x, y), other, first, done)
                    cut = next((c for c in cuts if c > first + done), expected)
                    num_remaining = min(len(x), cut - first) - done
                    size = self._size(label, x, num_remaining, first + done)
                    if states := run_if_it_fits(partial(step, state, part(size))):
                        (state,) = states
                    else:
                        problem.sizes.halve(self._memory_key(label, x), size)
                        continue
                    done += size
                first += len(x)
        if first != expected:
            name = problem.model.estimator.name
            raise InputError(
                f"The batches contain {first} examples, but {name} needs all {expected}."
                " Pass each training example once, or set num_data to their number."
            )
        return state

    def linearize(self, batch: MicroBatch, *, graph: bool) -> Linearization:
        """See ``Sweep.linearize``."""
        plan = self._plan_of(batch)
        with self._autocast():
            linearization = Linearization(
                plan.model, self.problem.network.weights, batch.x, plan.jacobian, graph
            )
        self._check_outputs(plan, linearization.outputs)
        if linearization.may_mix:
            self.check_separate(batch, linearization.outputs)
        return linearization

    def holds_graph(self, batch: MicroBatch) -> bool:
        """See ``Sweep.holds_graph``."""
        size = batch.data.stop - batch.data.start
        if size < self.block.num_collected(self.curvature.counts_data):
            return False
        if self.problem.sizes.asked == "auto":
            return False
        numbers = self._plan_of(batch).jacobian.numbers * len(batch.x) * (1 + self._width)
        return 0 < numbers <= _HELD_NUMBERS

    def outputs(self, batch: MicroBatch) -> Tensor:
        """See ``Sweep.outputs``."""
        plan = self._plan_of(batch)
        recorder = Recorder({}, len(batch.x))
        with self._autocast(), model_run(plan.model) as modules, recorder:
            f = model_outputs(plan.model, batch.x)
        self._check_outputs(plan, f)
        if recorder.may_mix(modules):
            self.check_separate(batch, f)
        return f.to(self.problem.dtype)

    def log_probabilities(self, f: Tensor, batch: MicroBatch) -> Tensor:
        """See ``Sweep.log_probabilities``. Errors in a custom likelihood contain its name."""
        model, compared = self.problem.model, self.problem.compared
        # Targets of a wrong shape could broadcast against other examples. This depends only on the
        # shapes and the type, so one example is evaluated by itself only the first time.
        key = (f.shape, batch.y.shape, batch.y.dtype)
        result = log_probabilities(model.likelihood, f, batch.y, compare=key not in compared)
        compared.add(key)
        model.likelihood.check_derivatives(f, batch.y, model.estimator.curvature)
        return result

    def total(self, statistic: Any) -> Any:
        """See ``Sweep.total``. The log-determinant of a custom curvature is checked once."""
        model, compared = self.problem.model, self.problem.compared
        if self.block.shares > 1:
            statistic = total_over_ranks(self.problem.ranks, statistic)
        custom = model.estimator.custom
        if custom is not None and statistic is not None and "log_det" not in compared:
            check_log_det(custom, statistic, model.prior.precisions())
            compared.add("log_det")
        return statistic

    # ------------------------------------------------------------ micro-batches

    def _batch(
        self, batch: Batch, plan: InputPlan | None, position: int, start: int, size: int
    ) -> PlannedBatch:
        """Return ``size`` examples from ``start`` in a batch whose first is at ``position``."""
        x, y = batch
        span = slice(start, start + size)
        data = slice(position + start, position + start + size)
        block = self.block
        return PlannedBatch(
            x=(plan or self.plan).pack(x[span], self.noise, data),
            y=y[span],
            data=data,
            columns=block.columns_of(data, self.problem.model.estimator.structure_type.counts_data),
            likelihood_weights=block.likelihood_weights[data],
            labels=[labels[data] for labels in self.labels],
            plan=plan,
        )

    def _first(self) -> tuple[Inputs, Callable[[int], PlannedBatch]]:
        """Return the first batch's inputs, and a function that makes a micro-batch of them."""
        x, y = next(iter(self.batches))
        plan = None if self.plan.fits(x) else self.problem.plan_of(x)
        return x, partial(self._batch, (x, y), plan, 0, 0)

    def _plan_of(self, batch: MicroBatch) -> InputPlan:
        return (batch.plan if isinstance(batch, PlannedBatch) else None) or self.plan

    def _evaluating(self) -> AbstractContextManager[object]:
        """Return the context of all passes: evaluation mode and seeds."""
        generator = torch.Generator().manual_seed(self.seed) if self.plan.draws_globally else None
        return evaluation_mode(self.plan.model, generator)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype, device = self.problem.settings.autocast, self.problem.device
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)

    # ------------------------------------------------------------ checks on real data

    def verified(self) -> "MicroBatchSweep":
        """Return the sweep without incorrect fast derivatives, after a check of all of them."""
        plan = self._verified_plan()
        if plan is self.plan:
            return self
        return replace(self, plan=plan, curvature=self.problem.curvature(plan))

    def _verified_plan(self) -> InputPlan:
        """Return the plan after a check on the first micro-batch, halved until it fits.

        A check takes less memory than a pass, so it does not determine automatic sizes.
        """
        problem, block, (x, part) = self.problem, self.block, self._first()
        sizes, at_once = problem.sizes, most_at_once(problem, self.plan, block)
        key, most = self._memory_key("first", x), _CHECKED if at_once is None else at_once
        cuts = [] if problem.model.estimator.structure_type.counts_data else block.cuts()
        size = min([len(x), *cuts[:1], most, sizes.chosen.get(key, most)])

        def verified() -> InputPlan:
            with self._evaluating():
                return problem.network.verified(self.plan, part(size).x)

        while not (plans := run_if_it_fits(verified)):
            if at_once is not None or size == 1:
                sizes.halve(key, size)
            size //= 2
        return plans[0]

    def _check_second_derivatives(self) -> None:
        """Check once that rows can be differentiated in the ``learned`` hyperparameters."""
        problem, learned, checked = self.problem, self.learned, self.problem.network.differentiated
        if checked.issuperset(learned):
            return
        changes_model = any(name.startswith("model.") for name in learned)
        with torch.enable_grad(), self._evaluating():
            x, part = self._first()
            batch = part(min(2, len(x)))  # a forward pass over a few examples suffices
            root = problem.model.cotangents(self.linearize(batch, graph=True).outputs, batch)
            varies = root.vectors.requires_grad
            if changes_model or varies:
                model, weights = self._plan_of(batch).model, problem.network.weights
                refuse_once_differentiable(model, weights, list(learned), batch.x)
        checked.update(learned)

    def _check_outputs(self, plan: InputPlan, f: Tensor) -> None:
        if f.shape[1] != plan.num_outputs:
            raise InputError(
                f"The model returned {f.shape[1]} outputs per example, but {plan.num_outputs}"
                " before. The model must return the same shape for inputs of the same shape. If you"
                " changed the model, create a new Evidence."
            )
        check_finite("The model's outputs", f)

    def check_separate(self, batch: MicroBatch, f: Tensor) -> None:
        """Raise an error if an output in ``f`` depends on other examples of the micro-batch."""
        plan, x = self._plan_of(batch), batch.x
        if len(x) == 1:
            return
        if self.problem.settings.autocast is not None:  # its rounding would look like mixing
            with model_run(plan.model), torch.no_grad():
                f = model_outputs(plan.model, x)
        check_separate(plan.model, x, f, torch.Generator().manual_seed(self.seed))

    # ------------------------------------------------------------ memory

    def check_memory(self) -> None:
        """Raise an error if the block does not fit in memory."""
        problem, block, curvature = self.problem, self.block, self.curvature
        size, width = len(block.indices), self._width
        num_rows = size * width if block.num_rows is None else block.num_rows
        most = most_at_once(problem, self.plan, block)
        is_whole = most is not None and most >= size
        cost = curvature.cost(num_rows, self.purpose, is_whole=is_whole)
        at_once = min(most or 1, size) * min(width, cost.rows_at_once or width)
        if block.num_draws > 1:
            # Several micro-batches: the rows of one, plus all that are stored.
            at_once = min(at_once, problem.partition(self.plan).block_rows)
        elif curvature.keeps_rows:
            at_once = 0
        many = not self.plan.positions and self.plan.num_outputs >= _MANY_OUTPUTS
        hint = _POSITIONS_HINT if many else ""
        check_memory(curvature, num_rows, problem.device, cost.total, at_once * cost.row, hint)

    @property
    def _width(self) -> int:
        """The largest number of rows of an example."""
        columns = self.block.columns
        if columns is None:
            return self.problem.partition(self.plan).rows_per_datum
        return columns.shape[1]

    def _size(self, label: str, x: Inputs, num_remaining: int, position: int) -> int:
        """Return how many of the remaining examples to take next."""
        sizes = self.problem.sizes
        at_once = most_at_once(self.problem, self.plan, self.block, position)
        if at_once is not None and not sizes.chosen:
            return min(num_remaining, at_once)
        key = self._memory_key(label, x)
        if at_once is None and key not in sizes.chosen:
            limit = sizes.limit(self._example_bytes(x), self.problem.device)
            if limit is not None:
                sizes.chosen[key] = limit
        return min(num_remaining, at_once or num_remaining, sizes.chosen.get(key, num_remaining))

    def _example_bytes(self, x: Inputs) -> int:
        """Return the bytes of an example in a pass: activations, gradients, roots and rows."""
        width = self._width
        cost = self.curvature.cost(width, self.purpose)
        rows = min(width, cost.rows_at_once or width)
        numbers = self.plan.numbers(x) + (1 + rows) * self.plan.jacobian.numbers
        numbers += width * self.plan.num_outputs
        return self.problem.dtype.itemsize * numbers + rows * cost.row

    def _memory_key(self, label: str, x: Inputs) -> str:
        """Return a description of everything that determines the memory of an example."""
        return f"{label} pass of {self.plan.numbers(x):,} numbers and {self._width} rows for each"


def new_sweep(
    problem: Problem, plan: InputPlan, batches: Iterable[Batch], block: Block
) -> MicroBatchSweep:
    """Return a sweep over a block, with all random numbers that its passes need.

    ``batches`` contains the block's checked data in the block's order. It must be possible to
    iterate over ``batches`` repeatedly.
    """
    generator, estimator, seed = problem.generator, problem.model.estimator, block.seed
    if seed is None:
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
    noise = problem.network.noise(seed, block.origin)
    sweep = MicroBatchSweep(
        problem,
        plan,
        problem.curvature(plan),
        batches,
        block,
        seed,
        noise,
        purpose=problem.purpose,
    )
    if estimator.curvature != "mc":
        return sweep

    def step(passed: list[tuple[Tensor, Tensor]], batch: MicroBatch) -> list[tuple[Tensor, Tensor]]:
        return [*passed, (sweep.outputs(batch), batch.y)]

    with torch.no_grad():
        passed = sweep.fold(step, list[tuple[Tensor, Tensor]](), label="outputs")
        f, y = (torch.cat(parts) for parts in zip(*passed, strict=True))
    if block.seed is not None:  # the shared generator stays equal on all ranks
        generator = torch.Generator().manual_seed(seed)
    elif block.shares > 1:
        generator = torch.Generator().manual_seed(seed + problem.ranks.rank)
    sample = problem.model.likelihood.at(y).sample
    labels = [sample(f, generator) for _ in range(estimator.outputs or 1)]
    return replace(sweep, labels=labels)


def most_at_once(problem: Problem, plan: InputPlan, block: Block, position: int = 0) -> int | None:
    """Return the largest number of examples for a pass that starts at ``position``.

    None means that the number is chosen automatically.
    """
    asked = problem.sizes.asked
    if asked is None and block.num_draws > 1:
        # At most the rows of one draw, a number that the user has chosen.
        return max(1, problem.partition(plan).block_rows // max(1, block.rows_of(position)))
    return len(block.indices) if asked is None else asked if isinstance(asked, int) else None
