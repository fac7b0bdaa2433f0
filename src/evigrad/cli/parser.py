"""Options of the command line and of YAML files.

Names, types, defaults and descriptions come from signatures and docstrings. Fields of the
dataclasses of ``fit`` have the name of their group in front, such as ``--schedule.every 5``.
"""

import inspect
import re
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import reduce
from itertools import zip_longest
from operator import or_
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, get_loader, set_loader
from yaml import YAMLError

from evigrad.blocks.anchors import Anchoring
from evigrad.configuration import check_plain
from evigrad.errors import ConfigurationError, nearest
from evigrad.training.settings import GROUPS

# Arguments of ``fit`` whose fields are options.
PARTS: dict[str, type] = {**GROUPS, "anchoring": Anchoring}
# Shorter names of fields, and the names in configurations of older versions: every is the key
# schedule.every.
KEYS = {field.name: f"{name}.{field.name}" for name in GROUPS for field in fields(GROUPS[name])}
KEYS |= {f"anchor_{field.name}": f"anchoring.{field.name}" for field in fields(Anchoring)}
# Options of older versions with the values that have no effect.
_GONE = {"split_blocks": False, "augerino_weight": 0.01}
_KEPT = dict.fromkeys(
    ("prior_rate", "prior_rate_min", "momentum", "scalar_lr_factor", "bracket_rows"),
    "It keeps its former default.",
)
_REMOVED = _KEPT | {
    "split_blocks": "To save memory, use --memory.rows-dtype bfloat16 or a smaller estimator.",
    "augerino_weight": "Augerino is in experiments/augerino.py in a clone of the repository.",
    "step_budget": "Omit estimator: auto, too, or name an estimator.",
}
# Value of --estimator for training without one, which is None in Python.
NO_ESTIMATOR = "none"

