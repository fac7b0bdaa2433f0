"""The configuration of a training: that of ``evigrad train``, resolved, without places."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from evigrad.cli.setup import SETUP_TYPES, Setup, set_up
from evigrad.cli.train import FIT_TYPES, make_parser
from evigrad.errors import ConfigurationError, nearest
from evigrad.training import Settings, fit

# Where things are, how they are shown, and on what they run: no result depends on these.
_FREE = ("data_dir", "device", "threads", "progress", "checkpoint_every")
_TYPES = {n: kind for n, kind in (SETUP_TYPES | FIT_TYPES).items() if n not in _FREE}
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "yes or no"}


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a training with their values, typed and checked.

    Args:
        options: Some of those of ``evigrad train``, in Python's spelling.

    Returns:
        Each option that a result may depend on.

    Raises:
        ConfigurationError: If there is no such option, or a value is of a wrong type.
    """
    found = dict(_defaults())
    for name, value in options.items():
        plain = name.replace("-", "_")
        if plain in _FREE:
            continue
        if plain not in _TYPES:
            raise ConfigurationError(f"A training has no option '{name}'.{nearest(plain, _TYPES)}")
        found[plain] = _typed(plain, value)
    return found


@cache
def _defaults() -> Mapping[str, Any]:
    parameters = inspect.signature(fit).parameters | inspect.signature(set_up).parameters
    # On the command line the likelihood is that of the data, unless another one is named.
    return {name: parameters[name].default for name in _TYPES} | {"likelihood": None}


def _typed(name: str, value: Any) -> Any:
    """A value as the option has it: 1 and "1e-3" are floating-point numbers where one is due."""
    kinds = get_args(_TYPES[name]) if not _is_plain(_TYPES[name]) else (_TYPES[name],)
    choices = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
    if (value is None and NoneType in kinds) or value in choices:
        return value
    for kind in (bool, int, float, str):
        if kind not in kinds:
            continue
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        if kind is float and not isinstance(value, bool) and isinstance(value, int | str):
            try:
                return float(value)
            except ValueError:
                pass
    expected = [_WORDS[kind] for kind in kinds if kind in _WORDS] + choices
    raise ConfigurationError(f"{name}: give {' or '.join(map(str, expected))}, not {value!r}.")


def _is_plain(kind: Any) -> bool:
    """Whether a type is none of several."""
    return get_origin(kind) is Literal or not get_args(kind)


def as_file(config: Mapping[str, Any]) -> str:
    """The configuration as a file that ``evigrad train --config`` takes.

    Args:
        config: Resolved.

    Returns:
        YAML.
    """
    parser = make_parser()
    return parser.dump(parser.parse_object(dict(config)))


def make_setup(config: Mapping[str, Any], data_dir: str | None, device: str) -> Setup:
    """Data and network.

    Args:
        config: Resolved.
        data_dir: Folder of data sets.
        device: Where to compute.

    Returns:
        What the commands work with.
    """
    options = {name: config[name] for name in SETUP_TYPES if name in config}
    return set_up(**options, data_dir=data_dir, device=device)


def make_settings(
    config: Mapping[str, Any], likelihood: str, hyperparameters: Sequence[str]
) -> Settings:
    """The settings of the training.

    Args:
        config: Resolved.
        likelihood: Of the data, where the configuration does not name one.
        hyperparameters: That the network has to learn.

    Returns:
        What ``prepare`` takes.

    Raises:
        ConfigurationError: If one does not fit another.
    """
    known = {field.name for field in fields(Settings)}
    given = {name: value for name, value in config.items() if name in known}
    given["likelihood"] = given["likelihood"] or likelihood
    given |= {"hyperparameters": hyperparameters, "checkpoint_every": None}
    return Settings(**given)
