"""``python -m experiments bounds``: bounds along a hyperparameter, for your data and network."""

import math
from statistics import fmean
from typing import Any, Literal

from jsonargparse import Namespace

from evigrad.cli.messages import show
from evigrad.cli.parser import Parser, chosen
from evigrad.cli.train import add_training, folder_name
from evigrad.core.names import Estimator
from evigrad.core.partition import Partition
from evigrad.core.types import standard_error
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.invariances import GENERATORS
from experiments import figures, trainings
from experiments.along import PRECISION, curves_along, make_grid, served_together

_DESCRIPTION = """\
Draw bounds on the log evidence along one hyperparameter, as in Figures 3 to 6 of the paper. The
network is trained once, with --estimator, and its weights stay fixed. Each bound is the mean over
all blocks of a partition, with its standard error. All other options come from evigrad train.

examples:
  python -m experiments bounds --subset 200
  python -m experiments bounds --curves full-N-C kfac-N-C diag-N-C --log-grid \\
      --start 0.01 --stop 100
  python -m experiments bounds --data mnist:rotated180 --subset 250 --model mininet \\
      --invariance rotation --along rotation"""

CURVES = ("ntk-10-C", "ntk-50-C", "ntk-100-C")
_TYPES: dict[str, Any] = {"along": Literal[(PRECISION, *GENERATORS)]}  # type: ignore[valid-type]


def make_parser() -> Parser:
    """Return the options of the command."""
    parser = Parser("python -m experiments bounds", _DESCRIPTION)
    group = parser.add_argument_group("what to draw")
    trainings.add_list(group, "--curves", str, CURVES, "Estimators. Each has a curve.")
    trainings.add_list(group, "--seeds", int, [0], "Seeds. Each has a training.")
    parser.add_group("along what", grid_along, types=_TYPES)
    parser.add_group("where", trainings.place_of, trainings.PLACE_OF_TRAINING)
    add_training(parser)
    return parser


def grid_along(
    along: str = PRECISION,
    start: float | None = None,
    stop: float | None = None,
    points: int = 33,
    log_grid: bool | None = None,
) -> list[float]:
    """Return the values of the horizontal axis, with six digits.

    Args:
        along: Hyperparameter: ``precision``, one prior precision for all weights, or the range of a
            random transform, such as rotation.
        start: First value. Default: 1e-4 for the precision, 0 for a range.
        stop: Last value. Default: 1e4 for the precision, π for a rotation, 1 for other ranges.
        points: Number of values.
        log_grid: Whether the values are evenly spaced on a logarithmic scale. Default: only for the
            precision.

    Raises:
        ConfigurationError: If the grid is invalid.
    """
    is_precision = along == PRECISION
    first, last = (1e-4, 1e4) if is_precision else (0.0, math.pi if along == "rotation" else 1.0)
    return make_grid(
        first if start is None else start,
        last if stop is None else stop,
        points,
        is_precision if log_grid is None else log_grid,
    )


def curves(
    config: dict[str, Any],
    place: trainings.Place,
    *,
    names: list[str],
    along: str,
    grid: list[float],
) -> dict[str, Any]:
    """Train once, and return the bounds along the hyperparameter. See ``curves_along``."""
    folder = trainings.run_folder(config, place)
    setup, result = trainings.trained(config, folder, place)
    data = setup.data.train
    together = served_together(result.evidence, data, names, along)
    curves_by_name = {}
    # A curve that is added later does not change curves that are evaluated by themselves.
    for group in [*([together] if together else []), *([n] for n in names if n not in together)]:
        file = f"curves-{trainings.digest([group, along, grid])}.json"
        curves_by_name |= trainings.kept(
            folder / file,
            lambda group=group, file=file: curves_along(
                result.evidence,
                data,
                group,
                along,
                grid,
                seed=config["seed"],
                partial=folder / f"{file}.begun",
            ),
        )
    return curves_by_name


def run(parser: Parser, options: Namespace) -> int:
    """Draw the bounds and return the exit code: 1 if a curve is missing."""
    place, along = trainings.place_from(options), options.along
    grid = grid_along(**chosen(grid_along, options))
    specs = {spec.name: spec for spec in map(Estimator.parse, options.curves)}
    if not specs or not options.seeds:
        raise ConfigurationError("Name at least one estimator and one seed.")
    setup, training = trainings.named_setup(options, place)
    names, problems = [], []
    for name, spec in specs.items():
        try:
            Partition(spec, len(setup.data.train[0]), setup.data.num_outputs)
            names.append(name)
        except EvigradError as error:
            problems.append(str(error))
    if not names:
        raise ConfigurationError(" ".join(problems))
    for reason in problems:
        show("warning", f"A curve is omitted: {reason}")
    configs = [trainings.resolved({**training, "seed": seed}) for seed in options.seeds]
    done = trainings.each_done(curves, configs, place, names=names, along=along, grid=grid)
    finished = [curves_by_name for curves_by_name in done if curves_by_name is not None]
    if not finished:
        return 1
    lines, rows = [], []
    for name in names:
        seed_curves = [curves_by_name[name] for curves_by_name in finished]
        means = list(map(fmean, zip(*(curve["mean"] for curve in seed_curves), strict=True)))
        spread = list(map(fmean, zip(*(curve["sem"] for curve in seed_curves), strict=True)))
        lines.append(figures.Curve(name, grid, means, spread))
        best = max(range(len(grid)), key=means.__getitem__)
        error = standard_error([curve["mean"][best] for curve in seed_curves]) or math.nan
        rows.append([name, means[best], error, grid[best]])
    is_precision = along == PRECISION
    panel = figures.Panel(
        f"{training['model']} on {training['data']}",
        "prior precision" if is_precision else f"range of {along}",
        "log evidence bound\n(nats per example)",
        lines,
        log=is_precision if options.log_grid is None else options.log_grid,
        clipped=True,
    )
    heads = ["estimator", "maximum, nats per example", "standard error", f"at {along}"]
    folder = folder_name("bounds", along, training["data"], training["model"])
    figure = figures.panels([[panel]], mark_tops=True)
    trainings.write_results(place, folder, [configs, names, along, grid], figure, heads, rows)
    return 1 if problems or len(finished) < len(done) else 0
