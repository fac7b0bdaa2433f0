"""What the command line says besides its results, on standard error."""

from rich.console import Console
from rich.text import Text

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
