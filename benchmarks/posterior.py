"""Compare posterior predictions with MAP predictions.

The digits are scikit-learn's. Their network is ``digitsnet``, trained by MAP with precision 1, and
with learned precisions. The tabular data sets are UCI's, standardized, with one split per seed.
Their network has two hidden layers of 64, with learned precisions and noise. With
``heteroscedastic``, the network has a log variance for each target.
``natural`` is a network of a natural Gaussian. Every row predicts with the same trained network:
``plug-in`` is the MAP prediction, and the others use the posterior of a structure. Test data are
only evaluated. The script stores every finished run and resumes where it was stopped.

    python benchmarks/posterior.py --data-dir DIR --results docs/results \
        --pages benchmarks/README.md
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist

from learning import Result, Results, make_parser, parse
from measure import show, summaries, with_error
from torch import Tensor

import evigrad
from evigrad import FitResult, Optimization
from evigrad.data import load
from evigrad.models import make_model

TABLES = ("yacht", "boston", "energy", "wine_red", "power", "naval")
# Data sets for all likelihoods, and those with too many rows for the kernel.
SMALL, LARGE = TABLES[:3], TABLES[4:]
TRAININGS = {"MAP": {"estimator": None, "precision": 1.0}, "learned": {}}
# N is small here. The kernel of all rows is exact, and cheaper than H.
OF_DIGITS = {"full": {}, "kfac": {}, "diag": {}, "last-layer": {}, "ntk, 1000 rows": {"rows": 1000}}
OF_TABLES = {"ntk": {}, "kfac": {}, "diag": {}, "last-layer": {}}
SUFFIXES = {
    "gaussian": "",
    "heteroscedastic": ", heteroscedastic",
    "natural-gaussian": ", natural",
}
INTERVALS = (50, 90, 95)
KEYS = ("log_likelihood", "accuracy", "rmse", *(f"coverage_{p}" for p in INTERVALS))
COLUMNS = ("row", "seed", *KEYS, "epistemic_std", "collect_seconds", "predict_seconds")

Pair = tuple[Tensor, Tensor]


def predictions(result: FitResult, train: Pair, test: Pair, structures: dict) -> Iterator[tuple]:
    """Yield name, seconds and prediction of each structure."""
    for name, options in structures.items():
        start = time.perf_counter()
        structure = name.partition(",")[0]
        posterior = result.evidence.posterior(train, structure=structure, **options)
        collected = time.perf_counter()
        predictive = posterior(test[0])
        times = {"collect_seconds": collected - start}
        yield name, predictive, times | {"predict_seconds": time.perf_counter() - collected}


def classified(predictive: evigrad.Predictive, y: Tensor) -> Result:
    """Return log likelihood and accuracy of a classifier."""
    right = (predictive.probabilities.argmax(1) == y).double().mean()
    return {
        "log_likelihood": float(predictive.log_prob(y).double().mean()),
        "accuracy": 100 * float(right),
        "epistemic_std": float(predictive.epistemic_variance.double().mean().sqrt()),
    }


def covered(predictive: evigrad.Predictive, y: Tensor, epistemic: bool) -> Result:
    """Return log likelihood and coverage of intervals, with or without the epistemic part."""
    error = (predictive.mean - y).double()
    noise = predictive.noise_variance
    assert noise is not None
    variance = (predictive.variance if epistemic else noise).double()
    metrics = {"rmse": float(error.square().mean().sqrt())}
    if epistemic:
        metrics["log_likelihood"] = float(predictive.log_prob(y).double().mean())
        metrics["epistemic_std"] = float(predictive.epistemic_variance.double().mean().sqrt())
    else:
        logs = predictive.likelihood.log_prob(predictive.outputs, y)
        metrics["log_likelihood"] = float(logs.double().mean())
    for percent in INTERVALS:
        width = NormalDist().inv_cdf(0.5 + percent / 200)
        metrics[f"coverage_{percent}"] = 100 * float(
            (error.abs() <= width * variance.sqrt()).double().mean()
        )
    return metrics


def digits(training: str, seed: int) -> Iterator[tuple[str, Result]]:
    """Return the rows of one training on digits."""
    data = load("digits", seed=seed)
    model = make_model("digitsnet", data.input_shape, data.num_outputs, seed)
    result = evigrad.fit(model, data.train, seed=seed, progress=False, **TRAININGS[training])
    y = data.test[1]
    for number, (name, predictive, times) in enumerate(
        predictions(result, data.train, data.test, OF_DIGITS)
    ):
        if not number:
            plain = classified(replace(predictive, link="plug-in"), y)
            yield "plug-in", plain | {"epistemic_std": None}
        for link in ("monte-carlo", "probit"):
            averaged = replace(predictive, link=link, num_samples=1000)
            yield f"{name}, {link}", classified(averaged, y) | times


def table(
    name: str, seed: int, data_dir: str | None, likelihood: str
) -> Iterator[tuple[str, Result]]:
    """Return the rows of one training on a tabular data set."""
    data = load(f"uci/{name}", data_dir, seed=seed, likelihood=likelihood)
    model = make_model("mlp", data.input_shape, data.num_outputs, seed)
    result = evigrad.fit(
        model,
        data.train,
        likelihood=likelihood,
        optimization=Optimization(start_decay=0.01),
        seed=seed,
        progress=False,
    )
    structures = {n: o for n, o in OF_TABLES.items() if n != "ntk" or name not in LARGE}
    for number, (row, predictive, times) in enumerate(
        predictions(result, data.train, data.test, structures)
    ):
        if not number:
            yield "plug-in", covered(predictive, data.test[1], epistemic=False)
        yield row, covered(predictive, data.test[1], epistemic=True) | times


def table_of(runs: list[Result], prefix: str, keys: dict[str, tuple[str, int]]) -> str:
    """Return the rows of one kind as Markdown. ``keys`` has each column's header and digits."""
    rows = list(dict.fromkeys(run["row"] for run in runs if run["row"].startswith(prefix)))
    lines = [
        f"| training: prediction | {' | '.join(head for head, _ in keys.values())} |",
        "|---" * (1 + len(keys)) + "|",
    ]
    for row in summaries(runs, rows, list(keys)):
        cells = [
            "" if math.isnan(row[key]) else with_error(row[key], row[f"{key}_error"], digits)
            for key, (_, digits) in keys.items()
        ]
        lines.append(f"| {row['row'].removeprefix(prefix)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the tables and insert them into the pages."""
    parser = make_parser(__doc__, seeds=(0, 1))
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    parser.add_argument("--trainings", nargs="*", choices=list(TRAININGS), default=list(TRAININGS))
    options = parse(parser, arguments)
    results = Results(options.results / "posterior.csv", COLUMNS)
    for seed in options.seeds:
        works = {f"digits, {training}": digits(training, seed) for training in options.trainings}
        works |= {
            name + suffix: table(name, seed, options.data_dir, likelihood)
            for name in options.tables
            for likelihood, suffix in SUFFIXES.items()
            if name in SMALL or not suffix
        }
        for prefix, rows in works.items():
            if not results.has(f"{prefix}: plug-in", seed):
                for row, metrics in list(rows):
                    whole = dict.fromkeys(COLUMNS) | metrics
                    results.add(whole | {"row": f"{prefix}: {row}", "seed": seed})
    runs = results.read()
    of_digits = {"log_likelihood": ("test log likelihood", 3), "accuracy": ("accuracy, %", 1)}
    of_tables = {"log_likelihood": ("test log likelihood", 3)}
    of_tables |= {f"coverage_{p}": (f"in {p} % intervals, %", 1) for p in INTERVALS}
    for marker, columns in (("digits", of_digits), ("tables", of_tables)):
        kind = "digits, " if marker == "digits" else ""
        runs_of_kind = [
            run for run in runs if run["row"].startswith("digits, ") == (marker == "digits")
        ]
        show(marker, table_of(runs_of_kind, kind, columns), options.pages)


if __name__ == "__main__":
    main()
