"""Tightness over time of many estimators, each of a training of its own (Figure 1)."""

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from evigrad.errors import ConfigurationError
from evigrad.estimators import EstimatorSpec
from evigrad.experiments import figures
from evigrad.experiments.cases import Case, Row
from evigrad.experiments.definition import Experiment
from evigrad.experiments.plan import evaluation, timing, training
from evigrad.experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Blocks that an estimate at the end is the mean of.
_BLOCKS = 30


def cases(experiment: Experiment) -> list[Case]:
    """A training for each estimator and seed, its estimate at the end, and the time of one.

    Args:
        experiment: Of this kind.

    Returns:
        The cases.
    """
    found = []
    for spec in estimators(experiment):
        name = spec.name
        for seed in experiment.seeds:
            trained = training(experiment.take("training"), {"estimator": name}, seed=seed)
            keys = {
                "estimator": name,
                "family": family(spec),
                "size": size(spec),
                "is_full_batch": is_full_batch(spec),
            }
            jobs = {
                "train": trained,
                "estimate": evaluation(trained, blocks=_BLOCKS),
                "time": timing(trained),
            }
            if judge := experiment.content.get("judge"):
                jobs["judge"] = evaluation(trained, judge)
            found.append(Case(keys, seed, jobs, _read))
    return found


def estimators(experiment: Experiment) -> list[EstimatorSpec]:
    """The estimators that are compared.

    Args:
        experiment: With ``estimators``: names, or every combination of ``structures``, ``subsets``
            and ``outputs``, and ``more`` names.

    Returns:
        Each once.

    Raises:
        ConfigurationError: If there is none.
    """
    found = experiment.take("estimators")
    if isinstance(found, Mapping) and found.keys() >= {"structures", "subsets", "outputs"}:
        parts = product(found["structures"], found["subsets"], found["outputs"])
        found = ["-".join(map(str, each)) for each in parts] + found.get("more", [])
    if not isinstance(found, list) or not found:
        raise ConfigurationError(
            f"The experiment {experiment.name} has {found!r} for estimators; give a list of names,"
            " or lists of structures, subsets and outputs."
        )
    return list(dict.fromkeys(map(EstimatorSpec.parse, found)))


def _read(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    found = {
        "seconds": results["time"]["estimate_seconds"],
        "steps": results["time"]["estimate_seconds"] / results["time"]["step_seconds"],
        "value": -results["estimate"]["per_datum"],
        "log_likelihood": results["train"]["test"]["log_likelihood"],
    }
    if "judge" in results:
        found["judge"] = -results["judge"]["per_datum"]
    return found


def family(spec: EstimatorSpec) -> str:
    """What estimators have in common that differ in their sizes.

    Args:
        spec: One of them.

    Returns:
        As ``ntk-m-1``, or the name itself of a full-batch estimator.
    """
    if is_full_batch(spec):
        return spec.name
    _, _, *rest = spec.name.split("-")
    return "-".join([spec.structure, "k" if spec.rows else "m", *rest])


def size(spec: EstimatorSpec) -> str:
    """What tells an estimator from others of its family.

    Args:
        spec: The estimator.

    Returns:
        Its subset, N for all data, or its name where all outputs are in it as well.
    """
    if is_full_batch(spec):
        return spec.name
    return "N" if spec.subset is None else str(spec.subset)


def is_full_batch(spec: EstimatorSpec) -> bool:
    """Whether nothing is drawn: all data and all outputs are one block.

    Args:
        spec: The estimator.

    Returns:
        True for what was known before the paper.
    """
    return spec.subset is None and spec.outputs is None


def figure(experiment: Experiment, rows: list[Row]) -> "Figure":
    """A point for each estimator.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        The figure.
    """
    return figures.pareto(experiment, rows)


def table(experiment: Experiment, rows: list[Row]) -> Table:
    """Times and values.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        A row for each estimator.
    """
    columns = [
        Column("estimator"),
        Column("− log evidence, own estimate"),
        Column("seconds of an estimate with gradient", digits=4),
        Column("× a step of the weights", digits=1),
        Column("test log likelihood", best="high"),
    ]
    keys = ["value", "seconds", "steps", "log_likelihood"]
    if any("judge" in row for row in rows):
        columns.append(Column(f"− log evidence by {experiment.take('judge')}", best="low"))
        keys.append("judge")
    columns.append(Column("on the frontier"))
    front = set(figures.pareto_front(_points(rows)))
    cells = [
        [row["estimator"], *(row.get(key) for key in keys), "yes" if number in front else ""]
        for number, row in enumerate(rows)
    ]
    return Table(columns, cells)


def _points(rows: list[Row]) -> list[tuple[float, float]]:
    return [(row["seconds"].mean, row["value"].mean) for row in rows]


def remarks(experiment: Experiment, rows: list[Row]) -> list[str]:
    """Which estimators are on the frontier.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        One sentence.
    """
    front = [rows[i]["estimator"] for i in figures.pareto_front(_points(rows))]
    return [f"On the frontier, by their time: {', '.join(front)}."]
