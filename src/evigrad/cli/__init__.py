"""The command ``evigrad``: its overview and its subcommands."""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import evigrad
from evigrad.cli.help import COMMANDS, OVERVIEW
from evigrad.errors import (
    ConfigurationError,
    EvigradError,
    EvigradWarning,
    RankError,
    is_out_of_memory,
    nearest,
)

_NEEDED = ("docstring_parser", "jsonargparse", "rich", "yaml")
_INTERRUPTED = 130
# A separate number, not one in a name such as ntk-10-C or layer.3.weight.
_NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w-])")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``evigrad`` for ``argv``, which defaults to the arguments of the process.

    Returns:
        The exit code, which is 0 for success, 2 for a mistake that the user can fix, 130 after
        Ctrl-C, and 143 after SIGTERM.
    """
    return reported(lambda: run(sys.argv[1:] if argv is None else argv))


def reported(work: Callable[[], int]) -> int:
    """Call ``work``, show its warnings and errors in plain words, and return its exit code."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        words = "The command line needs additional packages. Run: pip install 'evigrad[all]'"
        print(f"{words} ({', '.join(missing)} missing).", file=sys.stderr)
        return 2
    from evigrad.cli.messages import is_first_process, show

    said: set[str] = set()

    def show_warning(message: Warning | str, category: type[Warning], *details: Any) -> None:
        if not issubclass(category, EvigradWarning):
            return plain(message, category, *details)
        # Several runs in one command warn only once about a model.
        sentence = _NUMBER.sub("…", str(message))
        if sentence not in said:
            said.add(sentence)
            show("warning", str(message))

    plain = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always", EvigradWarning)
        warnings.showwarning = show_warning
        try:
            return work()
        except EvigradError as error:
            # All processes have the same mistakes, and one process reports them.
            if is_first_process() or isinstance(error, RankError):
                show("error", str(error))
            return 2
        except OSError as error:  # such as a full disk, for a file that does not belong to a run
            show("error", f"{error.filename or 'A file'}: {error.strerror or error}.")
            return 2
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            show("error", f"Out of memory: {error} Use less data or a smaller network.")
            return 2
        except KeyboardInterrupt as error:
            show("error", f"Interrupted. {error}")
            return getattr(error, "exit_code", _INTERRUPTED)


def run(arguments: Sequence[str]) -> int:
    """Show a help or the version, or run a subcommand, and return the exit code."""
    name, *words = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(OVERVIEW)
    elif name == "--version":
        print(f"evigrad {evigrad.__version__}")
    elif name not in COMMANDS:
        raise ConfigurationError(
            f"command must be one of {', '.join(COMMANDS)}, got '{name}'."
            f"{nearest(name, COMMANDS)} See evigrad --help."
        )
    elif {"-h", "--help"} & {*words}:
        print(COMMANDS[name])
    else:
        return run_command(import_module(f"evigrad.cli.{name}"), words)
    return 0


def run_command(command: ModuleType, arguments: Sequence[str]) -> int:
    """Run a subcommand, a module with ``make_parser`` and ``run``, and return the exit code."""
    # Imported here, because the help does not need a parser of options.
    from evigrad.cli.resume import resumed_configuration

    parser = command.make_parser()
    try:
        options = parser.read(arguments)
        if file := resumed_configuration(options.get("resume")):
            # Parsed again, as if the run's own options came first.
            options = parser.read(["--config", str(file), *arguments])
    except SystemExit as finished:  # --help-all and --print-config
        return int(finished.code or 0)
    try:
        return command.run(parser, options)
    except ConfigurationError as error:
        raise parser.named(error) from error
