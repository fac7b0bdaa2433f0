"""What a user gives an evidence to work on, checked before anything is drawn or computed."""

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from evigrad.blocks import Block
from evigrad.blocks.sources import Source, as_source
from evigrad.engine.checks import as_pair, check_block, check_inputs, not_data
from evigrad.engine.cotangents import rehearse
from evigrad.engine.kept import KeptPass
from evigrad.engine.passes import Batch
from evigrad.engine.plans import PROBE_SIZE, InputPlan
from evigrad.engine.problem import Problem
from evigrad.errors import InputError
from evigrad.likelihoods import LIKELIHOODS
from evigrad.likelihoods.calls import check_derivatives, check_targets, log_probabilities

Data = Tensor | Block | Iterable[Batch] | KeptPass | Iterable[KeptPass]

# Outputs for which a density of the user's own is tried at once.
_NUMBERS_AT_ONCE = 2**22
# Its multiples modulo one are spread evenly.
_GOLDEN_RATIO = 0.6180339887498949


class Batches:
    """Batches of all the data, checked, the same in every iteration.

    What can be iterated again is not kept; a second iteration is compared with the first.

    Args:
        problem: The problem of the evidence.
        batches: The user's.
    """

    def __init__(self, problem: Problem, batches: Iterable[Batch]) -> None:
        self._problem = problem
        self._once = isinstance(batches, Iterator)
        self._batches = [as_pair(batch) for batch in batches] if self._once else batches
        self._seen: list[tuple[int, float]] | None = None

    def first(self) -> Batch | None:
        """The first batch, or None where there is none."""
        return next((as_pair(batch) for batch in self._batches), None)

    def __iter__(self) -> Iterator[Batch]:
        """The batches.

        Yields:
            Inputs and targets.

        Raises:
            InputError: If a batch does not fit, or is another than in the first iteration.
        """
        signatures: list[tuple[int, float]] = []
        for index, batch in enumerate(self._batches):
            x, y = as_pair(batch)
            checked(self._problem, x, y)
            signatures.append(_signature(x, y))
            known = self._seen
            if known is not None and (index >= len(known) or known[index] != signatures[index]):
                raise InputError(
                    "The batches are not the same when they are read a second time, as two passes"
                    " do for the gradient in hyperparameters of the forward pass: do not shuffle"
                    " or augment in the loader, or give a list of batches."
                )
            yield x, y
        self._seen = self._seen or signatures


