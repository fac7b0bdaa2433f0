"""The configuration of a training: that of ``evigrad train``, resolved, without places."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jsonargparse import Namespace

from evigrad.cli.parser import CommandLineError, Parser, explain
from evigrad.cli.setup import SETUP_TYPES, Setup, set_up
from evigrad.cli.train import make_parser
from evigrad.errors import ConfigurationError
from evigrad.training import Settings

# Where things are, how they are shown, and on what they run: no result depends on these.
_FREE = (
    *("config", "resume", "print_config", "run_dir", "data_dir", "device", "threads"),
    *("progress", "figures", "compare_map", "evaluate_with", "checkpoint_every"),
)


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a training with their values, typed and checked.

    Args:
        options: Some of those of ``evigrad train``, in Python's spelling.

    Returns:
        Each option that a result may depend on.

    Raises:
        ConfigurationError: If there is no such option, or a value is of a wrong type.
    """
    parser = make_parser()
    found = _parsed(parser, {name.replace("-", "_"): value for name, value in options.items()})
    kept = found.as_dict()
    return {name: value for name, value in kept.items() if name not in _FREE}


def as_file(config: Mapping[str, Any]) -> str:
    """The configuration as a file that ``evigrad train --config`` takes.

    Args:
        config: Resolved.

    Returns:
        YAML.
    """
    parser = make_parser()
    return parser.dump(_parsed(parser, dict(config)))


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


def make_settings(config: Mapping[str, Any], setup: Setup) -> Settings:
    """The settings of the training.

    Args:
        config: Resolved.
        setup: Data and network.

    Returns:
        What ``prepare`` takes.

    Raises:
        ConfigurationError: If one does not fit another.
    """
    known = {field.name for field in fields(Settings)}
    given = {name: value for name, value in config.items() if name in known}
    given["likelihood"] = given["likelihood"] or setup.data.likelihood
    given |= {"hyperparameters": setup.hyperparameters, "checkpoint_every": None}
    return Settings(**given)


def _parsed(parser: Parser, options: dict[str, Any]) -> Namespace:
    try:
        return parser.parse_object(options)
    except CommandLineError as error:
        raise explain(str(error), parser, "evigrad train") from error
    except (TypeError, KeyError) as error:
        raise ConfigurationError(f"The options of a training are wrong: {error}.") from error
