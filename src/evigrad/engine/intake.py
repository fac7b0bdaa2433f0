"""What a user gives an evidence to work on, checked before anything is drawn or computed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from evigrad.blocks import Block
from evigrad.blocks.sources import Source, as_source
from evigrad.engine.assembly import Assembly
from evigrad.engine.checks import as_pair, check_block, check_inputs, not_data
from evigrad.engine.collected import Collected
from evigrad.engine.passes import Batch
from evigrad.engine.preparation import PROBE_SIZE, Prepared
from evigrad.errors import ConfigurationError, InputError, nearest
from evigrad.likelihoods import LIKELIHOODS
from evigrad.likelihoods.calls import check_derivatives, check_targets, log_probabilities
from evigrad.priors.groups import matches

Data = Tensor | Block | Iterable[Batch] | Collected | Iterable[Collected]

# Numbers whose sums are taken at once: a prime, so that no layer's rows have this length.
_WIDTH = 1021
# Outputs for which a density of the user's own is tried at once.
_NUMBERS_AT_ONCE = 2**22
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


class CheckedSource(Source):
    """All N data of a user, each checked against model and likelihood as it is read.

    What takes no reading is checked at once: their number, a few of the data, all targets that are
    in memory, and whether rows can be made of the likelihood at these.

    Args:
        assembly: Of the evidence.
        data: The user's, as for ``as_source``.

    Attributes:
        prepared: For their inputs.

    Raises:
        ConfigurationError: If rows cannot be made of the likelihood.
        InputError: If the data do not fit.
    """

    def __init__(self, assembly: Assembly, data: object) -> None:
        self._assembly, self._source = assembly, as_source(data)
        num_data = assembly.settings.num_data
        if len(self._source) != num_data:
            raise InputError(f"num_data is {num_data}, but the data set has {len(self._source)}.")
        self.is_held = self._source.is_held
        x, y = self._source.fetch(torch.arange(min(PROBE_SIZE, num_data)))
        self.prepared = checked(assembly, x, y)
        if self.is_held:
            y = self._source._targets()
            shape = torch.Size((num_data, self.prepared.partition.num_outputs))
            check_targets(assembly.likelihood, shape, y, self.prepared.outputs.device)
        if type(assembly.likelihood) not in LIKELIHOODS.values():
            # Of one's own; labels say all that they have to say once.
            y = y if y.is_floating_point() else y.unique(dim=0)
            for some in y.split(max(1, _NUMBERS_AT_ONCE // self.prepared.outputs.shape[1])):
                self._try_density(some)
        f = self.prepared.outputs
        assembly.passes.rehearse(f, y[torch.arange(len(f)) % len(y)])

    def _try_density(self, y: Tensor) -> None:
        """Take the density and its derivatives at targets, whatever outputs they may get."""
        likelihood, f = self._assembly.likelihood, self.prepared.outputs
        f = f[torch.arange(len(y)) % len(f)]
        with torch.no_grad():
            log_probabilities(likelihood, f, y)
        check_derivatives(likelihood, f, y, self._assembly.settings.spec.curvature)

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, indices: Int[Tensor, " m"]) -> tuple[Tensor, Tensor]:
        """Some of the data, checked; see ``Source.fetch``."""
        x, y = self._source.fetch(indices)
        checked(self._assembly, x, y)
        return x, y

    def _targets(self) -> Tensor:
        return self._source._targets()

    def labels(self) -> Int[Tensor, " N"]:
        """See ``Source.labels``."""
        return self._source.labels()


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
        inputs, targets, block = x.inputs, x.targets, x
        # A sub-block is of all columns of a datum, and KFAC counts data.
        if assembly.settings.root != "subblock" and spec.structure != "kfac":
            block = x.expanded()
            if block.origin is not None:
                places = block.origin.to(inputs.device)
                inputs, targets = inputs[places], targets[places]
        return Request(prepared, [(inputs, targets)], block)
    if isinstance(x, Tensor):
        if y is None:
            raise InputError("Inputs need their targets: estimate(x, y).")
        if spec.anchored:
            raise InputError(
                f"The anchors of {spec.name} are chosen among all the data: take its blocks, for"
                " block in evidence.blocks(data).take(n)."
            )
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


@contextmanager
def undrawn_on_error(generator: torch.Generator) -> Iterator[None]:
    """Put a generator back where an exception passes.

    Args:
        generator: Of the evidence.
    """
    state = generator.get_state()
    try:
        yield
    except BaseException:
        generator.set_state(state)
        raise


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
    check_targets(assembly.likelihood, shape, y, prepared.outputs.device)
    return prepared


def divided(
    hyperparameters: Mapping[str, nn.Parameter], wrt: str | Sequence[str] | None
) -> tuple[dict[str, nn.Parameter], list[nn.Parameter]]:
    """The hyperparameters that are asked for, and the others.

    Args:
        hyperparameters: All learnable ones, by name.
        wrt: Names, modules above them, or wildcards; None for all.

    Returns:
        Those asked for, by name in their order, and the rest.

    Raises:
        ConfigurationError: If there is nothing of a name.
    """
    if wrt is None:
        return dict(hyperparameters), []
    patterns = [wrt] if isinstance(wrt, str) else list(wrt)
    for pattern in patterns:
        if not any(matches(pattern, name) for name in hyperparameters):
            known = [*hyperparameters, *sorted({n.split(".")[0] for n in hyperparameters})]
            raise ConfigurationError(
                f"wrt: no learnable hyperparameter is named '{pattern}' or lies below it."
                f"{nearest(pattern, known)} There are {', '.join(hyperparameters) or 'none'}."
            )
    asked = {n: p for n, p in hyperparameters.items() if any(matches(w, n) for w in patterns)}
    return asked, [p for name, p in hyperparameters.items() if name not in asked]


def pinned(
    assembly: Assembly,
    collected: Collected,
    hyperparameters: Mapping[str, nn.Parameter],
    follows: Iterable[str],
) -> Collected:
    """Note what a kept pass was made with.

    Args:
        assembly: Of the evidence.
        collected: The pass.
        hyperparameters: All learnable ones, by name.
        follows: Names of those that may change; the prior always may.

    Returns:
        The same pass with the note.
    """
    names = frozenset([*follows, *(n for n in hyperparameters if n.startswith("prior."))])
    return replace(collected, follows=names, versions=_versions(assembly, hyperparameters, names))


def kept_passes(
    assembly: Assembly,
    x: Data,
    hyperparameters: Mapping[str, nn.Parameter],
    wanted: Iterable[str],
) -> list[Collected] | None:
    """The kept passes that were given in the place of data.

    Args:
        assembly: Of the evidence.
        x: Whatever was given.
        hyperparameters: All learnable ones, by name.
        wanted: Names of those to differentiate in.

    Returns:
        The passes, or None for data.

    Raises:
        ConfigurationError: If a pass does not follow a hyperparameter that is wanted.
        InputError: If one was made by another evidence, or with other weights.
    """
    names = list(wanted)
    if isinstance(x, Collected):
        kept = [x]
    elif isinstance(x, list | tuple) and x and all(isinstance(p, Collected) for p in x):
        kept = [p for p in x if isinstance(p, Collected)]
    else:
        return None
    now: dict[frozenset[str], tuple[tuple[int, int, int], ...]] = {}
    for collected in kept:
        if collected.owner is not assembly:
            raise InputError("This pass was collected by another evidence.")
        follows = collected.follows
        if follows not in now:
            now[follows] = _versions(assembly, hyperparameters, follows)
        if collected.versions != now[follows]:
            raise InputError(
                "The weights, a buffer of the model, a fixed noise or hyperparameters that the"
                " pass does not follow have changed since collect(): pass the data again."
            )
        if lost := [name for name in names if name not in collected.follows]:
            raise ConfigurationError(
                f"The kept pass does not follow {', '.join(lost)}: name what it was collected for,"
                f" as wrt={sorted(collected.follows)}, or give the data."
            )
    return kept


def _versions(
    assembly: Assembly, hyperparameters: Mapping[str, nn.Parameter], follows: Iterable[str]
) -> tuple[tuple[int, int, int], ...]:
    """Numbers that change with parameters and buffers."""
    free = {id(hyperparameters[name]) for name in follows if name in hyperparameters}
    model, likelihood = assembly.preparation.model, assembly.likelihood
    held = [*model.parameters(), *model.buffers(), *likelihood.parameters(), *likelihood.buffers()]
    held = [t for t in held if id(t) not in free and t.layout == torch.strided]
    sums = torch.stack([_checksum(t).to(assembly.device) for t in held]).tolist()
    return tuple((t.data_ptr(), t._version, own) for t, own in zip(held, sums, strict=True))


def _checksum(tensor: Tensor) -> Tensor:
    """A sum of bits by their place: writing through ``.data`` leaves no other trace."""
    whole = tensor.detach().reshape(-1)
    # Halves of 64 bits, whose sums cannot overflow; sums of integers are exact in any order.
    bits = whole.view({1: torch.int8, 2: torch.int16}.get(whole.element_size(), torch.int32))
    head = len(bits) // _WIDTH * _WIDTH
    table = bits[:head].view(-1, _WIDTH)
    sums = (bits[head:], table.sum(0), table.sum(1))[: 3 if head else 1]
    parts = [(s * torch.arange(1, len(s) + 1, device=s.device)).sum() for s in sums]
    return torch.stack(parts).sum()


def check_keepable(assembly: Assembly, prepared: Prepared, learned: Sequence[str]) -> None:
    """Refuse to keep a pass that steps on the hyperparameters would make wrong.

    Args:
        assembly: Of the evidence.
        prepared: For the inputs.
        learned: Names of the hyperparameters that are to change.

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
            "A pass can only be kept for steps on the prior and the noise;"
            f" {', '.join(changing)} changes it. Leave it out (wrt=['prior'], in training"
            " hyper_steps=...), or use estimate and backward on the data."
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
