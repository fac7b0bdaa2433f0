"""What the command line says besides its results, on standard error."""

from rich.console import Console
from rich.text import Text

# Width of tables in a file or a pipe, where no terminal tells its own.
_FILE_WIDTH = 100

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def show(kind: str, text: str) -> None:
    """Print one message as one line, coloured where a terminal reads it.

    Args:
        kind: ``error``, ``warning`` or ``note``.
        text: The message. Line breaks in it become spaces.
    """
    line = " ".join(text.split())
    label = "" if kind == "note" else f"{kind}: "
    # A Text is not searched for markup: brackets in a message are brackets. The terminal wraps.
    message = Text(f"{label}{line}", style=_STYLES[kind])
    Console(stderr=True, soft_wrap=True, highlight=False).print(message)


def results_console() -> Console:
    """Where tables of results go: standard output.

    Returns:
        The console.
    """
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)
