"""Methods in a table, blocks of them on several data sets, beside the paper's numbers."""

from collections.abc import Mapping
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
                    found.append(Case(keys, seed, with_estimate(trained, _BLOCKS), _read))
    return found


def _read(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return final_numbers(results) | {"weights": float(results["train"]["num_weights"])}


def table(experiment: Experiment, rows: list[Row]) -> Table:
    """A row for each method; for each data set ours and, behind it, the paper's.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        The table.
    """
    data_sets = list(dict.fromkeys(row["data_set"] for row in rows))
    columns = [Column(""), Column("method"), Column("weights")]
    for data_set in data_sets:
        columns += [
            Column(f"{data_set}: log evidence", 2, best="high"),
            Column(f"{data_set}: test log likelihood", 2, best="high"),
            Column(f"{data_set}: accuracy, %", 1, best="high"),
            Column(f"{data_set}: time, % of {experiment.take('yardstick')}", 0),
            Column(f"{data_set}: the paper's (evidence, log likelihood, accuracy, time)"),
        ]
    cells, groups = [], []
    for block, label in dict.fromkeys((row["block"], row["label"]) for row in rows):
        weights = max(r["weights"].mean for r in rows if (r["block"], r["label"]) == (block, label))
        line: list[Any] = [block, label, f"{weights:,.0f}"]
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
    """How the table is to be read.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        What is bold, whose evidence it is, and which data sets the preset leaves out.
    """
    found = [
        "The log evidence is each estimator's own estimate: a looser bound reports less of it.",
        "Bold: the best of a block, and what overlaps with it within standard errors. Numbers of"
        " one seed have none, and are not bold.",
    ]
    done = {row["data_set"] for row in rows}
    left = dict.fromkeys(
        name for of_block in experiment.content.get("paper", {}).values() for name in of_block
    )
    if missing := [name for name in left if name not in done]:
        found.append(f"Not run: {', '.join(missing)}.")
    return found
