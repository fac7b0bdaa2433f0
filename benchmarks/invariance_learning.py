"""Compare estimators that learn an invariance with MAP, a fixed invariance and Augerino.

MiniNet on 1,000 digits drawn by the seed is averaged over random rotations. With the data
``mnist:rotated180``, every training and test digit is rotated once by an angle uniform in ±180°.
With ``mnist``, the digits are upright. Each row trains from the same initial weights on the same
data, by the same schedule:

* ``map``: no invariance.
* ``fixed``: rotations by ±π, not learned.
* ``augerino``, ``augerino-0.1``: the range is trained with the weights on the training loss. The
  reward for wide ranges has the weight 0.01 (the default of its authors' code) or 0.1 (their value
  for rotated MNIST).
* the estimators: the range and layerwise prior precisions are learned from the evidence.

The first four rows keep weight decay 5e-4. Learned ranges start at 0.1. The log evidence of all
rows is evaluated after training. It is exact, for the linearized Laplace approximation of one
draw of transforms, by all rows of all data. The whole test set is only evaluated, with more
transforms per digit than in training. The script stores finished runs and checkpoints, and resumes
where it was stopped. All settings below were fixed before the first run.

    export PYTHONPATH=.  # for experiments/augerino.py
    python benchmarks/invariance_learning.py --data mnist:rotated180 --data-dir DIR --seeds 0 1 2
    python benchmarks/invariance_learning.py --data mnist:rotated180 --results docs/results --table
"""

import math
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from learning import JUDGE, Result, add_data_and_rows, make_parser, parse, run_and_show
from measure import summaries, with_error
from torch import Tensor, nn

import evigrad
from evigrad.data import DataSet
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.measure import evaluate, evaluate_evidence
from evigrad.models import make_model
from evigrad.training.settings import grouped
from experiments.augerino import fit_augerino

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
LABELS = {
    "map": "no rotations",
    "fixed": "full circle",
    "augerino": "Augerino, reward 0.01",
    "augerino-0.1": "Augerino, reward 0.1",
}
KEYS = ("log_likelihood", "accuracy", "rotation", "log_evidence", "seconds")
COLUMNS = ("row", "seed", *KEYS, "threads", "epochs", "test_samples", "precisions")


@dataclass(frozen=True)
class Problem:
    """A network and the number of training examples."""

    model: str
    subset: int


PROBLEMS = {
    "mnist:rotated180": Problem("mininet", 1000),
    "mnist": Problem("mininet", 1000),
}
CHECKPOINT_EVERY = 10
OF_WEIGHTS = ("epochs", "batch_size", "optimizer", "lr", "lr_min", "eval_every", "progress")
SCHEDULE: dict[str, Any] = {
    "epochs": 150,
    "batch_size": 250,
    "optimizer": "adam",
    "lr": 1e-3,
    "lr_min": 1e-9,
    "burn_in": 10,
    "every": 1,
    "steps": 2,
    "prior_update": "adam",
    "prior_lr": 0.1,
    "prior_lr_min": 0.01,
    "hyper_every": 1,
    "hyper_steps": 7,  # in 140 rounds, this equals 500 epochs with two steps each
    "hyper_lr": 0.05,
    "hyper_lr_min": 0.005,
    "progress": False,
}


def network(name: str, data: DataSet, seed: int, start: float | None, learn: bool) -> nn.Module:
    """Return the network of a seed, averaged over rotations that start at ``start``."""
    model = make_model(name, data.input_shape, data.num_outputs, seed=seed)
    if start is None:
        return model
    # Outside of a digit, pixels are black, as in the data.
    fill = (-data.mean / data.std).flatten().tolist()
    rotation = AffineInvariance({"rotation": start}, learn=learn, fill=fill)
    return Averaged(model, rotation, num_samples=SAMPLES)


def rotation_of(model: nn.Module) -> float | None:
    """Return the range of rotations of a network in radians. None without rotations."""
    if not isinstance(model, Averaged):
        return None
    return model.invariance.named_ranges()["rotation"]


def run_dir(folder: Path, seed: int, row: str) -> Path:
    """Return the folder of a run's checkpoints."""
    return folder / f"{row}-{seed}"


def run_row(problem: Problem, folder: Path, data: DataSet, seed: int, row: str) -> Result:
    """Return one row for one seed, resumed from its last checkpoint."""
    start = {"map": None, "fixed": math.pi}.get(row, START)
    model = network(problem.model, data, seed, start, learn=row not in ("map", "fixed"))
    options: dict[str, Any] = {"estimator": row, "prior": "layerwise", "precision": 1.0}
    if row not in ESTIMATORS:
        # Weight decay 5e-4 for all weights, in the units of the loss.
        options = {"estimator": None, "prior": "scalar", "precision": DECAY * len(data.train[0])}
    if row in ESTIMATORS:
        options["hyperparameters"] = ["invariance"]
    schedule = SCHEDULE
    if row not in (*ESTIMATORS, *REWARDS):
        schedule = {n: v for n, v in SCHEDULE.items() if n in OF_WEIGHTS}
    fit = evigrad.fit
    if row in REWARDS:
        fit = partial(fit_augerino, weight=REWARDS[row])
        del options["estimator"]
    result = fit(
        model,
        data.train,
        **grouped(
            dict(
                likelihood=data.likelihood,
                seed=seed,
                run_dir=run_dir(folder, seed, row),
                resume=True,
                checkpoint_every=CHECKPOINT_EVERY,
                **schedule,
                **options,
            )
        ),
    )
    judged = evaluate_evidence(result.evidence, data.train, JUDGE)
    if isinstance(model, Averaged):
        model.num_samples = TEST_SAMPLES
    metrics = test_metrics(model, result.evidence, data.test)
    return {
        "log_likelihood": metrics["log_likelihood"],
        "accuracy": metrics["accuracy"],
        "rotation": rotation_of(model) or 0.0,
        "log_evidence": judged.per_datum,
        "seconds": result.seconds,
        "epochs": SCHEDULE["epochs"],
        "test_samples": TEST_SAMPLES if row != "map" else 1,
        "precisions": {n: p.mean().item() for n, p in result.evidence.prior.precisions().items()},
    }


def test_metrics(
    model: nn.Module, evidence: evigrad.Evidence, test: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Return test log likelihood and accuracy, with equal transforms for every row."""
    generator = torch.Generator().manual_seed(0)
    return evaluate(model, evidence.likelihood, test, batch_size=TEST_BATCH, generator=generator)


def table_of(runs: list[Result]) -> str:
    """Return the means over the seeds, as Markdown."""
    rows = summaries(runs, ROWS, KEYS)
    lines = [
        "| method | test log likelihood | test accuracy, % | rotation, ± radians"
        " | log evidence | seconds | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        spread = r["rotation_error"] if r["row"] not in ("map", "fixed") else math.nan
        turned = "–" if r["row"] == "map" else with_error(r["rotation"], spread, 2)
        cells = [
            LABELS.get(r["row"], r["row"]),
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
    """Run what is missing, and print the table."""
    parser = add_data_and_rows(make_parser(__doc__), list(PROBLEMS), ROWS)
    parser.add_argument("--checkpoints", type=Path, default=Path("results/invariance_learning"))
    options = parse(parser, arguments)
    problem = PROBLEMS[options.data]
    folder = options.checkpoints / options.data.replace(":", "_")
    run = partial(run_row, problem, folder)

    def tidy(seed: int, row: str) -> None:
        shutil.rmtree(run_dir(folder, seed, row))

    run_and_show("invariance_learning", options, COLUMNS, problem.subset, run, table_of, tidy)


if __name__ == "__main__":
    main()
