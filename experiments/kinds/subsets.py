"""Trainings on data sets of several sizes and variants (Figure 7 and its plots in the Appendix)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evigrad import plots
from experiments.cases import Case, Row
from experiments.definition import Experiment, Options
from experiments.jobs import final_numbers, training, with_estimate
from experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLOCKS = 20  # that an estimate at the end is the mean of
_QUANTITIES = {
    "log_evidence": "log marginal likelihood\n(nats per datum)",
    "log_likelihood": "test log likelihood\n(nats per datum)",
    "accuracy": "test accuracy (%)",
}


@dataclass(frozen=True, kw_only=True)
class Subsets(Experiment):
    """Evidence, test log likelihood and accuracy over the number of training data.

    Attributes:
        sizes: Of the training data.
        variants: Label to data set.
        rows: Label to options of its trainings.
    """

    sizes: list[int]
    variants: dict[str, str]
    rows: dict[str, Options]

    def cases(self) -> list[Case]:
        """A training for each variant, row, size and seed."""
        found = []
        for variant, data in self.variants.items():
            for label, options in self.rows.items():
                for size in self.sizes:
                    for seed in self.seeds:
                        own = {"data": data, "subset": size}
                        trained = training(self.training, options, own, seed=seed)
                        keys = {"variant": variant, "label": label, "size": size}
                        jobs = with_estimate(trained, _BLOCKS)
                        found.append(Case(keys, seed, jobs, final_numbers))
        return found

    def own_settings(self) -> list[tuple[str, Options]]:
        """Those of the rows."""
        return list(self.rows.items())

    def figure(self, rows: list[Row]) -> "Figure":
        """Variants side by side; evidence, test log likelihood and accuracy one below the other."""
        columns = {v: [row for row in rows if row["variant"] == v] for v in self.variants}
        columns = {variant: found for variant, found in columns.items() if found}
        grid = [
            [
                plots.Panel(
                    variant if down == 0 else "",
                    "training data" if down == len(_QUANTITIES) - 1 else "",
                    "" if variant != next(iter(columns)) else unit,
                    [
                        plots.Curve(
                            label,
                            [row["size"] for row in found if row["label"] == label],
                            [row[name].mean for row in found if row["label"] == label],
                            [row[name].error for row in found if row["label"] == label],
                        )
                        for label in dict.fromkeys(row["label"] for row in found)
                    ],
                    log=True,
                )
                for variant, found in columns.items()
            ]
            for down, (name, unit) in enumerate(_QUANTITIES.items())
        ]
        looks = {"reference": self.reference, "ordered": self.ordered}
        return plots.panels(grid, size=(3.6, 2.5), shared=True, markers=True, **looks)

    def table(self, rows: list[Row]) -> Table:
        """A row for each point of the figure."""
        columns = [
            Column("variant"),
            Column("N", digits=0),
            Column("method"),
            Column("log evidence", best="high"),
            Column("test log likelihood", best="high"),
            Column("test accuracy, %", digits=1, best="high"),
            Column("seconds", digits=None),
        ]
        ordered = sorted(rows, key=lambda r: (list(self.variants).index(r["variant"]), r["size"]))
        cells = [
            [r["variant"], str(r["size"]), r["label"], *(r[n] for n in _QUANTITIES), r["seconds"]]
            for r in ordered
        ]
        return Table(columns, cells, [f"{r['variant']} {r['size']}" for r in ordered])
