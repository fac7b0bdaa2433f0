"""Architectures compared by log evidence and by test log likelihood."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import figures
from experiments.cases import Case, Row
from experiments.definition import Experiment, Options
from experiments.jobs import evaluation, training
from experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Selection(Experiment):
    """Test log likelihood against log evidence, with a point for each architecture.

    Attributes:
        architectures: Families of labels with the options of their trainings.
        judge: Estimator of the log evidence of all architectures.
    """

    architectures: dict[str, dict[str, Options]]
    judge: str

    def cases(self) -> list[Case]:
        """Return a training and its log evidence by the judge for each architecture and seed."""
        cases = []
        for family, architectures in self.architectures.items():
            for label, options in architectures.items():
                for seed in self.seeds:
                    trained = training(self.training, options, seed=seed)
                    jobs = {"train": trained, "evidence": evaluation(trained, self.judge)}
                    cases.append(Case({"family": family, "label": label}, seed, jobs, _read))
        return cases

    def figure(self, rows: list[Row]) -> "Figure":
        """Return a point for each network, with errors of both quantities."""
        points = [
            figures.Point(
                "networks",
                " = ".join(row["label"] for row in same),
                same[0]["x"].mean,
                same[0]["y"].mean,
                same[0]["x"].error,
                same[0]["y"].error,
            )
            for same in _networks(rows)
        ]
        across = f"log evidence by {self.judge} (nats per example)"
        return figures.points(points, self.title, across, "test log likelihood (nats per example)")

    def table(self, rows: list[Row]) -> Table:
        """Return both numbers for each architecture."""
        columns = [
            Column("family"),
            Column("architecture"),
            Column("weights", 0),
            Column("log evidence", best="high"),
            Column("test log likelihood", best="high"),
            Column("test accuracy, %", 1, 100.0, best="high"),
        ]
        cells = [
            [r["family"], r["label"], f"{r['weights'].mean:,.0f}", r["x"], r["y"], r["accuracy"]]
            for r in rows
        ]
        return Table(columns, cells, [row["family"] for row in rows])

    def remarks(self, rows: list[Row]) -> list[str]:
        """Return what evidence and test data choose in each family, and their correlation."""
        remarks = []
        for family in self.architectures:
            chosen = [row for row in rows if row["family"] == family]
            if len(chosen) < 3:
                continue
            by_evidence, by_test = (max(chosen, key=lambda row: row[key].mean) for key in "xy")
            agreement = rank_correlation(*([row[key].mean for row in chosen] for key in "xy"))
            remarks.append(
                f"{family}: the log evidence chooses {by_evidence['label']}, and the test data"
                f" choose {by_test['label']}. Rank correlation {agreement:.2f} over {len(chosen)}"
                " networks."
            )
        networks = _networks(rows)
        remarks += [
            f"{' and '.join(row['label'] for row in same)} are the same network, so there are"
            f" {len(networks)} networks in total."
            for same in networks
            if len(same) > 1
        ]
        return remarks


def _networks(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of each network. Several families may contain the same network."""
    by_values: dict[tuple[float, ...], list[Row]] = {}
    for row in rows:
        values = tuple(row[key].mean for key in ("weights", "x", "y"))
        by_values.setdefault(values, []).append(row)
    return list(by_values.values())


def _read(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    trained = results["train"]
    return {
        "x": results["evidence"]["per_datum"],
        "y": trained["test"]["log_likelihood"],
        "accuracy": trained["test"]["accuracy"],
        "weights": float(trained["num_weights"]),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's correlation, between -1 and 1, of two lists without ties."""
    one, other = (np.argsort(np.argsort(values)) for values in (first, second))
    return float(np.corrcoef(one, other)[0, 1])
