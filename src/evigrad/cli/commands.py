"""The table of subcommands, and the dispatch of arguments to one of them."""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import evigrad
from evigrad.errors import ConfigurationError, nearest

_PROGRAM = "evigrad"
_DESCRIPTION = (
    "Learn a network's hyperparameters (weight decay for each layer, noise, ...) by gradient on\n"
    "the marginal likelihood: on the training data alone, in one training run."
)

# What each subcommand does. Its module has its name, make_parser() and run(parser, options), and is
# imported on demand: it needs PyTorch, whose import would delay the overview.
COMMANDS = {
    "train": "Train a network, learn its weight decay for each layer and its invariances",
    "pareto": "Compare estimators: tightness over time (Figure 1 of the paper)",
    "bounds": "Draw bounds along a hyperparameter (Figures 3 to 6 of the paper)",
    "report": "Make a page of figures and tables of a run",
    "doctor": "Show what an estimator does with each parameter of a network, and its cost",
}

# Of a command of earlier versions.
_MOVED = (
    "The paper's figures and tables are no part of the installed package any more. In a checkout of"
    " evigrad's source: python -m experiments fig4, and python -m experiments --list for what"
    " there is."
)


def module_of(name: str) -> ModuleType:
    """The module of a subcommand, a key of ``COMMANDS``."""
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
    if name == "reproduce":
        raise ConfigurationError(_MOVED)
    if name not in COMMANDS:
        raise ConfigurationError(
            f"There is no command '{name}'.{nearest(name, COMMANDS)} See {_PROGRAM} --help."
        )
    return _run_command(name, arguments[1:])


def _run_command(name: str, arguments: Sequence[str]) -> int:
    # Not above: the overview does not wait for a parser of options either.
    from evigrad.cli.parser import CommandLineError, check_needs, check_null, explain, with_hyphens
    from evigrad.cli.resume import resumed_configuration
    from evigrad.engine.allocator import kept_memory

    arguments = with_hyphens(arguments)
    command = module_of(name)
    parser = command.make_parser()
    try:
        options = parser.parse_args(list(arguments))
        if file := resumed_configuration(options.get("resume")):
            # Parsed again, as if the run's own options had been given first.
            options = parser.parse_args(["--config", str(file), *arguments])
        check_null(parser, options)
        if not file:
            check_needs(parser, options, arguments)
    except CommandLineError as error:
        mistake = explain(str(error), parser, f"{_PROGRAM} {name}")
        raise mistake from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"The configuration is no text in UTF-8 ({error}). Save the file as UTF-8."
        ) from error
    except SystemExit as finished:  # --help and --print-config
        return int(finished.code or 0)
    with kept_memory():
        return command.run(parser, options)


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:<{width}}{summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: {_PROGRAM} COMMAND [options]\n\n{_DESCRIPTION}\n\ncommands:\n{commands}\n\n"
        f"'{_PROGRAM} COMMAND --help' lists the options of a command.\n\n"
        f"example:\n  {_PROGRAM} train --data mnist5k --subset 1000 --model mininet --compare-map"
    )
