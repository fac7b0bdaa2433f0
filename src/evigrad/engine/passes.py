"""Passes over a block: its micro-batches, one after the other, each with its forward pass.

All that is random belongs to the block and is drawn before the first pass, so that every pass and
every size of micro-batch sees the same.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from evigrad.blocks import Block
from evigrad.blocks.block import MOST_EXPANDED
from evigrad.engine.memory import (
    CPU_PASS_BYTES,
    PeakBytes,
    available_bytes,
    check_memory,
    fits,
)
from evigrad.engine.problem import InputPlan, Problem
from evigrad.errors import InputError
from evigrad.inputs import Inputs
from evigrad.invariances.noise import Noise
from evigrad.jacobians import (
    Linearization,
    Recorder,
    check_separate,
    model_outputs,
)
from evigrad.jacobians.modes import evaluation_mode, model_run
from evigrad.likelihoods.calls import check_finite

Batch = tuple[Inputs, Tensor]
State = TypeVar("State")

# The memory of a pass is measured on one datum and on two; the difference is what each adds.
_MEASURED = 2
# Rows of the example on which the memory of each further row is measured.
_MEASURED_ROWS = 8
# From so many outputs on, they may be those of positions.
_MANY_OUTPUTS = 1000
_POSITIONS_HINT = (
    "If outputs belong to positions (pixels, words), return (m, …, C): then only drawn positions go"
    " through the last layer."
)


@dataclass(frozen=True, eq=False)
class BlockPass:
    """A block, its data, and all that was drawn for it: the same in every pass over it.

    Attributes:
        problem: The model and how its evidence is computed.
        plan: The plan for the inputs.
        batches: The block's data, in its order, the same in every iteration.
        block: Columns and scale factors.
        seed: For what the model draws from global generators.
        noise: What modules draw through the evidence.
        labels: Sampled labels of all data, one tensor for each sample (curvature ``mc``).
        suspicious: Whether to check in every micro-batch that the model mixes no data.
    """

    problem: Problem
    plan: InputPlan
    batches: Iterable[Batch]
    block: Block
    seed: int
    noise: Noise
    labels: Sequence[Tensor] = ()
    suspicious: bool = False


@dataclass(frozen=True, eq=False)
class Chunk:
    """A micro-batch, and what the block says of its data.

    Attributes:
        x: Inputs, as the planned model takes them.
        y: Targets.
        data: Positions in the block.
        columns: Columns of the root, or None for all.
        likelihood_weights: Weights of the data's log likelihoods.
        labels: Sampled labels.
        plan: The plan for its inputs, where a batch has another shape than the block's first one.
    """

    x: Tensor
    y: Tensor
    data: slice
    columns: Tensor | None
    likelihood_weights: Tensor
    labels: Sequence[Tensor]
    plan: InputPlan | None = None

    @property
    def has_rows(self) -> bool:
        """Whether its data have rows, and not only a log likelihood."""
        return self.columns is None or self.columns.shape[1] > 0


def new_pass(
    problem: Problem, plan: InputPlan, batches: Iterable[Batch], block: Block
) -> BlockPass:
    """Return a block with all that passes over it need, drawn by the problem's generator.

    ``batches`` are its data, in its order and checked, and can be iterated again.
    """
    plans, generator, spec = problem.plans, problem.generator, problem.settings.spec
    seed = block.seed
    if seed is None:
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
    fresh = BlockPass(problem, plan, batches, block, seed, plans.noise(seed, block.origin))
    if spec.curvature != "mc":
        return fresh

    def collect(chunk_outputs: list[Tensor], chunk: Chunk) -> list[Tensor]:
        return [*chunk_outputs, outputs(fresh, chunk)]

    with torch.no_grad():
        f = torch.cat(over_chunks(fresh, "outputs", collect, []))
    if block.seed is not None:  # the shared generator stays where that of other ranks is
        generator = torch.Generator().manual_seed(seed)
    elif block.shares > 1:
        generator = torch.Generator().manual_seed(seed + problem.ranks.rank)
    sample = problem.likelihood.sample
    return replace(fresh, labels=[sample(f, generator) for _ in range(spec.outputs or 1)])


def over_chunks(
    block_pass: BlockPass, kind: str, step: Callable[[State, Chunk], State], state: State
) -> State:
    """Return the state after ``step`` was applied to each micro-batch of a block.

    ``kind`` names the pass; passes of one kind take the same memory. ``step`` makes the next state
    of a state and a micro-batch and changes neither: where memory does not suffice it is called
    again with half of the data.

    Raises:
        InputError: If the batches do not hold the block's data.
    """
    problem, plan, block = block_pass.problem, block_pass.plan, block_pass.block
    expected, first = len(block.indices), 0
    cuts = [] if problem.settings.spec.facts.counts_data else block.cuts()
    with evaluating(block_pass):
        for x, y in block_pass.batches:
            if first + len(x) > expected:
                raise InputError(f"The batches hold more than the {expected} data expected.")
            other = None if plan.fits(x) else problem.plan_of(x)
            start = 0
            while start < len(x):
                part = partial(_chunk, block_pass, (x, y), other, first, start)
                peak = partial(_peak_bytes, block_pass, partial(step, state), part)
                cut = next((c for c in cuts if c > first + start), expected)
                num_remaining = min(len(x), cut - first) - start
                size = _chunk_size(block_pass, kind, x, num_remaining, first + start, peak)
                if states := fits(partial(step, state, part(size))):
                    (state,) = states
                else:
                    problem.sizes.halve(_memory_key(block_pass, kind, x), size)
                    continue
                start += size
            first += len(x)
    if first != expected:
        raise InputError(
            f"The batches hold {first} data, but {problem.settings.spec.name} needs all {expected}."
        )
    return state


def first_chunk(block_pass: BlockPass, size: int) -> Chunk:
    """The first examples of a block, at most so many."""
    batch = next(iter(block_pass.batches))
    plan = None if block_pass.plan.fits(batch[0]) else block_pass.problem.plan_of(batch[0])
    return _chunk(block_pass, batch, plan, 0, 0, min(size, len(batch[0])))


def _chunk(
    block_pass: BlockPass,
    batch: Batch,
    plan: InputPlan | None,
    position: int,
    start: int,
    size: int,
) -> Chunk:
    """``size`` data of a batch from ``start`` on; ``position`` is that of its first one."""
    x, y = batch
    span = slice(start, start + size)
    data = slice(position + start, position + start + size)
    block, padded = block_pass.block, block_pass.problem.settings.spec.facts.counts_data
    return Chunk(
        x=(plan or block_pass.plan).pack(x[span], block_pass.noise, data),
        y=y[span],
        data=data,
        columns=block.columns_of(data, padded),
        likelihood_weights=block.likelihood_weights[data],
        labels=[labels[data] for labels in block_pass.labels],
        plan=plan,
    )


def evaluating(block_pass: BlockPass) -> AbstractContextManager[object]:
    """Return the context of all passes over a block: evaluation mode and seeds.

    Each forward pass in it is a ``model_run`` of its own.
    """
    plan, seed = block_pass.plan, block_pass.seed
    generator = torch.Generator().manual_seed(seed) if plan.draws_globally else None
    return evaluation_mode(plan.model, generator)


def linearized(block_pass: BlockPass, chunk: Chunk, differentiable: bool) -> Linearization:
    """The forward pass of a micro-batch; its rows have a graph if ``differentiable``."""
    plan = chunk.plan or block_pass.plan
    with _autocast(block_pass.problem):
        linearization = Linearization(
            plan.model, block_pass.problem.weights, chunk.x, plan.jacobian, differentiable
        )
    _check_outputs(chunk.plan or plan, linearization.outputs)
    if block_pass.suspicious or linearization.may_mix:
        _check_separate(block_pass, chunk, linearization.outputs)
    return linearization


def outputs(block_pass: BlockPass, chunk: Chunk) -> Tensor:
    """The outputs (m, C) of a micro-batch, finite, with a graph where gradients are on."""
    model, recorder = (chunk.plan or block_pass.plan).model, Recorder({}, len(chunk.x))
    with _autocast(block_pass.problem), model_run(model), recorder:
        f = model_outputs(model, chunk.x)
    _check_outputs(chunk.plan or block_pass.plan, f)
    if block_pass.suspicious or recorder.may_mix(model):
        _check_separate(block_pass, chunk, f)
    return f.to(block_pass.problem.dtype)


def _check_outputs(plan: InputPlan, f: Tensor) -> None:
    expected = plan.partition.num_outputs
    if f.shape[1] != expected:
        raise InputError(
            f"The model has {f.shape[1]} outputs where it had {expected} before: it must return one"
            " shape for inputs of one shape. Make a new Evidence of a model that was changed."
        )
    check_finite("The model's outputs", f)


def _check_separate(block_pass: BlockPass, chunk: Chunk, f: Tensor) -> None:
    if len(chunk.x) == 1:
        return
    model = (chunk.plan or block_pass.plan).model
    generator = torch.Generator().manual_seed(block_pass.seed)
    if block_pass.problem.settings.autocast is not None:  # its rounding would look like mixed data
        with model_run(model), torch.no_grad():
            f = model_outputs(model, chunk.x)
    check_separate(model, chunk.x, f, generator)


def _autocast(problem: Problem) -> AbstractContextManager[object]:
    dtype = problem.settings.autocast
    return nullcontext() if dtype is None else torch.autocast(problem.device.type, dtype=dtype)


# ------------------------------------------------------------ memory


def most_at_once(problem: Problem, plan: InputPlan, block: Block, position: int = 0) -> int | None:
    """Return how many data from this position on may pass together; None where memory decides."""
    asked = problem.sizes.asked
    if asked is None and block.num_draws > 1:
        # No more rows than one draw has, a number that the user has chosen.
        return max(1, plan.partition.block_rows // max(1, block.rows_of(position)))
    return len(block.indices) if asked is None else asked if isinstance(asked, int) else None


def check_fits(problem: Problem, plan: InputPlan, block: Block, condensed: bool) -> None:
    """Refuse a block that would not fit; ``condensed`` keeps only what log-determinants need."""
    structure, size, weights = plan.structure, len(block.indices), problem.weights
    width = _width(plan, block)
    most = most_at_once(problem, plan, block)
    at_once = min(most or 1, size) * width
    if block.num_draws > 1:
        # Several micro-batches: the formed rows of one, beside all that are kept.
        at_once = min(at_once, plan.partition.block_rows)
    elif structure.keeps_rows or problem.settings.spec.curvature == "hessian":
        at_once = 0
    formed = [weights[name] for name in structure.formed]
    pass_bytes = at_once * sum(w.numel() * w.element_size() for w in formed)
    summarised = condensed and most is not None and most >= size
    rows = size * width if block.num_rows is None else block.num_rows
    many = not plan.positions and plan.partition.num_outputs >= _MANY_OUTPUTS
    hint = _POSITIONS_HINT if many else ""
    check_memory(structure, rows, problem.device, pass_bytes, summarised, hint)


def _chunk_size(
    block_pass: BlockPass,
    kind: str,
    x: Inputs,
    num_remaining: int,
    position: int,
    peak: Callable[[int], int],
) -> int:
    problem, sizes = block_pass.problem, block_pass.problem.sizes
    key = _memory_key(block_pass, kind, x)
    if (at_once := most_at_once(problem, block_pass.plan, block_pass.block, position)) is not None:
        return min(num_remaining, at_once, sizes.chosen.get(key, at_once))
    if key in sizes.chosen:
        return min(num_remaining, sizes.chosen[key])
    free = available_bytes(problem.device)
    if free is not None and kind != "second":  # the statistic is still to come
        block = block_pass.block
        rows = block.num_rows or block_pass.plan.partition.block_rows
        free -= block_pass.plan.structure.predicted_bytes(rows)
    limit = CPU_PASS_BYTES if problem.device.type == "cpu" else None
    return sizes.size(key, num_remaining, lambda: bytes_per_datum(peak, num_remaining), free, limit)


def _memory_key(block_pass: BlockPass, kind: str, x: Inputs) -> str:
    """In words, what the memory of a pass depends on besides the number of data."""
    plan = block_pass.plan
    rows = _width(plan, block_pass.block)
    return f"{kind} pass of {plan.numbers(x):,} numbers and {rows} rows for each"


def _width(plan: InputPlan, block: Block) -> int:
    """Most rows of a datum."""
    return plan.partition.rows_per_datum if block.columns is None else block.columns.shape[1]


def _peak_bytes(
    block_pass: BlockPass,
    step: Callable[[Chunk], object],
    part: Callable[[int], Chunk],
    size: int,
) -> int:
    """Return the most bytes that a step over so many data holds, and leave no trace of it."""
    with evaluating(block_pass), PeakBytes() as held:
        step(part(size))
    return held.most


def predicted_bytes(problem: Problem, plan: InputPlan, x: Inputs) -> int:
    """Return the most bytes that an estimate is predicted to hold, by passes over a few examples.

    It is what the statistic and its log-determinant take, or a pass, if that takes more: its
    activations and gradients are as many as the rows times the numbers in the network. ``x`` are
    some inputs, or one batch if the estimator takes all data.
    """
    partition, structure, sizes = plan.partition, plan.structure, problem.sizes
    spec, num_rows = problem.settings.spec, partition.block_rows
    kept = structure.predicted_bytes(num_rows)
    if spec.curvature == "hessian":  # it has no rows
        return kept
    num_data = min(partition.num_data, num_rows // (1 if spec.rows else partition.rows_per_datum))
    at_once = num_data
    if spec.rows and num_rows > MOST_EXPANDED * num_data:
        # Examples with equally many rows pass together: hardly ever more than half of them.
        at_once = -(-num_data // 2)
    if spec.subset is None:
        at_once = min(at_once, len(x))
    if isinstance(sizes.asked, int):
        at_once = min(at_once, sizes.asked)
    rows_at_once = -(-num_rows * at_once // num_data)
    # The rows of a pass over one example, over two, and over one with more rows.
    more = min(_MEASURED_ROWS, partition.num_outputs)
    one = _bytes_of_rows(problem, plan, x, 1, 1)
    of_datum = max(_bytes_of_rows(problem, plan, x, 2, 1) - one, 0) if len(x) > 1 else one
    of_row = max(_bytes_of_rows(problem, plan, x, 1, more) - one, 0) / max(more - 1, 1)
    passing = one + int((at_once - 1) * of_datum + (rows_at_once - at_once) * of_row)
    if sizes.asked == "auto" and sizes.budget is not None:
        passing = min(passing, max(sizes.budget, one))
    return max(kept, passing)


def _bytes_of_rows(problem: Problem, plan: InputPlan, x: Inputs, size: int, width: int) -> int:
    """The most bytes that a pass over so many examples holds, each with so many rows."""
    problem = replace(problem, generator=torch.Generator().manual_seed(0))
    columns = torch.arange(width, device="cpu").expand(size, -1)
    indices = torch.arange(size, device="cpu")
    block = Block(indices, columns, 1.0, torch.ones_like(indices, dtype=torch.float64))
    noise = problem.plans.noise(0)
    block_pass = BlockPass(problem, plan, [], block, 0, noise)
    structure = plan.structure

    def step(chunk: Chunk) -> object:
        linearization = linearized(block_pass, chunk, False)
        outputs = linearization.outputs
        where = columns.to(outputs.device)
        root = problem.likelihood.root(outputs, where, problem.settings.root)
        if structure.condenses(plan.partition.block_rows):
            return structure.summarise(linearization, root)
        return structure.accumulate(None, linearization, root)

    def part(size: int) -> Chunk:
        return _chunk(block_pass, (x, torch.zeros(size, device="cpu")), None, 0, 0, size)

    with torch.no_grad():
        return _peak_bytes(block_pass, step, part, size)


def bytes_per_datum(peak: Callable[[int], int], num_remaining: int) -> float:
    """Bytes that each further datum takes; ``peak`` is for so many, up to ``num_remaining``."""
    of_one = fits(partial(peak, 1))
    if not of_one:
        return math.inf
    more = num_remaining >= _MEASURED and fits(partial(peak, _MEASURED))
    return float(max(more[0] - of_one[0], 1) if more else of_one[0])
