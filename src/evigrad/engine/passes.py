"""One pass over a block of data: micro-batches, their forward passes, their cotangents.

Whatever is drawn belongs to the block and is drawn before the pass, so that every pass over it
and every size of micro-batch sees the same.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evigrad.blocks import Block
from evigrad.engine.checks import check_inputs
from evigrad.engine.memory import available_bytes
from evigrad.engine.micro_batches import HeldBytes, MicroBatches, fits
from evigrad.engine.preparation import Preparation, Prepared, Settings
from evigrad.errors import InputError, NotPositiveDefiniteError
from evigrad.errors.users_code import raised_in
from evigrad.invariances.noise import Noise
from evigrad.jacobians import (
    Linearization,
    Recorder,
    check_separate,
    linearize,
    model_outputs,
    model_run,
)
from evigrad.jacobians.modes import evaluation_mode
from evigrad.likelihoods import Likelihood, RootRows
from evigrad.likelihoods.calls import check_finite

Batch = tuple[Tensor, Tensor]

# Data on which the memory of a pass is measured: the second shows what each one adds.
_MEASURED = 2


@dataclass(frozen=True, eq=False)
class Task:
    """A block and all that was drawn for it.

    Attributes:
        prepared: For its inputs.
        batches: Its data, in its order, the same in every iteration.
        block: Columns and scale factors.
        seed: Of what the model draws from global generators.
        noise: Of the modules that draw through the evidence.
        labels: Sampled labels of all its data, one tensor for each sample ("mc").
        suspicious: Whether to make sure in every micro-batch that no data mix.
    """

    prepared: Prepared
    batches: Iterable[Batch]
    block: Block
    seed: int
    noise: Noise | None
    labels: Sequence[Tensor] = ()
    suspicious: bool = False


@dataclass(frozen=True, eq=False)
class Chunk:
    """A micro-batch and its share of the block.

    Attributes:
        x: Inputs, as the prepared model takes them.
        y: Targets.
        data: Positions in the block.
        columns: Of the root, or None for all.
        likelihood_weights: Of the data's log likelihoods.
        labels: Sampled ones.
    """

    x: Tensor
    y: Tensor
    data: slice
    columns: Tensor | None
    likelihood_weights: Tensor
    labels: Sequence[Tensor]


class Passes:
    """Runs passes over the micro-batches of a block.

    Args:
        preparation: Of the evidence.
        likelihood: Gives the cotangents.
        settings: Of the evidence.
        device: Of the weights.
    """

    def __init__(
        self,
        preparation: Preparation,
        likelihood: Likelihood,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self._preparation = preparation
        self._likelihood = likelihood
        self._settings = settings
        self._device = device
        # KFAC counts data, those without rows too: they keep their padding, and their place.
        self._counts_data = settings.spec.structure == "kfac"
        self.sizes = MicroBatches(settings.micro_batch, settings.memory_budget)

    def task(
        self,
        prepared: Prepared,
        batches: Iterable[Batch],
        block: Block,
        generator: torch.Generator,
    ) -> Task:
        """Draw all that passes over a block need.

        Args:
            prepared: For inputs of this shape.
            batches: The block's data, in its order, which can be iterated again.
            block: Columns and scale factors.
            generator: Of the evidence.

        Returns:
            The task.
        """
        seed = int(torch.randint(2**62, (), generator=generator))
        noise = self._preparation.noise(seed, block.origin) if self._preparation.draws else None
        task = Task(prepared, batches, block, seed, noise)
        if self._settings.spec.curvature != "mc":
            return task
        outputs: list[Tensor] = []
        with torch.no_grad():
            self.run(task, "outputs", lambda chunk: outputs.append(self.outputs(task, chunk)))
        f = torch.cat(outputs)
        samples = range(self._settings.spec.outputs or 1)
        return replace(task, labels=[self._likelihood.sample(f, generator) for _ in samples])

    def run(self, task: Task, kind: str, work: Callable[[Chunk], object]) -> None:
        """Do something with every micro-batch of a block.

        Args:
            task: The block.
            kind: Of the pass; passes of one kind take the same memory.
            work: Leaves nothing behind where memory does not suffice: it is then run again on
                half of the data.

        Raises:
            InputError: If the batches do not hold the block's data.
        """
        expected, first = len(task.block.indices), 0
        cuts = [] if self._counts_data else task.block.cuts()
        with self._evaluating(task):
            for x, y in task.batches:
                check_inputs(x, self._device)
                if first + len(x) > expected:
                    raise InputError(f"The batches hold more than the {expected} data expected.")
                start = 0
                while start < len(x):
                    rest = len(x) - start
                    stop = start + self._size(task, kind, x, rest, first + start)
                    cut = next((c for c in cuts if c > first + start), expected)
                    stop = min(stop, cut - first)
                    chunk = self._chunk(task, x[start:stop], y[start:stop], first + start)
                    if self.sizes.asked != "auto":
                        work(chunk)
                    elif not fits(lambda chunk=chunk: work(chunk)):
                        self.sizes.halve(self._key(task, kind, x), stop - start)
                        continue
                    start = stop
                first += len(x)
        if first != expected:
            raise InputError(
                f"The batches hold {first} data, but {self._settings.spec.name} needs all"
                f" {expected}."
            )

    def linearized(self, task: Task, chunk: Chunk, differentiable: bool) -> Linearization:
        """The forward pass of a micro-batch.

        Args:
            task: The block.
            chunk: The micro-batch.
            differentiable: Whether its rows shall have a graph into hyperparameters.

        Returns:
            The linearization, its outputs finite.
        """
        prepared = task.prepared
        with self._autocast():
            linearization = linearize(
                prepared.model, self._preparation.weights, chunk.x, prepared.plan, differentiable
            )
        check_finite("The model's outputs", linearization.outputs)
        if task.suspicious or linearization.may_mix:
            self._check_separate(task, chunk, linearization.outputs)
        return linearization

    def rehearse(self, f: Tensor, y: Tensor) -> None:
        """Ask the likelihood for what passes will ask it, to hear now what it lacks.

        Args:
            f: Outputs of a few data.
            y: Their targets.

        Raises:
            EvigradError: If it lacks something, or is not what it says.
        """
        own = torch.Generator().manual_seed(0)
        sampled = self._settings.spec.curvature == "mc"
        labels = [self._likelihood.sample(f, own)] if sampled else []
        columns = torch.zeros(len(f), 1, dtype=torch.int64)
        weights = torch.ones(len(f))
        with torch.no_grad(), suppress(NotPositiveDefiniteError):  # other outputs may do better
            self.root_rows(f, Chunk(f, y, slice(0, len(f)), columns, weights, labels))

    def root_rows(self, f: Tensor, chunk: Chunk) -> RootRows:
        """The cotangents whose vector-Jacobian products are the rows, temperature included.

        Args:
            f: Outputs of the micro-batch.
            chunk: The micro-batch.

        Returns:
            The cotangents, with a graph into f and the likelihood's parameters where these have.
        """
        name = type(self._likelihood).__name__
        with raised_in(f"log_prob of {name}, or what is derived at its reference_targets,"):
            root = self._root_rows(f, chunk)
        if self._settings.temperature == 1.0:
            return root
        cooling = self._settings.temperature**-0.5
        scale = torch.ones_like(root.vectors[:, :, 0]) if root.scale is None else root.scale
        return replace(root, scale=scale * cooling)

    def _root_rows(self, f: Tensor, chunk: Chunk) -> RootRows:
        """The cotangents at temperature 1."""
        curvature, columns = self._settings.spec.curvature, chunk.columns
        if curvature == "ef":
            root = RootRows(self._likelihood.score(f, chunk.y)[:, None, :], None)
        elif curvature == "mc":  # outer products of sampled labels' scores average to Λ
            labels = chunk.labels
            scores = torch.stack([self._likelihood.score(f, label) for label in labels], dim=1)
            log_prob = torch.stack([self._likelihood.log_prob(f, label) for label in labels], dim=1)
            # One, with the gradient that the labels' distribution has in f and in the noise: the
            # labels are held fixed, and the gradient of H stays unbiased.
            ratio = (0.5 * (log_prob - log_prob.detach())).exp()
            root = RootRows(scores * len(labels) ** -0.5, ratio)
        else:
            columns = None if columns is None else columns.to(f.device)
            root = self._likelihood.root(f, columns, self._settings.root)
            if columns is not None and (columns < 0).any():
                root = replace(root, present=columns >= 0)
        return root

    def outputs(self, task: Task, chunk: Chunk) -> Tensor:
        """The outputs of a micro-batch, with a graph where gradients are on.

        Args:
            task: The block.
            chunk: The micro-batch.

        Returns:
            Of shape (m, C), finite, in the type of the weights.
        """
        model = task.prepared.model
        with self._autocast(), Recorder({}, len(chunk.x)) as recorder:
            f = model_outputs(model, chunk.x)
        check_finite("The model's outputs", f)
        if task.suspicious or recorder.may_mix(model):
            self._check_separate(task, chunk, f)
        return f.to(next(iter(self._preparation.weights.values())).dtype)

    def _check_separate(self, task: Task, chunk: Chunk, f: Tensor) -> None:
        if len(chunk.x) == 1:
            return
        model, own = task.prepared.model, torch.Generator().manual_seed(task.seed)
        if self._settings.autocast is not None:  # whose rounding would look like what is wrong
            with torch.no_grad():
                f = model_outputs(model, chunk.x)
        check_separate(model, chunk.x, f, own)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        dtype = self._settings.autocast
        context: Any = nullcontext()
        if dtype is not None:
            context = torch.autocast(self._device.type, dtype=dtype)
        with context:
            yield

    def _chunk(self, task: Task, x: Tensor, y: Tensor, start: int) -> Chunk:
        data = slice(start, start + len(x))
        columns = task.block.columns
        if columns is not None:
            columns = columns[data] if self._counts_data else task.block.columns_of(data)
        return Chunk(
            x=task.prepared.pack(x, task.noise, data),
            y=y,
            data=data,
            columns=columns,
            likelihood_weights=task.block.likelihood_weights[data],
            labels=[labels[data] for labels in task.labels],
        )

    # ------------------------------------------------------------ memory

    def most_at_once(self, prepared: Prepared, block: Block, position: int = 0) -> int | None:
        """Data of a block that go through the network together, at most.

        Args:
            prepared: For its inputs.
            block: The block.
            position: Of the first of them.

        Returns:
            Their number, or None where the memory will tell.
        """
        asked = self.sizes.asked
        if asked is None and len(block.draws) > 1:
            # No more rows than of one draw, whose number the user has chosen.
            return max(1, prepared.partition.block_rows // max(1, block.rows_of(position)))
        return len(block.indices) if asked is None else asked if isinstance(asked, int) else None

    def _size(self, task: Task, kind: str, x: Tensor, rest: int, position: int) -> int:
        if (at_once := self.most_at_once(task.prepared, task.block, position)) is not None:
            return min(rest, at_once)
        key = self._key(task, kind, x)
        if key in self.sizes.chosen or self.sizes.asked != "auto":
            return self.sizes.size(key, rest, lambda: 0.0, None)
        free = available_bytes(self._device)
        if free is not None and kind != "second":  # the statistic is still to come
            rows = task.block.num_rows or task.prepared.partition.block_rows
            free -= task.prepared.structure.predicted_bytes(rows)
        return self.sizes.size(key, rest, lambda: self.bytes_per_datum(task, kind, x), free)

    def _key(self, task: Task, kind: str, x: Tensor) -> str:
        """In words, what the memory of a pass depends on besides its data's number."""
        numbers = task.prepared.numbers(x)
        return f"{kind} pass of {numbers:,} numbers and {self._width(task)} rows for each"

    @staticmethod
    def _width(task: Task) -> int:
        columns = task.block.columns
        return task.prepared.partition.num_outputs if columns is None else columns.shape[1]

    def bytes_per_datum(self, task: Task, kind: str, x: Tensor) -> float:
        """Memory that is held at once for each further datum of a pass.

        Args:
            task: Of a block.
            kind: Of the pass, ``first`` or ``second``.
            x: Some inputs of the block, from its beginning.

        Returns:
            Bytes, measured.
        """
        totals: list[int] = []

        def measure(part: Tensor) -> None:
            totals.append(self._pass_bytes(task, kind, part))

        if not fits(lambda: measure(x[:1])):
            return math.inf
        if len(x) < _MEASURED or not fits(lambda: measure(x[:_MEASURED])):
            return float(totals[0])
        return float(max(totals[1] - totals[0], 1))

    def _pass_bytes(self, task: Task, kind: str, x: Tensor) -> int:
        prepared, weights = task.prepared, self._preparation.weights
        packed = prepared.pack(x, task.noise, slice(0, len(x)))
        width = self._width(task)
        with self._evaluating(task), torch.enable_grad(), self._autocast(), HeldBytes() as held:
            second, graph = kind == "second", None
            lin = linearize(prepared.model, weights, packed, prepared.plan, second)
            if second:
                shape = (len(x), width)
                zeros = {n: w.new_zeros(1).expand(*shape, *w.shape) for n, w in weights.items()}
                vectors = lin.outputs.detach()[:, None].expand(-1, width, -1)
                graph = lin.inner(vectors.clone().requires_grad_(), zeros)
            total = held.total  # while what was made above is there
            del graph
        formed = sum(w.numel() * w.element_size() for w in weights.values()) * len(x) * width
        return total + formed

    @contextmanager
    def _evaluating(self, task: Task) -> Iterator[None]:
        """What every forward pass of a block runs under, whatever it is for."""
        model = task.prepared.model
        own = torch.Generator().manual_seed(task.seed) if task.prepared.draws_globally else None
        with evaluation_mode(model, own), model_run(model):
            yield
