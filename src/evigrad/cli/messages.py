"""Messages of the command line besides its results, on standard error."""

import os

from rich.console import Console
from rich.text import Text

# Width of tables in a file or a pipe, which have no width of their own.
_FILE_WIDTH = 100

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def is_first_process() -> bool:
    """Whether this is the first of the processes that a launcher started, or the only one."""
    return int(os.environ.get("WORLD_SIZE", "1")) < 2 or os.environ.get("RANK", "0") == "0"


def show(kind: str, text: str) -> None:
    """Print an ``error``, ``warning`` or ``note`` in one line, coloured in a terminal.

    Of several processes the first one alone has notes and warnings.
    """
    if kind != "error" and not is_first_process():
        return
    line = " ".join(text.split())
    label = "" if kind == "note" else f"{kind}: "
    # In a Text, brackets are not markup. The terminal wraps long lines.
    message = Text(f"{label}{line}", style=_STYLES[kind])
    Console(stderr=True, soft_wrap=True, highlight=False).print(message)


def results_console() -> Console:
    """The console of tables of results: standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)
