"""Compare estimators that learn the weight decay with MAP and a grid search.

Each row trains from the same initial weights on the same data, by the same schedule:

* ``map-none``: maximum likelihood without weight decay. ``map-5e-4``: weight decay 5e-4.
* ``grid``: one decay for all weights, the best of seven by the log likelihood on 20 % held-out
  data, then trained again on all data. Its seconds cover all eight runs.
* the estimators: layerwise prior precisions learned during training, without held-out data.

The log evidence of all rows is evaluated after training. It is exact, for the linearized Laplace
approximation by all rows of all data. The test set is only evaluated. The script stores every
finished run and resumes where it was stopped. Settings and grid below were fixed before the first
run.

    python benchmarks/prior_learning.py --data mnist --data-dir DIR --seeds 0 1 2
    python benchmarks/prior_learning.py --data mnist --results docs/results --table
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from learning import JUDGE, Result, add_data_and_rows, make_parser, parse, run_and_show
from measure import summaries, with_error

import evigrad
from evigrad.data import DataSet
from evigrad.measure import evaluate_evidence
from evigrad.models import make_model
from evigrad.training.settings import grouped

DECAYS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
VALIDATION = 0.2
NO_DECAY = 1e-10  # a Gaussian prior needs a positive precision; this one has no effect in float32
ESTIMATORS = (
    *("ntk-100-1", "ntk-150-1", "ntk-400-1"),
    *("ntk-150-rows-anchored", "ntk-400-rows-anchored", "ntk-1000-rows-anchored"),
    *("kfac-150-1", "kfac-400-1", "kfac-N-C", "ntk-N-1"),
)
ROWS = ("map-none", "map-5e-4", "grid", *ESTIMATORS)
LABELS = {
    "map-none": "no weight decay",
    "map-5e-4": "weight decay 5e-4",
    "grid": "grid search",
}
KEYS = ("log_evidence", "log_likelihood", "accuracy", "seconds")
COLUMNS = ("row", "seed", *KEYS, "threads", "decay", "validation", "precisions")


@dataclass(frozen=True)
class Problem:
    """A data set with its network and the paper's schedule."""

    model: str
    subset: int | None
    epochs: int


PROBLEMS = {
    "digits": Problem("digitsnet", None, 200),
    "mnist": Problem("mininet", 1000, 500),
}
OF_ROUNDS = ("burn_in", "every", "steps", "prior_update", "prior_lr", "prior_lr_min")
SCHEDULE: dict[str, Any] = {
    "batch_size": 250,
    "optimizer": "adam",
    "lr": 1e-3,
    "lr_min": 1e-9,
    "burn_in": 10,
    "every": 5,
    "steps": 10,
    "prior_update": "adam",
    "prior_lr": 0.1,
    "prior_lr_min": 0.01,
    "progress": False,
}


def train(problem: Problem, data: DataSet, seed: int, parts: Any = None, **options: Any) -> Any:
    """Return one run from the initial weights of a seed. ``parts`` replaces (train, test)."""
    train_set, test_set = parts or (data.train, data.test)
    model = make_model(problem.model, data.input_shape, data.num_outputs, seed=seed)
    is_map = options.get("estimator", "") is None
    schedule = {n: v for n, v in SCHEDULE.items() if not (is_map and n in OF_ROUNDS)}
    return evigrad.fit(
        model,
        train_set,
        **grouped(
            dict(
                test=test_set,
                likelihood=data.likelihood,
                seed=seed,
                epochs=problem.epochs,
                **schedule,
                **options,
            )
        ),
    )


def run_map(problem: Problem, data: DataSet, seed: int, decay: float, parts: Any = None) -> Any:
    """Return a MAP run with one weight decay, as a precision of decay · N."""
    n = len((parts or (data.train,))[0][0])
    return train(problem, data, seed, parts, estimator=None, prior="scalar", precision=decay * n)


def run_row(problem: Problem, data: DataSet, seed: int, row: str) -> Result:
    """Return one row of the table for one seed."""
    run: Result = {"decay": None, "validation": None, "precisions": None, "log_evidence": None}
    searched = 0.0
    if row == "grid":
        part, held_out = data.split_validation(VALIDATION, seed)
        searches = {d: run_map(problem, data, seed, d, (part, held_out)) for d in DECAYS}
        scores = {decay: s.test_metrics["log_likelihood"] for decay, s in searches.items()}
        searched = sum(s.seconds for s in searches.values())
        run["decay"] = max(scores, key=scores.__getitem__)
        run["validation"] = {str(d): s for d, s in scores.items()}
        result = run_map(problem, data, seed, run["decay"])
    elif row.startswith("map-"):
        run["decay"] = NO_DECAY if row == "map-none" else float(row.removeprefix("map-"))
        result = run_map(problem, data, seed, run["decay"])
    else:
        result = train(problem, data, seed, estimator=row, prior="layerwise", precision=1.0)
        precisions = result.evidence.prior.precisions()
        run["precisions"] = {name: p.item() for name, p in precisions.items()}
    if row != "map-none":  # without a prior, there is no evidence
        judged = evaluate_evidence(result.evidence, data.train, JUDGE)
        run["log_evidence"] = judged.per_datum
    return run | {
        "seconds": searched + result.seconds,
        "log_likelihood": result.test_metrics["log_likelihood"],
        "accuracy": result.test_metrics["accuracy"],
    }


def table_of(runs: list[Result]) -> str:
    """Return the means over the seeds, as Markdown."""
    rows = summaries(runs, ROWS, KEYS)
    baseline = next((r["seconds"] for r in rows if r["row"] == "map-5e-4"), math.nan)
    lines = [
        "| method | test log likelihood | test accuracy, % | log evidence"
        " | seconds | time, × weight decay 5e-4 | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        evidence = "–"
        if not math.isnan(r["log_evidence"]):
            evidence = with_error(r["log_evidence"], r["log_evidence_error"], 3)
        cells = [
            LABELS.get(r["row"], r["row"]),
            with_error(r["log_likelihood"], r["log_likelihood_error"], 3),
            with_error(100 * r["accuracy"], 100 * r["accuracy_error"], 1),
            evidence,
            f"{r['seconds']:.0f}",
            "–" if math.isnan(baseline) else f"{r['seconds'] / baseline:.1f}",
            str(r["seeds"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = add_data_and_rows(make_parser(__doc__), sorted(PROBLEMS), ROWS)
    options = parse(parser, arguments)
    problem = PROBLEMS[options.data]
    run = partial(run_row, problem)
    run_and_show("prior_learning", options, COLUMNS, problem.subset, run, table_of)


if __name__ == "__main__":
    main()
