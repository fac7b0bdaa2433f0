"""Trainings by the options of ``evigrad train``. Each one runs only once."""

import hashlib
import json
from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from evigrad.blocks.anchors import Anchoring
from evigrad.cli.parser import NO_ESTIMATOR, Parser, by_key, by_name, chosen
from evigrad.cli.resume import CONFIGURATION
from evigrad.cli.setup import MOST_THREADS, Setup, check_range, set_up
from evigrad.cli.train import Results, make_parser, prepare_runs, settings_of
from evigrad.errors import ConfigurationError
from evigrad.training import FitResult, RunDirectory
from experiments.augerino import NAME as AUGERINO
from experiments.augerino import WEIGHT, prepare_augerino

# Folders, device and display of a training. No result depends on them.
_FREE = {"data_dir", "device", "threads", "progress", "checkpoint_every"}
_FREE |= {"config", "resume", *(field.name for field in fields(Results))}
_DIGITS = 16  # number of digits of a name that is a hash
# Options that were added or removed after the first results. At their defaults, the results keep
# their folders.
_YOUNGER = {"prior_mean": "zero", "noise_on_loss": False, "pixels": "normalized"}
_YOUNGER |= {"log_det_weight": 1.0, "validation_fraction": None}
_YOUNGER |= {f"anchor_{name}": value for name, value in asdict(Anchoring()).items()}
_YOUNGER |= dict.fromkeys(("categorical", "drop", "features", "max_epochs", "start_decay"))
_GONE = {"split_blocks": False, "augerino_weight": WEIGHT}
_MAP = "map"  # the stored name of trainings without an estimator


@dataclass(frozen=True)
class Place:
    """Folders, device and threads of runs (``place_of``). No result depends on it."""

    results: Path
    data_dir: str | None = None
    device: str = "auto"
    threads: int = 1


def place_of(
    results: str = "results",
    data_dir: str | None = None,
    device: str = "auto",
    threads: int | None = None,
) -> Place:
    """Return where trainings run.

    Args:
        results: Folder of all results. Nothing runs twice, interrupted runs resume, and you can
            move the folder.
        data_dir: Folder with NAME_train.parquet and NAME_test.parquet. Default: the environment
            variable EVIGRAD_DATA.
        device: Device: cpu, cuda, or auto (cuda if available).
        threads: CPU threads. Default: one per core.

    Raises:
        ConfigurationError: If a number is invalid.
    """
    if threads is not None:
        check_range("threads", threads, 1, MOST_THREADS)
    return Place(Path(results), data_dir, device, threads or torch.get_num_threads())


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options that a result may depend on, typed, with underscores in their names.

    ``options`` are options of ``evigrad train``, with hyphens or underscores. The estimator
    may also be ``augerino``, with ``augerino_weight`` for its reward.

    Raises:
        ConfigurationError: If there is no such option, or if a value has a wrong type.
    """
    parser, defaults = _parser()
    normalized = {name.replace("-", "_"): value for name, value in options.items()}
    gone = {name: normalized.pop(name, default) for name, default in _GONE.items()}
    try:
        typed = by_name(parser.parse_object(by_key(normalized), defaults=False))
    except ArgumentError as error:
        raise parser.mistake(error) from error
    config = {**defaults, **{name: v for name, v in typed.items() if name not in _FREE}}
    if config["estimator"] == NO_ESTIMATOR:
        config["estimator"] = _MAP
    config = {name: v for name, v in config.items() if name not in _YOUNGER or v != _YOUNGER[name]}
    return config | gone


@cache
def _parser() -> tuple[Parser, Mapping[str, Any]]:
    parser = make_parser()
    defaults = by_name(parser.get_defaults())
    return parser, {name: value for name, value in defaults.items() if name not in _FREE}


def trained(config: Mapping[str, Any], folder: Path, place: Place) -> tuple[Setup, FitResult]:
    """Return data, network and result of a training from ``resolved``: new, resumed or done.

    ``folder`` is the folder of the run. ``place`` names data and device.

    Raises:
        EvigradError: If the options do not fit each other or the data.
    """
    parser, _ = _parser()
    method = config["estimator"]
    options = parser.parse_object(by_key({**train_options(config), "checkpoint_every": None}))
    setup = _set_up_at(place, chosen(set_up, options))
    if method == AUGERINO:
        settings, data, weight = settings_of(setup, options), setup.data, config["augerino_weight"]
        parts: dict[str, Any] = {"test": data.test, "network": setup.network}
        run = prepare_augerino(setup.make_model(), data.train, settings, weight, **parts)
    else:
        (run,) = prepare_runs(setup, options)
    directory = RunDirectory(folder, resume=True)
    # Several jobs may need one training at a time, some of them only to read it.
    with directory.locked(wait=True):
        if not (directory.path / CONFIGURATION).exists():
            directory.write_text(
                CONFIGURATION, parser.dump(parser.parse_object(by_key(train_options(config))))
            )
        return setup, run.train(directory, resume=True, progress=False)


def train_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``evigrad train`` for a training from ``resolved``."""
    options = {name: value for name, value in config.items() if name not in _GONE}
    if options["estimator"] in (_MAP, AUGERINO):
        options["estimator"] = NO_ESTIMATOR
    return options


def digest(content: Any) -> str:
    """Return a short name of plain values, equal for any order of the keys."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:_DIGITS]


def stored(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file. Raise ConfigurationError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}). Remove it, and it will be computed again."
        ) from error


def _set_up_at(place: Place, options: dict[str, Any]) -> Setup:
    here = {"data_dir": place.data_dir, "device": place.device, "threads": place.threads}
    return set_up(**{**options, **here})
