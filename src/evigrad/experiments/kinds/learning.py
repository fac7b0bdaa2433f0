"""Trainings over their epochs, by many estimators (the training figures of the Appendix)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evigrad.experiments import figures
from evigrad.experiments.cases import Case, Mean, Row
from evigrad.experiments.definition import Experiment
from evigrad.experiments.plan import training
from evigrad.experiments.styles import in_order
from evigrad.experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cases(experiment: Experiment) -> list[Case]:
    """A training for each group, estimator and seed.

    Args:
        experiment: Of this kind.

    Returns:
        The cases.
    """
    quantities = list(experiment.take("quantities"))

    def read(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        history, found = results["train"]["history"], {}
        for name in quantities:
            if name in history:
                found[name] = history[name]["value"]
                found[f"{name} epochs"] = history[name]["epoch"]
        found["final"] = results["train"]["test"]["log_likelihood"]
        found["seconds"] = results["train"]["seconds"]
        return found

    return [
        Case(
            {"group": group, "estimator": name, "label": label or name},
            seed,
            {"train": training(experiment.take("training"), {"estimator": name}, seed=seed)},
            read,
        )
        for group, estimators in experiment.take("groups").items()
        for name, label in estimators.items()
        for seed in experiment.seeds
    ]


def figure(experiment: Experiment, rows: list[Row]) -> "Figure":
    """Groups side by side, quantities one below the other.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        The figure.
    """
    groups = {name: [r for r in rows if r["group"] == name] for name in experiment.take("groups")}
    return figures.lines(
        experiment,
        rows,
        {name: found for name, found in groups.items() if found},
        experiment.take("quantities"),
        "epoch",
        over="epochs",
    )


def table(experiment: Experiment, rows: list[Row]) -> Table:
    """Where each training ended.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        A row for each estimator, in the order of the legend.
    """
    labels = in_order([row["label"] for row in rows], experiment)
    groups = list(experiment.take("groups"))
    rows = sorted(rows, key=lambda r: (groups.index(r["group"]), labels.index(r["label"])))
    names = [name for name in experiment.take("quantities") if name != "test_log_likelihood"]
    columns = [
        Column("estimators"),
        Column("estimator"),
        *(Column(f"{name.replace('_', ' ')} at the end") for name in names),
        Column("test log likelihood", best="high"),
        Column("seconds", digits=0),
    ]
    cells = [
        [
            row["group"],
            row["label"],
            *(_last(row.get(name)) for name in names),
            row["final"],
            row["seconds"],
        ]
        for row in rows
    ]
    return Table(columns, cells, [row["group"] for row in rows])


def _last(value: Mean | None) -> Mean | None:
    return None if value is None else Mean(value.mean[-1], value.error[-1], value.count)
