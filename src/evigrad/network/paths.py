"""Define plans, which determine how the rows of each parameter are computed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from evigrad.errors import ConfigurationError, nearest

LOOP = "generic: loop"

_SETS = ("vectorised", "kronecker", "demoted", "operations")


class Use(NamedTuple):
    """One use of a parameter, which must be the same in every batch.

    Attributes:
        rule: Name of the closed form.
        slot: The parameter's role in the call, such as "weight".
        parts: F, the number of entries in dimension 0 per example.
        samples: The number of augmentation samples of each example.
        input: Shape of the call's input, without dimension 0.
        output: Shape of the call's output, without dimension 0.
        settings: The call's other settings, as text.
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
    """A plan for computing the rows of each parameter. Call ``plan`` to make a plan.

    Attributes:
        words: How the rows of each parameter are computed, by name, in the order of the weights.
            See ``describe``.
        uses: The uses of each parameter with a closed form, by name.
        vectorised: Names of parameters without a closed form, whose rows may be computed for all
            examples in one call.
        kronecker: Names of parameters whose uses all have Kronecker factors.
        datum_shape: Shape of one example's input.
        demoted: Names of parameters that use the plain loop in every pass. See ``demote``.
        operations: Names of the autograd graph's nodes when the plan was checked. Empty if the
            graph was not recorded.
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
        """The number of entries per example in the outputs of layers with a closed form."""
        uses = {use for uses in self.uses.values() for use in uses if use.slot == "weight"}
        return sum(use.parts * prod(use.output) for use in uses)

    def describe(self) -> dict[str, str]:
        """Return how the rows of each parameter are computed, by name.

        The values are "linear", "conv2d", …, "generic: vmap", "generic: loop" or "unused".
        """
        return dict(self.words)

    def as_record(self) -> dict[str, Any]:
        """Return the plan as plain types, for a checkpoint."""
        uses = {name: tuple(map(tuple, weight_uses)) for name, weight_uses in self.uses.items()}
        record = vars(self) | {"words": dict(self.words), "uses": uses}
        for name in _SETS:
            record[name] = sorted(record[name])
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "JacobianPlan":
        """Return the plan that ``as_record`` converted to this record."""
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
    """Return a plan that uses the slow but always correct plain loop for these parameters."""
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
