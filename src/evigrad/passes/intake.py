"""Check the user's data before anything is drawn or computed."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from evigrad.blocks.positions import PositionSource, by_target
from evigrad.blocks.samplers import check_sampler
from evigrad.blocks.sources import AT_ONCE, InColumns, LoaderSource, Source, as_source
from evigrad.core.block import Block, MicroBatch
from evigrad.errors import EvigradWarning, InputError, NotPositiveDefiniteError
from evigrad.inputs import AtPositions, Inputs, as_inputs, each_once, tensors_of
from evigrad.likelihoods import LIKELIHOODS
from evigrad.likelihoods.calls import check_targets, lacks_a_column, log_probabilities
from evigrad.likelihoods.positions import NO_TARGET, counted, is_batch, spread
from evigrad.network.modes import seeded
from evigrad.network.network import PROBE_SIZE, InputPlan
from evigrad.passes.checks import as_pair, check_block, not_data
from evigrad.passes.kept import checksums
from evigrad.passes.problem import Problem
from evigrad.passes.sweep import Batch, MicroBatchSweep, new_sweep

# Inputs may have any type that ``as_inputs`` accepts.
Data = Any

# Number of outputs for which a user's density is tried in one call.
_NUMBERS_AT_ONCE = 2**22
# Largest number of examples in memory that ranks compare, and the number compared at once.
_COMPARED, _TOGETHER = 4096, 64
# Number of items that are read twice, and number of readings if they draw random numbers. Two
# readings may agree by chance, for example if images are flipped at random.
_REREAD, _READINGS = 2, 8


def warn_of_changes(source: Source, device: torch.device) -> None:
    """Warn if the items of a data set change when they are read again.

    Each source is checked once. Different seeds are used for the readings, and the global random
    states are restored.
    """
    source = source.unseeded
    if source.is_held or source.is_compared:
        return
    source.is_compared = True
    indices = torch.arange(min(len(source), _REREAD), device="cpu")
    first: list[list[Tensor]] = []
    for seed in range(_READINGS):
        with seeded(seed, device) as has_drawn:
            x, y = source.fetch(indices)
            draws = has_drawn()
        reading = [list(tensors_of(x)), [y]]
        first = first or reading
        pairs = zip(("inputs", "targets"), first, reading, strict=True)
        if changed := [what for what, before, now in pairs if not _are_equal(before, now)]:
            break
        if seed and not draws:
            return
    else:
        return
    warnings.warn(
        f"The {' and '.join(changed)} of the data set change when items are read again, for"
        " example because of random augmentation. The evidence needs fixed data. Otherwise,"
        " estimates and posteriors change from call to call. Pass the data without random"
        " transforms, or read a fixed copy:"
        " tuple(torch.utils.data.default_collate(list(dataset))). To average over transforms of"
        " the inputs, use evigrad.invariances.Averaged.",
        EvigradWarning,
        stacklevel=4,  # the caller of Evidence.blocks
    )


def _are_equal(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether two readings are identical. NaN equals NaN."""
    return len(tensors) == len(others) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(tensors, others, strict=True)
    )


