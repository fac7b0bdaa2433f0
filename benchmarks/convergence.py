"""Does training with the defaults of ``fit`` converge, and what do two starts gain?

Each training runs in several ways:

* ``one start``, the weight decay 0.01, the default of classification;
* ``two starts``, the default of regression, which also tries 0.001 and continues from the start
  with the higher log evidence after a third of the epochs;
* ``student-t``: two starts and Student's t noise (regression);
* ``bernoulli``: as labels (``rare ones`` only);
* ``continued``: the default, then up to three times as many epochs until the run has settled;
* ``rounds``: the default, evaluated after each round. Test log likelihoods at the end and where the
  log evidence, averaged over three rounds, is highest show whether keeping the best round pays.

* ``sinusoid``: 150 points of sin(3x) with noise of standard deviation 0.3, and no points for
  −0.6 < x < 0.6. One hidden layer of 50 tanh units.
* UCI data sets: networks and splits of ``rivals.py``.
* ``normal noise`` and ``heavy noise``: 900 examples with 20 features and targets that do not depend
  on them, normal or cubes of normal numbers. ``half signal``: half of the variance is a function of
  three features. ``rare ones``: a tenth of the targets is 1 and the others are 0, standardized,
  whatever the features are. Two hidden layers of 50.
* Images: networks and splits of ``rivals.py``.

The log evidence is evaluated after training, exactly. The test set is only evaluated. The script
stores every finished run and resumes where it was stopped.

    python benchmarks/convergence.py --data-dir DIR --results docs/results --pages docs/start.md
"""

import math
from dataclasses import replace
from statistics import fmean

import torch
from learning import Result, Results, make_parser, parse
from measure import Clock, mean_and_error, show, with_error
from rivals import SCHEDULE, make_task
from start import Pair, exact
from tables import UCI
from torch import Tensor, nn

import evigrad
from evigrad import FitResult, Optimization
from evigrad.measure import evaluate_evidence
from evigrad.models import make_model
from evigrad.training.plan import ROUNDS, plan_schedule, planned

WAYS = ("one start", "two starts", "student-t", "rounds", "continued", "bernoulli")
STARTS: dict[str, Optimization] = {
    "one start": Optimization(start_decay=0.01),
    "two starts": Optimization(start_decay=(0.01, 0.001)),
}
RARE = "rare ones"
TABLES = ("normal noise", "heavy noise", "half signal", RARE)
IMAGES = ("digits", "mnist", "cifar10")
SETS = ("sinusoid", *UCI, *TABLES, *IMAGES)
COMPARED = tuple(name for name in SETS if name != RARE)
MOST = 3  # times the usual number of epochs
# Rounds whose log evidence is averaged to find the best one.
SMOOTHED = 3
POINTS, NOISE, GAP, END = 150, 0.3, 0.6, 2.0
ROWS, TEST_ROWS, FEATURES = 900, 2000, 20
KEYS = (
    *("log_evidence", "mode_gap", "log_likelihood", "best_log_likelihood"),
    *("noise", "gap_ratio", "start", "epochs", "seconds"),
)
COLUMNS = ("row", "seed", *KEYS, "threads")


def sinusoid(seed: int) -> tuple[Pair, Pair]:
    """Return points on both sides of the gap, and as many others for the test."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Pair:
        x = GAP + (END - GAP) * torch.rand(POINTS, 1, generator=generator)
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, x, -x)
        noise = torch.randn(x.shape, generator=generator)
        return x, torch.sin(3 * x) + NOISE * noise / noise.std()

    return draw(), draw()


def table(name: str, seed: int) -> tuple[Pair, Pair]:
    """Return normal features, and targets of unit variance that are noise or half noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS + TEST_ROWS, FEATURES, generator=generator)
    y = torch.randn(len(x), 1, generator=generator)
    if name == "heavy noise":
        y = y**3 / math.sqrt(15)
    if name == "half signal":
        signal = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
        y = (signal / signal.std() + y) / math.sqrt(2)
    if name == RARE:
        y = (torch.rand(y.shape, generator=generator) < 0.1).float()
        y = (y - y[:ROWS].mean()) / y[:ROWS].std()
    return (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])


