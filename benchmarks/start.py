"""Test whether learned precisions depend on the start.

Every run is ``fit`` with its defaults except for the start. Networks and splits come from
``rivals.py``. One more data set is synthetic. Its labels are drawn from probabilities near 1/2.

* ``fixed point``: the default, MacKay's update. Its burn-in has a weight decay of 0.01 whatever the
  given precision. Here it is also 0.003 and 0.03.
* ``adam``: steps of Adam on the log precisions, from the given precision, as in the paper.

The log evidence is evaluated after training, exactly. The test set is only evaluated. The spread of
a data set is the largest difference between two starts of a seed, the mean over the seeds. The
script stores every finished run and resumes where it was stopped.

    python benchmarks/start.py --data-dir DIR --results docs/results --pages docs/start.md
"""

import math
from collections.abc import Sequence
from itertools import product
from statistics import fmean, geometric_mean
from unittest.mock import patch

import torch
from learning import Result, Results, make_parser, parse
from measure import Clock, mean_and_error, show, spans, with_error
from rivals import SCHEDULE, make_task
from torch import Tensor, nn

import evigrad
from evigrad import Optimization
from evigrad.measure import evaluate_evidence
from evigrad.models import make_model
from evigrad.training import plan

# Starts of each update: weight decays of the burn-in, or precisions.
WAYS = {"fixed point": (0.003, 0.01, 0.03), "adam": (0.01, 0.1, 1.0, 10.0)}
NOISY = "noisy table"
SETS = ("digits", "mnist", "cifar10", "yacht", "boston", NOISY)
ROWS, TEST_ROWS, FEATURES = 320, 2080, 9
KEYS = ("log_evidence", "log_likelihood", "accuracy", "rmse", "seconds")
COLUMNS = ("row", "seed", *KEYS, "precisions", "threads")

Pair = tuple[Tensor, Tensor]


def noisy_table(seed: int) -> tuple[Pair, Pair]:
    """Return standard normal features, and labels of a logistic regression on two of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS + TEST_ROWS, FEATURES, generator=generator)
    probability = torch.sigmoid(0.8 + 0.9 * x[:, 0] - 0.5 * x[:, 1])
    y = (torch.rand(len(x), generator=generator) < probability).long()
    return (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])


def problem(name: str, seed: int, data_dir: str | None) -> tuple[nn.Module, Pair, Pair, str]:
    """Return the network, training and test data of a seed, and the likelihood."""
    if name == NOISY:
        return make_model("mlp", (FEATURES,), 2, seed), *noisy_table(seed), "categorical"
    task = make_task(name, seed, data_dir)
    return task.network(), task.data.train, task.data.test, task.data.likelihood


def run(name: str, way: str, start: float, seed: int, data_dir: str | None) -> Result:
    """Return the evaluation of one training."""
    model, train, test, likelihood = problem(name, seed, data_dir)
    optimization = Optimization(prior_update="adam")
    if way == "fixed point":
        optimization = Optimization(start_decay=start)
    # The same decay for any number of examples.
    with Clock() as clock, patch.object(plan, "BURN_IN_DATA", math.inf):
        result = evigrad.fit(
            model,
            train,
            test=test,
            likelihood=likelihood,
            precision=start if way == "adam" else None,
            schedule=SCHEDULE,
            optimization=optimization,
            seed=seed,
            progress=False,
        )
    metrics = result.test_metrics
    precisions = result.evidence.prior.precisions()
    squared = metrics.get("squared_error")
    return {
        "log_evidence": evaluate_evidence(result.evidence, train, exact(model, train)).per_datum,
        "log_likelihood": metrics["log_likelihood"],
        "accuracy": metrics.get("accuracy"),
        "rmse": None if squared is None else math.sqrt(squared),
        "seconds": clock.seconds,
        "precisions": {key: value.item() for key, value in precisions.items()},
    }


def exact(model: nn.Module, data: Pair) -> str:
    """Return the cheaper of the two exact estimators, by weights or by rows."""
    rows = model(data[0][:2]).shape[1] * len(data[0])
    return "full-N-C" if sum(w.numel() for w in model.parameters()) < rows else "ntk-N-C"


def row_of(name: str, way: str, start: float) -> str:
    """Return the name of a run's row in the results."""
    return f"{name}: {way} from {start:g}"


def spread(runs: Sequence[Result], rows: Sequence[str], key: str) -> tuple[float, float]:
    """Return the largest difference between rows of a seed, with mean and error over seeds."""
    differences = []
    for seed in sorted({run["seed"] for run in runs}):
        values = [run[key] for run in runs if run["seed"] == seed and run["row"] in rows]
        if len(values) == len(rows):
            differences.append(max(values) - min(values))
    return mean_and_error(differences) if differences else (math.nan, math.nan)


def table_of(runs: list[Result]) -> str:
    """Return the means over seeds of each start, and the spread, as Markdown."""
    lines = [
        "| data | update | start | log evidence | test log likelihood | accuracy, % or RMSE"
        " | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (way, starts) in product(SETS, WAYS.items()):
        rows = [row_of(name, way, start) for start in starts]
        for start, row in zip(starts, rows, strict=True):
            runs_of_start = [run for run in runs if run["row"] == row]
            if not runs_of_start:
                continue
            evidence, likelihood = (
                with_error(*mean_and_error([run[key] for run in runs_of_start]), 3)
                for key in ("log_evidence", "log_likelihood")
            )
            if runs_of_start[0]["rmse"] is None:
                third = f"{100 * fmean(run['accuracy'] for run in runs_of_start):.1f}"
            else:
                third = f"{fmean(run['rmse'] for run in runs_of_start):.3f}"
            seeds = spans(run["seed"] for run in runs_of_start)
            cells = [name, way, f"{start:g}", evidence, likelihood, third, seeds]
            lines.append(f"| {' | '.join(cells)} |")
        differences = [spread(runs, rows, key) for key in ("log_evidence", "log_likelihood")]
        if not math.isnan(differences[0][0]):
            cells = [with_error(*difference, 3) for difference in differences]
            lines.append(f"| {name} | {way} | *spread* | {' | '.join(cells)} | – | – |")
    return "\n".join(lines)


def precisions_of(runs: list[Result]) -> str:
    """Return precisions of the weight tensors, geometric means over the seeds, as Markdown.

    The file of the runs also has the precisions of the biases.
    """
    lines = ["| data | update | start | prior precisions of the weights |", "|---|---|---|---|"]
    for name, (way, starts) in product(SETS, WAYS.items()):
        for start in starts:
            precisions = [r["precisions"] for r in runs if r["row"] == row_of(name, way, start)]
            if not precisions:
                continue
            layer_means = {
                layer.removesuffix(".weight"): geometric_mean(
                    by_layer[layer] for by_layer in precisions
                )
                for layer in precisions[0]
                if layer.endswith(".weight")
            }
            words = ", ".join(
                f"{layer} {float(f'{value:.2g}'):g}" for layer, value in layer_means.items()
            )
            lines.append(f"| {name} | {way} | {start:g} | {words} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parse(parser, arguments)
    results = Results(options.results / "start.csv", COLUMNS)
    runs = product(options.seeds, options.sets, options.ways)
    for seed, name, way in runs:
        for start in WAYS[way]:
            row = row_of(name, way, start)
            if results.has(row, seed):
                continue
            columns = run(name, way, start, seed, options.data_dir)
            results.add({"row": row, "seed": seed, "threads": options.threads} | columns)
            print(row, seed, {key: columns[key] for key in KEYS}, flush=True)
    show("start", table_of(results.read()), options.pages)
    show("start precisions", precisions_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
