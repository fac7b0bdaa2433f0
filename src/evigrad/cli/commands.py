"""The table of subcommands, and the way from arguments to the one that was asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from evigrad.allocator import kept_memory
from evigrad.cli import bounds, doctor, pareto, report, reproduce, train
from evigrad.cli.needs import check_needs
from evigrad.cli.parser import CommandLineError, Parser, check_null, explain, with_hyphens
from evigrad.cli.resume import resumed_configuration
from evigrad.errors import ConfigurationError, nearest

_PROGRAM = "evigrad"
_DESCRIPTION = (
    "Learn a network's hyperparameters (weight decay for each layer, noise, ...) by gradient on\n"
    "the marginal likelihood: on the training data alone, in one training run."
)


@dataclass(frozen=True)
class Command:
    """A subcommand: its words in the overview, its parser, and what it does."""

    summary: str
    make_parser: Callable[[], Parser]
    run: Callable[..., int]


def _command(module: ModuleType) -> Command:
    return Command(module.SUMMARY, module.make_parser, module.run)


# A new subcommand is one module with SUMMARY, make_parser() and run(parser, options).
COMMANDS = {
    "train": _command(train),
    "pareto": _command(pareto),
    "bounds": _command(bounds),
    "reproduce": _command(reproduce),
    "report": _command(report),
    "doctor": _command(doctor),
}


def run(arguments: Sequence[str]) -> int:
    """Parse arguments and run the subcommand.

    Args:
        arguments: The arguments after the program's name.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: If the arguments are wrong, with the nearest right ones.
    """
    arguments = with_hyphens(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        print(f"{_PROGRAM} {_version()}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        raise ConfigurationError(
            f"There is no command '{name}'.{nearest(name, COMMANDS)} See {_PROGRAM} --help."
        )
    command = COMMANDS[name]
    parser = command.make_parser()
    try:
        options = parser.parse_args(list(arguments[1:]))
        if file := resumed_configuration(options.get("resume")):
            # Again, as if the run's own options had been given first.
            options = parser.parse_args(["--config", str(file), *arguments[1:]])
        check_null(parser, options)
        if not file:
            check_needs(parser, options, arguments[1:])
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
    commands = "\n".join(f"  {name:<{width}}{c.summary}" for name, c in COMMANDS.items())
    return (
        f"usage: {_PROGRAM} COMMAND [options]\n\n{_DESCRIPTION}\n\ncommands:\n{commands}\n\n"
        f"'{_PROGRAM} COMMAND --help' lists the options of a command.\n\n"
        f"example:\n  {_PROGRAM} train --data digits --model digitsnet --estimator ntk-100-1"
        " --compare-map"
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(_PROGRAM)
    except PackageNotFoundError:  # run from a source tree
        return "(not installed)"
