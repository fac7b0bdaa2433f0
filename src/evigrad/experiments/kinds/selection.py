"""Architectures compared by their log evidence, against what the test data say."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evigrad.experiments import figures
from evigrad.experiments.cases import Case, Row
from evigrad.experiments.definition import Experiment
from evigrad.experiments.plan import evaluation, training
from evigrad.experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cases(experiment: Experiment) -> list[Case]:
    """A training for each architecture and seed, and its log evidence by one common estimator.

    Args:
        experiment: Of this kind.

    Returns:
        The cases.
    """
    found = []
    for family, architectures in experiment.take("architectures").items():
        for label, options in architectures.items():
            for seed in experiment.seeds:
                trained = training(experiment.take("training"), options, seed=seed)
                jobs = {
                    "train": trained,
                    "evidence": evaluation(trained, experiment.take("judge")),
                }
                found.append(Case({"family": family, "label": label}, seed, jobs, _read))
    return found


def _read(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "x": results["evidence"]["per_datum"],
        "y": results["train"]["test"]["log_likelihood"],
        "accuracy": results["train"]["test"]["accuracy"],
        "weights": float(results["train"]["num_weights"]),
    }


def figure(experiment: Experiment, rows: list[Row]) -> "Figure":
    """Test log likelihood over log evidence.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        The figure.
    """
    return figures.scatter(
        experiment,
        rows,
        f"log marginal likelihood by {experiment.take('judge')} (nats per datum)",
        "test log likelihood (nats per datum)",
    )


def table(experiment: Experiment, rows: list[Row]) -> Table:
    """Both numbers for each architecture.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        The table.
    """
    columns = [
        Column("architectures"),
        Column("architecture"),
        Column("weights", 0),
        Column("log evidence per datum", best="high"),
        Column("test log likelihood", best="high"),
        Column("test accuracy, %", 1, 100.0, best="high"),
    ]
    cells = [
        [r["family"], r["label"], f"{r['weights'].mean:,.0f}", r["x"], r["y"], r["accuracy"]]
        for r in rows
    ]
    return Table(columns, cells, [row["family"] for row in rows])


def remarks(experiment: Experiment, rows: list[Row]) -> list[str]:
    """How far evidence and test data agree.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        The rank correlation, and both choices, for each family and for all.
    """
    found = []
    families = list(dict.fromkeys(row["family"] for row in rows))
    for family in families:
        chosen = [row for row in rows if row["family"] == family]
        if len(chosen) < 3:
            continue
        by_evidence = max(chosen, key=lambda row: row["x"].mean)
        by_test = max(chosen, key=lambda row: row["y"].mean)
        agreement = rank_correlation(
            [row["x"].mean for row in chosen], [row["y"].mean for row in chosen]
        )
        found.append(
            f"{family}: the evidence chooses {by_evidence['label']}, the test data"
            f" {by_test['label']}; rank correlation {agreement:.2f} over {len(chosen)}."
        )
    return found


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's correlation of two lists without ties.

    Args:
        first: Numbers.
        second: As many.

    Returns:
        Between -1 and 1.
    """
    n = len(first)
    ranks = [_ranks(first), _ranks(second)]
    distance = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * distance / (n * (n**2 - 1))


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    for rank, place in enumerate(order):
        ranks[place] = rank
    return ranks
