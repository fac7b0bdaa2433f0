"""A table in three forms: Markdown, CSV and LaTeX."""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from evigrad.plots.style import with_minus
from experiments.cases import Mean

Cell = str | Mean | float | None
_LATEX = {"%": r"\%", "_": r"\_", "–": "--", "×": r"$\times$", "−": "$-$", "±": r"$\pm$"}
_LATEX |= {"~": r"$\sim$", "…": r"\ldots{}"}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Header.
        digits: Number of decimals. None for at least two significant digits, and no decimals for
            larger numbers.
        scale: Factor of the numbers, such as 100 for percent.
        best: ``high`` or ``low`` to print the best values in bold. Empty for none. Numbers without
            a standard error are not bold. If one of them is the best, nothing is bold.
    """

    name: str
    digits: int | None = 3
    scale: float = 1.0
    best: str = ""

    def shown(self, cell: Cell, between: str) -> str:
        """Return a cell as text, with some text between a mean and its error."""
        if isinstance(cell, str):
            return cell
        mean, error = (cell.mean, cell.error) if isinstance(cell, Mean) else (cell, math.nan)
        if mean is None or not math.isfinite(mean):
            return "–"
        digits = self.digits
        if digits is None:
            digits = max(0, 1 - math.floor(math.log10(abs(self.scale * mean)))) if mean else 0
        text = f"{self.scale * mean:.{digits}f}"
        if math.isfinite(error):
            text += f"{between}{self.scale * error:.{digits}f}"
        return text


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns.

    Attributes:
        columns: Columns. The first one holds words.
        rows: A cell for each column.
        group: Group of each row within which the best value is bold. Empty for one group.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    group: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table as Markdown, with a minus sign before negative numbers."""
        head, *body = (
            f"| {' | '.join(line)} |"
            for line in ([c.name for c in self.columns], *self._cells(" ± ", "**{}**"))
        )
        return with_minus("\n".join([head, "|" + "---|" * len(self.columns), *body]))

    def latex(self) -> str:
        """Return the table as LaTeX, for the package booktabs."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.columns))]
        aligned = "".join("r" if any(map(_is_number, column)) else "l" for column in columns)
        lines = [r"\begin{tabular}{" + aligned + "}", r"\toprule"]
        lines += [" & ".join(_escaped(c.name) for c in self.columns) + r" \\", r"\midrule"]
        groups = self._groups
        for number, cells in enumerate(self._cells(r" {\scriptsize$\pm$} ", r"\textbf{{{}}}")):
            if number and groups[number] != groups[number - 1]:
                lines.append(r"\midrule")
            lines.append(" & ".join(map(_escaped, cells)) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

    def csv(self) -> str:
        """Return the table as CSV with all digits, and separate columns for means and errors."""
        with_error = [any(isinstance(row[i], Mean) for row in self.rows) for i in self._places]
        lines = [[column.name for column in self.columns], *self.rows]
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        for number, line in enumerate(lines):
            cells: list[str] = []
            for cell, split in zip(line, with_error, strict=True):
                pair = (cell.mean, cell.error) if isinstance(cell, Mean) else (cell, None)
                if not number and split:
                    pair = (cell, f"{cell}, error")
                cells += [_digits(value) for value in pair[: 1 + split]]
            writer.writerow(cells)
        return text.getvalue()

    @property
    def _places(self) -> range:
        return range(len(self.columns))

    @property
    def _groups(self) -> Sequence[str]:
        return self.group or [""] * len(self.rows)

    def _cells(self, between: str, bold: str) -> list[list[str]]:
        best = {(row, place) for place in self._places for row in self._best(place)}
        texts = [
            [column.shown(cell, between) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]
        return [
            [bold.format(t) if (number, i) in best else t for i, t in enumerate(row)]
            for number, row in enumerate(texts)
        ]

    def _best(self, place: int) -> list[int]:
        """Return the rows whose standard errors overlap with the best row of their group."""
        if not self.columns[place].best:
            return []
        sign = 1.0 if self.columns[place].best == "high" else -1.0
        best_rows = []
        for name in dict.fromkeys(self._groups):
            means = {
                number: cell
                for number, (row, group) in enumerate(zip(self.rows, self._groups, strict=True))
                if group == name and isinstance(cell := row[place], Mean)
                if math.isfinite(cell.mean)
            }
            with_error = {n: cell for n, cell in means.items() if math.isfinite(cell.error)}
            if len(with_error) > 1:
                top = max(with_error.values(), key=lambda cell: sign * cell.mean)
                if any(sign * cell.mean > sign * top.mean for cell in means.values()):
                    continue  # a better cell has no error
                least = sign * top.mean - top.error
                best_rows += [n for n, c in with_error.items() if sign * c.mean + c.error >= least]
        return best_rows


def _is_number(cell: Cell) -> bool:
    return cell[:1].isdigit() if isinstance(cell, str) else cell is not None


def _digits(value: Cell) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.8g}" if isinstance(value, float | int) and math.isfinite(value) else ""


def _escaped(text: str) -> str:
    marked = "".join(_LATEX.get(letter, letter) for letter in text)
    marked = re.sub(r"(?<![\w$-])-(?=\d)", "$-$", marked)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", marked)
