"""The names of the estimators: ``STRUCTURE-SUBSET-OUTPUTS[-MODIFIER...]``, as in ``kfac-150-1``.

A name says which *structure* of the curvature is taken (the whole Gram matrix, the whole Hessian,
its blocks, ...) and into which blocks the data and the outputs are *partitioned*
(`evigrad.core.partition`). This module knows the spelling and which combinations make sense.
"""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from evigrad.core.curvature.base import Curvature
from evigrad.core.curvature.dense import BlockDiagonal, Full
from evigrad.core.curvature.diagonal import Diagonal
from evigrad.core.curvature.kfac import Kfac
from evigrad.core.curvature.ntk import Ntk
from evigrad.core.roots import ROOTS
from evigrad.errors import ConfigurationError, nearest

# The curvatures that a name can ask for.
STRUCTURES: dict[str, type[Curvature[Any]]] = {
    kind.name: kind for kind in (Ntk, Full, BlockDiagonal, Kfac, Diagonal)
}
MODIFIERS = ("iid", "grouped", "anchored", "ef", "mc")
# How the curvature of the outputs is taken: exactly, from the targets, or from sampled labels.
CURVATURES = ("ggn", "ef", "mc")

GRAMMAR = (
    "A name is STRUCTURE-SUBSET-OUTPUTS[-MODIFIER...]: "
    f"STRUCTURE {' | '.join(STRUCTURES)}, SUBSET an integer or N, OUTPUTS an integer, C or rows, "
    f"MODIFIER {' | '.join(MODIFIERS)}; for instance 'kfac-150-1' or 'ntk-N-C'."
)

# What people take who do not want to choose: docs/estimators.md says when another is better.
DEFAULT_ESTIMATOR = "ntk-400-rows-anchored"

