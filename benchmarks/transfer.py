"""Compare ways to regularize fine-tuning toward the pretrained weights.

A Wide ResNet (16-1, 173,845 weights, Fixup) is trained on CIFAR-10's classes 0 to 4 (25,000 images,
averaged to 16 x 16 pixels, weight decay 5e-4). It is then fine-tuned on N = 100 or 1,000 images of
classes 5 to 9, drawn by the seed, and evaluated on the 5,000 test images of these classes. The
decay of the backbone pulls it toward its pretrained weights, and the decay of the new last layer
pulls toward zero. All methods begin at the same weights and take equally many steps. They differ in
how they choose the two decays:

* ``usual``: 5e-4 for all weights toward zero, as in most fine-tuning.
* ``grid``: six decays of the backbone times six of the last layer, the best by the log likelihood
  on 20 % held-out data, then trained again on all data.
* ``tpe-12``, ``tpe-36``: Optuna's TPE over the two log decays in the range of the grid.
* ``last layer``: the backbone stays fixed, and six decays of the last layer are tried.
* ``default-2``, ``default``: ``fit`` learns two precisions, one for the backbone and one for the
  last layer, or one per tensor. It uses its default estimator with one block per round
  (``Schedule(prior_blocks=1)``) and no held-out data. ``choice-2``, ``choice``: the same with
  ``validation_fraction=0.5``, for which one half of the data chooses the weight of the
  log-determinant. The last training uses all data. ``…, posterior``: the same
  network with predictions of the posterior of its last layer (``structure="last-layer"``).
* ``last layer, choice``: ``fit(validation_fraction=0.5)`` with a fixed backbone.
* ``diag-ef``: two precisions from the evidence with a diagonal empirical Fisher of all data.

``seconds`` are the process time of a method without pretraining. ``trace`` has these seconds after
each trial of a search, with the test log likelihood of the best trial so far by held-out data. Its
last entry is the network trained on all data. Grids and settings below were fixed before the first
run, and the test set is only evaluated. The script stores every finished run and resumes where it
was stopped. TPE needs optuna.

    python benchmarks/transfer.py --data-dir DIR --results docs/results --pages benchmarks/README.md
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from learning import Result, Results, make_parser, parse
from measure import Clock, mean_and_error, show, summaries, with_error
from rivals import (
    BY_POSTERIOR,
    HELD_OUT_SHARE,
    USUAL,
    Decay,
    Search,
    Task,
    check_extras,
    columns_of,
    draw,
    judged,
    learned,
    likelihoods_of,
    study,
    train,
)
from torch import nn

import evigrad
from evigrad import Schedule
from evigrad.data import DataSet, load
from evigrad.data.dataset import stratified_split
from evigrad.models import make_model
from evigrad.priors import GaussianPrior
from evigrad.training.plan import planned

SIZES = (100, 1000)
SUBSETS = range(5)
OLD = 5  # number of old classes
MODEL, OPTIONS = "wide_resnet", {"depth": 16, "widen_factor": 1}
POOLED = 2  # pixels per side to average
PRETRAINING = Schedule(epochs=15, eval_every=0)
# 200 steps in batches of 50.
SCHEDULES = {size: Schedule(epochs=200 * 50 // size, batch_size=50, eval_every=0) for size in SIZES}
DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
BACKBONE = ("conv1", "bias1", "stages", "bias2")
GROUPS = {"backbone": BACKBONE, "head": ("output",)}
MEAN = dict.fromkeys(BACKBONE, "initial")
CHOICE = {"validation_fraction": HELD_OUT_SHARE}
FIXED_BACKBONE = CHOICE | {"frozen": True}
METRICS = ("log_likelihood", "accuracy")
FIGURE = "images/transfer.png"
COLUMNS = ("row", "seed", *METRICS, "seconds", "trial_seconds", "decay", "weight", "trace")
COLUMNS = (*COLUMNS, "threads")


@dataclass(frozen=True)
class Transfer(Task):
    """A fine-tuning task: a split with the initial weights of its backbone."""

    weights: dict[str, torch.Tensor] | None = None
    frozen: bool = False

    def network(self, seed: int | None = None) -> nn.Module:
        """Return the pretrained backbone with a new last layer."""
        model = super().network(seed)
        assert self.weights is not None
        model.load_state_dict(self.weights, strict=False)
        if self.frozen:
            for name, weight in model.named_parameters():
                weight.requires_grad_(not name.startswith(BACKBONE))
        return model

    def fixed_prior(self, decay: Decay, num_data: int) -> GaussianPrior:
        """Return one decay toward zero, or decays of backbone and head toward their starts."""
        if not isinstance(decay, Mapping):
            return super().fixed_prior(decay, num_data)
        precision = {group: value * num_data for group, value in decay.items()}
        return GaussianPrior(GROUPS, precision, learnable=False, mean={"backbone": "initial"})


@lru_cache(maxsize=1)
def read(data_dir: str | None) -> DataSet:
    """Return all of CIFAR-10, at half of its resolution."""
    data = load("cifar10", data_dir)
    small = [(F.avg_pool2d(x, POOLED), y) for x, y in (data.train, data.test)]
    return replace(data, train=small[0], test=small[1], input_shape=tuple(small[0][0].shape[1:]))


def of_classes(data: DataSet, old: bool) -> DataSet:
    """Return the images of the old or new classes, numbered from 0."""

    def part(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = (y < OLD) if old else (y >= OLD)
        return x[kept], y[kept] - (0 if old else OLD)

    return replace(data, train=part(*data.train), test=part(*data.test), num_outputs=OLD)


def pretrained(data: DataSet, path: Path) -> dict[str, torch.Tensor]:
    """Return the backbone's weights after training on the old classes, or from a file."""
    if not path.exists():
        model = make_model(MODEL, data.input_shape, data.num_outputs, seed=0, **OPTIONS)
        result = evigrad.fit(
            model, data.train, estimator=None, schedule=PRETRAINING, test=data.test, progress=False
        )
        print(f"pretrained: {result.test_metrics}, {result.seconds:.0f} s", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({n: w for n, w in model.state_dict().items() if n.startswith(BACKBONE)}, path)
    return torch.load(path, weights_only=True)


def make_task(data: DataSet, size: int, seed: int, weights: dict[str, torch.Tensor]) -> Transfer:
    """Return a subset of the new classes, in equal proportions."""
    x, y = data.train
    _, drawn = stratified_split(y.numpy(), size / len(y), seed)
    subset = replace(data, train=(x[drawn], y[drawn]))
    return Transfer(subset, MODEL, seed, OPTIONS, SCHEDULES[size], weights)


def run_once(task: Transfer, **options: Any) -> Result:
    """Return one training on all data."""
    with Clock() as clock:
        fitted = train(task, **options)
    return judged(task, fitted) | {"seconds": clock.seconds, "decay": fitted.decay}


def run_grid(task: Transfer) -> Result:
    """Return the best decay of the backbone and of the last layer."""
    search = Search(task, [task.held_out()])
    for backbone, head in product(DECAYS, DECAYS):
        search.trial(decay={"backbone": backbone, "head": head})
    return search.finish()


def run_tpe(task: Transfer) -> list[Result]:
    """Return the best two decays by Optuna's TPE."""
    return study(Search(task, [task.held_out()]), list(GROUPS), DECAYS[0], DECAYS[-1])


def run_last(task: Transfer) -> Result:
    """Return the best decay of the last layer with a fixed backbone."""
    frozen = replace(task, frozen=True)
    search = Search(frozen, [frozen.held_out()])
    for decay in DECAYS:
        search.trial(decay=decay)
    return search.finish()


def learned_prior(structure: Any) -> GaussianPrior:
    """Return a prior with a precision per tensor, or for each of two groups."""
    mean: Any = MEAN if structure == "layerwise" else {"backbone": "initial"}
    return GaussianPrior(structure, mean=mean)


def run_fisher(task: Transfer) -> Result:
    """Return two precisions from the evidence with a diagonal empirical Fisher."""
    return run_once(task, prior=learned_prior(GROUPS), estimator="diag-N-1-ef")


def run_learned(
    task: Transfer, structure: Any, frozen: bool = False, **options: Any
) -> list[Result]:
    """Return learned precisions by ``fit``, with MAP and posterior predictions."""
    task = replace(task, frozen=frozen)
    schedule = replace(planned(task.schedule), prior_blocks=1)
    prior = GaussianPrior(structure) if frozen else learned_prior(structure)
    with Clock() as clock:
        fitted = train(task, prior=prior, schedule=schedule, **options)
    columns = judged(task, fitted) | {"seconds": clock.seconds} | learned(fitted)
    x, y = task.data.test
    assert fitted.evidence is not None
    with clock:
        predictive = fitted.evidence.posterior(task.data.train, structure="last-layer")(x)
    posterior_columns = {
        "log_likelihood": float(predictive.log_prob(y).double().mean()),
        "accuracy": float((predictive.probabilities.argmax(1) == y).double().mean()),
        "seconds": clock.seconds,
    }
    return [columns, columns | posterior_columns]


# Each returns the columns of its row, or of all rows that share it, in their order.
WAYS: dict[str, Callable[[Transfer], Any]] = {
    "usual": partial(run_once, decay=USUAL),
    "last layer": run_last,
    "grid": run_grid,
    "tpe-12": run_tpe,
    "tpe-36": run_tpe,
    "diag-ef": run_fisher,
    "default-2": (two := partial(run_learned, structure=GROUPS)),
    f"default-2{BY_POSTERIOR}": two,
    "default": (layerwise := partial(run_learned, structure="layerwise")),
    f"default{BY_POSTERIOR}": layerwise,
    "choice-2": (two := partial(run_learned, structure=GROUPS, **CHOICE)),
    f"choice-2{BY_POSTERIOR}": two,
    "choice": (layerwise := partial(run_learned, structure="layerwise", **CHOICE)),
    f"choice{BY_POSTERIOR}": layerwise,
    "last layer, choice": (fixed := partial(run_learned, structure="layerwise", **FIXED_BACKBONE)),
    f"last layer, choice{BY_POSTERIOR}": fixed,
}


LABELS = dict(
    zip(
        WAYS,
        (
            "weight decay 5e-4",
            "last layer only",
            "grid search",
            "TPE, 12 trials",
            "TPE, 36 trials",
            "diagonal Fisher",
            "evigrad, 2 precisions",
            "evigrad, 2 precisions, posterior",
            "evigrad",
            "evigrad, posterior",
            "evigrad, 2 precisions, chosen weight",
            "evigrad, 2 precisions, chosen weight, posterior",
            "evigrad, chosen weight",
            "evigrad, chosen weight, posterior",
            "last layer, chosen weight",
            "last layer, chosen weight, posterior",
        ),
        strict=True,
    )
)


def run_way(task: Transfer, row: str) -> list[Result]:
    """Return the complete rows of a method."""
    return [
        {key: columns.get(key) for key in COLUMNS} | {"row": name, "seed": task.seed}
        for name, columns in columns_of(WAYS, task, row).items()
    ]


def table_of(size: int, runs: Sequence[Result]) -> str:
    """Return the means over the subsets, as Markdown."""
    likelihoods = {row: likelihoods_of(list(runs), row) for row in WAYS}
    lines = [
        "| N | method | test log likelihood | gain over grid search | accuracy, % | seconds"
        " | time, × grid search | subsets |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = summaries(runs, list(WAYS), (*METRICS, "seconds"))
    grid = next((r["seconds"] for r in rows if r["row"] == "grid"), None)
    for r in rows:
        shared = sorted(likelihoods[r["row"]].keys() & likelihoods["grid"].keys())
        ahead = [likelihoods[r["row"]][seed] - likelihoods["grid"][seed] for seed in shared]
        cells = [
            f"{size:,}",
            LABELS[r["row"]],
            with_error(r["log_likelihood"], r["log_likelihood_error"], 3),
            "–" if r["row"] == "grid" or not ahead else with_error(*mean_and_error(ahead), 3),
            with_error(100 * r["accuracy"], 100 * r["accuracy_error"], 1),
            f"{r['seconds']:.0f}",
            "–" if grid is None else f"{r['seconds'] / grid:.3f}",
            r["seed_spans"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__, seeds=SUBSETS)
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=SIZES)
    parser.add_argument("--rows", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--backbone", type=Path, default=Path("results/transfer.pt"))
    options = parse(parser, arguments)
    results = {size: Results(options.results / f"transfer_{size}.csv", COLUMNS) for size in SIZES}
    left = [
        (size, seed, row)
        for size, seed, row in product(options.sizes, options.seeds, options.rows)
        if not results[size].has(row, seed)
    ]
    check_extras([row for _, _, row in left])
    if left:
        data = read(options.data_dir)
        weights = pretrained(of_classes(data, old=True), options.backbone)
        data = of_classes(data, old=False)
        for size, seed, row in left:
            if results[size].has(row, seed):  # some methods return two rows
                continue
            for run in run_way(make_task(data, size, seed, weights), row):
                if results[size].has(run["row"], seed):
                    continue
                results[size].add(run | {"threads": options.threads})
                print({key: run[key] for key in ("row", "seed", *METRICS, "seconds")}, flush=True)
    for size in SIZES:
        show(f"transfer {size}", table_of(size, results[size].read()), options.pages)
    runs_by_size = {f"{size:,} images": results[size].read() for size in SIZES}
    runs_by_size = {name: runs for name, runs in runs_by_size.items() if runs}
    if options.pages:
        path = options.results.parent / FIGURE
        draw(runs_by_size, ["grid"] * len(runs_by_size), WAYS, path, LABELS)


if __name__ == "__main__":
    main()
