"""Separate the effects of the rotation range and of the weight decay on rotated digits.

The seed draws 1,000 MNIST digits. Every training and test digit is rotated once by an angle
uniform in ±180°. MiniNet is averaged over 8 random rotations of each digit, or 32 in the test.
Every range is trained with every decay, from the same initial weights, by the schedule of ``fit``:

* ranges: ``none``, no rotations. ``fixed``, the full circle. ``augerino``, learned on the training
  loss with a reward of 0.1 for a wide range. ``learned``, from the evidence, starting at ±0.1
  radians.
* decays: ``5e-4``, fixed. ``grid``, the best of seven by the log likelihood on 20 % held-out data,
  then trained again on all data. ``learned``, layerwise precisions by ``fit``'s defaults.
  ``choice``, the same with ``validation_fraction=0.5``, for learned ranges only.

The grid is searched without rotations and with the full circle. ``augerino, grid`` and ``learned,
grid`` have the decay of the full circle, and their seconds include that search. ``augerino,
learned`` keeps the range that Augerino learned with decay 5e-4, and its seconds include that
training. The test set is only evaluated. The script stores every finished run and resumes where it
was stopped.

    export PYTHONPATH=.  # for experiments/augerino.py
    python benchmarks/rotated.py --data-dir DIR --results docs/results \
        --pages benchmarks/README.md
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from learning import Result, Results, make_parser, parse
from measure import Clock, show, summaries, with_error
from rivals import DECAYS, HELD_OUT_SHARE, SCHEDULE, USUAL, VALIDATION, Pair, fixed_prior
from torch import nn

import evigrad
from evigrad import Optimization
from evigrad.data import DataSet, load
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.measure import evaluate
from evigrad.models import make_model
from experiments.augerino import fit_augerino

DATA, MODEL, SUBSET = "mnist:rotated180", "mininet", 1000
START = 0.1  # radians
SAMPLES, TEST_SAMPLES, TEST_BATCH = 8, 32, 250
RANGES = ("none", "fixed", "augerino", "learned")
WAYS = ("5e-4", "grid", "learned")
ROWS = (*(f"{rotations}, {way}" for rotations in RANGES for way in WAYS), "learned, choice")
# The reward is that of its authors for rotated MNIST. Each batch has a step on the range.
REWARD, AUGERINO = 0.1, Optimization(hyper_lr=0.05, hyper_lr_min=0.005)
KEYS = ("log_likelihood", "accuracy", "rotation", "seconds")
COLUMNS = ("row", "seed", *KEYS, "decay", "weight", "epochs", "threads")


def network(data: DataSet, seed: int, start: float | None, learn: bool) -> nn.Module:
    """Return the network of a seed, averaged over rotations that start at ``start``."""
    model = make_model(MODEL, data.input_shape, data.num_outputs, seed=seed)
    if start is None:
        return model
    # Outside of a digit, pixels are black, as in the data.
    fill = (-data.mean / data.std).flatten().tolist()
    rotation = AffineInvariance({"rotation": start}, learn=learn, fill=fill)
    return Averaged(model, rotation, num_samples=SAMPLES)


def train(
    data: DataSet,
    seed: int,
    rotations: str,
    decay: float | None,
    start: float | None = None,
    part: Pair | None = None,
    **options: Any,
) -> evigrad.FitResult:
    """Return a training with one of ``RANGES``. Without a decay, it learns its precisions."""
    part = part or data.train
    if start is None:
        start = {"none": None, "fixed": math.pi}.get(rotations, START)
    fit = evigrad.fit
    if decay is not None:
        options["prior"] = fixed_prior(decay, len(part[0]))
    if rotations == "learned":
        options["hyperparameters"] = ["invariance"]
    elif rotations == "augerino":
        fit = partial(fit_augerino, weight=REWARD)
        options["optimization"] = AUGERINO
    elif decay is not None:
        options["estimator"] = None
    return fit(
        network(data, seed, start, learn=rotations in ("augerino", "learned")),
        part,
        seed=seed,
        schedule=SCHEDULE,
        progress=False,
        **options,
    )


def judged(result: evigrad.FitResult, test: Pair) -> Result:
    """Return log likelihood, accuracy and range, with more rotations than in training."""
    model, rotation = result.model, None
    if isinstance(model, Averaged):
        model.num_samples = TEST_SAMPLES
        rotation = model.invariance.named_ranges()["rotation"]
    generator = torch.Generator().manual_seed(0)  # equal transforms for every row
    likelihood = result.evidence.likelihood
    metrics = evaluate(model, likelihood, test, batch_size=TEST_BATCH, generator=generator)
    columns = {key: metrics[key] for key in ("log_likelihood", "accuracy")}
    return columns | {"rotation": rotation}


def search(data: DataSet, seed: int, rotations: str) -> float:
    """Return the best decay on 20 % held-out training data."""
    part, held_out = data.split_validation(VALIDATION, seed)
    scores = {
        decay: judged(train(data, seed, rotations, decay, part=part), held_out)["log_likelihood"]
        for decay in DECAYS
    }
    return max(scores, key=lambda decay: scores[decay])


def run_row(data: DataSet, seed: int, row: str, earlier: dict[str, Result]) -> Result:
    """Return the columns of a row. ``earlier`` has finished rows of the seed."""
    rotations, way = row.split(", ")
    decay: float | None = {"5e-4": USUAL}.get(way)
    before, start = 0.0, None
    with Clock() as clock:
        if way == "grid" and rotations in ("none", "fixed"):
            decay = search(data, seed, rotations)
        elif way == "grid":
            finished = earlier["fixed, grid"]
            decay, before = finished["decay"], finished["seconds"]
        elif row == "augerino, learned":
            finished = earlier["augerino, 5e-4"]
            start, before = finished["rotation"], finished["seconds"]
            rotations = "fixed"
        choice = {"validation_fraction": HELD_OUT_SHARE} if way == "choice" else {}
        result = train(data, seed, rotations, decay, start, **choice)
    columns = judged(result, data.test) | {"seconds": before + clock.seconds}
    learned = {name: float(value) for name, value in result.evidence.weight_decay().items()}
    weight = None if result.weight_choice is None else result.weight_choice.weight
    return columns | {"decay": decay or learned, "weight": weight, "epochs": len(result.history)}


def table_of(runs: Sequence[Result]) -> str:
    """Return the means over the seeds, as Markdown."""
    lines = [
        "| range | decay | test log likelihood | test accuracy, % | rotation, ± radians"
        " | seconds | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in summaries(runs, ROWS, KEYS):
        rotations, way = r["row"].split(", ")
        turned = "–"
        if rotations != "none":
            spread = math.nan if rotations == "fixed" else r["rotation_error"]
            turned = with_error(r["rotation"], spread, 2)
        cells = [
            rotations,
            way,
            with_error(r["log_likelihood"], r["log_likelihood_error"], 3),
            with_error(100 * r["accuracy"], 100 * r["accuracy_error"], 1),
            turned,
            f"{r['seconds']:.0f}",
            r["seed_spans"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    options = parse(parser, arguments)
    results = Results(options.results / "rotated.csv", COLUMNS)
    for seed in options.seeds:
        data = None
        for row in options.rows:
            if results.has(row, seed):
                continue
            data = data or load(DATA, options.data_dir, subset=SUBSET, seed=seed)
            earlier = {run["row"]: run for run in results.read() if run["seed"] == seed}
            columns = run_row(data, seed, row, earlier)
            results.add({"row": row, "seed": seed, "threads": options.threads} | columns)
            print(row, seed, {key: columns[key] for key in (*KEYS, "decay")}, flush=True)
    show("rotated", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
