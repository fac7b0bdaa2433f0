"""Does learning an invariance by the evidence pay? MAP, a fixed one, Augerino, and the estimators.

1000 digits drawn by the seed, MiniNet averaged over random rotations. With the data
``mnist:rotated180`` every digit, of the training and of the test set, was rotated once by an angle
uniform in ±180°; with ``mnist`` they stand upright. Each row trains from the same initial weights
on the same data, by the same schedule:

* ``map``: no invariance;
* ``fixed``: rotations by ±π, not learned;
* ``augerino``, ``augerino-0.1``: the range trained with the weights on the training loss, with a
  reward for wide ranges of weight 0.01 (the default of its authors' code) or 0.1 (what they take
  for rotated MNIST);
* the estimators: the range and layerwise prior precisions learned by the evidence.

The first four keep the usual weight decay, 5e-4. Learned ranges start at 0.1. The log evidence is
evaluated afterwards with one common, tight bound; the test set, all of it, is only evaluated, with
more transforms of each digit than in training. Every run is kept in the folder of results as it
ends, and has checkpoints while it lasts: the script goes on where it was stopped. All settings are
below, fixed beforehand.

    python benchmarks/invariance_learning.py --data mnist:rotated180 --data-dir DIR --seeds 0 1 2
    python benchmarks/invariance_learning.py --data mnist:rotated180 --table
"""

import argparse
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import insert, summaries, with_error, write_csv
from torch import Tensor, nn

import evigrad
from evigrad.data import DataSet, load
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.models import make_model
from evigrad.training import evaluate, evaluate_evidence

DECAY = 5e-4
START = 0.1
SAMPLES = 8
TEST_SAMPLES = 32
TEST_BATCH = 250
REWARDS = {"augerino": 0.01, "augerino-0.1": 0.1}
ESTIMATORS = (
    *("ntk-150-1", "kfac-150-1", "ntk-150-rows-anchored"),
    *("ntk-400-1", "kfac-400-1", "ntk-400-rows-anchored"),
)
ROWS = ("map", "fixed", *REWARDS, *ESTIMATORS)
KEYS = ("log_likelihood", "accuracy", "rotation", "log_evidence", "seconds")


@dataclass(frozen=True)
class Problem:
    """A network, the number of data, and the estimator of the final log evidence."""

    model: str
    subset: int
    judge: str


PROBLEMS = {
    "mnist:rotated180": Problem("mininet", 1000, "ntk-250-C"),
    "mnist": Problem("mininet", 1000, "ntk-250-C"),
}
CHECKPOINT_EVERY = 10
SCHEDULE: dict[str, Any] = {
    "epochs": 150,
    "batch_size": 250,
    "optimizer": "adam",
    "lr": 1e-3,
    "lr_min": 1e-9,
    "burn_in": 10,
    "every": 1,
    "steps": 2,
    "prior_lr": 0.1,
    "prior_lr_min": 0.01,
    "hyper_every": 1,
    "hyper_steps": 7,  # with 140 rounds as many steps on the range as 500 epochs of two each have
    "hyper_lr": 0.05,
    "hyper_lr_min": 0.005,
    "progress": False,
}


def network(problem: Problem, data: DataSet, seed: int, row: str) -> nn.Module:
    """The network of a row, with the seed's initial weights."""
    model = make_model(problem.model, data.input_shape, data.num_outputs, seed=seed)
    if row == "map":
        return model
    start = math.pi if row == "fixed" else START
    # Beyond the borders of a digit it is black, as in the data.
    fill = (-data.mean / data.std).flatten().tolist()
    rotation = AffineInvariance({"rotation": start}, learn=row != "fixed", fill=fill)
    return Averaged(model, rotation, num_samples=SAMPLES)


def rotation_of(model: nn.Module) -> float:
    """The range of rotations of a network, in radians."""
    if not isinstance(model, Averaged):
        return 0.0
    return model.invariance.named_ranges()["rotation"]


