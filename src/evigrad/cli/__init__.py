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
_PROGRAM = "evigrad"
_DESCRIPTION = (
    "Learn a network's hyperparameters (weight decay for each layer, noise, ...) by gradient\n"
    "ascent on the marginal likelihood, from the training data only and in one training run."
)

# What each subcommand does. Its module has its name, make_parser() and run(parser, options). It is
# imported on demand, because it needs PyTorch, whose import would delay the overview.
COMMANDS = {
    "train": "Train a network, and learn its weight decay for each layer and its invariances",
    "doctor": "Show how an estimator treats each parameter of a network, and what it costs",
}

# Commands of earlier versions.
_MOVED = {
    "reproduce": "python -m experiments fig4, or python -m experiments --list for all names",
    "pareto": "python -m experiments FILE.yaml, with a file of the kind 'pareto'",
    "bounds": "python -m experiments FILE.yaml, with a file of the kind 'bounds'",
}


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


def module_of(name: str) -> ModuleType:
    """Import and return the module of a subcommand, whose name is a key of ``COMMANDS``."""
    return import_module(f"evigrad.cli.{name}")


def run(arguments: Sequence[str]) -> int:
    """Show the overview or the version, or run a subcommand, and return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        print(f"{_PROGRAM} {evigrad.__version__}")
        return 0
    name = arguments[0]
    if name in _MOVED:
        raise ConfigurationError(
            f"The command '{name}' is no longer part of the installed package. In a checkout of"
            f" evigrad's source, run {_MOVED[name]}."
        )
    if name not in COMMANDS:
        raise ConfigurationError(
            f"command must be one of {', '.join(COMMANDS)}, got '{name}'."
            f"{nearest(name, COMMANDS)} See {_PROGRAM} --help."
        )
    return run_command(module_of(name), f"{_PROGRAM} {name}", arguments[1:])


def run_command(command: ModuleType, program: str, arguments: Sequence[str]) -> int:
    """Run a subcommand, and return the exit code. Messages call the subcommand ``program``."""
    # Imported here, because the overview does not need a parser of options.
    from evigrad.cli.parser import CommandLineError, check_needs, check_null, explain, with_hyphens
    from evigrad.cli.resume import resumed_configuration

    arguments = with_hyphens(arguments)
    parser = command.make_parser()
    try:
        options = parser.parse_args(list(arguments))
        if file := resumed_configuration(options.get("resume")):
            # Parsed again, as if the run's own options came first.
            options = parser.parse_args(["--config", str(file), *arguments])
        check_null(parser, options)
        if not file:
            check_needs(parser, options)
    except CommandLineError as error:
        mistake = explain(str(error), parser, program)
        raise mistake from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"The configuration must be a text file in UTF-8, got a file that cannot be decoded"
            f" ({error}). Save the file as UTF-8."
        ) from error
    except SystemExit as finished:  # --help and --print-config
        return int(finished.code or 0)
    return command.run(parser, options)


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:<{width}}{summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: {_PROGRAM} COMMAND [options]\n\n{_DESCRIPTION}\n\ncommands:\n{commands}\n\n"
        f"'{_PROGRAM} COMMAND --help' lists the options of a command.\n\n"
        f"example:\n  {_PROGRAM} train --data mnist5k --subset 1000 --model mininet --compare-map"
    )
