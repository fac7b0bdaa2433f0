"""Compare ``fit`` with fixed decays on 1,000 images up to all of MNIST and CIFAR-10.

``mnist`` trains MiniNet, and ``cifar10`` a Fixup Wide ResNet of depth 10 without augmentation
(77,387 weights). The seed draws the training images, the initial weights and the order of training.
All methods train for the same number of epochs with batches of 100 and the other defaults of
``fit``. Decays, epochs and methods were fixed before the first run, except for ``start_decay``, the
examples of scaled curvature, and the ``-long`` sets, with as many epochs as ``fit`` would take:

* ``weight decay 5e-4``, ``weight decay 1e-4``, ``weight decay 5e-3``: one decay for all weights.
* ``evigrad``: the defaults of ``fit``. ``evigrad, scalar`` learns one decay for all weights. The
  others use another estimator (``kfac-N-C-scaled`` is the default for many data, anchored rows for
  few, and the others are the paper's), one block for all steps of a round, or a tenth of the
  weight decay during the burn-in.
* ``early stopping``: no decay, from the best epoch by the log likelihood of 10 % held-out data.

All predictions are MAP predictions for 10,000 test images, which are only evaluated. ``seconds``
are the process time of training. A training writes checkpoints to ``--runs``, and the script
resumes it where it was stopped, except for early stopping. It stores every finished run.

    python benchmarks/large_images.py --data-dir DIR --results docs/results \
        --pages benchmarks/README.md
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from learning import Result, Results, make_parser, parse
from measure import cells_of, show, summaries, with_gains
from rivals import NO_DECAY, BestEpoch, Fitted, fixed_prior, metrics

import evigrad
from evigrad import FitResult, Optimization, Schedule
from evigrad.data import DataSet, load
from evigrad.models import make_model

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist": ("mininet", {}),
    "cifar10": ("wide_resnet", {"depth": 10, "widen_factor": 1}),
}
SIZES = {"mnist": (1000, 3000, 10_000, 60_000), "cifar10": (1000, 10_000, 50_000)}
EPOCHS = {1000: 100, 3000: 60, 10_000: 30, 50_000: 15, 60_000: 12}
HELD_OUT, BATCH = 0.1, 100
KEYS = ("log_likelihood", "accuracy", "ece", "train_log_likelihood", "log_evidence", "seconds")
COLUMNS = ("row", "seed", *KEYS, "decay", "epochs", "num_data", "num_weights")
# Options of ``fit``. A decay needs the number of examples.
METHODS: dict[str, Mapping[str, Any]] = {
    "weight decay 5e-4": {"decay": 5e-4},
    "evigrad": {},
    "evigrad, scalar": {"prior": "scalar"},
    "weight decay 1e-4": {"decay": 1e-4},
    "weight decay 5e-3": {"decay": 5e-3},
    "early stopping": {"decay": NO_DECAY},
    "evigrad, start_decay 1e-3": {"optimization": Optimization(start_decay=1e-3)},
    "evigrad, kfac-1000-C-scaled, one block": {
        "estimator": "kfac-1000-C-scaled",
        "prior_blocks": 1,
    },
    **{
        f"evigrad, {name}": {"estimator": name}
        for name in (
            *("kfac-400-C-scaled", "kfac-400-1"),
            *("ntk-400-rows-anchored", "ntk-1600-rows-anchored"),
        )
    },
}
# Network, images and epochs.
SETS = {
    f"{name}-{size}": (name, size, EPOCHS[size]) for name, sizes in SIZES.items() for size in sizes
} | {
    "mnist-60000-long": ("mnist", 60_000, 34),
    "cifar10-10000-long": ("cifar10", 10_000, 100),
}


class ProcessTime:
    """A callback that adds up the process time of a training, also over resumed processes."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "process_seconds.txt"
        self._before = float(self._file.read_text()) if self._file.exists() else 0.0
        self._start = time.process_time()

    @property
    def seconds(self) -> float:
        """Return the process time so far."""
        return self._before + time.process_time() - self._start

    def __call__(self, _: object) -> None:
        """Store the time after an epoch."""
        self._file.write_text(str(self.seconds))