# Without leading zeros and ASCII only, so that every estimator has exactly one spelling; 18 digits
# fit into an int64.
_INTEGER = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class Estimator:
    """What the name of an estimator says.

    Attributes:
        structure: One of `STRUCTURES`.
        subset: Number of data points in a block (with `rows`: number of rows); ``None`` is all N.
        outputs: Number of outputs in a block; ``None`` is all C. For ``ef`` it is 1, for ``mc``
            the number of labels sampled for each datum.
        rows: Whether a block is made of single rows (datum, output) drawn freely.
        iid: Whether each datum of a block draws its own outputs.
        grouped: Whether blocks are filled from one class before the next.
        anchored: Whether blocks are conditioned on a set of anchors.
        curvature: One of `CURVATURES`: generalised Gauss-Newton, empirical or sampled Fisher.
        custom: The user's own curvature, whose name `structure` is.

    Raises:
        ConfigurationError: If the parts do not go together.
    """

    structure: str
    subset: int | None = None
    outputs: int | None = None
    rows: bool = False
    iid: bool = False
    grouped: bool = False
    anchored: bool = False
    curvature: str = "ggn"
    custom: Curvature[Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuse combinations without a meaning, whichever way the spec was made."""
        for kind, value, choices in (
            ("structure", self.structure, _structures(self.custom)),
            ("curvature", self.curvature, CURVATURES),
        ):
            if value not in choices:
                raise ConfigurationError(
                    f"unknown {kind} {value!r}; known are {', '.join(choices)}."
                    f"{nearest(str(value), choices)}"
                )
        for part, size in (("SUBSET", self.subset), ("OUTPUTS", self.outputs)):
            if size is not None and size < 1:
                raise ConfigurationError(f"{part} must be at least 1, not {size}.")
        if self.rows:
            self._check_rows()
        if self.anchored and not (self.rows and self.kind.keeps_rows):
            raise ConfigurationError(
                "'anchored' conditions single rows on others, so the structure must be 'ntk' and"
                f" OUTPUTS 'rows', as in 'ntk-{self.subset or 400}-rows-anchored'."
            )
        if self.iid and (self.outputs is None or self.curvature != "ggn"):
            raise ConfigurationError(
                "'iid' draws outputs for each datum, so OUTPUTS must be an integer and none of "
                "'ef' and 'mc' may stand beside it."
            )
        if self.curvature == "ef" and self.outputs != 1:
            raise ConfigurationError(
                "'ef' has one row for each datum, so OUTPUTS must be 1, "
                f"as in '{self.structure}-{self.subset or 'N'}-1-ef'."
            )
        if self.curvature == "mc" and self.outputs is None:
            raise ConfigurationError(
                "'mc' samples labels, so OUTPUTS must be an integer, their number for each datum, "
                f"as in '{self.structure}-{self.subset or 'N'}-1-mc'."
            )

    def _check_rows(self) -> None:
        if self.outputs is not None:
            raise ConfigurationError("OUTPUTS is either 'rows' or a number of outputs, not both.")
        if self.subset is None:
            raise ConfigurationError(
                "with OUTPUTS 'rows', SUBSET counts rows and must be an integer, "
                f"as in '{self.structure}-400-rows'; all rows are '{self.structure}-N-C'."
            )
        clashing = [name for name in ("iid", "grouped") if getattr(self, name)]
        if self.curvature != "ggn":
            clashing.append(self.curvature)
        if clashing:
            raise ConfigurationError(
                f"'rows' draws single rows freely and cannot be combined with '{clashing[0]}'."
            )

    @classmethod
    def parse(cls, name: str, custom: Curvature[Any] | None = None) -> "Estimator":
        """Read a name.

        Args:
            name: For instance ``"ntk-400-1"``. Modifiers may come in any order.
            custom: A curvature of the user's own, with whose name the estimator's begins.

        Returns:
            The spec, whose `name` is the canonical spelling.

        Raises:
            ConfigurationError: If the name is not in the grammar or combines what does not go
                together; the text gives the reason, the nearest valid spelling and the grammar.
        """
        if "auto" in name.split("-"):
            raise ConfigurationError(
                f"Estimator name {name!r}: evigrad no longer chooses estimators or subsets by"
                f" itself. Name one: '{DEFAULT_ESTIMATOR}', the default, or give a number in the"
                f" place of 'auto'. {GRAMMAR}"
            )
        try:
            return cls._read(name, custom)
        except ConfigurationError as error:
            reason = str(error)
        repaired = _repair(name, custom)
        try:
            hint = f" Did you mean '{cls._read(repaired, custom)}'?"
        except ConfigurationError:
            hint = ""
        raise ConfigurationError(f"Estimator name {name!r}: {reason}{hint} {GRAMMAR}")

    @classmethod
    def _read(cls, name: str, custom: Curvature[Any] | None) -> "Estimator":
        structures = _structures(custom)
        # A curvature's own name may have hyphens.
        structure = next((s for s in structures if name.startswith(f"{s}-")), name.split("-")[0])
        if structure not in structures:
            raise ConfigurationError(
                f"unknown structure {structure!r}; known are {', '.join(structures)}."
            )
        parts = name.removeprefix(structure).split("-")[1:]
        if not parts:
            raise ConfigurationError(
                "SUBSET and OUTPUTS are missing, "
                f"as in '{structure}-100-1', '{structure}-100-C' or '{structure}-N-C'."
            )
        subset = _read_size("SUBSET", parts[0], "N")
        if len(parts) == 1 or parts[1] in MODIFIERS:
            raise ConfigurationError(
                f"OUTPUTS is missing, as in '{structure}-{parts[0]}-1' (one output drawn for each "
                f"block) or '{structure}-{parts[0]}-C' (all outputs)."
            )
        rows = parts[1] == "rows"
        outputs = None if rows else _read_size("OUTPUTS", parts[1], "C")
        return cls(structure, subset, outputs, rows, **_read_modifiers(parts[2:]), custom=custom)

    @cached_property
    def name(self) -> str:
        """The canonical name: modifiers in the order of `MODIFIERS`."""
        subset = "N" if self.subset is None else str(self.subset)
        outputs = "rows" if self.rows else "C" if self.outputs is None else str(self.outputs)
        chosen = {self.curvature, *(m for m in ("iid", "grouped", "anchored") if getattr(self, m))}
        modifiers = [modifier for modifier in MODIFIERS if modifier in chosen]
        return "-".join([self.structure, subset, outputs, *modifiers])

    def __str__(self) -> str:
        """The canonical name."""
        return self.name

    @cached_property
    def kind(self) -> Curvature[Any] | type[Curvature[Any]]:
        """The curvature, or its class."""
        return STRUCTURES[self.structure] if self.custom is None else self.custom

    @property
    def is_full_batch(self) -> bool:
        """Whether nothing is drawn: all data and all outputs are one block."""
        return self.subset is None and self.outputs is None

    @property
    def family(self) -> tuple[str, str]:
        """Return the name without the size, shared by estimators of other sizes, and the size.

        For example ``("ntk-m-1", "50")``; for a full-batch estimator twice its name.
        """
        if self.is_full_batch:
            return self.name, self.name
        _, subset, *parts = self.name.split("-")
        return "-".join([self.structure, "k" if self.rows else "m", *parts]), subset

    @property
    def default_root(self) -> str:
        """The root of the likelihood's Hessian when the user names none.

        Single rows want the curvature of a datum in as few of them as possible ("eigen"); blocks
        that share an output would have an exploding variance with it and take the paper's
        "subblock".
        """
        return "eigen" if self.rows else "subblock"

    def is_bound(self, root: str, couples_outputs: bool) -> bool:
        """Whether the estimate is, in expectation, a lower bound on the log evidence.

        It is where its log-determinant is at least the exact one, and not where it may be smaller,
        as that of a part of the weights.

        Args:
            root: How the likelihood's Hessian is split over outputs, one of `ROOTS`.
            couples_outputs: Whether that Hessian has off-diagonal entries (softmax).

        Returns:
            True where theory guarantees the bound (Theorems 1 and 2). For an integer OUTPUTS it is
            assumed that there are more outputs than that.

        Raises:
            ConfigurationError: If the root is unknown.
        """
        if root not in ROOTS:
            raise ConfigurationError(
                f"Unknown root {root!r}; known are {', '.join(ROOTS)}.{nearest(root, ROOTS)}"
            )
        if self.kind.log_det_is == "approximate" or self.curvature == "mc":
            return False
        if self.curvature == "ef":
            return True
        splits_outputs = self.rows or self.outputs is not None
        # Sub-blocks of a Hessian that couples the outputs are not rows of one matrix root.
        return not (splits_outputs and couples_outputs and root == "subblock")


def _structures(custom: Curvature[Any] | None) -> list[str]:
    """The structures that a name may begin with: the user's own alone, if there is one."""
    return list(STRUCTURES) if custom is None else [custom.name]


def _read_size(part: str, text: str, everything: str) -> int | None:
    if text == everything:
        return None
    if not _INTEGER.fullmatch(text):
        also = ", 'rows'" if part == "OUTPUTS" else ""
        raise ConfigurationError(
            f"{part} must be a positive integer{also} or '{everything}', not {text!r}."
        )
    return int(text)


def _read_modifiers(modifiers: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for modifier in modifiers:
        if modifier == "hessian":
            raise ConfigurationError(
                "the exact Hessian is no modifier any more: docs/extending has it as a curvature of"
                " your own, Evidence(..., curvature=ExactHessian(...))."
            )
        if modifier not in MODIFIERS:
            raise ConfigurationError(
                f"unknown modifier {modifier!r}; known are {', '.join(MODIFIERS)}."
            )
        if modifiers.count(modifier) > 1:
            raise ConfigurationError(f"the modifier '{modifier}' is given twice.")
        if modifier not in CURVATURES:
            settings[modifier] = True
        elif "curvature" in settings:
            raise ConfigurationError(
                f"'{settings['curvature']}' and '{modifier}' exclude each other: "
                "there is one kind of curvature."
            )
        else:
            settings["curvature"] = modifier
    return settings


def _repair(name: str, custom: Curvature[Any] | None) -> str:
    """Return the name that was probably meant; not necessarily a valid one."""
    words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
    if not words:
        return ""
    close = get_close_matches(words[0].lower(), _structures(custom), n=1, cutoff=0.5)
    repaired = close or words[:1]
    for word in words[1:]:
        if word.isdecimal():
            word = word.lstrip("0") or "0"
        elif word.upper() in ("N", "C"):
            word = word.upper()
        else:
            candidates = [*MODIFIERS, "rows"]
            word = next(iter(get_close_matches(word.lower(), candidates, n=1, cutoff=0.5)), word)
        if len(repaired) == 2 and word in MODIFIERS:
            repaired.append({"anchored": "rows"}.get(word, "1"))
        if word not in repaired or word not in MODIFIERS:
            repaired.append(word)
    return "-".join(repaired)
