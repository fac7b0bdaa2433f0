"""Tightness against time of several estimators, each with its own training (Figure 1)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from evigrad.core.names import Estimator
from evigrad.errors import ConfigurationError
from experiments import figures
from experiments.cases import Case, Row
from experiments.definition import Experiment, Options
from experiments.jobs import BLOCKS, OVER_SUBSETS, RANGE, evaluation, timing, training
from experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Names:
    """All combinations of the parts of an estimator's name, and more names."""

    structures: list[str]
    subsets: list[int | str]
    outputs: list[int | str]
    more: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Pareto(Experiment):
    """Tightness against time.

    Attributes:
        estimators: Estimators to compare: names, or parts of names.
        exceptions: Estimator to options that only its trainings have.
        judge: Common estimator for all trained networks, for the table.
    """

    estimators: list[str] | Names
    exceptions: dict[str, Options] = field(default_factory=dict)
    judge: str | None = None

    def specs(self) -> dict[str, Estimator]:
        """Return the estimators to compare, by name."""
        names = self.estimators
        if isinstance(names, Names):
            combinations = product(names.structures, names.subsets, names.outputs)
            names = ["-".join(map(str, combination)) for combination in combinations] + names.more
        if not names:
            raise ConfigurationError(f"The experiment {self.name} names no estimators.")
        specs = map(Estimator.parse, names)
        return {spec.name: spec for spec in specs}

    def cases(self) -> list[Case]:
        """Return a training, its final estimate and its time for each estimator and seed."""
        cases = []
        for name in self.specs():
            for seed in self.seeds:
                exception = self.exceptions.get(name, {})
                trained = training(self.training, {"estimator": name}, exception, seed=seed)
                jobs = {
                    "train": trained,
                    "estimate": evaluation(trained, blocks=BLOCKS),
                    "time": timing(trained),
                }
                if self.judge is not None:
                    jobs["judge"] = evaluation(trained, self.judge)
                cases.append(Case({"estimator": name}, seed, jobs, _read))
        return cases

    def figure(self, rows: list[Row]) -> "Figure":
        """Return a point for each estimator, and the frontier. Full-batch estimators are black."""
        specs, points = self.specs(), []
        families = [specs[row["estimator"]].family for row in rows]
        many = Counter(group for group, _ in families)
        for row, (group, size) in zip(rows, families, strict=True):
            if specs[row["estimator"]].anchored:
                group += " (evigrad)"
            elif many[group] == 1:
                group = row["estimator"]
            x, y, hollow = row["seconds"], row["value"], row["estimator"] in self.exceptions
            points.append(
                figures.Point(group, size, x.mean, y.mean, y_error=y.error, hollow=hollow)
            )
        return figures.points(
            points,
            self.title,
            "seconds per estimate with gradient",
            "− log evidence, own estimate\n(nats per example)",
            reference=[name for name, spec in specs.items() if spec.is_full_batch],
            frontier=True,
        )

    def table(self, rows: list[Row]) -> Table:
        """Return times and values."""
        columns = [
            Column("estimator"),
            Column("− log evidence, own estimate"),
            Column(OVER_SUBSETS),
            Column("seconds per estimate with gradient", digits=4),
            Column("time, × training step", digits=1),
            Column("test log likelihood", best="high"),
        ]
        keys = ["value", OVER_SUBSETS, "seconds", "steps", "log_likelihood"]
        ranges = sorted({key for row in rows for key in row if key.startswith(RANGE)})
        columns += [Column(f"{name} at the end") for name in ranges]
        keys += ranges
        if self.judge is not None:
            columns.append(Column(f"− log evidence by {self.judge}", best="low"))
            keys.append("judge")
        columns.append(Column("on the frontier"))
        front = self._front(rows)
        cells = [
            [
                r["estimator"],
                *(r.get(key) for key in keys),
                "yes" if r["estimator"] in front else "",
            ]
            for r in rows
        ]
        return Table(columns, cells)

    def remarks(self, rows: list[Row]) -> list[str]:
        """Return the estimators on the frontier, and remarks on points and times."""
        remarks = [f"On the frontier, from fast to slow: {', '.join(self._front(rows))}."]
        specs, names = self.specs(), [row["estimator"] for row in rows]
        if any(name in self.exceptions for name in names):
            remarks.append(
                "Hollow markers: trained with the settings under `exceptions` in the file."
            )
        if any(specs[name].anchored for name in names):
            remarks.append(
                "Anchors are chosen every third round. The time of anchored rows includes their"
                " share of the choice."
            )
        return remarks

    def _front(self, rows: list[Row]) -> list[str]:
        points = [(row["seconds"].mean, row["value"].mean) for row in rows]
        return [rows[i]["estimator"] for i in figures.pareto_front(points)]


def _read(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    times = results["time"]
    numbers = {
        "seconds": times["estimate_seconds"],
        "steps": times["estimate_seconds"] / times["step_seconds"],
        "value": -results["estimate"]["per_datum"],
        OVER_SUBSETS: results["estimate"]["sem"],
        "log_likelihood": results["train"]["test"]["log_likelihood"],
    }
    if "judge" in results:
        numbers["judge"] = -results["judge"]["per_datum"]
    history = results["train"]["history"]
    return numbers | {n: history[n]["value"][-1] for n in history if n.startswith(RANGE)}
