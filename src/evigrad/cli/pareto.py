"""``evigrad pareto``: which estimator is worth its time, on one's own data and network."""

from typing import Any

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

_DESCRIPTION = """\
Train with each of some estimators, and show the log evidence at the end by the estimator itself
over the time of one estimate with its gradient, as in Figure 1 of the paper: a point for each, the
frontier of those that no other one beats in both, full-batch estimators in black. The anchored
bound is one of the family. All other options are those of evigrad train.

examples:
  evigrad pareto                                    digits, a small network
  evigrad pareto --estimators ntk-100-1 kfac-100-1 ntk-400-rows-anchored --judge ntk-400-C
  evigrad pareto --data mnist:rotated180 --subset 1000 --model mininet --invariance rotation \\
      --estimators ntk-100-1 kfac-100-1 --epochs 20"""

ESTIMATORS = (
    *("ntk-50-1", "ntk-200-1", "ntk-20-C", "ntk-50-C"),
    *("ntk-100-rows-anchored", "ntk-200-rows-anchored", "ntk-400-rows-anchored"),
    *("kfac-50-1", "kfac-200-1", "kfac-50-C", "kfac-N-C", "diag-50-C", "diag-N-C"),
)
_TYPES: dict[str, Any] = {"judge": str | None}


def make_parser() -> Parser:
    """The options of ``evigrad pareto``.

    Returns:
        The parser.
    """
    parser = Parser(description=_DESCRIPTION, usage="evigrad pareto [options]")
    group = parser.add_argument_group("what to compare")
    add_list(group, "--estimators", str, ESTIMATORS, "Estimators.")
    add_list(group, "--seeds", int, [0], "Each is a training of its own for each estimator.")
    options = Options(parser)
    options.add_group("a common measure", experiment, tuple(_TYPES), _TYPES)
    options.add_group("where", place_of, PLACE_OF_TRAINING, PLACE_TYPES)
    add_training(options, with_estimator=False)
    return parser


def experiment(
    training: dict[str, Any],
    estimators: list[str],
    seeds: list[int],
    judge: str | None = None,
) -> Experiment:
    """The experiment that options describe.

    Args:
        training: Options of each training.
        estimators: Names.
        seeds: Each is a training of its own.
        judge: Estimator by which the log evidence of all trained networks is evaluated too, for
            the table. Default: none.

    Returns:
        The experiment.

    Raises:
        ConfigurationError: If there is nothing to compare, or no estimator of a name.
    """
    names = list(dict.fromkeys(EstimatorSpec.parse(name).name for name in estimators))
    if len(names) < 2 or not seeds:
        raise ConfigurationError("Name two estimators or more to compare, and a seed or more.")
    where = f"{training['model']} on {training['data']}"
    if training["subset"] is not None:
        where = f"{training['model']} on {training['subset']} of {training['data']}"
    content = {
        "kind": "pareto",
        "title": f"Tightness over time, {where}",
        "seeds": seeds,
        "training": training,
        "estimators": names,
        **({} if judge is None else {"judge": EstimatorSpec.parse(judge).name}),
    }
    folder = folder_name("pareto", training["data"], training["model"])
    return make_experiment(folder, content, preset="")


def run(parser: Parser, options: Namespace) -> int:
    """Compare as the options say.

    Args:
        parser: The parser of the options.
        options: The options.

    Returns:
        The exit code.
    """
    made = experiment(training_options(options), options.estimators, options.seeds, options.judge)
    return reproduce(made, place_from(options))
