"""``evigrad train --resume RUN``: find the run, and refuse options that contradict it."""

from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from evigrad.cli.parser import Parser
from evigrad.errors import ConfigurationError

CONFIGURATION = "config.yaml"
# The last file that a run writes.
RESULTS = "results.json"

# Options that change no result; and the folder of the data, as the data themselves are compared.
_FREE = {"config", "resume", "run_dir", "progress", "figures", "checkpoint_every", "data_dir"}


def resumed_configuration(resume: str | None = None) -> Path | None:
    """The options of the run to go on with.

    Args:
        resume: Folder of a run that was interrupted: go on with it from its last checkpoint, with
            its own options, to the same results as without the interruption.

    Returns:
        The file that holds them, or None for a run of its own.

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
        raise ConfigurationError(f"There is no run to resume in {folder}: no such folder.")
    if (folder / "config.json").is_file():
        raise ConfigurationError(
            f"The run in {folder} was started from Python: resume it there, with"
            f" fit(..., run_dir={str(folder)!r}, resume=True)."
        )
    raise ConfigurationError(
        f"There is no run to resume in {folder}: no {CONFIGURATION}. (A run that was stopped before"
        " it wrote that has done nothing yet: start it again with --run-dir.)"
    )


def resumed_folder(parser: Parser, options: Namespace, file: Path) -> Path:
    """The folder of the run to resume.

    Args:
        parser: The parser of the options.
        options: The options of ``file``, and those that were typed after it.
        file: The result of ``resumed_configuration``.

    Returns:
        The folder.

    Raises:
        ConfigurationError: If an option was typed that contradicts the run; the text names it.
    """
    saved = parser.parse_args(["--config", str(file)])
    differing = [
        f"--{name.replace('_', '-')} {_word(value)}, not {_word(options[name])}"
        for name, value in saved.as_dict().items()
        if name not in _FREE and options[name] != value
    ]
    named = (saved.run_dir, str(file.parent))
    if options.run_dir not in named and Path(options.run_dir).resolve() != file.parent.resolve():
        differing.append(f"its folder {file.parent}, not {options.run_dir}")
    if differing:
        raise ConfigurationError(
            f"The run in {file.parent} has {'; '.join(differing)}. Leave away what contradicts it,"
            f" or start a new run with --config {file} and other options after that."
        )
    return file.parent


def is_complete(folder: Path, figures: bool) -> bool:
    """Whether a run's folder has all that was asked for, maybe figures too."""
    drawn = not figures or (folder / "figures").is_dir()
    return drawn and (folder / RESULTS).is_file()


def _word(value: Any) -> str:
    if value is None:
        return "left at its default"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
