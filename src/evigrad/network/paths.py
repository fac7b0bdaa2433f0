"""The path by which the rows in each parameter are computed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from evigrad.errors import ConfigurationError, nearest

LOOP = "generic: loop"

_SETS = ("vectorised", "kronecker", "demoted", "operations")


class Use(NamedTuple):
    """All that must stay the same from batch to batch in one use of a parameter.

    Attributes:
        rule: Name of its closed form.
        slot: The parameter's role in the call.
        parts: F, how many entries of dim 0 belong to each example.
        samples: How many augmentation samples of each example were announced.
        input: Shape of the call's input, without dim 0.
        output: Shape of its output, without dim 0.
        settings: The call's other settings, in words.
    """

    rule: str
    slot: str
    parts: int
    samples: int
    input: tuple[int, ...]
    output: tuple[int, ...]
    settings: str


@dataclass(frozen=True)
class JacobianPlan:
    """The path that the rows in each parameter take; made by ``plan``.

    Attributes:
        words: Name → the path in words, in the order of the weights.
        uses: Name → each use, for the parameters with a closed form.
        vectorised: Names whose generic rows may be computed for all data at once.
        kronecker: Names whose every use has Kronecker factors.
        datum_shape: Shape of one input.
        demoted: Names that take the plain loop in every pass; see ``demote``.
        operations: Names of the nodes of the autograd graph that the plan was checked on; none
            where it was not recorded.
    """

    words: Mapping[str, str]
    uses: Mapping[str, tuple[Use, ...]]
    vectorised: frozenset[str]
    kronecker: frozenset[str]
    datum_shape: tuple[int, ...]
    demoted: frozenset[str] = frozenset()
    operations: frozenset[str] = frozenset()

    @property
    def numbers(self) -> int:
        """How many numbers an example has in the outputs of layers with a closed form."""
        uses = {use for of_name in self.uses.values() for use in of_name if use.slot == "weight"}
        return sum(use.parts * prod(use.output) for use in uses)

    def describe(self) -> dict[str, str]:
        """Name → "linear", "conv2d", ..., "generic: vmap", "generic: loop" or "unused"."""
        return dict(self.words)

    def as_record(self) -> dict[str, Any]:
        """The plan in plain types, for a checkpoint; other weights may give another plan."""
        uses = {name: tuple(map(tuple, weight_uses)) for name, weight_uses in self.uses.items()}
        record = vars(self) | {"words": dict(self.words), "uses": uses}
        for name in _SETS:
            record[name] = sorted(record[name])
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "JacobianPlan":
        """The plan of a record by ``as_record``."""
        sets = {name: frozenset(map(str, record.get(name, ()))) for name in _SETS}
        uses = {name: tuple(map(_use, records)) for name, records in record["uses"].items()}
        return cls(**{**record, **sets, "uses": uses})


def _use(record: Sequence[Any]) -> Use:
    rule, slot, parts, samples, *shapes, settings = record
    input_shape, output_shape = (tuple(map(int, shape)) for shape in shapes)
    return Use(
        str(rule), str(slot), int(parts), int(samples), input_shape, output_shape, str(settings)
    )


def demote(plan: JacobianPlan, names: Collection[str]) -> JacobianPlan:
    """The plan with these parameters on the plain loop, which is slow and always right."""
    for name in names:
        if name not in plan.words:
            raise ConfigurationError(
                f"The plan has no parameter named {name!r}.{nearest(name, plan.words)}"
            )
    gone = frozenset(names)
    return replace(
        plan,
        words={name: LOOP if name in gone else word for name, word in plan.words.items()},
        uses={name: uses for name, uses in plan.uses.items() if name not in gone},
        vectorised=plan.vectorised - gone,
        kronecker=plan.kronecker - gone,
        demoted=plan.demoted | gone,
    )
