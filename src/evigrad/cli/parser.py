"""A parser for options and YAML files, which explains mistakes in them.

Options come from the signatures and docstrings of functions and dataclasses.
"""

import inspect
import re
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import docstring_parser
from jsonargparse import ActionYesNo, ArgumentParser, Namespace, get_loader, set_loader
from yaml import YAMLError

from evigrad.configuration import check_plain
from evigrad.core.names import DEFAULT_ESTIMATOR, STRUCTURES
from evigrad.errors import ConfigurationError, nearest
from evigrad.training import learns_likelihood

_HELP_WIDTH = 96
_HELP_COLUMN = 30
# Options of earlier versions, which configurations of old runs still have, and what to do.
_KEPT = "It keeps its former default. Remove it."
_GONE = {
    **dict.fromkeys(
        (
            *("prior-rate", "prior-rate-min", "momentum", "scalar-lr-factor", "bracket-rows"),
            *("anchor-refresh", "anchor-likelihood", "anchor-share", "anchor-choice"),
        ),
        _KEPT,
    ),
    "step-budget": "It belonged to the estimator 'auto', which no longer exists. Remove it."
    f" If the estimator is 'auto', choose another name, such as the default {DEFAULT_ESTIMATOR}.",
    "augerino-weight": "It belonged to Augerino, a baseline from another paper, which is in"
    " experiments/augerino.py in evigrad's source. Remove it.",
    "split-blocks": "Each process evaluates its own blocks. Remove it. If the rows of a block do"
    " not fit one device, use a smaller estimator, --rows-dtype bfloat16 or --rows-device cpu.",
}
# Harmless at their default, because older runs wrote every option.
_GONE_DEFAULTS = {"split_blocks": False, "augerino_weight": 0.01}
# Value of --estimator for training without one, which is None in Python.
NO_ESTIMATOR = "none"


class CommandLineError(Exception):
    """A mistake in the arguments.

    It is not a ``ValueError``, because the parser would catch a ``ValueError``.
    """


class Formatter(RawDescriptionHelpFormatter):
    """Format help with the default after each description, and without internal types."""

    def __init__(self, prog: str, **keywords: Any) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=_HELP_WIDTH)

    def _format_action_invocation(self, action: Action) -> str:
        if isinstance(action, ActionYesNo):  # not four values after each of two spellings
            return ", ".join(action.option_strings)
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.default in (None, "==SUPPRESS=="):
            return text
        if isinstance(action.default, bool):
            return f"{text} (default: {'yes' if action.default else 'no'})"
        if isinstance(action.default, list):
            return f"{text} (default: {' '.join(map(str, action.default))})"
        return f"{text} (default: %(default)s)"


def _load(text: str) -> Any:
    """Parse a YAML file of options, or the value of an option. Values must be plain."""
    check_plain(text)
    try:
        loaded = get_loader("yaml")(text)
    except (ValueError, RecursionError) as error:  # such as a number with ten thousand digits
        raise ConfigurationError(" ".join(str(error).split())) from error
    if isinstance(loaded, dict):
        for name, default in _GONE_DEFAULTS.items():
            if name in loaded and loaded[name] == default:
                del loaded[name]
    return loaded


_YAML = "evigrad"
set_loader(_YAML, _load, (ConfigurationError, YAMLError))


class Parser(ArgumentParser):
    """Parse options from the command line or a YAML file. Mistakes raise CommandLineError."""

    def __init__(self, **keywords: Any) -> None:
        """Add ``--help`` and ``--config``. ``keywords`` are passed to ``ArgumentParser``."""
        super().__init__(
            parser_mode=_YAML,
            formatter_class=Formatter,
            print_config="--print-config",
            add_help=False,
            **keywords,
        )
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")
        self.add_argument("--config", action="config", metavar="FILE", help="YAML file of options.")
        for action in self._actions:
            if "--print-config" in action.option_strings:
                action.help, action.metavar = "Print all options as a YAML file and exit.", ""

    def parse_args(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the parsed arguments. Convert unexpected errors to CommandLineError."""
        try:
            return super().parse_args(*arguments, **keywords)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            if isinstance(error, UnicodeError):
                raise
            # Such as a file whose "config" is a number: a value that the parser did not expect.
            raise CommandLineError(f"Cannot parse the command-line options: {error}.") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a CommandLineError for a mistake, instead of printing usage and exiting."""
        if isinstance(ex, CommandLineError):
            raise ex
        raise CommandLineError(message) from ex

    def add_group(
        self,
        title: str,
        source: Callable[..., Any],
        names: Sequence[str] = (),
        types: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        words: Mapping[str, str] | None = None,
    ) -> None:
        """Add options to a group of the help: a function's parameters, or a dataclass's fields.

        The signature and the Google docstring of ``source`` define types, defaults and
        descriptions. ``types``, ``defaults`` and ``words`` override them by name.
        """
        groups = {group.title: group for group in self._action_groups}
        group = groups.get(title) or self.add_argument_group(title)
        descriptions = argument_descriptions(source)
        parameters = inspect.signature(source).parameters
        annotations = get_type_hints(source.__init__ if isinstance(source, type) else source)
        for name in names or parameters:
            default = (defaults or {}).get(name, parameters[name].default)
            flag = f"--{name.replace('_', '-')}"
            kind = (types or {}).get(name) or typed(annotations[name])
            text = (words or {}).get(name, descriptions[name])
            text = re.sub(r"\s*\([Ii]n Python[^)]*\)", "", text)
            text = text.replace("``", "").replace("%", "%%")
            if kind in (bool, bool | None):
                action = ActionYesNo(no_prefix="no-")
                group.add_argument(flag, action=action, nargs="?", default=default, help=text)
            else:
                metavar = _metavar(name, kind)
                group.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)


