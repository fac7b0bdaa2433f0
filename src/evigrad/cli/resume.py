"""Interrupting a run by Ctrl-C or SIGTERM, and resuming it (``evigrad train --resume RUN``)."""

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

from jsonargparse import Namespace

from evigrad.cli.parser import Parser, flag
from evigrad.errors import ConfigurationError

CONFIGURATION = "config.yaml"
# Options that change no result, and the folder of the data, because the data are compared.
_FREE = {"config", "resume", "run_dir", "progress", "figures", "checkpoint_every", "data_dir"}

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def resumed_configuration(resume: str | None = None) -> Path | None:
    """Return the file with the options of the run to resume, or None for a new run.

    Args:
        resume: Folder of an interrupted run. The run resumes from its last checkpoint with its
            saved options. The results are the same as without the interruption.

    Raises:
        ConfigurationError: If the folder holds no run of ``evigrad train``.
    """
    if resume is None:
        return None
    folder = Path(resume)
    file = folder / CONFIGURATION
    if file.is_file():
        return file
    if not folder.is_dir():
        raise ConfigurationError(
            f"There is no run to resume in {folder}: the folder does not exist. Use the"
            " folder of a run."
        )
    if (folder / "config.json").is_file():
        raise ConfigurationError(
            f"The run in {folder} was started from Python. Resume it from Python, with"
            f" fit(..., run_dir={str(folder)!r}, resume=True)."
        )
    raise ConfigurationError(
        f"There is no run to resume in {folder}: the folder has no {CONFIGURATION}. If a run was"
        " stopped before it wrote this file, start the run again with --run-dir."
    )


def resumed_folder(parser: Parser, options: Namespace, file: Path) -> Path:
    """Check that the given options agree with the run's ``file``, and return the run's folder."""
    saved = parser.read(["--config", str(file)])
    differing = [
        f"{flag(key)} {'left at its default' if value is None else value}, not {options[key]}"
        for key, value in saved.items()
        if key.rpartition(".")[2] not in _FREE and options[key] != value
    ]
    named = (saved.run_dir, str(file.parent))
    if options.run_dir not in named and Path(options.run_dir).resolve() != file.parent.resolve():
        differing.append(f"its folder {file.parent}, not {options.run_dir}")
    if differing:
        raise ConfigurationError(
            f"The run in {file.parent} has {'; '.join(differing)}. To resume it, remove the options"
            f" that differ. To start a new run, use --config {file}, and put the options that"
            " differ after it."
        )
    return file.parent


class Interrupted(KeyboardInterrupt):
    """A signal that ended a command, with a message for the user and the ``exit_code``."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.exit_code = 128 + number


class Interruption:
    """Handle signals. They end a command immediately, but training only at the end of an epoch."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._patient = False

    @contextmanager
    def patient(self) -> Iterator[Callable[[], bool]]:
        """Delay the first signal to the end. Yield a function that tells whether a signal came."""
        self._patient = True
        try:
            yield lambda: self.number is not None
        finally:
            self._patient = False
        if self.number is not None:
            raise KeyboardInterrupt

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        first, self.number = self.number is None, number
        if not (first and self._patient):
            raise KeyboardInterrupt
        # Without print, because the signal may have come in the middle of one.
        words = "\nStopping after this epoch. Press Ctrl-C again to stop now.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())


@contextmanager
def interruptible(folder: Path) -> Iterator[Interruption]:
    """Handle signals during a run. The ``Interrupted`` error tells how to resume the run."""
    interruption, before = Interruption(), dict[int, Any]()
    if threading.current_thread() is threading.main_thread():  # others must not handle signals
        before = {number: signal.signal(number, interruption.take) for number in _SIGNALS}
    try:
        yield interruption
    except KeyboardInterrupt as error:
        words = f"{error} To resume: evigrad train --resume {shlex.quote(str(folder))}"
        raise Interrupted(words, interruption.number or signal.SIGINT) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
