"""What Ctrl-C and a polite kill do to a command that trains."""

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
    """A command that was ended by a signal, with words for its user.

    Attributes:
        exit_code: That of a process that the signal ended.
    """

    def __init__(self, text: str, number: int) -> None:
        """Take up a signal.

        Args:
            text: What to say.
            number: Of the signal.
        """
        super().__init__(text)
        self.exit_code = 128 + number


class Interruption:
    """SIGINT and SIGTERM: at once in general, after the epoch where one is in training.

    Used as a context, inside of which it takes the signals.
    """

    def __init__(self) -> None:
        """Nothing is taken before the context is entered."""
        self.number: int | None = None
        self._patient = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        """Take the signals, which Python only lets the main thread do."""
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._take) for n in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def patient(self) -> Iterator[Callable[[], bool]]:
        """Where the first signal is only taken note of, as somebody asks for it.

        Yields:
            Whether there was a signal.

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
        # Not by print: the signal may have come in the middle of one.
        words = "\nStopping after this epoch; once more to stop at once.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())


@contextmanager
def interruptible(folder: Path) -> Iterator[Interruption]:
    """Take the signals for a run, and say how to go on with it.

    Args:
        folder: Of the run.

    Yields:
        What took the signals.

    Raises:
        Interrupted: Where something inside was.
    """
    with Interruption() as interruption:
        try:
            yield interruption
        except KeyboardInterrupt as error:
            words = f"{error} To go on: evigrad train --resume {shlex.quote(str(folder))}"
            raise Interrupted(words, interruption.number or signal.SIGINT) from error
