"""Repeat ``make run`` with more seeds: learned weight decay and MAP.

Each run is ``evigrad train --config experiments/NAME.yaml --seed SEED``, in its own folder. The
script stores every finished run and resumes where it was stopped.

    python benchmarks/first_run.py --results docs/results --pages docs/results.md
"""

import json
import math
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from learning import Result, Results, make_parser, parse
from measure import show, summaries, with_error

from evigrad.cli import main as evigrad
from evigrad.data import load

CONFIGURATIONS = Path(__file__).parents[1] / "experiments"
NAMES = ("mnist5k", "autompg")
WAYS = ("MAP", "learned")
LABELS = {"MAP": "weight decay 5e-4", "learned": "evigrad"}
KEYS = ("log_likelihood", "accuracy", "rmse", "seconds")
COLUMNS = ("row", "seed", *KEYS, "threads")


def run(name: str, seed: int, threads: int) -> dict[str, Result]:
    """Return the columns of both rows of a seed. RMSE is in miles per gallon."""
    with TemporaryDirectory() as folder:
        config = CONFIGURATIONS / f"{name}.yaml"
        options = ["--seed", str(seed), "--run-dir", folder, "--threads", str(threads)]
        if evigrad(["train", "--config", str(config), *options, "--no-progress"]):
            raise SystemExit(f"{name}, seed {seed} failed.")
        results: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
    columns_by_way = {}
    for way, result in zip(WAYS, results.values(), strict=True):
        test, rmse = result["test"], None
        if "squared_error" in test:
            std = load(name, seed=seed).target_std  # the seed chooses the split
            assert std is not None
            rmse = math.sqrt(test["squared_error"]) * std.item()
        columns = {"log_likelihood": test["log_likelihood"], "accuracy": test.get("accuracy")}
        columns_by_way[way] = columns | {"rmse": rmse, "seconds": result["seconds"]}
    return columns_by_way


def table_of(runs: list[Result]) -> str:
    """Return the means over the seeds, as Markdown."""
    lines = [
        "| data | method | test log likelihood | accuracy, %, or RMSE in miles per gallon | seconds"
        " | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, way in product(NAMES, WAYS):
        row_runs = [run for run in runs if run["row"] == f"{name}: {way}"]
        if not row_runs:
            continue
        key, factor, digits = (
            ("accuracy", 100, 1) if row_runs[0]["rmse"] is None else ("rmse", 1, 2)
        )
        (r,) = summaries(row_runs, [f"{name}: {way}"], ("log_likelihood", key, "seconds"))
        cells = [
            name,
            LABELS[way],
            with_error(r["log_likelihood"], r["log_likelihood_error"], 3),
            with_error(factor * r[key], factor * r[f"{key}_error"], digits),
            f"{r['seconds']:.0f}",
            r["seed_spans"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=NAMES, default=NAMES)
    options = parse(parser, arguments)
    results = Results(options.results / "first_run.csv", COLUMNS)
    for seed, name in product(options.seeds, options.sets):
        if results.has(f"{name}: {WAYS[-1]}", seed):
            continue
        for way, columns in run(name, seed, options.threads).items():
            common = {"row": f"{name}: {way}", "seed": seed, "threads": options.threads}
            results.add(common | columns)
    show("first_run", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
