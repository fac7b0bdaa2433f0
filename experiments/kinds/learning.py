"""Quantities over the epochs of trainings by several estimators (figures of the Appendix)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from evigrad.errors import ConfigurationError
from experiments import figures
from experiments.cases import Case, Mean, Row
from experiments.definition import Experiment, Options
from experiments.jobs import BLOCKS, OVER_SUBSETS, RANGE, is_kept, training, with_estimate
from experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Learning(Experiment):
    """Quantities over the epochs.

    Attributes:
        quantities: Name of a metric to the label of its axis.
        groups: Columns of the figure: estimators with their labels.
        exceptions: Estimator to options that only its trainings have.
    """

    quantities: dict[str, str]
    groups: dict[str, dict[str, str | None]]
    exceptions: dict[str, Options] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.quantities:
            if not is_kept(name):
                raise ConfigurationError(
                    f"The experiment {self.name} draws '{name}', which its trainings do not keep"
                    f" of all epochs. They keep log_evidence, test_…, train_… and {RANGE}…."
                )

    def cases(self) -> list[Case]:
        """Return a training and its final estimate for each group, estimator and seed."""
        cases = []
        for group, estimators in self.groups.items():
            for name, label in estimators.items():
                options = (self.training, {"estimator": name}, self.exceptions.get(name, {}))
                keys = {"group": group, "estimator": name, "label": label or name}
                for seed in self.seeds:
                    jobs = with_estimate(training(*options, seed=seed), BLOCKS)
                    cases.append(Case(keys, seed, jobs, self._read))
        return cases

    def remarks(self, rows: list[Row]) -> list[str]:
        """Return remarks on the log evidence, and on estimators with other settings."""
        remarks = []
        for group in self.groups:
            in_group = [row for row in rows if row["group"] == group]
            labels = [row["label"] for row in in_group if row["estimator"] in self.exceptions]
            if labels:
                remarks.append(f"Estimators with other settings in *{group}*: {', '.join(labels)}.")
        if "log_evidence" in self.quantities:
            remarks.append(
                "The figure shows the mean log evidence over the steps of a round, without the"
                " lowest values. The table shows the estimate after training, over at most"
                f" {BLOCKS} subsets. It is exact for estimators on all data."
            )
        return remarks

    def _read(self, results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        trained = results["train"]
        numbers: dict[str, Any] = {"final": trained["test"]["log_likelihood"]}
        numbers |= {"seconds": trained["seconds"]}
        if "estimate" in results:
            numbers["estimate"] = results["estimate"]["per_datum"]
            numbers[OVER_SUBSETS] = results["estimate"]["sem"]
        for name, column in trained["history"].items():
            if name in self.quantities:
                # Epochs may differ between seeds, for example if a step was skipped.
                numbers[name] = np.full(trained["epochs"], np.nan)
                numbers[name][np.array(column["epoch"]) - 1] = column["value"]
        return numbers

    def figure(self, rows: list[Row]) -> "Figure":
        """Return groups side by side, with quantities below each other."""
        groups = [group for group in self.groups if any(row["group"] == group for row in rows)]
        columns = {group: [row for row in rows if row["group"] == group] for group in groups}
        grid = [
            [
                figures.Panel(
                    group if down == 0 else "",
                    "epoch" if down == len(self.quantities) - 1 else "",
                    "" if group != groups[0] else unit,
                    [
                        figures.Curve(
                            row["label"],
                            range(1, len(row[name].mean) + 1),
                            row[name].mean,
                            row[name].error,
                        )
                        for row in group_rows
                        if name in row
                    ],
                    clipped=name == "log_evidence",
                )
                for group, group_rows in columns.items()
            ]
            for down, (name, unit) in enumerate(self.quantities.items())
        ]
        looks = {"reference": self.reference, "ordered": self.ordered}
        return figures.panels(grid, size=(3.6, 2.5), shared=True, **looks)

    def table(self, rows: list[Row]) -> Table:
        """Return the final numbers of each training, in the order of the legend."""
        others = ("log_evidence", "test_log_likelihood")
        names = [name for name in self.quantities if name not in others]
        columns = [
            Column("group"),
            Column("estimator"),
            Column("log evidence, own estimate"),
            Column(OVER_SUBSETS),
            *(Column(f"{name.replace('_', ' ')} at the end") for name in names),
            Column("test log likelihood", best="high"),
            Column("seconds", digits=None),
        ]
        ordered = self.in_order(rows, "group", list(self.groups))
        cells = [
            [
                *(r["group"], r["label"], r.get("estimate"), r.get(OVER_SUBSETS)),
                *(_last(r.get(name)) for name in names),
                *(r["final"], r["seconds"]),
            ]
            for r in ordered
        ]
        return Table(columns, cells, [row["group"] for row in ordered])


def _last(value: Mean | None) -> Mean | None:
    """Return the last value of a curve that is known for all seeds."""
    if value is None:
        return None
    finite = np.flatnonzero(np.isfinite(value.mean))
    if not len(finite):
        return None
    return Mean(value.mean[finite[-1]], value.error[finite[-1]], value.count)
