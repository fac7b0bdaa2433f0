"""Estimator names: ``STRUCTURE-SUBSET-OUTPUTS[-MODIFIER...]``, such as ``kfac-150-1``.

A name specifies the *structure* of the curvature and how examples and outputs are *partitioned*
into blocks (`evigrad.core.partition`). This module parses names and checks combinations.
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

# The structures that a name can specify.
STRUCTURES: dict[str, type[Curvature[Any]]] = {
    kind.name: kind for kind in (Ntk, Full, BlockDiagonal, Kfac, Diagonal)
}
MODIFIERS = ("iid", "grouped", "anchored", "scaled", "ef", "mc")
# The curvature of the outputs: exact, from the targets, or from sampled labels.
CURVATURES = ("ggn", "ef", "mc")


def _grammar(structures: list[str], first: str, second: str) -> str:
    return (
        "A name is STRUCTURE-SUBSET-OUTPUTS[-MODIFIER...]: "
        f"STRUCTURE is {' | '.join(structures)}. SUBSET is an integer or N. OUTPUTS is an integer,"
        f" C or rows. MODIFIER is {' | '.join(MODIFIERS)}. Examples: '{first}-150-1' and"
        f" '{second}-N-C'."
    )


GRAMMAR = _grammar(list(STRUCTURES), "kfac", "ntk")

# docs/choosing.md describes when another estimator is better.
DEFAULT_ESTIMATOR = "ntk-400-rows-anchored"
# The default of ``fit``: an estimator that depends on the sizes of data and model.
AUTO = "auto"

# ASCII without leading zeros, so that every estimator has one spelling. 18 digits fit into int64.
_INTEGER = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class Estimator:
    """A parsed estimator name.

    Attributes:
        structure: One of `STRUCTURES`.
        subset: Number of examples in a block, or number of rows if `rows` is True. ``None`` means
            all N examples.
        outputs: Number of outputs in a block. ``None`` means all C. For ``ef``, the number is 1.
            For ``mc``, it is the number of labels sampled for each example.
        rows: Whether a block consists of single rows, each for a random pair (example, output).
        iid: Whether each example of a block draws its own outputs.
        grouped: Whether blocks are filled class by class.
        anchored: Whether blocks are conditioned on anchors, which are rows that all blocks share.
        scaled: Whether the curvature of a block, instead of its log-determinant, is multiplied by
            the number of blocks.
        curvature: ``ggn`` (generalized Gauss-Newton), ``ef`` (empirical Fisher) or ``mc`` (sampled
            Fisher).
        custom: A custom curvature, whose name is `structure`.

    Raises:
        ConfigurationError: If the parts cannot be combined.
    """

    structure: str
    subset: int | None = None
    outputs: int | None = None
    rows: bool = False
    iid: bool = False
    grouped: bool = False
    anchored: bool = False
    scaled: bool = False
    curvature: str = "ggn"
    custom: Curvature[Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raise an error for an invalid combination."""
        for kind, value, choices in (
            ("structure", self.structure, _structures(self.custom)),
            ("curvature", self.curvature, CURVATURES),
        ):
            if value not in choices:
                raise ConfigurationError(
                    f"unknown {kind} {value!r}. Use one of {', '.join(choices)}."
                    f"{nearest(str(value), choices)}"
                )
        for part, size in (("SUBSET", self.subset), ("OUTPUTS", self.outputs)):
            if size is not None and size < 1:
                raise ConfigurationError(f"{part} must be at least 1, got {size}.")
        if self.rows:
            self._check_rows()
        if self.anchored and not (self.rows and self.structure_type.keeps_rows):
            raise ConfigurationError(
                "'anchored' conditions single rows on other rows, so the structure must be 'ntk'"
                f" and OUTPUTS must be 'rows', as in 'ntk-{self.subset or 400}-rows-anchored'."
            )
        if self.scaled and (self.anchored or self.is_full_batch):
            raise ConfigurationError(
                "'scaled' scales the curvature of a random block, so it needs an integer SUBSET or"
                " OUTPUTS, and it excludes 'anchored'. Omit 'scaled'."
            )
        if self.iid and (self.outputs is None or self.curvature != "ggn"):
            raise ConfigurationError(
                "'iid' draws separate outputs for each example. Therefore, OUTPUTS must be an"
                " integer, and 'ef' and 'mc' are not allowed. Otherwise, omit 'iid'."
            )
        if self.curvature == "ef" and self.outputs != 1:
            raise ConfigurationError(
                "'ef' has one row for each example, so OUTPUTS must be 1, "
                f"as in '{self.structure}-{self.subset or 'N'}-1-ef'."
            )
        if self.curvature == "mc" and self.outputs is None:
            raise ConfigurationError(
                "'mc' samples labels, so OUTPUTS must be an integer, the number of labels per "
                f"example, as in '{self.structure}-{self.subset or 'N'}-1-mc'."
            )

    def _check_rows(self) -> None:
        if self.outputs is not None:
            raise ConfigurationError(
                "OUTPUTS must be either 'rows' or a number of outputs, not both. Set only one of"
                " them."
            )
        if self.subset is None:
            raise ConfigurationError(
                "SUBSET is a number of rows if OUTPUTS is 'rows', so it must be an integer, as in "
                f"'{self.structure}-400-rows'. For all rows, use '{self.structure}-N-C'."
            )
        clashing = [name for name in ("iid", "grouped") if getattr(self, name)]
        if self.curvature != "ggn":
            clashing.append(self.curvature)
        if clashing:
            raise ConfigurationError(
                f"'rows' draws single rows and cannot be combined with '{clashing[0]}'."
                " Omit one of them."
            )

    @classmethod
    def parse(cls, name: str, custom: Curvature[Any] | None = None) -> "Estimator":
        """Return the estimator with this name.

        Args:
            name: A name such as ``"ntk-400-1"``. Modifiers may come in any order.
            custom: Custom curvature, if any. Its name is the first part of ``name``.

        Raises:
            ConfigurationError: If the name does not match the grammar, or combines parts that
                are mutually exclusive. The message contains the reason and, if there is one, a
                similar valid name.
        """
        if custom is not None:
            _check_custom(name, custom)
        if "auto" in name.split("-"):
            raise ConfigurationError(
                f"Estimator name {name!r}: only fit and what builds on it accept 'auto', which"
                f" chooses by the size of the data. Use '{DEFAULT_ESTIMATOR}', or a number instead"
                f" of 'auto'. {GRAMMAR}"
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
        words = GRAMMAR if custom is None else _grammar([custom.name], custom.name, custom.name)
        raise ConfigurationError(f"Estimator name {name!r}: {reason}{hint} {words}")

    @classmethod
    def _read(cls, name: str, custom: Curvature[Any] | None) -> "Estimator":
        structures = _structures(custom)
        # The name of a custom curvature may contain hyphens.
        structure = next((s for s in structures if name.startswith(f"{s}-")), name.split("-")[0])
        if structure not in structures:
            raise ConfigurationError(
                f"unknown structure {structure!r}. Use one of {', '.join(structures)}. A custom"
                " curvature needs Evidence(..., curvature=...) and a Learner, because fit and tune"
                " do not take one. See evigrad/network/README.md."
            )
        parts = name.removeprefix(structure).split("-")[1:]
        if not parts:
            raise ConfigurationError(
                "SUBSET and OUTPUTS are missing. Use, for example, "
                f"'{structure}-100-1', '{structure}-100-C' or '{structure}-N-C'."
            )
        subset = _read_size("SUBSET", parts[0], "N")
        if len(parts) == 1 or parts[1] in MODIFIERS:
            raise ConfigurationError(
                f"OUTPUTS is missing. Use, for example, '{structure}-{parts[0]}-1' (one random "
                f"output per block) or '{structure}-{parts[0]}-C' (all outputs)."
            )
        rows = parts[1] == "rows"
        outputs = None if rows else _read_size("OUTPUTS", parts[1], "C")
        return cls(structure, subset, outputs, rows, **_read_modifiers(parts[2:]), custom=custom)

    @cached_property
    def name(self) -> str:
        """The canonical name, with modifiers in the order of `MODIFIERS`."""
        subset = "N" if self.subset is None else str(self.subset)
        outputs = "rows" if self.rows else "C" if self.outputs is None else str(self.outputs)
        modifiers = [m for m in MODIFIERS if m == self.curvature or getattr(self, m, False)]
        return "-".join([self.structure, subset, outputs, *modifiers])

    def __str__(self) -> str:
        """Return the canonical name."""
        return self.name

    @cached_property
    def structure_type(self) -> Curvature[Any] | type[Curvature[Any]]:
        """The custom curvature if there is one, or else the class of the structure."""
        return STRUCTURES[self.structure] if self.custom is None else self.custom

    @property
    def is_full_batch(self) -> bool:
        """Whether nothing is drawn, because all examples and outputs form one block."""
        return self.subset is None and self.outputs is None

    def exceeds(self, num_data: int) -> bool:
        """Return whether the name sets blocks of more examples than the data have."""
        return self.subset is not None and not self.rows and self.subset > num_data

    @property
    def family(self) -> tuple[str, str]:
        """The name with a placeholder for the size, and the size, such as ``("ntk-m-1", "50")``.

        For a full-batch estimator, both are the whole name.
        """
        if self.is_full_batch:
            return self.name, self.name
        _, subset, *parts = self.name.split("-")
        return "-".join([self.structure, "k" if self.rows else "m", *parts]), subset

    @property
    def default_root(self) -> str:
        """The default root of the likelihood's Hessian.

        For single rows, it is "eigen", which concentrates the curvature of an example in a few
        rows. Otherwise, it is "subblock", because "eigen" would give estimates from some of the
        outputs a huge variance.
        """
        return "eigen" if self.rows else "subblock"

    def is_bound(self, root: str, couples_outputs: bool) -> bool:
        """Return whether the estimate is, in expectation, a lower bound on the log evidence.

        For a bound, the expected log-determinant is at least the exact log-determinant (Theorems 1
        and 2). If OUTPUTS is an integer, it is assumed to be less than the number of outputs.

        Args:
            root: How the likelihood's Hessian is split over the outputs. One of `ROOTS`.
            couples_outputs: Whether the Hessian has off-diagonal entries, as for a softmax.

        Raises:
            ConfigurationError: If the root is unknown.
        """
        if root not in ROOTS:
            raise ConfigurationError(
                f"root must be one of {', '.join(ROOTS)}, got {root!r}.{nearest(root, ROOTS)}"
            )
        if self.structure_type.log_det_is == "approximate" or self.scaled or self.curvature == "mc":
            return False
        if self.curvature == "ef":
            return True
        splits_outputs = self.rows or self.outputs is not None
        # If the Hessian couples outputs, its sub-blocks are not rows of one matrix root.
        return not (splits_outputs and couples_outputs and root == "subblock")


def _check_custom(name: str, custom: Curvature[Any]) -> None:
    """Raise an error if a custom curvature has no name, or the estimator has another name."""
    kind, structure = type(custom).__name__, getattr(custom, "name", None)
    if not isinstance(structure, str) or not structure:
        raise ConfigurationError(
            f"{kind} needs a name for the names of estimators, got {structure!r}. Set it in the"
            " class, such as name = 'traces'."
        )
    if structure in STRUCTURES:
        raise ConfigurationError(
            f"The name of a {kind} must differ from the names of the built-in structures, got"
            f" {structure!r}. Rename the curvature. A built-in structure needs no curvature=..."
        )
    if not name.startswith(f"{structure}-"):
        raise ConfigurationError(
            f"The curvature is a {kind}, so the estimator's name must begin with '{structure}-',"
            f" such as '{structure}-100-C', got {name!r}."
        )


def _structures(custom: Curvature[Any] | None) -> list[str]:
    return list(STRUCTURES) if custom is None else [custom.name]


def _read_size(part: str, text: str, everything: str) -> int | None:
    if text == everything:
        return None
    if not _INTEGER.fullmatch(text):
        also = ", 'rows'" if part == "OUTPUTS" else ""
        raise ConfigurationError(
            f"{part} must be a positive integer{also} or '{everything}', got {text!r}."
        )
    return int(text)


def _read_modifiers(modifiers: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for modifier in modifiers:
        if modifier == "hessian":
            raise ConfigurationError(
                "'hessian' is not a modifier. For the exact Hessian, use a custom curvature:"
                " Evidence(..., curvature=ExactHessian(...)). See evigrad/network/README.md."
            )
        if modifier not in MODIFIERS:
            raise ConfigurationError(
                f"unknown modifier {modifier!r}. Use one of {', '.join(MODIFIERS)}."
            )
        if modifiers.count(modifier) > 1:
            raise ConfigurationError(
                f"the modifier '{modifier}' occurs more than once. Write it once."
            )
        if modifier not in CURVATURES:
            settings[modifier] = True
        elif "curvature" in settings:
            raise ConfigurationError(
                f"'{settings['curvature']}' and '{modifier}' are mutually exclusive. "
                "Choose one kind of curvature."
            )
        else:
            settings["curvature"] = modifier
    return settings


def _repair(name: str, custom: Curvature[Any] | None) -> str:
    """Return the name that the user probably meant, which may still be invalid."""
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
