"""What Ctrl-C and SIGTERM do to a command that trains."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A command that a signal ended, with a text for its user and the process' ``exit_code``."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.exit_code = 128 + number


class Interruption:
    """SIGINT and SIGTERM end a command at once, and a training after its epoch.

    A context manager, which handles the signals while it is open.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._patient = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        """Handle the signals; Python lets only the main thread do so."""
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._take) for n in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def patient(self) -> Iterator[Callable[[], bool]]:
        """Only note the first signal, so that the caller can finish its epoch.

        Yields:
            A function that tells whether there was a signal.

        Raises:
            KeyboardInterrupt: On the way out, if there was one.
        """
        self._patient = True
        try:
            yield lambda: self.number is not None
        finally:
            self._patient = False
        if self.number is not None:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        first, self.number = self.number is None, number
        if not (first and self._patient):
            raise KeyboardInterrupt
        # Without print: the signal may have come in the middle of one.
        words = "\nStopping after this epoch; once more to stop at once.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())


@contextmanager
def interruptible(folder: Path) -> Iterator[Interruption]:
    """Handle the signals for a run, and say how to resume it.

    Args:
        folder: The run's folder.

    Yields:
        The handler.

    Raises:
        Interrupted: If a signal ended what was inside.
    """
    with Interruption() as interruption:
        try:
            yield interruption
        except KeyboardInterrupt as error:
            words = f"{error} To go on: evigrad train --resume {shlex.quote(str(folder))}"
            raise Interrupted(words, interruption.number or signal.SIGINT) from error
