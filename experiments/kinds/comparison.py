"""Tables of methods: blocks of methods on several data sets, with the paper's numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from experiments.cases import Case, Mean, Row
from experiments.definition import Experiment, Options
from experiments.jobs import final_numbers, training, with_estimate
from experiments.tables import Column, Table

_BLOCKS = 20  # number of blocks whose mean is the final estimate
# Key of a row: the label of the paper's row whose numbers are shown next to it.
_STANDS_FOR = "stands_for"
_NUMBERS = ("log_evidence", "log_likelihood", "accuracy")


@dataclass(frozen=True, kw_only=True)
class Block:
    """Methods that are compared with each other.

    Attributes:
        rows: Label of a method to options of its trainings, and optionally ``stands_for``.
        training: Options of all trainings of the block.
        seeds: Seeds. Default: the seeds of the experiment.
        yardstick: Row that times relate to. Default: the yardstick of the experiment.
    """

    rows: dict[str, Options]
    training: Options = field(default_factory=dict)
    seeds: list[int] | None = None
    yardstick: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison(Experiment):
    """Methods on data sets.

    Attributes:
        blocks: Blocks by name.
        data_sets: Label to data set.
        yardstick: Row that times relate to. None for seconds.
        paper: Block, data set and method to the paper's numbers: evidence, log likelihood,
            accuracy, time.
    """

    blocks: dict[str, Block]
    data_sets: dict[str, str]
    yardstick: str | None = None
    paper: dict[str, dict[str, dict[str, list[Any]]]] = field(default_factory=dict)

    def cases(self) -> list[Case]:
        """Return a training for each block, data set, row and seed."""
        cases = []
        for name, block in self.blocks.items():
            for data_set, data in self.data_sets.items():
                for label, row in block.rows.items():
                    row_options = _training_options(row)
                    options = (self.training, block.training, {"data": data}, row_options)
                    for seed in block.seeds or self.seeds:
                        trained = training(*options, seed=seed)
                        keys = {"block": name, "data_set": data_set, "label": label}
                        jobs = with_estimate(trained, _BLOCKS)
                        cases.append(Case(keys, seed, jobs, final_numbers))
        return cases

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """Return the experiment with other seeds, also in blocks with their own seeds."""
        blocks = {name: replace(block, seeds=None) for name, block in self.blocks.items()}
        return replace(self, seeds=list(seeds), blocks=blocks)

    def table(self, rows: list[Row]) -> Table:
        """Return a row per method, with our numbers and the paper's for each data set.

        Methods that only the paper has come last in their block.
        """
        rows_by_key = {(row["block"], row["data_set"], row["label"]): row for row in rows}
        data_sets = list(dict.fromkeys(row["data_set"] for row in rows))
        standards = {n: block.yardstick or self.yardstick for n, block in self.blocks.items()}
        named = ", ".join(dict.fromkeys(name for name in standards.values() if name))
        time = f"time, % of {named}" if named else "seconds"
        columns = [Column("block"), Column("method"), Column("weights")]
        for data_set in data_sets:
            columns += [
                Column(f"{data_set}: log evidence", 2, best="high"),
                Column(f"{data_set}: test log likelihood", 2, best="high"),
                Column(f"{data_set}: accuracy, %", 1, best="high"),
                Column(f"{data_set}: {time}", 0),
                Column(f"{data_set}, the paper: evidence, log likelihood, accuracy, time"),
            ]
        cells: list[list[Any]] = []
        for name, block in self.blocks.items():
            ours = {
                label: row.get(_STANDS_FOR, label)
                for label, row in block.rows.items()
                if any((name, data_set, label) in rows_by_key for data_set in data_sets)
            }
            theirs = dict.fromkeys(
                m for methods in self.paper.get(name, {}).values() for m in methods
            )
            others = {label: label for label in theirs if label not in ours.values()}
            for label, paper_label in (ours | others if ours else {}).items():
                method_rows = [rows_by_key.get((name, data_set, label)) for data_set in data_sets]
                weights = max((row["weights"].mean for row in method_rows if row), default=None)
                line = [name, label, None if weights is None else f"{weights:,.0f}"]
                for data_set, row in zip(data_sets, method_rows, strict=True):
                    line += [row and row[number] for number in _NUMBERS]
                    yardstick = rows_by_key.get((name, data_set, standards[name] or ""))
                    line.append(_time(row, standards[name], yardstick))
                    line.append(self._of_the_paper(name, data_set, paper_label))
                cells.append(line)
        return Table(columns, cells, [line[0] for line in cells])

    def _of_the_paper(self, block: str, data_set: str, label: str) -> str:
        numbers = self.paper.get(block, {}).get(data_set, {}).get(label)
        return "–" if numbers is None else ", ".join("–" if n is None else str(n) for n in numbers)

    def remarks(self, rows: list[Row]) -> list[str]:
        """Return remarks on bold numbers, on the evidence, and on omitted data sets."""
        remarks = [
            "Each estimator reports its own log evidence. Looser bounds report lower values.",
            "Bold: the best of a block, and all that overlap with it within standard errors."
            " Results of one seed have no standard error and are not bold.",
        ]
        paper_data_sets = dict.fromkeys(
            data_set for block in self.blocks for data_set in self.paper.get(block, {})
        )
        if left := [name for name in paper_data_sets if name not in self.data_sets]:
            remarks.append(f"Not run: {', '.join(left)}.")
        return remarks


def _training_options(row: Options) -> Options:
    return {key: value for key, value in row.items() if key != _STANDS_FOR}


def _time(row: Row | None, standard: str | None, yardstick: Row | None) -> Mean | None:
    """Return seconds of a training, or percent of the yardstick if there is one."""
    if row is None or (standard is not None and yardstick is None):
        return None
    share = 1.0 if yardstick is None else 100 / yardstick["seconds"].mean
    seconds = row["seconds"]
    return Mean(share * seconds.mean, share * seconds.error, seconds.count)
