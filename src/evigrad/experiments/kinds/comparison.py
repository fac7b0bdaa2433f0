"""Methods in a table, blocks of them on several data sets, beside the paper's numbers."""

from collections.abc import Mapping
from typing import Any

from evigrad.experiments.cases import Case, Mean, Row
from evigrad.experiments.definition import Experiment
from evigrad.experiments.plan import final_numbers, training, with_estimate
from evigrad.experiments.tables import Column, Table

_BLOCKS = 20
# Key of a row: the paper's row that it takes the place of.
STANDS_FOR = "stands_for"
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
            for label, row in content["rows"].items():
                options = {key: value for key, value in row.items() if key != STANDS_FOR}
                for seed in content.get("seeds", experiment.seeds):
                    trained = training(
                        shared, content.get("training", {}), {"data": data}, options, seed=seed
                    )
                    keys = {"block": block, "data_set": data_set, "label": label}
                    found.append(Case(keys, seed, with_estimate(trained, _BLOCKS), _read))
    return found


def _read(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return final_numbers(results) | {"weights": float(results["train"]["num_weights"])}


def table(experiment: Experiment, rows: list[Row]) -> Table:
    """A row for each method; for each data set ours and, behind it, the paper's.

    The paper's methods that ours have none of come last in their block.

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
            Column(f"{data_set}: {_time_in_words(experiment)}", 0),
            Column(f"{data_set}: the paper's (evidence, log likelihood, accuracy, time)"),
        ]
    cells, groups = [], []
    for block, content in experiment.take("blocks").items():
        standard = content.get("yardstick", experiment.content.get("yardstick"))
        done = dict.fromkeys(row["label"] for row in rows if row["block"] == block)
        ours = {label: content["rows"][label].get(STANDS_FOR, label) for label in done}
        theirs = dict.fromkeys(
            name for known in _paper(experiment, block).values() for name in known
        )
        lines = [*ours.items(), *((name, name) for name in theirs if name not in ours.values())]
        for label, name in lines if done else ():
            all_found = {data_set: _find(rows, block, data_set, label) for data_set in data_sets}
            known = [row["weights"].mean for row in all_found.values() if row is not None]
            line: list[Any] = [block, label, f"{max(known):,.0f}" if known else None]
            for data_set, found in all_found.items():
                yardstick = _find(rows, block, data_set, standard)
                line += [None if found is None else found[number] for number in _NUMBERS]
                line.append(_time(found, yardstick, is_relative=standard is not None))
                line.append(_of_the_paper(experiment, block, data_set, name))
            cells.append(line)
            groups.append(block)
    return Table(columns, cells, groups)


def _time_in_words(experiment: Experiment) -> str:
    shared = experiment.content.get("yardstick")
    own = (block.get("yardstick", shared) for block in experiment.take("blocks").values())
    standards = dict.fromkeys(each for each in own if each is not None)
    return f"time, % of {', '.join(standards)}" if standards else "seconds"


def _paper(experiment: Experiment, block: str) -> Mapping[str, Mapping[str, Any]]:
    return experiment.content.get("paper", {}).get(block, {})


def _find(rows: list[Row], block: str, data_set: str, label: str | None) -> Row | None:
    wanted = (block, data_set, label)
    return next((r for r in rows if (r["block"], r["data_set"], r["label"]) == wanted), None)


def _time(row: Row | None, yardstick: Row | None, *, is_relative: bool) -> Mean | None:
    if row is None or (is_relative and yardstick is None):
        return None
    if yardstick is None:
        return row["seconds"]
    share = 100 / yardstick["seconds"].mean
    return Mean(share * row["seconds"].mean, share * row["seconds"].error, row["seconds"].count)


def _of_the_paper(experiment: Experiment, block: str, data_set: str, label: str) -> str:
    numbers = _paper(experiment, block).get(data_set, {}).get(label)
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
    of_paper = dict.fromkeys(
        name for block in experiment.take("blocks") for name in _paper(experiment, block)
    )
    if left := [name for name in of_paper if name not in experiment.take("data_sets")]:
        found.append(f"Not run: {', '.join(left)}.")
    return found
