"""What a user gives an evidence to work on, checked before anything is drawn or computed."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evigrad.assembly import Assembly, Batch, Collected, Prepared
from evigrad.checks import as_pair, check_block, check_inputs, not_data
from evigrad.errors import InputError
from evigrad.partitions import Block

Data = Tensor | Block | Iterable[Batch] | Collected


@dataclass(frozen=True)
class Request:
    """A block and where its data come from."""

    prepared: Prepared
    batches: Iterable[Batch]
    block: Block


def resolve(assembly: Assembly, x: Data, y: Tensor | None) -> Request:
    """The block of rows to evaluate, drawn where the data do not name it.

    Args:
        assembly: Of the evidence.
        x: Inputs, a block, or batches of all the data.
        y: Targets of inputs.

    Returns:
        The block with its batches.

    Raises:
        InputError: If the data do not fit the model, the likelihood or the estimator.
    """  # noqa: DOC501 - not_data is an InputError
    spec, num_data = assembly.settings.spec, assembly.settings.num_data
    if isinstance(x, Block):
        if x.inputs is None or x.targets is None:
            raise InputError("The block holds no data: use one of evidence.blocks(data).")
        prepared = checked(assembly, x.inputs, x.targets)
        check_block(x, prepared.partition)
        return Request(prepared, [(x.inputs, x.targets)], x)
    if isinstance(x, Tensor):
        if y is None:
            raise InputError("Inputs need their targets: estimate(x, y).")
        prepared = checked(assembly, x, y)
        return Request(prepared, [(x, y)], prepared.partition.subset(len(x), assembly.generator))
    if (
        y is not None
        or isinstance(x, Collected)
        or not isinstance(x, Iterable)
        or isinstance(x, str | Mapping)
    ):
        raise not_data(x)
    if spec.subset is not None:
        raise InputError(
            f"{spec.name} takes one subset, estimate(x, y), or a block of blocks(data); batches"
            " of all the data are for names with N."
        )
    iterator = iter(x)
    first = next(iterator, None)
    if first is None:
        raise InputError("The set is empty: there is no batch of data.")
    prepared = checked(assembly, *as_pair(first))
    block = prepared.partition.subset(num_data, assembly.generator)
    return Request(prepared, _checked_batches(assembly, first, iterator), block)


def checked(assembly: Assembly, x: Tensor, y: Tensor) -> Prepared:
    """Inputs and targets that fit the model and the likelihood.

    Args:
        assembly: Of the evidence.
        x: Inputs (m, ...).
        y: Targets.

    Returns:
        What is prepared for inputs of this shape.

    Raises:
        InputError: If they do not fit.
    """
    check_inputs(x, assembly.device)
    prepared = assembly.prepare(x)
    shape = torch.Size((len(x), prepared.partition.num_outputs))
    assembly.likelihood.validate(shape, y)
    return prepared


def _checked_batches(assembly: Assembly, first: Batch, rest: Iterator[Batch]) -> Iterator[Batch]:
    yield first
    for batch in rest:
        x, y = as_pair(batch)
        checked(assembly, x, y)
        yield x, y