def chosen(function: Callable[..., Any], options: Namespace) -> dict[str, Any]:
    """Return keyword arguments for a function: the options named like its parameters."""
    return {name: options[name] for name in inspect.signature(function).parameters}


def check_null(parser: ArgumentParser, options: Namespace) -> None:
    """Raise ConfigurationError if an option is null, unless its default is null."""
    for name, default in parser.get_defaults().items():
        if options[name] is None and default is not None:
            raise ConfigurationError(
                f"'{name}' must not be null. Remove it to use the default, {default}."
            )


def typed(annotation: Any) -> Any:
    """Return a type without the members of a union that a command line cannot express."""
    if get_origin(annotation) in (Union, UnionType):
        plain = (int, float, str, bool, NoneType)
        members = get_args(annotation)
        return reduce(or_, (m for m in members if m in plain or get_origin(m) is Literal))
    return annotation


def argument_descriptions(function: Callable[..., Any]) -> dict[str, str]:
    """Return a one-line description of each argument, from a Google docstring."""
    docstring = docstring_parser.parse(
        function.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE
    )
    return {
        param.arg_name: " ".join((param.description or "").split()) for param in docstring.params
    }


def with_hyphens(arguments: Sequence[str]) -> list[str]:
    """Return arguments with hyphens in option names: ``--run_dir`` becomes ``--run-dir``."""
    spelled = []
    for argument in arguments:
        if argument.startswith("--"):
            option, equals, value = argument.partition("=")
            argument = f"--{option[2:].replace('_', '-')}{equals}{value}"
        spelled.append(argument)
    return spelled


def explain(message: str, parser: ArgumentParser | None, command: str) -> ConfigurationError:
    """Return an error with the parser's message in plain words, for users of ``command``."""
    options = [
        option
        for action in ([] if parser is None else parser._actions)
        for option in action.option_strings
        if option.startswith("--") and not option.startswith("--no-")
    ]
    return ConfigurationError(_explained(" ".join(message.split()), options, command))


def _explained(text: str, options: list[str], command: str) -> str:
    help_hint = f" See {command} --help."
    if match := re.search(r"unrecognized arguments: (\S+)", text):
        typed = match[1]
        if not typed.startswith("-"):
            return f"Options start with --, got '{typed}'.{help_hint}"
        typed = typed.partition("=")[0]
        if (name := typed.removeprefix("--")) in _GONE:
            return f"The option {typed} no longer exists. {_GONE[name]}"
        return f"There is no option {typed}.{nearest(typed, options)}{help_hint}"
    if match := re.search(r"(?:does not accept option|Option) '([^']+)'", text):
        key = match[1]
        if (gone := key.replace("_", "-")) in _GONE:
            others = ", ".join(name.replace("-", "_") for name in _GONE if name != gone)
            return (
                f"The configuration has the key '{key}', which is no longer an option."
                f" {_GONE[gone]} (The same holds for {others}.)"
            )
        plain = [option.removeprefix("--").replace("-", "_") for option in options]
        hint = nearest(key.replace("-", "_"), plain)
        return f"The configuration has an unknown key '{key}'.{hint}{help_hint}"
    if match := re.search(r'Parser key "([^"]+)": ?(.*)', text):
        key = match[1].rpartition(".")[2].replace("_", "-")
        return f"--{key}: {_expected(match[2])}{help_hint}"
    if match := re.search(r"argument (--[\w-]+)[^:]*: invalid _boolean_type value: (.*)", text):
        return f"{match[1]} must be yes or no, got {match[2]}.{help_hint}"
    if match := re.search(r"argument (--[\w-]+)[^:]*: expected .*argument", text):
        return f"{match[1]} needs a value.{help_hint}"
    return f"{text[:1].upper()}{text[1:].rstrip('.')}.{help_hint}"


