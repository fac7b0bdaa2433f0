"""Trainings on data sets of several sizes and variants (Figure 7 and the Appendix)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments import figures
from experiments.cases import Case, Row
from experiments.definition import Experiment, Options
from experiments.jobs import OVER_SUBSETS, final_numbers, training, with_estimate
from experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLOCKS = 20  # number of blocks whose mean is the final estimate
_QUANTITIES = {
    "log_evidence": "log evidence\n(nats per example)",
    "log_likelihood": "test log likelihood\n(nats per example)",
    "accuracy": "test accuracy (%)",
}


@dataclass(frozen=True, kw_only=True)
class Subsets(Experiment):
    """Evidence, test log likelihood and accuracy against the number of training examples.

    Attributes:
        sizes: Numbers of training examples.
        variants: Label to data set.
        rows: Label to options of its trainings.
    """

    sizes: list[int]
    variants: dict[str, str]
    rows: dict[str, Options]

    def cases(self) -> list[Case]:
        """Return a training for each variant, row, size and seed."""
        cases = []
        for variant, data in self.variants.items():
            for label, options in self.rows.items():
                for size in self.sizes:
                    for seed in self.seeds:
                        data_options = {"data": data, "subset": size}
                        trained = training(self.training, options, data_options, seed=seed)
                        keys = {"variant": variant, "label": label, "size": size}
                        jobs = with_estimate(trained, _BLOCKS)
                        cases.append(Case(keys, seed, jobs, final_numbers))
        return cases

    def figure(self, rows: list[Row]) -> "Figure | None":
        """Return evidence, test log likelihood and accuracy over the sizes, if there are several.

        Each variant has a column of panels.
        """
        if len({row["size"] for row in rows}) == 1:
            return None  # the table shows it better
        variants = [v for v in self.variants if any(row["variant"] == v for row in rows)]
        columns = {v: [row for row in rows if row["variant"] == v] for v in variants}
        looks = {"reference": self.reference, "ordered": self.ordered}
        grid = [
            [
                figures.Panel(
                    variant if down == 0 else "",
                    "training examples" if down == len(_QUANTITIES) - 1 else "",
                    "" if variant != variants[0] else unit,
                    [
                        _curve(label, method_rows, name)
                        for label, method_rows in _by_label(variant_rows).items()
                    ],
                    log=True,
                )
                for variant, variant_rows in columns.items()
            ]
            for down, (name, unit) in enumerate(_QUANTITIES.items())
        ]
        return figures.panels(grid, size=(3.6, 2.5), shared=True, markers=True, **looks)

    def table(self, rows: list[Row]) -> Table:
        """Return a row for each point of the figure."""
        columns = [
            Column("variant"),
            Column("N", digits=0),
            Column("method"),
            Column("log evidence", best="high"),
            Column(OVER_SUBSETS),
            Column("test log likelihood", best="high"),
            Column("test accuracy, %", digits=1, best="high"),
            Column("seconds", digits=None),
        ]
        evidence, *others = _QUANTITIES
        numbers = [evidence, OVER_SUBSETS, *others, "seconds"]
        ordered = sorted(rows, key=lambda r: (list(self.variants).index(r["variant"]), r["size"]))
        cells = [
            [r["variant"], str(r["size"]), r["label"], *(r[number] for number in numbers)]
            for r in ordered
        ]
        return Table(columns, cells, [f"{r['variant']} {r['size']}" for r in ordered])


def _curve(label: str, rows: list[Row], name: str) -> figures.Curve:
    """Return a quantity of a method over the sizes of its rows."""
    sizes, numbers = [row["size"] for row in rows], [row[name] for row in rows]
    return figures.Curve(label, sizes, [n.mean for n in numbers], [n.error for n in numbers])


def _by_label(rows: list[Row]) -> dict[str, list[Row]]:
    labels = dict.fromkeys(row["label"] for row in rows)
    return {label: [row for row in rows if row["label"] == label] for label in labels}
