"""Command-line messages on standard error, and tables of results."""

import os
from collections.abc import Collection, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Width of tables in a file or a pipe, which have no width themselves.
_FILE_WIDTH = 100

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def is_first_process() -> bool:
    """Return whether this is the first of the processes that a launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1")) < 2 or os.environ.get("RANK", "0") == "0"


def show(kind: str, text: str) -> None:
    """Print an ``error``, ``warning`` or ``note``, in color and wrapped at words in a terminal.

    Only the first of several processes prints notes and warnings.
    """
    if kind != "error" and not is_first_process():
        return
    line = " ".join(text.split())
    label = "" if kind == "note" else f"{kind}: "
    message = Text(f"{label}{line}", style=_STYLES[kind])  # in which brackets are not markup
    console = Console(stderr=True, highlight=False)
    console.print(message, soft_wrap=not console.is_terminal)


def print_table(
    title: str, caption: str, rows: Sequence[Mapping[str, str]], left: Collection[str]
) -> None:
    """Print a table. Rows map columns to cells. Columns not in ``left`` are right-aligned."""
    table = Table(box=SIMPLE_HEAD, title=title, caption=caption, caption_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    results_console().print(table)


def results_console() -> Console:
    """Return the console for tables of results, which writes to standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)