def problem(name: str, seed: int, data_dir: str | None) -> tuple[nn.Module, Pair, Pair]:
    """Return the network, training and test data of a seed."""
    if name == "sinusoid":
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)), *sinusoid(seed)
    if name in TABLES:
        return make_model("mlp", (FEATURES,), 1, seed), *table(name, seed)
    task = make_task(name, seed, data_dir)
    return task.network(), task.data.train, task.data.test


def run(name: str, way: str, seed: int, data_dir: str | None) -> Result:
    """Return the evaluation of one training."""
    model, train, test = problem(name, seed, data_dir)
    schedule, likelihood = SCHEDULE, "categorical" if name in IMAGES else "gaussian"
    epochs = planned(plan_schedule(SCHEDULE, len(train[0])).epochs)
    if way == "continued":
        schedule = replace(schedule, max_epochs=MOST * epochs)
    if way == "rounds":
        every = max(1, epochs // ROUNDS)
        schedule = replace(schedule, burn_in=2 * every, every=every, eval_every=every)
    if way in ("student-t", "bernoulli"):
        likelihood = way
    if way == "bernoulli":
        train, test = ((x, (y > 0).float()) for x, y in (train, test))
    with Clock() as clock:
        result = evigrad.fit(
            model,
            train,
            likelihood=likelihood,
            test=test,
            schedule=schedule,
            optimization=STARTS.get(way),
            seed=seed,
            progress=False,
        )
    return {
        "log_evidence": evaluate_evidence(result.evidence, train, exact(model, train)).per_datum,
        "mode_gap": result.mode_gap,
        "log_likelihood": result.test_metrics["log_likelihood"],
        "best_log_likelihood": best_round(result) if way == "rounds" else None,
        "noise": result.history[-1].get("noise"),
        "gap_ratio": gap_ratio(result, train) if name == "sinusoid" else None,
        "start": max(result.starts, key=result.starts.__getitem__) if result.starts else 0.01,
        "epochs": len(result.history),
        "seconds": clock.seconds,
    }


def is_possible(name: str, way: str) -> bool:
    """Return whether the likelihood of a way fits the targets of a set."""
    return {"student-t": name not in IMAGES, "bernoulli": name == RARE}.get(way, True)


def best_round(result: FitResult) -> float:
    """Return the test log likelihood after the round with the highest average log evidence."""
    rounds = [row for row in result.history if row["log_evidence"] is not None]
    means = [
        fmean(row["log_evidence"] for row in rounds[max(0, end - SMOOTHED) : end])
        for end in range(1, len(rounds) + 1)
    ]
    best: float = rounds[means.index(max(means))]["test_log_likelihood"]
    return best


def gap_ratio(result: FitResult, train: Pair) -> float:
    """Return the predicted standard deviation in the middle of the gap, divided by that at data."""
    posterior = result.evidence.posterior(train, structure="full")
    at_data: Tensor = posterior(train[0]).std
    return float(posterior(torch.zeros(1, 1)).std / at_data.mean())


def table_of(runs: list[Result]) -> str:
    """Return the means over seeds from one start and from two, as Markdown."""
    lines = [
        "| data | starts | log evidence | mode gap | test log likelihood | noise"
        " | from 0.001 | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in COMPARED:
        by_way = {way: [run for run in runs if run["row"] == f"{name}: {way}"] for way in STARTS}
        if not all(by_way.values()):
            continue
        before = fmean(run["seconds"] for run in by_way["one start"])
        for way, of_way in by_way.items():
            evidence, distance, likelihood = (
                with_error(*mean_and_error([run[key] for run in of_way]), 3)
                for key in ("log_evidence", "mode_gap", "log_likelihood")
            )
            noises = [run["noise"] for run in of_way]
            noise = "–" if None in noises else f"{min(noises):.3f}–{max(noises):.3f}"
            weak = f"{sum(run['start'] == 0.001 for run in of_way)} of {len(of_way)}"
            ratio = f"{fmean(run['seconds'] for run in of_way) / before:.2f}"
            starts = way.removesuffix("s").removesuffix(" start")
            cells = [name, starts, evidence, distance, likelihood, noise, weak, ratio]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def compared(name: str, before: list[float], after: list[float]) -> str:
    """Return a row with the means over seeds of two values and of their difference."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    cells = [with_error(*mean_and_error(c), 3) for c in (before, after, differences)]
    return f"| {name} | {' | '.join(cells)} |"


def student_table_of(runs: list[Result]) -> str:
    """Return test log likelihoods with Gaussian and with Student's t noise, as Markdown."""
    lines = ["| data | Gaussian | Student's t | difference |", "|---|---|---|---|"]
    for name in COMPARED:
        gaussian, student = (
            {r["seed"]: r["log_likelihood"] for r in runs if r["row"] == f"{name}: {way}"}
            for way in ("two starts", "student-t")
        )
        both = sorted(gaussian.keys() & student.keys())
        if both:
            columns = ([values[seed] for seed in both] for values in (gaussian, student))
            lines.append(compared(name, *columns))
    return "\n".join(lines)


def rare_table_of(runs: list[Result]) -> str:
    """Return the results of each seed on targets that are 0 or 1, as Markdown."""
    lines = ["| likelihood | log evidence | test log likelihood |", "|---|---|---|"]
    ways = {"Gaussian": "two starts", "Student's t": "student-t", "Bernoulli": "bernoulli"}
    for likelihood, way in ways.items():
        of_way = [run for run in runs if run["row"] == f"{RARE}: {way}"]
        if of_way:
            cells = [
                ", ".join(f"{run[key]:,.2f}" for run in of_way)
                for key in ("log_evidence", "log_likelihood")
            ]
            lines.append(f"| {likelihood} | {' | '.join(cells)} |")
    return "\n".join(lines)


def continued_table_of(runs: list[Result]) -> str:
    """Return what training until it has settled changes, as Markdown."""
    lines = [
        "| data | epochs, ratio | log evidence | mode gap | test log likelihood | noise, ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name in COMPARED:
        usual_way = "one start" if name in IMAGES else "two starts"
        usual, longer = (
            {run["seed"]: run for run in runs if run["row"] == f"{name}: {way}"}
            for way in (usual_way, "continued")
        )
        if both := sorted(usual.keys() & longer.keys()):
            pairs = [(usual[seed], longer[seed]) for seed in both]
            changes = [
                with_error(*mean_and_error([b[key] - a[key] for a, b in pairs]), 3)
                for key in ("log_evidence", "mode_gap", "log_likelihood")
            ]
            epochs = f"{fmean(b['epochs'] / a['epochs'] for a, b in pairs):.2f}"
            noise = "–"
            if name not in IMAGES:
                noise = f"{fmean(b['noise'] / a['noise'] for a, b in pairs):.2f}"
            lines.append(f"| {name} | {epochs} | {' | '.join(changes)} | {noise} |")
    return "\n".join(lines)


def best_table_of(runs: list[Result]) -> str:
    """Return test log likelihoods at the end and at the highest log evidence, as Markdown."""
    lines = ["| data | at the end | at the best round | difference |", "|---|---|---|---|"]
    for name in COMPARED:
        of_set = [run for run in runs if run["row"] == f"{name}: rounds"]
        if of_set:
            keys = ("log_likelihood", "best_log_likelihood")
            lines.append(compared(name, *([run[key] for run in of_set] for key in keys)))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parse(parser, arguments)
    results = Results(options.results / "convergence.csv", COLUMNS)
    for name in options.sets:
        for seed in range(5) if name == "sinusoid" and options.seeds else options.seeds:
            for way in options.ways:
                row = f"{name}: {way}"
                if results.has(row, seed) or not is_possible(name, way):
                    continue
                measured = run(name, way, seed, options.data_dir)
                results.add({"row": row, "seed": seed, "threads": options.threads} | measured)
                print(row, seed, {key: measured[key] for key in KEYS}, flush=True)
    show("convergence", table_of(results.read()), options.pages)
    show("student-t", student_table_of(results.read()), options.pages)
    show("rare-ones", rare_table_of(results.read()), options.pages)
    show("continued", continued_table_of(results.read()), options.pages)
    show("best-round", best_table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
