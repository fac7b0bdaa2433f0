"""Trainings on data sets of several sizes and variants (Figure 7 and its plots in the Appendix)."""

from typing import TYPE_CHECKING

from evigrad.experiments import figures
from evigrad.experiments.cases import Case, Mean, Row
from evigrad.experiments.definition import Experiment
from evigrad.experiments.plan import final_numbers, training, with_estimate
from evigrad.experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLOCKS = 20
QUANTITIES = {
    "log_evidence": "log marginal likelihood\n(nats per datum)",
    "log_likelihood": "test log likelihood\n(nats per datum)",
    "accuracy": "test accuracy (%)",
}


def cases(experiment: Experiment) -> list[Case]:
    """A training for each variant, estimator, size and seed.

    Args:
        experiment: Of this kind.

    Returns:
        The cases.
    """
    found = []
    shared = experiment.take("training")
    for variant, data in experiment.take("variants").items():
        for label, options in experiment.take("rows").items():
            for size in experiment.take("sizes"):
                for seed in experiment.seeds:
                    own = {"data": data, "subset": size}
                    trained = training(shared, options, own, seed=seed)
                    keys = {"variant": variant, "label": label, "size": size}
                    found.append(Case(keys, seed, with_estimate(trained, _BLOCKS), final_numbers))
    return found


def figure(experiment: Experiment, rows: list[Row]) -> "Figure":
    """Variants side by side; evidence, test log likelihood and accuracy one below the other.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        The figure.
    """
    columns: dict[str, list[Row]] = {}
    for variant in experiment.take("variants"):
        of_variant = [row for row in rows if row["variant"] == variant]
        for label in dict.fromkeys(row["label"] for row in of_variant):
            points = [row for row in of_variant if row["label"] == label]
            line: Row = {"label": label, "sizes": [row["size"] for row in points]}
            for name in QUANTITIES:
                means, errors = zip(*((r[name].mean, r[name].error) for r in points), strict=True)
                line[name] = Mean(list(means), list(errors), points[0][name].count)
            columns.setdefault(variant, []).append(line)
    every = [row for column in columns.values() for row in column]
    return figures.lines(
        experiment, every, columns, QUANTITIES, "training data", over="sizes", log=True
    )


def table(experiment: Experiment, rows: list[Row]) -> Table:
    """All numbers of the figure.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        A row for each point.
    """
    columns = [
        Column("variant"),
        Column("N", digits=0),
        Column("method"),
        Column("log evidence", best="high"),
        Column("test log likelihood", best="high"),
        Column("test accuracy, %", digits=1, best="high"),
        Column("seconds", digits=0),
    ]
    ordered = sorted(
        rows, key=lambda row: (list(experiment.take("variants")).index(row["variant"]), row["size"])
    )
    cells = [
        [r["variant"], str(r["size"]), r["label"], *(r[name] for name in QUANTITIES), r["seconds"]]
        for r in ordered
    ]
    return Table(columns, cells, [f"{r['variant']} {r['size']}" for r in ordered])
