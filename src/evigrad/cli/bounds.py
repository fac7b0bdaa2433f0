"""``evigrad bounds``: bounds along a hyperparameter, on one's own data and network."""

import math
from typing import Any, Literal

from jsonargparse import Namespace

from evigrad.cli.experiments import (
    PLACE_OF_TRAINING,
    PLACE_TYPES,
    add_list,
    place_from,
    place_of,
    reproduce,
    training_options,
)
from evigrad.cli.parser import Options, Parser
from evigrad.cli.train import add_training, folder_name
from evigrad.errors import ConfigurationError
from evigrad.estimators import EstimatorSpec
from evigrad.experiments import Experiment, make_experiment
from evigrad.experiments.curves import PRECISION
from evigrad.invariances import GENERATORS

_DESCRIPTION = """\
Train a network once, with --estimator, and evaluate bounds on its log evidence along one
hyperparameter, the weights being fixed, as in Figures 3 to 6 of the paper: the mean over all blocks
of a partition and its standard error. All other options are those of evigrad train.

examples:
  evigrad bounds --subset 200
  evigrad bounds --curves full-N-C kfac-N-C diag-N-C --log-grid --start 0.01 --stop 100
  evigrad bounds --data mnist:rotated180 --subset 250 --model mininet --invariance rotation \\
      --along rotation"""

CURVES = ("ntk-10-C", "ntk-50-C", "ntk-100-C")
_TYPES: dict[str, Any] = {
    "along": Literal[(PRECISION, *GENERATORS)],  # type: ignore[valid-type]
    "start": float | None,
    "stop": float | None,
    "points": int,
    "log_grid": bool | None,
}


def make_parser() -> Parser:
    """The options of ``evigrad bounds``.

    Returns:
        The parser.
    """
    parser = Parser(description=_DESCRIPTION, usage="evigrad bounds [options]")
    group = parser.add_argument_group("what to draw")
    add_list(group, "--curves", str, CURVES, "Estimators, a curve for each.")
    add_list(group, "--seeds", int, [0], "Each is a training of its own.")
    options = Options(parser)
    options.add_group("along what", experiment, tuple(_TYPES), _TYPES)
    options.add_group("where", place_of, PLACE_OF_TRAINING, PLACE_TYPES)
    add_training(options)
    return parser


def experiment(
    training: dict[str, Any],
    curves: list[str],
    seeds: list[int],
    along: str = PRECISION,
    start: float | None = None,
    stop: float | None = None,
    points: int = 33,
    log_grid: bool | None = None,
) -> Experiment:
    """The experiment that options describe.

    Args:
        training: Options of the training.
        curves: Names of estimators.
        seeds: Each is a training of its own.
        along: The hyperparameter: precision, one prior precision for all weights, or the range of
            a random transform, as rotation.
        start: Its first value. Default: 1e-4 of the precision, 0 of a range.
        stop: Its last value. Default: 1e4 of the precision, π of a rotation, 1 of other ranges.
        points: How many values.
        log_grid: Whether they are evenly spaced on a logarithmic scale. Default: of the precision.

    Returns:
        The experiment.

    Raises:
        ConfigurationError: If there is no curve to draw.
    """
    names = list(dict.fromkeys(EstimatorSpec.parse(name).name for name in curves))
    if not names or not seeds:
        raise ConfigurationError("Name an estimator or more to draw a curve of, and a seed.")
    where = f"{training['model']} on {training['data']}"
    is_precision = along == PRECISION
    first, last = (1e-4, 1e4) if is_precision else (0.0, math.pi if along == "rotation" else 1.0)
    panel = {
        "title": where,
        "axis": "prior precision" if is_precision else f"range of {along}",
        "hyperparameter": along,
        "grid": {
            "start": first if start is None else start,
            "stop": last if stop is None else stop,
            "count": points,
            "log": is_precision if log_grid is None else log_grid,
        },
        "training": {},
    }
    content = {
        "kind": "bounds",
        "title": f"Bounds along {along}, {where}",
        "seeds": seeds,
        "training": training,
        "panels": {along: panel},
        "curves": {name: name for name in names},
    }
    folder = folder_name("bounds", along, training["data"], training["model"])
    return make_experiment(folder, content, preset="")


def run(parser: Parser, options: Namespace) -> int:
    """Draw as the options say.

    Args:
        parser: The parser of the options.
        options: The options.

    Returns:
        The exit code.
    """
    grid = {name: options[name] for name in _TYPES}
    made = experiment(training_options(options), options.curves, options.seeds, **grid)
    return reproduce(made, place_from(options))
