"""Compare three families with one number that moves the level of all learned precisions.

* ``weight``: a weight of the log-determinant in learning.
* ``temperature``: a temperature of the posterior in learning.
* ``factor``: a factor on the precisions that the default has learned, which then stay fixed.

Each network trains on all data. With ``--fraction``, it trains on the other examples, and a line
also shows the log likelihood of the held-out ones.

    python benchmarks/log_det_weight.py mnist --data-dir DIR --values 0.25 0.5 1 2
"""

import argparse
import warnings
from collections.abc import Callable, Sequence

import torch
from rivals import Fitted, Pair, Task, make_task, train

from evigrad import Laplace
from evigrad.data.dataset import stratified_split


def compare(
    task: Task, part: Pair, held_out: Pair | None, names: Sequence[str], values: Sequence[float]
) -> None:
    """Train the default and all values of the families, and print a line for each training."""

    def show(family: str, value: float, fitted: Fitted) -> None:
        likelihood = fitted.log_likelihood(task.data.test)
        words = f"seed={task.seed} {family} {value:g}: test {likelihood:.4f}"
        if held_out is not None:
            words += f", held out {fitted.log_likelihood(held_out):.4f}"
        print(words, flush=True)

    show("weight", 1.0, default := train(task, part))
    assert default.decay is not None
    learned = dict(default.decay)

    def scaled(value: float) -> Fitted:
        return train(task, part, decay={name: value * decay for name, decay in learned.items()})

    families: dict[str, Callable[[float], Fitted]] = {
        "weight": lambda value: train(task, part, laplace=Laplace(log_det_weight=value)),
        "temperature": lambda value: train(task, part, laplace=Laplace(temperature=value)),
        "factor": scaled,
    }
    for name in names:
        for value in values:
            show(name, value, families[name](value))


def main() -> None:
    """Compare the families for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("digits", "mnist", "cifar10"))
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--fraction", type=float, default=0.0)
    parser.add_argument("--families", nargs="+", default=("weight", "temperature", "factor"))
    parser.add_argument("--values", type=float, nargs="+", default=(0.25, 0.5, 2.0, 4.0))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in options.seeds:
        task = make_task(options.name, seed, options.data_dir)
        x, y = task.data.train
        part, held_out = (x, y), None
        if options.fraction:
            places = stratified_split(y.numpy(), options.fraction, seed)
            part, held_out = ((x[place], y[place]) for place in map(torch.from_numpy, places))
        compare(task, part, held_out, options.families, options.values)


if __name__ == "__main__":
    main()