class Batches:
    """Checked batches of all examples, which must be the same in every iteration.

    An iterable is not copied if it can be iterated repeatedly, and a source is read batch by batch.
    If ranks share the data, each rank iterates only over its own part. The first iteration then
    compares the batches of all ranks.

    Args:
        problem: The model, and how its evidence is computed.
        batches: The user's batches, or a source of all examples.

    Attributes:
        plan: The plan for the first batch.
        part: The positions of the examples that the current rank iterates over, or None for all.

    Raises:
        InputError: If there is no batch, if a batch does not fit the model or differs in a later
            iteration, or if the sampler of a loader omits or repeats examples.
    """

    def __init__(self, problem: Problem, batches: Iterable[Batch] | Source) -> None:
        self._problem = problem
        loader: DataLoader[Any] | None = None
        if isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset):
            loader = batches
            check_sampler(loader, is_read=True)
        once = isinstance(batches, Iterator)
        self._given = list(batches) if once else batches
        self._seen: list[list[int]] | None = None
        first = next(self._read(), None)
        if first is None:
            raise InputError("The data are empty. Pass at least one batch (x, y).")
        _, _, self.plan = checked(problem, *first)
        # Without a batch sampler, items are batches. Items may need what a worker's function does.
        if loader is not None and loader.batch_sampler and not loader.worker_init_fn:
            with seeded(0, problem.device):  # the constructor reads an item
                source = LoaderSource(loader, len(cast(Sized, loader.dataset)))
            warn_of_changes(source, problem.device)
        num_data = problem.model.num_data
        self.part = problem.ranks.part(num_data) if problem.splits(self.plan) else None

    def _read(self) -> Iterator[Batch]:
        if isinstance(self._given, Source):
            positions = torch.arange(len(self._given), device="cpu").split(AT_ONCE)
            yield from map(self._given.fetch, positions)
        else:
            yield from map(as_pair, self._given)

    def __iter__(self) -> Iterator[Batch]:
        signatures, count, part = list[list[int]](), 0, self.part
        for index, batch in enumerate(self._read()):
            x, y, _ = checked(self._problem, *batch)
            signatures.append(_signature(x, y))
            first_signatures = self._seen
            if first_signatures is not None and (
                index >= len(first_signatures) or first_signatures[index] != signatures[index]
            ):
                raise InputError(
                    "The batches differ when they are read again. They are read twice if a"
                    " hyperparameter changes the forward pass. Switch off shuffling and"
                    " augmentation in the loader, or pass a list of batches."
                )
            if not len(x):
                continue  # no target counts
            if part is None:
                yield x, y
            else:
                ends = (min(max(end - count, 0), len(x)) for end in (part.start, part.stop))
                local_span = slice(*ends)
                if local_span.start < local_span.stop:
                    yield x[local_span], y[local_span]
            count += len(x)
        model = self._problem.model
        if part is not None and count != model.num_data:
            raise InputError(
                f"The batches contain {count} examples, but {model.estimator.name} needs all"
                f" {model.num_data}. Pass each training example once, or set num_data to their"
                " number."
            )
        if self._seen is None:
            self._seen = signatures
            if part is not None:
                with self._problem.ranks.together() as alike:
                    alike["batches (a loader that shuffles needs the same seed on each)"] = (
                        signatures
                    )


def _advice(count: int) -> str:
    return f"Set num_data={count} if the model is trained only on these data."


