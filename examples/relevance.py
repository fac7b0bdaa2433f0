"""Which columns of a table matter: relevance, noise and error bars in one fit.

The progression of diabetes in 442 patients (scikit-learn's), with three columns of random numbers
beside the ten measured ones. ``EvidenceRegressor`` learns a relevance of each column, the decay of
each layer and the noise of the target on the training table. In every fold the whole procedure
starts anew; what is held out is only evaluated.

    python examples/relevance.py
"""

import argparse
from collections.abc import Sequence

import numpy as np
from pandas import DataFrame
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold

from evigrad.sklearn import EvidenceRegressor

RANDOM = ("random 1", "random 2", "random 3")
COVERED = 1.96  # standard deviations, 95 % of a normal distribution


def read_table() -> tuple[DataFrame, np.ndarray]:
    """The patients, their sex as a category, and the random columns."""
    patients, progression = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    patients["sex"] = patients["sex"].astype("category")
    draw = np.random.default_rng(0)
    for name in RANDOM:
        patients[name] = draw.normal(size=len(patients))
    return patients, progression.to_numpy()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Print a line for each fold and the mean relevance of each column, which is returned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=None)
    given = parser.parse_args(arguments)
    X, y = read_table()
    relevances = []
    print("fold    R2  noise  in 95 % intervals")
    folds = KFold(given.folds, shuffle=True, random_state=0)
    for number, (train, test) in enumerate(folds.split(X)):
        model = EvidenceRegressor(epochs=given.epochs, random_state=number)
        model.fit(X.iloc[train], y[train])
        mean, std = model.predict(X.iloc[test], return_std=True)
        covered = np.mean(abs(y[test] - mean) < COVERED * std)
        score = model.score(X.iloc[test], y[test])
        print(f"{number:4} {score:5.2f} {model.noise_:6.1f} {covered:18.2f}", flush=True)
        relevances.append(model.relevance_)
    found = dict(zip(X.columns, np.mean(relevances, axis=0), strict=True))
    print("\ncolumn    relevance")
    for name, value in sorted(found.items(), key=lambda each: -each[1]):
        print(f"{name:9} {value:9.3f}  {'#' * round(40 * value)}")
    return found


if __name__ == "__main__":
    main()
