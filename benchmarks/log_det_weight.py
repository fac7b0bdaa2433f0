"""Measure which weight of the log-determinant is best, by the length and the data of training.

A network trains on a part of the data with several weights, for a share of the epochs. It predicts
the rest of the data and the test set. With the fraction 0, it trains on all data.

Without ``--weights``, the search of ``evigrad.training.weight_choice`` chooses the weights.

    python benchmarks/log_det_weight.py mnist --data-dir DIR --fraction 0.5 --share 0.5 1
    python benchmarks/log_det_weight.py cifar10 --data-dir DIR --fraction 0 --weights 1 2 3 4
"""

import argparse
import warnings

import torch
from rivals import SCHEDULE, make_task, train

from evigrad import Laplace, Schedule
from evigrad.data.dataset import stratified_split
from evigrad.training.plan import plan_schedule, planned
from evigrad.training.weight_choice import FACTOR, Predictions, search


def main() -> None:
    """Print a line for each training, and the vertex for each seed and share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("digits", "mnist", "cifar10"))
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--fraction", type=float, default=0.5)
    parser.add_argument("--share", type=float, nargs="+", default=(0.5, 1.0))
    parser.add_argument("--weights", type=float, nargs="+", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in options.seeds:
        task = make_task(options.name, seed, options.data_dir)
        x, y = task.data.train
        epochs = planned(plan_schedule(SCHEDULE, len(x)).epochs)
        part, held_out = (x, y), task.data.test
        if options.fraction:
            places = stratified_split(y.numpy(), options.fraction, seed)
            part, held_out = ((x[place], y[place]) for place in map(torch.from_numpy, places))
        for share in options.share:
            schedule = Schedule(epochs=round(share * epochs), eval_every=0)

            def predict(weight: float) -> Predictions:
                laplace = Laplace(log_det_weight=weight)
                fitted = train(task, part, schedule=schedule, laplace=laplace)  # noqa: B023
                f = fitted.outputs(held_out[0]).double().log_softmax(1)  # noqa: B023
                sums = f.gather(1, held_out[1][:, None])[:, 0]  # noqa: B023
                test = fitted.log_likelihood(task.data.test)  # noqa: B023
                mean = float(sums.mean())
                print(f"{seed=} {share=} {weight=:.3g} held out {mean:.4f} test {test:.4f}")  # noqa: B023
                return Predictions(sums, torch.ones_like(sums))

            if options.weights is None:
                print(f"{seed=} {share=} {search(predict)} (steps of a factor of {FACTOR:g})")
            else:
                for weight in options.weights:
                    predict(weight)


if __name__ == "__main__":
    main()
