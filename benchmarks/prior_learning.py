"""Does learning the weight decay by the evidence pay? MAP, a grid search, and the estimators.

Each row trains from the same initial weights on the same data, by the same schedule:

* ``map-none``: maximum likelihood, no decay; ``map-5e-4``: the usual weight decay;
* ``grid``: one decay for all weights, the best of seven by the log likelihood of a fifth of the
  training data held out, then trained again on all of it; its seconds are those of all eight runs;
* the estimators: layerwise prior precisions learned during training, no held-out data.

The log evidence is evaluated afterwards with one common, tight bound. The test set is only
evaluated. Every run is kept in the folder of results as it ends, so that the script goes on where
it was stopped; settings and grid are below, fixed beforehand.

    python benchmarks/prior_learning.py --data mnist --data-dir DIR --seeds 0 1 2
    python benchmarks/prior_learning.py --data mnist --table
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import insert, summaries, write_csv

import evigrad
from evigrad.data import DataSet, load
from evigrad.models import make_model
from evigrad.training import evaluate_evidence

DECAYS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
VALIDATION = 0.2
NO_DECAY = 1e-10  # a Gaussian prior needs a positive precision; this one is none in float32
ESTIMATORS = (
    *("ntk-100-1", "ntk-150-1", "ntk-400-1", "ntk-150-rows-anchored", "ntk-400-rows-anchored"),
    *("kfac-150-1", "kfac-400-1", "kfac-N-C", "ntk-N-1"),
)
ROWS = ("map-none", "map-5e-4", "grid", *ESTIMATORS)
KEYS = ("log_evidence", "log_likelihood", "accuracy", "seconds")


@dataclass(frozen=True)
class Problem:
    """A data set with its network and the paper's schedule."""

    model: str
    subset: int | None
    epochs: int
    judge: str


PROBLEMS = {
    "digits": Problem("digitsnet", None, 200, "ntk-200-C"),
    "mnist": Problem("mininet", 1000, 500, "ntk-250-C"),
}
SCHEDULE: dict[str, Any] = {
    "batch_size": 250,
    "optimizer": "adam",
    "lr": 1e-3,
    "lr_min": 1e-9,
    "burn_in": 10,
    "every": 5,
    "steps": 10,
    "prior_lr": 0.1,
    "prior_lr_min": 0.01,
    "progress": False,
}


def train(problem: Problem, data: DataSet, seed: int, parts: Any = None, **options: Any) -> Any:
    """One run from the seed's initial weights; ``parts`` replaces (train, test)."""
    train_set, test_set = parts or (data.train, data.test)
    model = make_model(problem.model, data.input_shape, data.num_outputs, seed=seed)
    return evigrad.fit(
        model,
        train_set,
        test=test_set,
        likelihood=data.likelihood,
        seed=seed,
        epochs=problem.epochs,
        **SCHEDULE,
        **options,
    )


def run_map(problem: Problem, data: DataSet, seed: int, decay: float, parts: Any = None) -> Any:
    """MAP at one weight decay: a precision of decay · N in the loss's units."""
    n = len((parts or (data.train,))[0][0])
    return train(problem, data, seed, parts, estimator=None, prior="scalar", precision=decay * n)


def run_row(problem: Problem, data: DataSet, seed: int, row: str) -> dict[str, Any]:
    """One row of the table for one seed."""
    extra: dict[str, Any] = {}
    searched = 0.0
    if row == "grid":
        part, held_out = data.split_validation(VALIDATION, seed)
        runs = {d: run_map(problem, data, seed, d, (part, held_out)) for d in DECAYS}
        scores = {decay: run.test_metrics["log_likelihood"] for decay, run in runs.items()}
        searched = sum(run.seconds for run in runs.values())
        best = max(scores, key=scores.__getitem__)
        extra = {"decay": best, "validation": {str(d): s for d, s in scores.items()}}
        result = run_map(problem, data, seed, best)
    elif row.startswith("map-"):
        decay = NO_DECAY if row == "map-none" else float(row.removeprefix("map-"))
        result = run_map(problem, data, seed, decay)
    else:
        result = train(problem, data, seed, estimator=row, prior="layerwise", precision=1.0)
        precisions = result.evidence.prior.precisions()
        extra = {"precisions": {name: p.item() for name, p in precisions.items()}}
    evidence = float("nan")
    if row != "map-none":  # without a prior there is no evidence
        judged = evaluate_evidence(result.evidence, data.train, problem.judge)
        evidence = judged.per_datum
    return {
        "row": row,
        "seed": seed,
        "seconds": searched + result.seconds,
        "log_evidence": evidence,
        "log_likelihood": result.test_metrics["log_likelihood"],
        "accuracy": result.test_metrics["accuracy"],
        "threads": torch.get_num_threads(),
        **extra,
    }


def write_table(name: str, results: list[dict[str, Any]], folder: Path) -> str:
    """The table as CSV in the folder; returns it as Markdown."""
    rows = summaries(results, ROWS, KEYS)
    write_csv(folder / f"prior_learning_{name}.csv", rows)
    baseline = next((r["seconds"] for r in rows if r["row"] == "map-5e-4"), math.nan)
    lines = [
        "| | test log likelihood | test accuracy, % | log evidence per datum"
        " | seconds | × MAP | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        evidence = "–"
        if not math.isnan(r["log_evidence"]):
            evidence = f"{r['log_evidence']:.3f} ± {r['log_evidence_error']:.3f}"
        lines.append(
            f"| {r['row']} | {r['log_likelihood']:.3f} ± {r['log_likelihood_error']:.3f}"
            f" | {100 * r['accuracy']:.1f} ± {100 * r['accuracy_error']:.1f} | {evidence}"
            f" | {r['seconds']:.0f} | {r['seconds'] / baseline:.1f} | {r['seeds']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", choices=sorted(PROBLEMS), default="digits")
    parser.add_argument("--data-dir", default=None, help="folder with NAME_train.parquet files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("results/prior_learning"))
    parser.add_argument("--tables", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--table", action="store_true", help="only print the table of what is there"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    problem = PROBLEMS[arguments.data]
    folder = arguments.results / arguments.data
    folder.mkdir(parents=True, exist_ok=True)
    for seed in [] if arguments.table else arguments.seeds:
        data = load(arguments.data, data_dir=arguments.data_dir, subset=problem.subset, seed=seed)
        for row in arguments.rows:
            path = folder / f"{row}-{seed}.json"
            if path.exists():
                continue
            result = run_row(problem, data, seed, row)
            path.write_text(json.dumps(result, indent=1))
            print({k: v for k, v in result.items() if not isinstance(v, dict)}, flush=True)
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    table = write_table(arguments.data, results, arguments.tables)
    print(table)
    for page in (Path("README.md"), Path("docs/results.md")):
        if page.exists():
            insert(page, f"prior_learning {arguments.data}", table)


if __name__ == "__main__":
    main()
