"""Measure which columns ``relevance=True`` finds, and whether it improves predictions.

The methods train on the same rows:

* ``relevance=True``: ``EvidenceRegressor`` with a precision for each column.
* ``relevance=False``: ``EvidenceRegressor`` with a precision for each layer.
* ``lasso path``: a column is the more important, the larger the penalty at which it enters.
  Predictions are those of ``LassoCV``, with the error of its folds as the noise.

In the synthetic tables, 10 of 20 columns matter, the noise has the standard deviation 1, and there
are 300 rows for training and 1,000 for the test. ``friedman`` is the mean of two of Friedman's
functions, times √2. ``linear`` has coefficients from 0.2 to 2. ``products`` adds up five products
of two columns. ``auc`` is the probability that a relevant column has a larger importance than an
irrelevant one (area under the ROC curve), and ``permutation_auc`` is the same for the permutation
importance on the training rows. The UCI data sets have splits by the seed, and their relevant
columns are not known. ``columns_in_use`` is 1 / Σ p² for normalized importances p. ``rmse`` and
``log_likelihood`` are of the test rows, for standardized targets. ``seconds`` are process time.
The script stores every finished run and resumes where it was stopped.

    python benchmarks/relevance.py --data-dir DIR --pages benchmarks/README.md
"""

import warnings

import numpy as np
from learning import Result, Results, make_parser, parse
from measure import Clock, show, summaries, with_error
from scipy.stats import norm
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LassoCV, lasso_path
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler
from sklearn_tables import UCI, Table, read_table
from threadpoolctl import threadpool_limits

from evigrad.errors import EvigradWarning
from evigrad.sklearn import EvidenceRegressor

SYNTHETIC = ("friedman", "linear", "products")
METHODS = ("relevance=True", "relevance=False", "lasso path")
KEYS = ("auc", "permutation_auc", "columns_in_use", "rmse", "log_likelihood", "seconds")
COLUMNS = ("row", "seed", *KEYS, "importances", "num_data", "num_features", "threads")

HIDDEN, EPOCHS = (32, 32), 300
NUM_DATA, NUM_TEST, NUM_COLUMNS, NUM_RELEVANT = 300, 1000, 20, 10


def make_table(name: str, seed: int) -> Table:
    """Return a synthetic table, whose first columns are relevant."""
    draw = np.random.default_rng(seed)
    size = NUM_DATA + NUM_TEST, NUM_COLUMNS
    x = draw.uniform(size=size) if name == "friedman" else draw.normal(size=size)
    a = x[:, :NUM_RELEVANT].T
    if name == "friedman":
        values = 10 * np.sin(np.pi * a[::5] * a[1::5]) + 20 * (a[2::5] - 0.5) ** 2
        signal = (values + 10 * a[3::5] + 5 * a[4::5]).sum(0) / np.sqrt(2)
    elif name == "linear":
        signal = np.linspace(0.2, 2.0, NUM_RELEVANT) @ a
    else:
        signal = (a[::2] * a[1::2]).sum(0)
    y = signal + draw.normal(size=len(x))
    return x[:NUM_DATA], y[:NUM_DATA], x[NUM_DATA:], y[NUM_DATA:]


def run_row(name: str, method: str, seed: int, data_dir: str | None) -> Result:
    """Return one method on one table."""
    is_known = name in SYNTHETIC
    x, y, test_x, test_y = make_table(name, seed) if is_known else read_table(name, seed, data_dir)
    columns, targets = StandardScaler().fit(x), StandardScaler().fit(y[:, None])
    x, test_x = columns.transform(x), columns.transform(test_x)
    y, test_y = (targets.transform(values[:, None])[:, 0] for values in (y, test_y))
    relevant = np.arange(x.shape[1]) < NUM_RELEVANT
    permuted = None
    with Clock() as clock:
        if method == "lasso path":
            model = LassoCV(random_state=seed).fit(x, y)
            penalties, coefficients, _ = lasso_path(x, y)
            entered = (coefficients != 0).argmax(1)
            importances = np.where((coefficients != 0).any(1), penalties[entered], 0.0)
        else:
            model = EvidenceRegressor(
                HIDDEN, relevance=method == METHODS[0], epochs=EPOCHS, random_state=seed
            ).fit(x, y)
            importances = model.feature_importances_
    if isinstance(model, LassoCV):
        mean, noise = model.predict(test_x), np.sqrt(model.mse_path_.mean(1).min())
    else:
        mean, noise = model.predict(test_x, return_std=True)
        permuted = permutation_importance(model, x, y, random_state=seed).importances_mean
    shares = importances / importances.sum()
    is_permuted = is_known and permuted is not None
    return {
        "auc": float(roc_auc_score(relevant, importances)) if is_known else None,
        "permutation_auc": float(roc_auc_score(relevant, permuted)) if is_permuted else None,
        "columns_in_use": 1 / float((shares**2).sum()),
        "rmse": float(np.sqrt(np.mean((mean - test_y) ** 2))),
        "log_likelihood": float(norm.logpdf(test_y, mean, noise).mean()),
        "seconds": clock.seconds,
        "importances": [round(float(share), 4) for share in shares],
        "num_data": len(x),
        "num_features": x.shape[1],
    }


def table_of(runs: list[Result]) -> str:
    """Return means of the seeds as Markdown."""
    lines = [
        "| table | rows × columns | method | AUC | AUC, permutation | columns in use | test RMSE"
        " | test log likelihood | seconds | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (*SYNTHETIC, *UCI):
        for row in summaries(runs, [f"{name}: {method}" for method in METHODS], KEYS):
            first = next(run for run in runs if run["row"] == row["row"])
            digits = {"auc": 3, "permutation_auc": 3, "columns_in_use": 1, "rmse": 3}
            numbers = [
                with_error(row[key], row[f"{key}_error"], places) if row[key] == row[key] else ""
                for key, places in (digits | {"log_likelihood": 3}).items()
            ]
            cells = [
                name,
                f"{first['num_data']:,} × {first['num_features']}",
                row["row"].partition(": ")[2],
                *numbers,
                f"{row['seconds']:.1f}",
                str(row["seeds"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__, seeds=range(5))
    tables = (*SYNTHETIC, *UCI)
    parser.add_argument("--tables", nargs="+", choices=tables, default=tables)
    options = parse(parser, arguments)
    results = Results(options.results / "relevance.csv", COLUMNS)
    warnings.simplefilter("ignore", EvigradWarning)  # training ends before it has settled
    with threadpool_limits(options.threads):
        if options.seeds:  # the first training imports modules, which takes seconds
            EvidenceRegressor((), epochs=2, random_state=0).fit(*make_table("linear", 0)[:2])
        for seed in options.seeds:
            for name in options.tables:
                for method in METHODS:
                    row = f"{name}: {method}"
                    if not results.has(row, seed):
                        run = run_row(name, method, seed, options.data_dir)
                        results.add({"row": row, "seed": seed, "threads": options.threads} | run)
                        print(row, seed, {key: run[key] for key in KEYS}, flush=True)
    show("relevance", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