# Also those of jsonargparse for values that it does not expect, such as a number as "config".
_UNEXPECTED = (ArgumentError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_FOLDERS = ("data_dir", "run_dir", "resume", "results")


def _load(text: str) -> Any:
    """Parse a YAML file of options, or the value of an option. Values must be plain."""
    check_plain(text)
    try:
        loaded = get_loader("yaml")(text)
    except (ValueError, RecursionError) as error:  # such as a number with ten thousand digits
        raise ConfigurationError(" ".join(str(error).split())) from error
    return by_key(loaded) if isinstance(loaded, dict) else loaded


_YAML = "evigrad"
set_loader(_YAML, _load, (ConfigurationError, YAMLError))


def by_key(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by keys, such as schedule.every, from nested options or shorter names."""
    result: dict[str, Any] = {}
    for name, value in options.items():
        pairs = {KEYS.get(name, name): value}
        if name in PARTS:
            if not isinstance(value, Mapping | None):
                first = fields(PARTS[name])[0].name
                raise ConfigurationError(
                    f"{name} must contain options such as {first}, got {value!r}"
                )
            pairs = {f"{name}.{field}": inner for field, inner in (value or {}).items()}
        elif name in _GONE and value == _GONE[name]:
            continue
        if twice := result.keys() & pairs.keys():
            raise ConfigurationError(f"'{min(twice)}' is set twice: remove one of the lines")
        result |= pairs
    return result


def by_name(options: Namespace) -> dict[str, Any]:
    """Return options by their shorter names, such as every."""
    names = {key: name for name, key in KEYS.items()}
    return {names.get(key, key): value for key, value in options.items()}


class _Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **keywords: Any) -> None:
        super().__init__(prog, max_help_position=30, width=96)


class Parser(ArgumentParser):
    """Parse options from the command line and from YAML files. Mistakes raise an EvigradError."""

    def __init__(self, command: str, description: str) -> None:
        """Add the general options of a ``command``, such as ``evigrad train``."""
        super().__init__(
            prog=command,
            usage=f"{command} [options]",
            description=description,
            parser_mode=_YAML,
            formatter_class=_Formatter,
            print_config="--print-config",
            add_help=False,
            exit_on_error=False,
            allow_abbrev=False,
        )
        self.types: dict[str, Any] = {}
        names = ("-h", "--help", "--help-all")
        self.add_argument(*names, action="help", help="Show all options and exit.")
        words = "YAML file of options. Options after it replace its values."
        self.add_argument("--config", action="config", metavar="FILE", help=words)

    def add_group(
        self,
        title: str,
        source: Callable[..., Any],
        names: Sequence[str] = (),
        part: str | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> None:
        """Add options: a function's parameters, or a dataclass's fields.

        ``names`` selects some of them. ``part`` is their group in ``PARTS``. ``types`` replaces
        annotations.
        """
        groups = {group.title: group for group in self._action_groups}
        group = groups.get(title) or self.add_argument_group(title)
        document = docstring_parser.parse(source.__doc__ or "", docstring_parser.Style.GOOGLE)
        texts = {param.arg_name: param.description or "" for param in document.params}
        hints = get_type_hints(source.__init__ if isinstance(source, type) else source)
        parameters = inspect.signature(source).parameters
        for name in names or parameters:
            key = name if part is None else f"{part}.{name}"
            self.types[key] = (types or {}).get(name) or plain_type(hints[name])
            group.add_argument(
                flag(key),
                type=self.types[key],
                default=parameters[name].default,
                help=_described(texts[name]),
                metavar="DIR" if name in _FOLDERS else None,
            )

    def read(self, arguments: Sequence[str]) -> Namespace:
        """Return the options of a command line. Mistakes raise ConfigurationError."""
        try:
            options = self.parse_args([*self._spelled(arguments)])
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"The configuration must be a text file in UTF-8, got a file that cannot be decoded"
                f" ({error}). Save the file as UTF-8."
            ) from error
        except _UNEXPECTED as error:
            raise self.mistake(error) from error
        for key, default in self.get_defaults().items():
            if options[key] is None and default is not None:
                raise ConfigurationError(
                    f"{flag(key)} must not be null. Remove it to use the default, {default}."
                )
        return options

    def mistake(self, error: Exception) -> ConfigurationError:
        """Return jsonargparse's error in plain words."""
        hint = f" See {self.prog} --help-all."
        return ConfigurationError(self._explained(" ".join(str(error).split())) + hint)

    def named(self, error: ConfigurationError) -> ConfigurationError:
        """Return an error whose first word, if it is the name of an option, is its flag."""
        name, space, text = str(error).partition(" ")
        key = KEYS.get(name, name)
        return ConfigurationError(flag(key) + space + text) if key in self.types else error

    def _spelled(self, arguments: Sequence[str]) -> Iterator[str]:
        """Yield arguments with full names, hyphens in names, and values for --NAME and --no-NAME.

        For example, --lr_min=0 becomes --optimization.lr-min=0, and --no-progress becomes
        --progress=false.
        """
        for argument, following in zip_longest(arguments, arguments[1:], fillvalue="-"):
            name, equals, value = argument.removeprefix("--").partition("=")
            if not argument.startswith("--"):
                yield argument
                continue
            key, switch = _key(name), _key(re.sub("^no[-_]", "", name))
            lacks_value = not equals and (key != switch or following.startswith("-"))
            if lacks_value and self.types.get(switch) in (bool, bool | None):
                key, equals, value = switch, "=", str(key == switch).lower()
            yield f"{flag(key)}{equals}{value}"

    def _explained(self, text: str) -> str:
        if match := re.search(r"unrecognized arguments: ([^\s=]+)", text):
            if not match[1].startswith("-"):
                return f"Options start with --, got '{match[1]}'."
            short = [name for name, key in KEYS.items() if key in self.types]
            names = map(flag, [*self.types, *short])
            return f"There is no option {match[1]}.{nearest(match[1], names)}"
        if match := re.search(r"[Oo]ption '([^']+)'", text):
            if match[1] in _REMOVED:
                return f"The option '{match[1]}' was removed. Delete it. {_REMOVED[match[1]]}"
            hint = nearest(match[1], [*self.types, *KEYS])
            return f"The configuration has an unknown key '{match[1]}'.{hint}"
        if match := re.search(r"argument (--[^\s:,]+)[^:]*: expected .*argument", text):
            return f"{match[1]} needs a value."
        if match := re.search(r'Parser key "([^"]+)": ?(.*)', text):
            key, text = match.groups()
            value = re.search(r"(?:Got value|Given value): (.*)$", text)
            if key not in self.types or value is None:
                return f"{flag(key)}: {text.rstrip('.')}."
            words = list(_words(self.types[key]))
            hint = nearest(value[1].strip(), words)
            one_of = " or ".join([", ".join(words[:-1]), words[-1]][len(words) < 2 :])
            return f"{flag(key)} must be {one_of}, got '{value[1].strip()}'.{hint}"
        return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def chosen(function: Callable[..., Any], options: Namespace) -> dict[str, Any]:
    """Return keyword arguments for a function: the options named like its parameters."""
    return {name: options[name] for name in inspect.signature(function).parameters}


def plain_type(annotation: Any) -> Any:
    """Return a type without classes, which a file of options could import and call."""
    if get_origin(annotation) in (Union, UnionType):
        members = get_args(annotation)
        return reduce(or_, [kind for kind in members if kind is NoneType or any(_words(kind))])
    return annotation


def _words(kind: Any) -> Iterator[str]:
    """Yield what a value of a type must be, as words. Classes have no words."""
    if get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _words(member)
    elif get_origin(kind) is Sequence:
        yield "a list"
    elif kind in _WORDS:
        yield _WORDS[kind]


def _key(name: str) -> str:
    name = name.replace("-", "_")
    return KEYS.get(name, name)


def flag(key: str) -> str:
    """Return the option with a key, such as --schedule.batch-size."""
    return f"--{key.replace('_', '-')}"


def _described(text: str) -> str:
    """Return a description from a docstring, with flags instead of names in Python."""
    text = re.sub(r"\s*\([Ii]n Python[^)]*\)", "", " ".join(text.split()))
    text = text.replace("``", "").replace("%", "%%").replace("None", NO_ESTIMATOR)
    # Such as log_det_weight, Laplace.log_det_weight or Optimization(prior_update="adam").
    in_python = r"""(?:[A-Z]\w+[.(])?\b([a-z]+(?:_[a-z]+)+)\b(?:=["']?([^"')]*)["']?\))?"""

    def in_flags(match: re.Match[str]) -> str:
        name, value = match.groups()
        return f"{flag(KEYS[name])} {value or ''}".rstrip(" .") if name in KEYS else match[0]

    return re.sub(in_python, in_flags, text)
