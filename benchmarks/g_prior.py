"""Compare g-priors with equal precisions per tensor, on networks with and without normalization.

The sets are:

* ``text``: the transformer of ``examples/text.py`` (LayerNorm) on 600 lines of text.
* ``digits, normalized``: 500 of scikit-learn's digits, two hidden layers of 50 with LayerNorm.
* ``digits``: the network of ``digits, normalized`` without LayerNorm.

All methods train the same network from the same initial weights, with the schedule of ``fit`` or of
``examples/text.py``:

* ``weight decay``: 5e-4.
* ``default``, ``kfac-400-1``, ``diag-N-C``: ``fit`` with this estimator, and one precision per
  tensor.
* ``diag-N-C, g-prior``: the same with ``GaussianPrior(shape="g-prior")``.

``seconds`` are the process time of a training. The test set is only evaluated. The script stores
every finished run and resumes where it was stopped.

    export PYTHONPATH=.
    python benchmarks/g_prior.py --results docs/results --pages benchmarks/README.md
"""

import warnings
from functools import partial
from typing import Any

import torch
from classifiers import text_task
from learning import Result, Results, make_parser, parse
from measure import Clock, mean_and_error, show, spans, with_error
from rivals import USUAL, Fitted, Pair, fixed_prior, metrics
from torch import nn

import evigrad
from evigrad import Schedule
from evigrad.data import load
from evigrad.errors import EvigradWarning
from evigrad.priors import GaussianPrior

SETS = ("text", "digits, normalized", "digits")
DECAY, BASE = "weight decay", "diag-N-C"
ESTIMATORS = {"default": "ntk-400-rows-anchored", "kfac-400-1": "kfac-400-1", BASE: BASE}
METHODS = (DECAY, *ESTIMATORS, f"{BASE}, g-prior")
KEYS = ("log_likelihood", "accuracy", "ece")
COLUMNS = ("row", "seed", *KEYS, "seconds")


def dense_network(is_normalized: bool) -> nn.Module:
    """Return a network for digits with two hidden layers of 50."""
    layers = list[nn.Module]()
    for size in (64, 50):
        layers += [nn.Linear(size, 50), *([nn.LayerNorm(50)] if is_normalized else []), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(50, 10))


def task_of(name: str, seed: int) -> tuple[Any, Pair, Pair, Schedule | None]:
    """Return a function that makes the network, the data, and a schedule if it is not the usual."""
    if name == "text":
        task = text_task(seed)
        return task.network, task.data.train, task.data.test, task.schedule
    data = load("digits", subset=500, seed=seed)
    assert data.test is not None
    return partial(dense_network, "normalized" in name), data.train, data.test, None


def run_row(name: str, method: str, seed: int) -> Result:
    """Return the columns of a training."""
    make, train, (x, y), schedule = task_of(name, seed)
    estimator, _, shape = method.partition(", ")
    is_learned = method != DECAY
    prior = (
        GaussianPrior(shape=shape or "equal") if is_learned else fixed_prior(USUAL, len(train[1]))
    )
    torch.manual_seed(seed)
    with Clock() as clock:
        result = evigrad.fit(
            make(),
            train,
            estimator=ESTIMATORS[estimator] if is_learned else None,
            prior=prior,
            schedule=schedule or Schedule(),
            seed=seed,
            progress=False,
        )
    judged = metrics(Fitted(result.model).outputs(x), y)
    judged["accuracy"] *= 100
    return {key: judged[key] for key in KEYS} | {"seconds": clock.seconds}


def table_of(runs: list[Result]) -> str:
    """Return a table of the means over the seeds, with paired differences."""
    heads = ("log likelihood", f"gain over {BASE}", "accuracy, %", "calibration error")
    lines = [f"| set: method | {' | '.join(heads)} | time, × {DECAY} | seeds |", "|---" * 7 + "|"]
    by_row = {
        row: {r["seed"]: r for r in runs if r["row"] == row}
        for row in dict.fromkeys(r["row"] for r in runs)
    }
    for row, of_row in by_row.items():
        name = row.partition(":")[0]
        base, decay = by_row.get(f"{name}: {BASE}", {}), by_row.get(f"{name}: {DECAY}", {})
        values = [[run[key] for run in of_row.values()] for key in KEYS]
        values.insert(1, [of_row[s][KEYS[0]] - base[s][KEYS[0]] for s in of_row if s in base])
        cells = [
            with_error(*mean_and_error(v), digits) if v else ""
            for v, digits in zip(values, (3, 3, 1, 3), strict=True)
        ]
        ratios = [of_row[s]["seconds"] / decay[s]["seconds"] for s in of_row if s in decay]
        cells.append(f"{mean_and_error(ratios)[0]:.1f}" if ratios else "")
        lines.append(f"| {row} | {' | '.join(cells)} | {spans(of_row)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    options = parse(parser, arguments)
    results = Results(options.results / "g_prior.csv", COLUMNS)
    warnings.filterwarnings("ignore", "The model has normalization", EvigradWarning)
    for name in options.sets:
        for seed in options.seeds:
            for method in options.methods:
                row = f"{name}: {method}"
                if not results.has(row, seed):
                    run = run_row(name, method, seed)
                    results.add({"row": row, "seed": seed} | run)
                    print(row, seed, run, flush=True)
    show("g-prior", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