def run_row(
    problem: Problem, data: DataSet, seed: int, row: str, schedule: dict[str, Any], run_dir: Path
) -> dict[str, Any]:
    """One row of the table for one seed, from the last checkpoint in its folder on."""
    model = network(problem, data, seed, row)
    options: dict[str, Any] = {"estimator": row, "prior": "layerwise", "precision": 1.0}
    if row not in ESTIMATORS:
        # The usual decay in the loss's units, one for all weights.
        options = {"estimator": "map", "prior": "scalar", "precision": DECAY * len(data.train[0])}
    if row in ESTIMATORS:
        options["hyperparameters"] = ["invariance"]
    if row in REWARDS:
        options |= {"estimator": "augerino", "augerino_weight": REWARDS[row]}
    result = evigrad.fit(
        model,
        data.train,
        likelihood=data.likelihood,
        seed=seed,
        run_dir=run_dir,
        resume=True,
        checkpoint_every=CHECKPOINT_EVERY,
        **schedule,
        **options,
    )
    judged = evaluate_evidence(result.evidence, data.train, problem.judge)
    if isinstance(model, Averaged):
        model.num_samples = TEST_SAMPLES
    metrics = test_metrics(model, result.evidence, data.test)
    return {
        "row": row,
        "seed": seed,
        "log_likelihood": metrics["log_likelihood"],
        "accuracy": metrics["accuracy"],
        "rotation": rotation_of(model),
        "log_evidence": judged.per_datum,
        "seconds": result.seconds,
        "epochs": schedule["epochs"],
        "test_samples": TEST_SAMPLES if row != "map" else 1,
        "threads": torch.get_num_threads(),
        "precisions": {n: p.mean().item() for n, p in result.evidence.prior.precisions().items()},
        "ranges": [row.get("range/rotation") for row in result.history],
    }


def test_metrics(
    model: nn.Module, evidence: evigrad.Evidence, test: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Log likelihood and accuracy on all test data, the same transforms for every row."""
    generator = torch.Generator().manual_seed(0)
    return evaluate(model, evidence.likelihood, *test, batch_size=TEST_BATCH, generator=generator)


def write_table(name: str, results: list[dict[str, Any]], folder: Path) -> str:
    """The table as CSV in the folder; returns it as Markdown."""
    rows = summaries(results, ROWS, KEYS)
    write_csv(folder / f"invariance_learning_{name.replace(':', '_')}.csv", rows)
    lines = [
        "| | test log likelihood | test accuracy, % | rotation, ± radians"
        " | log evidence per datum | seconds | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        spread = r["rotation_error"] if r["row"] not in ("map", "fixed") else math.nan
        turned = "–" if r["row"] == "map" else with_error(r["rotation"], spread, 2)
        cells = [
            r["row"],
            with_error(r["log_likelihood"], r["log_likelihood_error"], 3),
            with_error(100 * r["accuracy"], 100 * r["accuracy_error"], 1),
            turned,
            with_error(r["log_evidence"], r["log_evidence_error"], 3),
            "–" if math.isnan(r["seconds"]) else f"{r['seconds']:.0f}",
            str(r["seeds"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", choices=sorted(PROBLEMS), default="mnist:rotated180")
    parser.add_argument("--data-dir", default=None, help="folder with NAME_train.parquet files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--epochs", type=int, default=SCHEDULE["epochs"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("results/invariance_learning"))
    parser.add_argument("--tables", type=Path, default=Path("docs/results"))
    parser.add_argument("--pages", type=Path, nargs="*", default=[Path("docs/results.md")])
    parser.add_argument(
        "--table", action="store_true", help="only print the table of what is there"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    problem = PROBLEMS[options.data]
    folder = options.results / options.data.replace(":", "_")
    folder.mkdir(parents=True, exist_ok=True)
    schedule = SCHEDULE | {"epochs": options.epochs}
    for seed in [] if options.table else options.seeds:
        data = load(options.data, data_dir=options.data_dir, subset=problem.subset, seed=seed)
        for row in options.rows:
            path = folder / f"{row}-{seed}.json"
            if path.exists():
                continue
            run_dir = folder / "runs" / path.stem
            result = run_row(problem, data, seed, row, schedule, run_dir)
            shutil.rmtree(run_dir)
            path.write_text(json.dumps(result, indent=1))
            shown = {k: v for k, v in result.items() if not isinstance(v, dict | list)}
            print(shown, flush=True)
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not results:
        parser.error(f"there are no results in {folder}")
    table = write_table(options.data, results, options.tables)
    print(table)
    for page in options.pages:
        if page.exists():
            insert(page, f"invariance_learning {options.data}", table)


if __name__ == "__main__":
    main()
