"""Write the first table of the benchmarks: evigrad and the best baseline on every data set.

It reads the CSV files of ``rivals.py``, ``transfer.py``, ``pretrained.py``, ``large_tables.py`` and
``large_images.py``. A baseline is one network with the architecture and the epochs of evigrad, so
ensembles, adapters and gradient boosting are in the other tables only. The difference is a mean
over the seeds that evigrad and the baseline share, and the best baseline is the one with the lowest
mean. It needs at least three shared seeds. Times include searches, and are divided by the time of
one training with a fixed weight decay.

    python benchmarks/overview.py --results docs/results --pages docs/benchmarks.md \
        benchmarks/README.md
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from learning import Result, Results, make_parser, parse
from measure import mean_and_error, show, with_error
from rivals import LABELS

OURS = ("evigrad", "default", "choice", "kfac-400-1", "diag-ef")
NO_BASELINE = (*OURS, "ensemble", "gradient boosting", "last layer, choice", "LoRA")
USUAL = ("weight decay 5e-4", "map-5e-4", "map-noise", "usual", "AdamW, 0.01")
FEWEST = 3
LARGE = 0.0015  # smaller standard errors need four digits
# Name, file, prefix of the rows, examples, weights, and the row of evigrad.
POSTERIOR = "default, posterior"
SETS = (
    ("yacht", "rivals_yacht", "", 277, 2951, POSTERIOR),
    ("boston", "rivals_boston", "", 455, 3301, POSTERIOR),
    ("energy", "rivals_energy", "", 691, 3051, POSTERIOR),
    ("wine_red", "rivals_wine_red", "", 1439, 3201, POSTERIOR),
    ("power", "rivals_power", "", 8611, 2851, POSTERIOR),
    ("naval", "rivals_naval", "", 10_741, 3451, POSTERIOR),
    ("scikit-learn's digits", "rivals_digits", "", 1438, 6090, "default"),
    ("MNIST", "rivals_mnist", "", 1000, 14_538, "default"),
    ("CIFAR-10", "rivals_cifar10", "", 1000, 62_006, "default"),
    ("fine-tuning", "transfer_100", "", 100, 173_845, "default"),
    ("fine-tuning", "transfer_1000", "", 1000, 173_845, "default"),
    ("TREC questions", "pretrained", "questions: ", 500, 10_649_094, "evigrad"),
    ("CIFAR-10, EfficientNet", "pretrained", "photos: ", 500, 3_383_818, "evigrad"),
    ("diamonds", "large_tables", "diamonds: ", 43_152, 20_481, "evigrad"),
    ("movies", "large_tables", "movies: ", 47_030, 18_945, "evigrad"),
    ("MNIST", "large_images", "mnist-3000: ", 3000, 14_538, "evigrad"),
    ("MNIST, 12 epochs", "large_images", "mnist-60000: ", 60_000, 14_538, "evigrad"),
    ("MNIST, 34 epochs", "large_images", "mnist-60000-long: ", 60_000, 14_538, "evigrad"),
    ("CIFAR-10, 30 epochs", "large_images", "cifar10-10000: ", 10_000, 77_387, "evigrad"),
    ("CIFAR-10, 100 epochs", "large_images", "cifar10-10000-long: ", 10_000, 77_387, "evigrad"),
    ("CIFAR-10", "large_images", "cifar10-50000: ", 50_000, 77_387, "evigrad"),
    ("synthetic regression", "large_tables", "regression: ", 160_000, 18_049, "evigrad"),
    ("synthetic classes", "large_tables", "classification: ", 160_000, 18_436, "evigrad"),
    ("flights", "large_tables", "flights: ", 261_877, 37_121, "evigrad"),
    ("late flights", "large_tables", "late: ", 261_877, 37_250, "evigrad"),
)


def row_of(
    folder: Path, name: str, file: str, prefix: str, examples: int, weights: int, ours: str
) -> str:
    """Return a row of the table."""
    by_row: dict[str, dict[int, Result]] = {}
    path = folder / f"{file}.csv"
    with path.open(newline="") as lines:
        columns = next(csv.reader(lines))
    for run in Results(path, columns).read():
        if run["row"].startswith(prefix):
            by_row.setdefault(run["row"].removeprefix(prefix), {})[run["seed"]] = run
    learned = by_row[ours]
    usual = next(by_row[row] for row in USUAL if row in by_row)
    gains = {
        row: {
            seed: learned[seed]["log_likelihood"] - runs[seed]["log_likelihood"]
            for seed in sorted(runs.keys() & learned.keys())
        }
        for row, runs in by_row.items()
        if not row.startswith(NO_BASELINE)
    }
    best = min(
        (row for row in gains if len(gains[row]) >= FEWEST),
        key=lambda row: fmean(gains[row].values()),
    )
    shared = list(gains[best])
    gain, error = mean_and_error(list(gains[best].values()))
    digits = 3 if error >= LARGE else 4
    gain = round(gain, digits) + 0.0  # no −0.000
    timed = [s for s in shared if s in usual and usual[s]["seconds"]]
    ratio = fmean(learned[s]["seconds"] / usual[s]["seconds"] for s in timed)
    cells = (
        name,
        f"{examples:,}",
        f"{weights:,}",
        LABELS.get(best, best),
        with_error(*mean_and_error([learned[s]["log_likelihood"] for s in shared]), 3),
        f"{'+' if gain > 0 else ''}{with_error(gain, error, digits)}",
        f"{ratio:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and insert it into the pages."""
    options = parse(make_parser(__doc__), arguments)
    lines = [
        "| Data | Examples | Weights | Best baseline | evigrad | Difference | Time ratio |",
        "|---|---|---|---|---|---|---|",
        *(row_of(options.results, *settings) for settings in SETS),
    ]
    show("overview", "\n".join(lines), options.pages)


if __name__ == "__main__":
    main()
