"""What a user gives an evidence to work on, checked before anything is drawn or computed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from evigrad.assembly import Assembly, Collected
from evigrad.checks import as_pair, check_block, check_inputs, not_data
from evigrad.errors import ConfigurationError, InputError
from evigrad.partitions import Block
from evigrad.passes import Batch
from evigrad.preparation import Prepared

Data = Tensor | Block | Iterable[Batch] | Collected | Iterable[Collected]

# Its multiples modulo one are spread evenly.
_GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True)
class Request:
    """A block and where its data come from."""

    prepared: Prepared
    batches: Iterable[Batch]
    block: Block


class Batches:
    """Batches of all the data, checked, the same in every iteration.

    What can be iterated again is not kept; a second iteration is compared with the first.

    Args:
        assembly: Of the evidence.
        batches: The user's.
    """

    def __init__(self, assembly: Assembly, batches: Iterable[Batch]) -> None:
        self._assembly = assembly
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
            checked(self._assembly, x, y)
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
    batches = Batches(assembly, cast(Iterable[Batch], x))
    first = batches.first()
    if first is None:
        raise InputError("The set is empty: there is no batch of data.")
    prepared = checked(assembly, *first)
    return Request(prepared, batches, prepared.partition.subset(num_data, assembly.generator))


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


def check_keepable(assembly: Assembly, prepared: Prepared, learned: Sequence[str]) -> None:
    """Refuse to keep a pass that steps on the hyperparameters would make wrong.

    Args:
        assembly: Of the evidence.
        prepared: For the inputs.
        learned: Names of the learnable hyperparameters.

    Raises:
        ConfigurationError: If one of them is neither the prior's nor a noise that can be followed.
    """
    beside = [name for name in learned if not name.startswith("prior.")]
    changing = [name for name in beside if name.startswith("model.")]
    num_outputs = prepared.partition.num_outputs
    if beside and not changing and assembly.rows_depend_on_likelihood(num_outputs):
        changing = beside
    if changing:
        raise ConfigurationError(
            "A pass can only be kept where the prior and the noise alone are learned;"
            f" {', '.join(changing)} changes it. Use estimate and backward on the data."
        )
    if beside and assembly.noise_differs_in_sums(num_outputs):
        raise ConfigurationError(
            f"{assembly.settings.spec.name} sums rows of different noise, so that a kept pass"
            f" cannot follow {', '.join(beside)}. Take one noise for all outputs, an 'ntk'"
            " estimator, or estimate and backward on the data."
        )


def _signature(x: Tensor, y: Tensor) -> tuple[int, float]:
    """A number that another order, other data or flipped images would change."""
    total = 0.0
    for part in (x, y):
        values = part.reshape(-1).double()
        # Weights without a pattern, so that no exchange of entries leaves the sum as it is.
        position = torch.arange(len(values), dtype=torch.float64, device=x.device)
        total += float((values * (1.0 + (position * _GOLDEN_RATIO).frac())).sum())
    return len(x), total
