"""Learn which columns of tabular data matter, with noise and error bars.

``EvidenceRegressor`` learns a prior precision of each column and layer, and the noise of the
target. A large precision switches off a column, whose importance is then small. The script uses two
data sets. Friedman's data set is synthetic, and five of its ten columns determine the target. The
other one is the progression of diabetes in 442 patients (from scikit-learn), with three added
columns of random numbers. The script trains again for each fold of the patients, and uses the
held-out fold only for evaluation.

On Friedman's data set, the five irrelevant columns have importances of at most 0.006. For the
patients, the target is mostly noise, and random columns keep up to a quarter of the largest
importance.

    python examples/relevance.py
    python examples/relevance.py --figure relevance.png
"""

import argparse
from collections.abc import Sequence

import numpy as np
from pandas import DataFrame
from sklearn.datasets import load_diabetes, make_friedman1
from sklearn.model_selection import KFold

from evigrad.plots import LIGHT, new_figure, save
from evigrad.sklearn import EvidenceRegressor

RANDOM = ("random 1", "random 2", "random 3")
COVERED = 1.96  # standard deviations, for 95 % of a normal distribution


def read_table() -> tuple[DataFrame, np.ndarray]:
    """Return the patients, with their sex as a category, and the random columns."""
    patients, progression = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    patients["sex"] = patients["sex"].astype("category")
    draw = np.random.default_rng(0)
    for name in RANDOM:
        patients[name] = draw.normal(size=len(patients))
    return patients, progression.to_numpy()


def draw(path: str, friedman: dict[str, float], patients: dict[str, float]) -> None:
    """Draw the importances as bars, with irrelevant columns in another color."""
    figure = new_figure(9, 3.6)
    for place, (title, importances, useless) in enumerate(
        (
            ("Friedman's data set", friedman, [f"x{i}" for i in range(6, 11)]),
            ("diabetes, mean of the folds", patients, RANDOM),
        ),
        start=1,
    ):
        ordered = sorted(importances, key=lambda name: -importances[name])
        axes = figure.add_subplot(1, 2, place)
        colours = [LIGHT.lines[1] if name in useless else LIGHT.lines[0] for name in ordered]
        axes.barh(ordered, [importances[name] for name in ordered], color=colours)
        axes.invert_yaxis()
        axes.set_title(f"importance: {title}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].barh("x6", 0, color=LIGHT.lines[1], label="irrelevant")
    figure.axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    save(figure, path)


def show(importances: dict[str, float]) -> None:
    """Print a line for each column, the most important first."""
    for name in sorted(importances, key=lambda name: -importances[name]):
        print(f"{name:9} {importances[name]:10.3f}  {'#' * round(100 * importances[name])}")


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Print a line for each fold, and print and return the mean importance of each column."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--figure", help="draw into this file, a PNG")
    options = parser.parse_args(arguments)
    X, y = read_table()
    importances = []
    print("fold    R2  noise  in 95 % intervals")
    folds = KFold(options.folds, shuffle=True, random_state=0)
    for number, (train, test) in enumerate(folds.split(X)):
        model = EvidenceRegressor(epochs=options.epochs, random_state=number)
        model.fit(X.iloc[train], y[train])
        mean, std = model.predict(X.iloc[test], return_std=True)
        covered = np.mean(abs(y[test] - mean) < COVERED * std)
        score = model.score(X.iloc[test], y[test])
        print(f"{number:4} {score:5.2f} {model.noise_:6.1f} {covered:18.2f}", flush=True)
        importances.append(model.feature_importances_)
    mean_importance = dict(zip(X.columns, np.mean(importances, axis=0), strict=True))
    print("\ncolumn    importance, mean of the folds")
    show(mean_importance)
    X, y = make_friedman1(300, n_features=10, noise=1.0, random_state=0)
    model = EvidenceRegressor(epochs=options.epochs, random_state=0).fit(X, y)
    friedman = {f"x{i}": float(value) for i, value in enumerate(model.feature_importances_, 1)}
    print("\nFriedman's data set")
    show(friedman)
    if options.figure:
        draw(options.figure, friedman, mean_importance)
    return mean_importance


if __name__ == "__main__":
    main()
