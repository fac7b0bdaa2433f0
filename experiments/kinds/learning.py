"""Trainings over their epochs, by many estimators (the training figures of the Appendix)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from evigrad import plots
from experiments.cases import Case, Mean, Row
from experiments.definition import Experiment, Options
from experiments.jobs import training
from experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Learning(Experiment):
    """Quantities over the epochs.

    Attributes:
        quantities: Name of a metric to the words of its axis.
        groups: Columns of the figure: estimators with their labels.
        exceptions: Estimator to options that its trainings have alone.
    """

    quantities: dict[str, str]
    groups: dict[str, dict[str, str | None]]
    exceptions: dict[str, Options] = field(default_factory=dict)

    def cases(self) -> list[Case]:
        """A training for each group, estimator and seed."""
        found = []
        for group, estimators in self.groups.items():
            for name, label in estimators.items():
                options = (self.training, {"estimator": name}, self.exceptions.get(name, {}))
                keys = {"group": group, "estimator": name, "label": label or name}
                for seed in self.seeds:
                    jobs = {"train": training(*options, seed=seed)}
                    found.append(Case(keys, seed, jobs, self._read))
        return found

    def remarks(self, rows: list[Row]) -> list[str]:
        """What its log evidence is."""
        if "log_evidence" not in self.quantities:
            return []
        return [
            "The log evidence is that of each step, of one subset where there are several; the"
            " figure leaves out its lowest values."
        ]

    def own_settings(self) -> list[tuple[str, Options]]:
        """Those of the exceptions."""
        known = {name for estimators in self.groups.values() for name in estimators}
        return [item for item in self.exceptions.items() if item[0] in known]

    def _read(self, results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        trained = results["train"]
        known = {n: trained["history"][n] for n in self.quantities if n in trained["history"]}
        found = {name: column["value"] for name, column in known.items()}
        found |= {f"{name} epochs": column["epoch"] for name, column in known.items()}
        return found | {"final": trained["test"]["log_likelihood"], "seconds": trained["seconds"]}

    def figure(self, rows: list[Row]) -> "Figure":
        """Groups side by side, quantities one below the other."""
        columns = {group: [row for row in rows if row["group"] == group] for group in self.groups}
        columns = {group: found for group, found in columns.items() if found}
        grid = [
            [
                plots.Panel(
                    group if down == 0 else "",
                    "epoch" if down == len(self.quantities) - 1 else "",
                    "" if group != next(iter(columns)) else unit,
                    [
                        plots.Curve(
                            row["label"],
                            row[f"{name} epochs"].mean,
                            row[name].mean,
                            row[name].error,
                        )
                        for row in found
                        if name in row
                    ],
                    clipped=name == "log_evidence",
                )
                for group, found in columns.items()
            ]
            for down, (name, unit) in enumerate(self.quantities.items())
        ]
        looks = {"reference": self.reference, "ordered": self.ordered}
        return plots.panels(grid, size=(3.6, 2.5), shared=True, **looks)

    def table(self, rows: list[Row]) -> Table:
        """Where each training ended, in the order of the legend."""
        names = [name for name in self.quantities if name != "test_log_likelihood"]
        columns = [
            Column("estimators"),
            Column("estimator"),
            *(Column(f"{name.replace('_', ' ')} at the end") for name in names),
            Column("test log likelihood", best="high"),
            Column("seconds", digits=0),
        ]
        ordered = self.in_order(rows, "group", list(self.groups))
        cells = [
            [r["group"], r["label"], *(_last(r.get(n)) for n in names), r["final"], r["seconds"]]
            for r in ordered
        ]
        return Table(columns, cells, [row["group"] for row in ordered])


def _last(value: Mean | None) -> Mean | None:
    return None if value is None else Mean(value.mean[-1], value.error[-1], value.count)