def _expected(text: str) -> str:
    """Return the parser's message about a value of a wrong type, without Python's types."""
    kinds = {"int": "a whole number", "float": "a number", "bool": "yes or no", "str": "text"}
    value = re.search(r"(?:Got value|Given value): (.*)$", text)
    refusal = f", got '{value[1].strip()}'" if value else ""
    if choices := re.search(r"Literal\[([^\]]*)\]", text):
        names = re.findall(r"'([^']*)'", choices[1])
        hint = nearest(value[1].strip(), names) if value else ""
        if "<class 'int'>" in text:
            return f"must be a whole number or {', '.join(names)}{refusal}.{hint}"
        return f"must be one of {', '.join(names)}{refusal}.{hint}"
    named = [words for kind, words in kinds.items() if f"<class '{kind}'>" in text]
    if named:
        return f"must be {named[0]}{refusal}."
    return text if text.endswith(".") else f"{text}."


def _metavar(name: str, kind: Any) -> str:
    text = str(kind)
    if name.endswith("_dir") or name == "results":
        return "DIR"
    if name == "memory_budget":
        return "BYTES"
    if "list[float]" in text:
        return "X|[X,X]"
    if "Literal" in text:
        return "|".join(["N"] * bool(re.search(r"\bint\b", text)) + re.findall(r"'([^']*)'", text))
    return "N" if "int" in text else "X" if "float" in text else "NAME"


# ------------------------------------------------------------ options that need others


def check_needs(parser: ArgumentParser, options: Namespace) -> None:
    """Raise ConfigurationError if an option, typed or in a file, has no effect."""
    defaults = parser.get_defaults()
    for names, needed, is_met in NEEDS:
        for name in names:
            if name not in options or options[name] == defaults[name] or is_met(options):
                continue
            flag = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                f"{flag} would have no effect: it only works {needed}. Add what is missing, or"
                f" remove {flag} (in a configuration file, {name})."
            )


def _uses(part: str, options: Namespace) -> bool:
    """Return whether a word is in the name of a training run's estimator."""
    names = options.get("estimators") or [options.estimator]
    return any(part in name.split("-") for name in names)


def _evidence(options: Namespace) -> bool:
    """Return whether a training run takes steps on an estimate of the evidence."""
    return options.get("estimator") != NO_ESTIMATOR


def _ranges(options: Namespace) -> bool:
    return bool(options.invariance and options.learn_invariance)


def _adam(options: Namespace) -> bool:
    """Return whether Adam has something to learn: the prior, or a noise, as for tabular data."""
    by_name = options.likelihood is None and re.search("[/.]", options.data)
    learns = options.likelihood is not None and learns_likelihood(options.likelihood)
    return options.prior_update == "adam" or learns or bool(by_name)


_Need = tuple[tuple[str, ...], str, Callable[[Namespace], bool]]
# Options, what they work with, and whether it is there. The first failure is reported.
NEEDS: tuple[_Need, ...] = (
    (("initial_range", "learn_invariance"), "with --invariance", lambda o: bool(o.invariance)),
    (
        ("samples", "average"),
        "with --invariance or --flip",
        lambda o: bool(o.invariance or o.flip),
    ),
    (
        (
            *("burn_in", "every", "steps", "prior_blocks", "hyper_every", "hyper_steps"),
            *(
                "max_epochs",
                "prior_update",
                "start_decay",
                "prior_lr",
                "prior_lr_min",
                "root",
                "gram_dtype",
                "autocast",
            ),
            *("hyper_lr", "hyper_lr_min"),
        ),
        "with an --estimator of the evidence, such as ntk-100-1",
        _evidence,
    ),
    (
        ("hyper_every", "hyper_steps", "hyper_lr", "hyper_lr_min"),
        "with an --invariance that is learned",
        _ranges,
    ),
    (
        ("prior_lr", "prior_lr_min"),
        "with --prior-update adam, or a noise to learn (--likelihood gaussian)",
        _adam,
    ),
    (
        ("start_decay",),
        "with --prior-update fixed_point",
        lambda options: options.prior_update != "adam",
    ),
    (("noise_on_loss",), "with --estimator none", lambda options: not _evidence(options)),
    *(
        (facts.settings, f"with {name} estimators", partial(_uses, name))
        for name, facts in STRUCTURES.items()
    ),
)
