"""Methods in a table, blocks of them on several data sets, beside the paper's numbers."""

from typing import Any

from evigrad.experiments.cases import Case, Mean, Row
from evigrad.experiments.definition import Experiment
from evigrad.experiments.plan import final_numbers, training, with_estimate
from evigrad.experiments.tables import Column, Table

_BLOCKS = 20
_NUMBERS = ("log_evidence", "log_likelihood", "accuracy")


def cases(experiment: Experiment) -> list[Case]:
    """A training for each block, data set, row and seed.

    Args:
        experiment: Of this kind.

    Returns:
        The cases.
    """
    found = []
    shared = experiment.take("training")
    for block, content in experiment.take("blocks").items():
        for data_set, data in experiment.take("data_sets").items():
            for label, options in content["rows"].items():
                for seed in content.get("seeds", experiment.seeds):
                    trained = training(
                        shared, content["training"], {"data": data}, options, seed=seed
                    )
                    keys = {"block": block, "data_set": data_set, "label": label}
                    found.append(Case(keys, seed, with_estimate(trained, _BLOCKS), final_numbers))
    return found


def table(experiment: Experiment, rows: list[Row]) -> Table:
    """A row for each method; for each data set ours and, behind it, the paper's.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        The table.
    """
    data_sets = list(dict.fromkeys(row["data_set"] for row in rows))
    columns = [Column(""), Column("method")]
    for data_set in data_sets:
        columns += [
            Column(f"{data_set}: log evidence", 2),
            Column(f"{data_set}: test log likelihood", 2, best="high"),
            Column(f"{data_set}: accuracy, %", 1, best="high"),
            Column(f"{data_set}: time, % of {experiment.take('yardstick')}", 0),
            Column(f"{data_set}: the paper's (evidence, log likelihood, accuracy, time)"),
        ]
    cells, groups = [], []
    for block, label in dict.fromkeys((row["block"], row["label"]) for row in rows):
        line: list[Any] = [block, label]
        for data_set in data_sets:
            found = _find(rows, block, data_set, label)
            yardstick = _find(rows, block, data_set, experiment.take("yardstick"))
            line += [None if found is None else found[name] for name in _NUMBERS]
            line.append(_relative(found, yardstick))
            line.append(_of_the_paper(experiment, block, data_set, label))
        cells.append(line)
        groups.append(block)
    return Table(columns, cells, groups)


def _find(rows: list[Row], block: str, data_set: str, label: str) -> Row | None:
    wanted = (block, data_set, label)
    return next((r for r in rows if (r["block"], r["data_set"], r["label"]) == wanted), None)


def _relative(row: Row | None, yardstick: Row | None) -> Mean | None:
    if row is None or yardstick is None:
        return None
    share = 100 / yardstick["seconds"].mean
    return Mean(share * row["seconds"].mean, share * row["seconds"].error, row["seconds"].count)


def _of_the_paper(experiment: Experiment, block: str, data_set: str, label: str) -> str:
    numbers = experiment.content.get("paper", {}).get(block, {}).get(data_set, {}).get(label)
    return "–" if numbers is None else ", ".join("–" if n is None else str(n) for n in numbers)


def remarks(experiment: Experiment, rows: list[Row]) -> list[str]:
    """How bold is to be read.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        One sentence.
    """
    return ["Bold: the best of a block, and what overlaps with it within standard errors."]