class CheckedSource(Source):
    """All N data of a user, each checked against model and likelihood as it is read.

    What takes no reading is checked at once: their number, a few of the data, all targets that are
    in memory, and whether rows can be made of the likelihood at these.

    Args:
        problem: The problem of the evidence.
        data: The user's, as for ``as_source``.

    Attributes:
        plan: The plan for their inputs.

    Raises:
        ConfigurationError: If rows cannot be made of the likelihood.
        InputError: If the data do not fit.
    """

    def __init__(self, problem: Problem, data: object) -> None:
        self._problem, self._source = problem, as_source(data)
        num_data = problem.settings.num_data
        if len(self._source) != num_data:
            raise InputError(f"num_data is {num_data}, but the data set has {len(self._source)}.")
        self.is_held = self._source.is_held
        x, y = self._source.fetch(torch.arange(min(PROBE_SIZE, num_data)))
        self.plan = checked(problem, x, y)
        if self.is_held:
            y = self._source._targets()
            shape = torch.Size((num_data, self.plan.partition.num_outputs))
            check_targets(problem.likelihood, shape, y, self.plan.outputs.device)
        if type(problem.likelihood) not in LIKELIHOODS.values():
            # Of one's own; labels say all that they have to say once.
            y = y if y.is_floating_point() else y.unique(dim=0)
            for some in y.split(max(1, _NUMBERS_AT_ONCE // self.plan.outputs.shape[1])):
                self._try_density(some)
        f = self.plan.outputs
        rehearse(problem, f, y[torch.arange(len(f)) % len(y)])

    def _try_density(self, y: Tensor) -> None:
        """Take the density and its derivatives at targets, whatever outputs they may get."""
        likelihood, f = self._problem.likelihood, self.plan.outputs
        f = f[torch.arange(len(y)) % len(f)]
        with torch.no_grad():
            log_probabilities(likelihood, f, y)
        check_derivatives(likelihood, f, y, self._problem.settings.spec.curvature)

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Tensor, Tensor]:
        """Some of the data, checked; see ``Source.fetch``."""
        x, y = self._source.fetch(indices)
        checked(self._problem, x, y)
        return x, y

    def _targets(self) -> Tensor:
        return self._source._targets()

    def labels(self) -> Int[Tensor, " N"]:
        """See ``Source.labels``."""
        return self._source.labels()


def resolve(
    problem: Problem, x: Data, y: Tensor | None
) -> tuple[InputPlan, Iterable[Batch], Block]:
    """The block of rows to evaluate, drawn where the data do not name it.

    Args:
        problem: The problem of the evidence.
        x: Inputs, a block, or batches of all the data.
        y: Targets of inputs.

    Returns:
        The plan for the inputs, the block's data in batches, and the block.

    Raises:
        InputError: If the data do not fit the model, the likelihood or the estimator.
    """  # noqa: DOC501 - not_data is an InputError
    spec, num_data = problem.settings.spec, problem.settings.num_data
    if isinstance(x, Block):
        if x.inputs is None or x.targets is None:
            raise InputError("The block holds no data: use one of evidence.blocks(data).")
        plan = checked(problem, x.inputs, x.targets)
        check_block(x, plan.partition)
        inputs, targets, block = x.inputs, x.targets, x
        # A sub-block is of all columns of a datum, and KFAC counts data.
        if problem.settings.root != "subblock" and spec.structure != "kfac":
            block = x.expanded()
            if block.origin is not None:
                places = block.origin.to(inputs.device)
                inputs, targets = inputs[places], targets[places]
        return plan, [(inputs, targets)], block
    if isinstance(x, Tensor):
        if y is None:
            raise InputError("Inputs need their targets: estimate(x, y).")
        if spec.anchored:
            raise InputError(
                f"The anchors of {spec.name} are chosen among all the data: take its blocks, for"
                " block in evidence.blocks(data).take(n)."
            )
        plan = checked(problem, x, y)
        return plan, [(x, y)], plan.partition.subset(len(x), problem.generator)
    if (
        y is not None
        or isinstance(x, KeptPass)
        or not isinstance(x, Iterable)
        or isinstance(x, str | Mapping)
    ):
        raise not_data(x)
    if spec.subset is not None:
        raise InputError(
            f"{spec.name} takes one subset, estimate(x, y), or a block of blocks(data); batches"
            " of all the data are for names with N."
        )
    batches = Batches(problem, cast(Iterable[Batch], x))
    first = batches.first()
    if first is None:
        raise InputError("The set is empty: there is no batch of data.")
    plan = checked(problem, *first)
    return plan, batches, plan.partition.subset(num_data, problem.generator)


def checked(problem: Problem, x: Tensor, y: Tensor) -> InputPlan:
    """Inputs and targets that fit the model and the likelihood.

    Args:
        problem: The problem of the evidence.
        x: Inputs (m, ...).
        y: Targets.

    Returns:
        The plan for inputs of this shape.

    Raises:
        InputError: If they do not fit.
    """
    check_inputs(x, problem.device)
    plan = problem.plans.of(x)
    shape = torch.Size((len(x), plan.partition.num_outputs))
    check_targets(problem.likelihood, shape, y, plan.outputs.device)
    return plan


def _signature(x: Tensor, y: Tensor) -> tuple[int, float]:
    """A number that another order, other data or flipped images would change."""
    total = 0.0
    for part in (x, y):
        values = part.reshape(-1).double()
        # Weights without a pattern, so that no exchange of entries leaves the sum as it is.
        position = torch.arange(len(values), dtype=torch.float64, device=x.device)
        total += float((values * (1.0 + (position * _GOLDEN_RATIO).frac())).sum())
    return len(x), total