class CheckedSource(Source):
    """A user's N examples (see ``as_source``), checked when they are read.

    The constructor checks the number of examples, the first examples, and all targets in memory. It
    also computes the likelihood's rows at these targets. ``plan`` is the plan for inputs with the
    shape of the first examples. All ranks must call the constructor together, because it compares
    examples between ranks. If there are fewer than N examples, the error ends with the ``advice``
    for their number.

    Raises:
        ConfigurationError: If the likelihood's rows cannot be computed, or if ranks have different
            data.
        InputError: If the data do not fit the model or the likelihood.
    """

    def __init__(
        self, problem: Problem, data: object, advice: Callable[[int], str] = _advice
    ) -> None:
        self._problem, source = problem, as_source(data)
        likelihood = problem.model.likelihood
        x, y = source.first(PROBE_SIZE)
        plan = problem.plan_of(x)
        if plan.positions and is_batch(y, len(x)):
            counted(likelihood, plan.positions, y)  # raises for targets at other positions
        shape = (*plan.positions, plan.num_outputs)
        in_shape = InColumns(source) if lacks_a_column(likelihood, shape, y) else source
        self._source = by_target(in_shape, likelihood, shape)
        num_data, count = problem.model.num_data, len(self._source)
        self.positions = self._source if isinstance(self._source, PositionSource) else None
        if count != num_data:
            kind = "positions with a target" if self.positions else "examples"
            fix = f"Pass the training data only, or set num_data={count}."
            if count < num_data:
                fix = f"Pass all training data. {advice(count)}"
            raise InputError(f"num_data is {num_data}, but the data set has {count} {kind}. {fix}")
        self.is_held = self._source.is_held
        warn_of_changes(source, problem.device)
        if self.is_held:  # all targets at once, so that errors contain their shape
            y = self._source.targets()
            shape = torch.Size((num_data, plan.num_outputs))
            check_targets(likelihood, shape, y, plan.outputs.device)
        _, first, self.plan = checked(problem, *self._source.first(PROBE_SIZE))
        y = y if self.is_held else first
        if type(likelihood) not in LIKELIHOODS.values():
            # A custom likelihood needs one trial for each label.
            y = y if y.is_floating_point() else y.unique(dim=0)
            for labels in y.split(max(1, _NUMBERS_AT_ONCE // self.plan.outputs.shape[1])):
                self._try_density(labels)
        f = self.plan.outputs
        rehearse(problem, f, y[torch.arange(len(f), device="cpu") % len(y)])
        if problem.ranks.count > 1:
            with problem.ranks.together() as alike:
                alike["data"] = self._signatures() if self.is_held else None

    def _signatures(self) -> list[list[int]]:
        """Return the signatures of at most ``_COMPARED`` examples, evenly spaced."""
        count = min(len(self), _COMPARED)
        chosen = torch.arange(count, device="cpu") * len(self) // count
        return [_signature(*self._source.fetch(indices)) for indices in chosen.split(_TOGETHER)]

    def _try_density(self, y: Tensor) -> None:
        """Evaluate the density and its derivatives at all targets, for a few outputs."""
        likelihood, f = self._problem.model.likelihood, self.plan.outputs
        f = f[torch.arange(len(y), device="cpu") % len(f)]
        with torch.no_grad():
            log_probabilities(likelihood, f, y)
        likelihood.check_derivatives(f, y, self._problem.model.estimator.curvature)

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Any, Tensor]:
        """See ``Source.fetch``. The returned examples are checked."""
        x, y, _ = checked(self._problem, *self._source.fetch(indices))
        return x, y

    def targets(self) -> Tensor:
        return self._source.targets()

    def labels(self) -> Int[Tensor, " N"]:
        return self._source.labels()


def rehearse(problem: Problem, f: Tensor, y: Tensor) -> None:
    """Call the methods of the likelihood that a pass needs, so that errors occur early."""
    generator = torch.Generator().manual_seed(0)
    sampled = problem.model.estimator.curvature == "mc"
    labels = [problem.model.likelihood.at(y).sample(f, generator)] if sampled else []
    columns = torch.zeros(len(f), 1, dtype=torch.int64, device="cpu")
    weights = torch.ones(len(f), device="cpu")
    batch = MicroBatch(f, y, slice(0, len(f)), columns, weights, labels)
    with torch.no_grad(), suppress(NotPositiveDefiniteError):  # other outputs may work
        problem.model.cotangents(f, batch)


def resolve(problem: Problem, x: Data, y: Tensor | None) -> MicroBatchSweep:
    """Return a sweep over a block. The block is drawn if ``x`` is not a block.

    ``x`` is a block, batches or a source of all examples, or inputs for the targets ``y``.

    Raises:
        InputError: If the data do not fit the model, the likelihood or the estimator.
    """  # noqa: DOC501 - not_data is an InputError
    if isinstance(x, Block):
        return _given_block(problem, x)
    if isinstance(x, Inputs | Mapping) or (y is not None and isinstance(x, tuple | list)):
        return _given_subset(problem, as_inputs(x), y)
    readable = isinstance(x, Iterable | CheckedSource)
    if y is not None or isinstance(x, str) or not readable:
        raise not_data(x)
    return _given_batches(problem, cast("Iterable[Batch] | Source", x))


def _given_block(problem: Problem, block: Block) -> MicroBatchSweep:
    if block.inputs is None or block.targets is None:
        raise InputError("The block contains no data. Use a block from evidence.blocks(data).")
    _, _, plan = checked(problem, block.inputs, block.targets)
    check_block(block, problem.partition(plan))
    # A sub-block root needs all columns of an example together.
    if problem.model.root != "subblock" and not problem.model.estimator.structure_type.counts_data:
        block = block.expanded()
    return new_sweep(problem, plan, [cast(Batch, (block.inputs, block.targets))], block)


def _given_subset(problem: Problem, x: Inputs, y: Tensor | None) -> MicroBatchSweep:
    if y is None:
        raise InputError("There are no targets for the inputs. Call estimate(x, y).")
    if problem.model.estimator.anchored:
        raise InputError(
            f"{problem.model.estimator.name} chooses anchors from all examples, so it cannot use a"
            " subset. Use blocks instead: for block in evidence.blocks(data).take(n)."
        )
    x, y, plan = checked(problem, x, y)
    if not len(x):
        raise InputError(NO_TARGET)
    if isinstance(x, AtPositions) and x.data is not None and len(x) != problem.model.num_data:
        counts = x.data.bincount(minlength=len(x.whole))
        if bool((counts != counts[0]).any()):
            # Each position is equally likely to be drawn, but the number of positions is random,
            # and with it the factor of the estimate.
            raise InputError(
                f"These examples have {int(counts.min())} to {int(counts.max())} targets each, so"
                " they are not a subset of a known size. Use blocks of all examples instead: for"
                " block in evidence.blocks(data).take(n)."
            )
    if problem.splits(plan):
        with problem.ranks.together() as alike:
            alike["data given"] = _signature(x, y)
        whole = replace(
            problem.partition(plan).subset(len(x), problem.generator), inputs=x, targets=y
        )
        local_block = whole.share(problem.ranks.part(len(x)), problem.ranks.count)
        return new_sweep(
            problem, plan, [cast(Batch, (local_block.inputs, local_block.targets))], local_block
        )
    block = _own_subset(problem, plan, len(x))
    return new_sweep(problem, plan, [(x, y)], block)


def _own_subset(problem: Problem, plan: InputPlan, size: int) -> Block:
    """Return a subset's block, drawn by the problem's generator or with a seed of this rank."""
    ranks, generator = problem.ranks, problem.generator
    if ranks.count == 1:
        return problem.partition(plan).subset(size, generator)
    seeds = torch.randint(2**62, (ranks.count,), generator=generator, device="cpu")
    seed = int(seeds[ranks.rank])
    rank_generator = torch.Generator().manual_seed(seed)
    return replace(problem.partition(plan).subset(size, rank_generator), seed=seed)


def _given_batches(problem: Problem, all_batches: Iterable[Batch] | Source) -> MicroBatchSweep:
    if problem.model.estimator.subset is not None:
        raise InputError(
            f"{problem.model.estimator.name} needs one subset, as in estimate(x, y), or a block"
            " from blocks(data). Pass batches of all examples only to estimators with N in their"
            " name."
        )
    batches, num_data = Batches(problem, all_batches), problem.model.num_data
    if batches.part is None:
        block = _own_subset(problem, batches.plan, num_data)
    else:
        block = problem.partition(batches.plan).subset(num_data, problem.generator)
        block = block.share(batches.part, problem.ranks.count)
    return new_sweep(problem, batches.plan, batches, block)


def checked(problem: Problem, x: Inputs, y: Tensor) -> tuple[Inputs, Tensor, InputPlan]:
    """Check the data, and find the plan for the shape of the inputs.

    For outputs (m, …, C), each position with a target becomes an example.

    Returns:
        The checked inputs and targets, and the plan.
    """
    plan, likelihood = problem.plan_of(x), problem.model.likelihood
    num_outputs, device = plan.num_outputs, plan.outputs.device
    if plan.positions and is_batch(y, len(x)) and not isinstance(x, AtPositions):
        return *spread(likelihood, (*plan.positions, num_outputs), x, y), plan
    check_targets(likelihood, torch.Size((len(x), num_outputs)), y, device)
    return x, y, plan


def _signature(x: Inputs, y: Tensor) -> list[int]:
    """Return the length, and numbers that change with the values and order of the entries."""
    return [len(x), *checksums([*tensors_of(each_once(x)), y], x.device)]
