"""``python -m experiments pareto``: compare estimators by tightness and time on your data."""

import math
from dataclasses import asdict
from statistics import fmean
from typing import Any

from jsonargparse import Namespace

from evigrad.cli.messages import show
from evigrad.cli.parser import Parser
from evigrad.cli.train import add_training, folder_name
from evigrad.core.names import Estimator
from evigrad.core.types import standard_error
from evigrad.errors import ConfigurationError
from evigrad.measure import evaluate_evidence
from experiments import figures, trainings
from experiments.times import time_steps

_DESCRIPTION = """\
Compare estimators. Train one network per estimator and plot each estimator's final log evidence
against the time of one gradient estimate, as in Figure 1 of the paper. The frontier joins the
estimators that no other one beats in both. Full-batch estimators are black. All other options
come from evigrad train.

examples:
  python -m experiments pareto                                    digits, a small network
  python -m experiments pareto --judge ntk-400-C \\
      --estimators ntk-100-1 kfac-100-1 ntk-400-rows-anchored
  python -m experiments pareto --data mnist:rotated180 --subset 1000 --model mininet \\
      --invariance rotation --estimators ntk-100-1 kfac-100-1 --epochs 20"""

ESTIMATORS = (
    *("ntk-50-1", "ntk-200-1", "ntk-20-C", "ntk-50-C"),
    *("ntk-100-rows-anchored", "ntk-200-rows-anchored", "ntk-400-rows-anchored"),
    *("kfac-50-1", "kfac-200-1", "kfac-50-C", "kfac-N-C", "diag-50-C", "diag-N-C"),
)
# Number of blocks of a final estimate.
_BLOCKS = 30


def make_parser() -> Parser:
    """Return the options of the command."""
    parser = Parser("python -m experiments pareto", _DESCRIPTION)
    group = parser.add_argument_group("what to compare")
    trainings.add_list(group, "--estimators", str, ESTIMATORS, "Estimators.")
    trainings.add_list(group, "--seeds", int, [0], "Seeds. Each has a training per estimator.")
    parser.add_group("a common measure", evaluated, ("judge",))
    parser.add_group("where", trainings.place_of, trainings.PLACE_OF_TRAINING)
    add_training(parser, ("prior", "precision"))
    return parser


def evaluated(
    config: dict[str, Any], place: trainings.Place, *, judge: str | None = None
) -> dict[str, Any]:
    """Return values at the end of a training, in nats per example.

    They are ``value``, the log evidence by the training's own estimator, ``log_likelihood`` of the
    test data, and the log evidence by the ``judge``.

    Args:
        config: Options of the training.
        place: Where it runs.
        judge: Estimator that also evaluates the log evidence of all trained networks, for the
            table. Default: none.
    """
    folder = trainings.run_folder(config, place)
    setup, result = trainings.trained(config, folder, place)
    values = {"log_likelihood": result.test_metrics["log_likelihood"]}
    for key, name, blocks in (("value", config["estimator"], _BLOCKS), ("judge", judge, None)):
        if name is None:
            continue
        value = trainings.kept(
            folder / f"evidence-{trainings.digest([name, blocks])}.json",
            lambda name=name, blocks=blocks: asdict(
                evaluate_evidence(
                    result.evidence, setup.data.train, name, seed=config["seed"], blocks=blocks
                )
            ),
        )
        values[key] = value["per_datum"]
    return values


def timed(config: dict[str, Any], place: trainings.Place) -> dict[str, Any]:
    """Return the time of an estimate after a training. Nothing else may run at this time."""
    folder = trainings.run_folder(config, place)

    def compute() -> dict[str, Any]:
        setup, result = trainings.trained(config, folder, place)
        steps = config["hyper_steps"] or config["steps"]
        times = time_steps(result.evidence, setup.data.train, config["batch_size"], steps)
        return asdict(times)

    return trainings.kept(folder / "times.json", compute)


def run(parser: Parser, options: Namespace) -> int:
    """Compare the estimators and return the exit code: 1 if one is missing."""
    place = trainings.place_from(options)
    specs = {spec.name: spec for spec in map(Estimator.parse, options.estimators)}
    if len(specs) < 2 or not options.seeds:
        raise ConfigurationError("Name at least two estimators and one seed.")
    judge = None if options.judge is None else Estimator.parse(options.judge).name
    _, training = trainings.named_setup(options, place)
    configs = [
        trainings.resolved({**training, "estimator": name, "seed": seed})
        for name in specs
        for seed in options.seeds
    ]
    done = trainings.each_done(evaluated, configs, place, judge=judge)
    left = [config for config, values in zip(configs, done, strict=True) if values is not None]
    times = trainings.each_done(timed, left, place)
    numbers_by_estimator: dict[str, list[dict[str, Any]]] = {name: [] for name in specs}
    pairs = zip(left, filter(None, done), times, strict=True)
    for config, values, seconds in pairs:
        if seconds is not None:
            numbers_by_estimator[config["estimator"]].append({**values, **seconds})
    drawn, rows = [], []
    for name, seed_numbers in numbers_by_estimator.items():
        if not seed_numbers:
            continue
        means = {key: fmean(numbers[key] for numbers in seed_numbers) for key in seed_numbers[0]}
        seconds, value = means["estimate"], means["value"]
        error = standard_error([numbers["value"] for numbers in seed_numbers]) or math.nan
        group, size = specs[name].family
        drawn.append(figures.Point(group, size, seconds, -value, y_error=error))
        ratio = seconds / means["step"]
        judged = [] if judge is None else [-means["judge"]]
        rows.append([name, -value, error, seconds, ratio, means["log_likelihood"], *judged])
    if not drawn:
        return 1
    corners = figures.pareto_front([(point.x, point.y) for point in drawn])
    for number, row in enumerate(rows):
        row.append("yes" if number in corners else "")
    where = f"{training['model']} on {training['data']}"
    if training["subset"] is not None:
        where = f"{training['model']} on {training['subset']} of {training['data']}"
    figure = figures.points(
        drawn,
        f"Tightness against time, {where}",
        "seconds per estimate with gradient",
        "− log evidence, own estimate\n(nats per example)",
        reference=[name for name, spec in specs.items() if spec.is_full_batch],
        frontier=True,
    )
    heads = ["estimator", "− log evidence, own estimate", "standard error"]
    heads += ["seconds per estimate with gradient", "time, × training step"]
    heads += ["test log likelihood", *([] if judge is None else [f"− log evidence by {judge}"])]
    heads.append("on the frontier")
    folder = folder_name("pareto", training["data"], training["model"])
    trainings.write_results(place, folder, [configs, judge], figure, heads, rows)
    front = ", ".join(rows[number][0] for number in corners)
    show("note", f"On the frontier, from fast to slow: {front}.")
    return 0 if all(map(len, numbers_by_estimator.values())) and len(left) == len(configs) else 1
