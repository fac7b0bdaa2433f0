"""A table in three forms: Markdown, CSV and LaTeX."""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from evigrad.experiments.cases import Mean


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its head.
        digits: Behind the point.
        scale: What numbers are multiplied by, as 100 for percent.
        best: ``high`` or ``low`` to have the best values in bold; empty for none. Numbers without
            a standard error, as those of one seed, are not bold.
        suffix: Behind each number.
    """

    name: str
    digits: int = 3
    scale: float = 1.0
    best: str = ""
    suffix: str = ""


Cell = str | Mean | float | None


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns.

    Attributes:
        columns: The heads; the first column holds words.
        rows: A cell for each column.
        group: For each row what it is compared with for the best in bold; all rows if empty.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    group: Sequence[str] = field(default_factory=tuple)

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [
            "| " + " | ".join(column.name for column in self.columns) + " |",
            "|" + "---|" * len(self.columns),
        ]
        for cells in self._cells(" ± ", "**{}**"):
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def latex(self) -> str:
        """The table as LaTeX, for the package booktabs."""
        heads = " & ".join(_escaped(column.name) for column in self.columns)
        lines = [
            r"\begin{tabular}{" + "".join("l" if words else "r" for words in self._words) + "}",
            r"\toprule",
            heads + r" \\",
            r"\midrule",
        ]
        before = None
        for number, cells in enumerate(self._cells(r" {\scriptsize$\pm$} ", r"\textbf{{{}}}")):
            group = self.group[number] if self.group else None
            if before is not None and group != before:
                lines.append(r"\midrule")
            before = group
            lines.append(" & ".join(_escaped(cell) for cell in cells) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def csv(self) -> str:
        """The table as CSV with every digit, means and errors in columns of their own."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        heads: list[str] = []
        with_errors = [any(isinstance(row[i], Mean) for row in self.rows) for i in self._places]
        for column, has_error in zip(self.columns, with_errors, strict=True):
            heads += [column.name, f"{column.name}, error"] if has_error else [column.name]
        writer.writerow(heads)
        for row in self.rows:
            cells: list[str] = []
            for cell, has_error in zip(row, with_errors, strict=True):
                if isinstance(cell, Mean):
                    cells += [_digits(cell.mean), _digits(cell.error)]
                else:
                    text_of = cell if isinstance(cell, str) else _digits(cell)
                    cells += [text_of, ""] if has_error else [text_of]
            writer.writerow(cells)
        return text.getvalue()

    @property
    def _words(self) -> list[bool]:
        """Which columns hold words."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        return [not any(_is_number(cell) for cell in column) for column in columns]

    @property
    def _places(self) -> range:
        return range(len(self.columns))

    def _cells(self, between: str, bold: str) -> list[list[str]]:
        best = {(r, c) for c in self._places for r in self._best(c)}
        made = []
        for number, row in enumerate(self.rows):
            cells = []
            for place, (cell, column) in enumerate(zip(row, self.columns, strict=True)):
                text = _shown(cell, column, between)
                cells.append(bold.format(text) if (number, place) in best else text)
            made.append(cells)
        return made

    def _best(self, place: int) -> list[int]:
        """The rows whose standard errors overlap with those of the best one of their group."""
        direction = self.columns[place].best
        if not direction:
            return []
        sign = 1.0 if direction == "high" else -1.0
        found = []
        for name in dict.fromkeys(self._groups):
            values = {
                number: row[place]
                for number, row in enumerate(self.rows)
                if self._groups[number] == name
            }
            known = {
                number: cell
                for number, cell in values.items()
                if isinstance(cell, Mean) and math.isfinite(cell.mean + cell.error)
            }
            if len(known) < 2:
                continue
            top = max(known.values(), key=lambda cell: sign * cell.mean)
            least = sign * top.mean - top.error
            found += [n for n, cell in known.items() if sign * cell.mean + cell.error >= least]
        return found

    @property
    def _groups(self) -> Sequence[str]:
        return self.group or [""] * len(self.rows)


def _is_number(cell: Cell) -> bool:
    return not isinstance(cell, str | None) or (cell or "")[:1].isdigit()


def _shown(cell: Cell, column: Column, between: str) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    mean, error = (cell.mean, cell.error) if isinstance(cell, Mean) else (cell, math.nan)
    if not math.isfinite(mean):
        return "–"
    text = f"{column.scale * mean:.{column.digits}f}"
    if math.isfinite(error):
        text += f"{between}{column.scale * error:.{column.digits}f}"
    return text + column.suffix


def _digits(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.8g}"


def _escaped(text: str) -> str:
    marks = {
        "%": r"\%",
        "_": r"\_",
        "–": "--",
        "×": r"$\times$",
        "−": "$-$",
        "±": r"$\pm$",
        "~": r"$\sim$",
        "…": r"\ldots{}",
    }
    marked = "".join(marks.get(letter, letter) for letter in text)
    marked = re.sub(r"(?<![\w$-])-(?=\d)", "$-$", marked)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", marked)
