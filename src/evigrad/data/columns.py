"""Rules for the columns of tables, from files or in the scikit-learn estimators.

Texts are categories, and missing texts are a separate category. Numbers and yes/no values are
numeric, and none of them may be missing. Constant columns are omitted with a warning.
"""

import datetime
import decimal
import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evigrad.errors import InputError

# A column with more different texts holds names or remarks, not categories.
MOST_CATEGORIES = 100
# Kinds of values in words; other kinds are the name of a type.
NUMERIC = ("yes/no", "whole numbers", "numbers")
TEXT = "text"
DATES = "dates"
# Categories that the user declared, of any type.
DECLARED = "categories"
# Maximum number of names in a warning.
_MOST_NAMES = 10
_IMPUTER = "sklearn.impute.SimpleImputer"


@dataclass(frozen=True)
class Column:
    """A column of a table: its name, its kind and its values."""

    name: Hashable  # its number if the table has no names
    kind: str  # of ``NUMERIC``, or ``TEXT``, ``DATES``, ``DECLARED``, or the name of another type
    # Numbers in float64, NaN if missing; otherwise objects, None if missing.
    values: np.ndarray
    declared: Sequence[Hashable] | None = None  # all categories, if they are declared

    @property
    def label(self) -> str:
        """Return the column's name for messages, such as ``column 'age'``."""
        return f"column '{self.name}'" if isinstance(self.name, str) else f"column {self.name}"

    @property
    def missing(self) -> np.ndarray:
        """Return a mask (n,) of the missing values."""
        if self.values.dtype == np.float64:
            return np.isnan(self.values)
        return np.array([value is None for value in self.values], dtype=np.bool_)

    @property
    def categories(self) -> list[Hashable]:
        """Return the declared or the sorted categories, followed by None if a value is missing."""
        values = set(self.values.tolist())
        present = sorted(values - {None}, key=str) if self.declared is None else self.declared
        return [*present, None] if None in values else list(present)

    @property
    def is_constant(self) -> bool:
        """Return whether all rows have the same value."""
        return bool((self.values == self.values[0]).all())


def problem_of(column: Column, leave_out: str, *, must_be_numbers: bool = False) -> str | None:
    """Return a message that says what is wrong with a column, or None if nothing is wrong.

    ``leave_out`` is part of the message. It says how to use the table without the column.
    """
    if column.kind in NUMERIC:
        if problem := problem_of_missing(column, leave_out):
            return problem
        if np.isfinite(column.values).all():
            return None
        return f"{column.label} holds infinite values (inf): replace them, or {leave_out}"
    if column.kind == TEXT and (problem := problem_of_marks(column, leave_out)):
        return problem
    if must_be_numbers or column.kind not in (TEXT, DECLARED):
        what = {TEXT: "texts", DATES: DATES}.get(column.kind, f"values of type {column.kind}")
        return f"{column.label} holds {what} instead of numbers: convert them, or {leave_out}"
    count = len(column.categories)
    if count <= MOST_CATEGORIES:
        return None
    what = "texts" if column.kind == TEXT else "values"
    return (
        f"{column.label} must hold at most {MOST_CATEGORIES} categories, got {count:,} different"
        f" {what}: convert them to numbers, or {leave_out}"
    )


def problem_of_missing(column: Column, leave_out: str) -> str | None:
    """Return a message that says how many values are missing, or None if there are none."""
    if not (count := int(column.missing.sum())):
        return None
    mark = " (NaN)" if column.values.dtype == np.float64 else ""
    return (
        f"{column.label} lacks {count:,} of {len(column.values):,} values{mark}: fill them in (in"
        f" Python with {_IMPUTER}), remove their rows, or {leave_out}"
    )


def problem_of_marks(column: Column, leave_out: str) -> str | None:
    """Return a message if most texts of a column are numbers, but not all are valid numbers.

    Otherwise, return None. Numbers with a decimal comma are not valid.
    """
    texts = [text for text in column.values.tolist() if text is not None]
    distinct, counts = np.unique(np.array(texts, dtype=np.str_), return_counts=True)
    plain = np.array([_is_number(text) for text in distinct], dtype=np.bool_)
    commas = [_is_number(text.replace(",", ".")) for text in distinct]
    with_comma = np.array(commas, dtype=np.bool_) & ~plain
    others = distinct[~plain & ~with_comma]
    if 2 * counts[plain | with_comma].sum() < len(texts):
        return None
    if with_comma.any():
        return (
            f"{column.label} holds numbers with a decimal comma, such as"
            f" '{distinct[with_comma][0]}': write them with a decimal point, and thousands without"
            " a separator"
        )
    if len(others):
        marks = ", ".join(f"'{text}'" for text in others[:3])
        return (
            f"{column.label} holds numbers, but also {marks}: fill in these values (in Python with"
            f" {_IMPUTER}), remove their rows, or {leave_out} (for categories, put a letter before"
            " the numbers)"
        )
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def refuse(where: str, problems: Iterable[str | None]) -> None:
    """Raise an InputError that lists the problems of a table, if any. ``where`` names the table."""
    texts = [problem for problem in problems if problem]
    sentences = [f"{text[:1].upper()}{text[1:]}." for text in texts]
    if len(texts) == 1:
        raise InputError(f"{where}: {texts[0]}" if where else sentences[0])
    if texts:
        numbered = " ".join(f"({n}) {sentence}" for n, sentence in enumerate(sentences, 1))
        raise InputError(f"{where or 'The table'} has {len(texts)} problems. {numbered}")


def words_of_constants(names: Sequence[Hashable]) -> str:
    """Return the warning about constant columns, without the name of the table."""
    shown = ", ".join(map(str, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"omitted from the features, because they are the same in all rows: {shown}{more}."


# ------------------------------------------------------------ cells that are Python's objects


def is_missing(value: Any) -> bool:
    """Return whether a cell is None, NaN, or pandas' NaT or NA."""
    pandas = sys.modules.get("pandas")
    if value is None or (pandas is not None and (value is pandas.NA or value is pandas.NaT)):
        return True
    return isinstance(value, float | np.floating | decimal.Decimal) and value != value


def kind_of_cell(value: Any) -> str:
    """Return the kind of a cell, in the format of ``Column.kind``."""
    if isinstance(value, str):
        return TEXT
    if isinstance(value, bool | np.bool_):
        return "yes/no"
    if isinstance(value, int | float | np.integer | np.floating | decimal.Decimal):
        return "numbers"
    if isinstance(value, datetime.date | np.datetime64):
        return DATES
    return type(value).__name__


def kinds_of_cells(cells: Iterable[Any]) -> dict[str, Any]:
    """Return the first cell of each kind. Missing cells are ignored."""
    kinds: dict[str, Any] = {}
    for value in cells:
        if not is_missing(value):
            kinds.setdefault(kind_of_cell(value), value)
    return kinds


def problem_of_mixture(label: str, kinds: dict[str, Any]) -> str | None:
    """Return a message if a column mixes several ``kinds`` of cells, or else None."""
    if len(kinds) < 2:
        return None
    (one, first), (other, second) = list(kinds.items())[:2]
    return (
        f"{label} mixes {one} ({_shown(first)}) and {other} ({_shown(second)}): convert all cells"
        " to one type, for example with .astype(str)"
    )


def _shown(value: Any) -> str:
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 30 else f"{text[:27]}..."
