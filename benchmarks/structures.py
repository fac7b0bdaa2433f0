"""Compare one learned precision for all weights with one precision for each parameter tensor.

Each training is ``fit`` with its defaults and ``prior="scalar"`` or ``prior="layerwise"``, from the
same initial weights. ``fixed`` is a training with weight decay 5e-4, which costs the least. For
regression, it learns the noise on the training loss.

* ``mnist500``: the first example of docs/index.md, with 1,000 test digits.
* ``digits``: the quick start of the README, with the 359 test digits of scikit-learn's digits.
* ``autompg`` and ``yacht``: two hidden layers of 50. Their default tries two starts. The published
  runs have ``--ways fixed layerwise`` and show the time ratio.

The seed draws the training digits, or the split of the table, and the initial weights. Digits have
one split. The test set is only evaluated. ``seconds`` are process time. The script stores every
finished run and resumes where it was stopped.

    python benchmarks/structures.py --data-dir DIR --results docs/results --pages docs/results.md
"""

import math
from itertools import product
from typing import Any

import torch
from learning import Result, Results, make_parser, parse
from measure import Clock, show, summaries, with_error
from rivals import HIDDEN, SCHEDULE, difference
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evigrad
from evigrad import Optimization
from evigrad.data import DataSet, load
from evigrad.models import make_model

TABLES = ("autompg", "yacht")
SETS = ("mnist500", "digits", *TABLES)
WAYS = ("fixed", "scalar", "layerwise")
LABELS = {
    "fixed": "weight decay 5e-4",
    "scalar": "evigrad, one precision",
    "layerwise": "evigrad, one precision per tensor",
}
KEYS = ("log_likelihood", "accuracy", "rmse", "seconds")
COLUMNS = ("row", "seed", *KEYS, "threads")


def problem(name: str, seed: int, data_dir: str | None) -> tuple[nn.Module, Any, DataSet]:
    """Return the network with the initial weights of a seed, its training data, and all data."""
    if name in TABLES:
        source = name if name == "autompg" else f"uci/{name}"
        data = load(source, data_dir, seed=seed)
        model = make_model("mlp", data.input_shape, data.num_outputs, seed, hidden=HIDDEN)
        return model, data.train, data
    if name == "digits":
        data = load("digits")
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Conv2d(1, 16, 3), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 6 * 6, 10)), data.train, data
    data = load("mnist5k", subset=500, seed=seed)
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))
    return model, DataLoader(TensorDataset(*data.train), batch_size=50), data


def run(name: str, way: str, seed: int, data_dir: str | None) -> Result:
    """Return the evaluation of one training. RMSE refers to the standardized target."""
    model, train, data = problem(name, seed, data_dir)
    options: dict[str, Any] = {"prior": way}
    if way == "fixed":
        options = {"estimator": None}
        if name in TABLES:
            options["optimization"] = Optimization(noise_on_loss=True)
    with Clock() as clock:
        result = evigrad.fit(
            model,
            train,
            test=data.test,
            likelihood=data.likelihood,
            schedule=SCHEDULE,
            seed=seed,
            progress=False,
            **options,
        )
    test = result.test_metrics
    squared = test.get("squared_error")
    return {
        "log_likelihood": test["log_likelihood"],
        "accuracy": test.get("accuracy"),
        "rmse": None if squared is None else math.sqrt(squared),
        "seconds": clock.seconds,
    }


def table_of(runs: list[Result]) -> str:
    """Return the means over the seeds, as Markdown."""
    lines = [
        "| data | method | test log likelihood | gain of one precision per tensor | accuracy, %,"
        " or RMSE | seconds | time, × weight decay 5e-4 | seeds |",
        "|" + "---|" * 8,
    ]
    for name in SETS:
        rows = summaries(runs, [f"{name}: {way}" for way in WAYS], KEYS)
        fixed = next((r["seconds"] for r in rows if r["row"] == f"{name}: fixed"), math.nan)
        for r in rows:
            way = r["row"].removeprefix(f"{name}: ")
            key, factor, digits = ("rmse", 1, 3) if name in TABLES else ("accuracy", 100, 1)
            cells = [
                name,
                LABELS[way],
                with_error(r["log_likelihood"], r["log_likelihood_error"], 3),
                difference(runs, f"{name}: layerwise", f"{name}: {way}"),
                with_error(factor * r[key], factor * r[f"{key}_error"], digits),
                f"{r['seconds']:.3g}",
                "–" if math.isnan(fixed) else f"{r['seconds'] / fixed:.1f}",
                r["seed_spans"],
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parse(parser, arguments)
    results = Results(options.results / "structures.csv", COLUMNS)
    for seed, name, way in product(options.seeds, options.sets, options.ways):
        row = f"{name}: {way}"
        if not results.has(row, seed):
            columns = run(name, way, seed, options.data_dir)
            results.add({"row": row, "seed": seed, "threads": options.threads} | columns)
            print(row, seed, {key: columns[key] for key in KEYS}, flush=True)
    show("structures", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