@lru_cache(maxsize=1)
def read(name: str, seed: int, data_dir: str | None) -> DataSet:
    """Return the images of a seed."""
    data, size, _ = SETS[name]
    return load(data, data_dir, subset=None if size == max(SIZES[data]) else size, seed=seed)


def run(name: str, method: str, seed: int, data_dir: str | None, runs: Path) -> Result:
    """Return the columns of a training."""
    data, (kind, size, epochs) = read(name, seed, data_dir), SETS[name]
    network, settings = NETWORKS[kind]
    model = make_model(network, data.input_shape, data.num_outputs, seed, **settings)
    folder = runs / f"{name}-{method}-{seed}".replace(" ", "-").replace(",", "")
    train, held_out = data.train, None
    if method == "early stopping":
        train, held_out = data.split_validation(HELD_OUT, seed)
        shutil.rmtree(folder, ignore_errors=True)  # the best epoch is not in the checkpoints
    folder.mkdir(parents=True, exist_ok=True)
    clock, options = ProcessTime(folder), dict(METHODS[method])
    best = BestEpoch(lambda: Fitted(model).log_likelihood(held_out), model)
    if "decay" in options:
        prior = fixed_prior(options.pop("decay"), len(train[0]))
        options |= {"estimator": None, "prior": prior}
    blocks = options.pop("prior_blocks", None)
    result: FitResult = evigrad.fit(
        model,
        train,
        schedule=Schedule(epochs=epochs, batch_size=BATCH, eval_every=0, prior_blocks=blocks),
        seed=seed,
        run_dir=folder / "run",
        resume=(folder / "run").exists(),
        progress=False,
        callbacks=[clock, best] if held_out else [clock],
        **options,
    )
    seconds = clock.seconds
    if held_out:
        best.restore()
    fitted, (x, y) = Fitted(result.model), data.test
    evidences = [row["log_evidence"] for row in result.history if row["log_evidence"] is not None]
    scores = metrics(fitted.outputs(x), y)
    return {key: scores[key] for key in ("log_likelihood", "accuracy", "ece")} | {
        "train_log_likelihood": fitted.log_likelihood(train),
        "log_evidence": evidences[-1] if evidences else None,
        "seconds": seconds,
        "decay": {key: float(d) for key, d in result.evidence.weight_decay().items()},
        "epochs": epochs,
        "num_data": size,
        "num_weights": sum(p.numel() for p in model.parameters()),
    }


def table_of(runs: Sequence[Result]) -> str:
    """Return means of the seeds as Markdown, with the gain over the usual decay, seed by seed."""
    lines = [
        "| data set | images | epochs | method | test log likelihood | gain over weight decay 5e-4"
        " | accuracy, % | calibration error | training log likelihood | log evidence | seconds"
        " | time ratio | seeds |",
        f"|{'---|' * 13}",
    ]
    for name, (kind, size, epochs) in SETS.items():
        rows = [f"{name}: {method}" for method in METHODS]
        for s in summaries(with_gains(runs, rows), rows, (*KEYS, "gain", "ratio")):
            values = (
                *(("log_likelihood", 4, 1), ("gain", 4, 1), ("accuracy", 2, 100)),
                *(("ece", 4, 1), ("train_log_likelihood", 4, 1)),
            )
            times = (("log_evidence", 3, 1), ("seconds", 0, 1), ("ratio", 2, 1))
            cells = [*cells_of(s, values), *cells_of(s, times, errors=False)]
            cells = [
                kind,
                f"{size:,}",
                str(epochs),
                s["row"].partition(": ")[2],
                *cells,
                s["seed_spans"],
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--runs", type=Path, default=Path("runs/large_images"))
    options = parse(parser, arguments)
    results = Results(options.results / "large_images.csv", COLUMNS)
    for seed in options.seeds:
        for name in options.sets:
            for method in options.methods:
                row = f"{name}: {method}"
                if not results.has(row, seed):
                    columns = run(name, method, seed, options.data_dir, options.runs)
                    results.add(columns | {"row": row, "seed": seed})
                    print(row, seed, {key: columns[key] for key in KEYS}, flush=True)
    show("large_images", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
