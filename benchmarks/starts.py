"""Where precisions start, and when they are first learned: defaults of a classifier.

Test log likelihood (nats per datum) and accuracy of ``fit`` with its defaults but for the precision
at the start and ``burn_in``, on 500 images of digits of two kinds and on a made table of 320 rows
whose labels are drawn from probabilities near one half. The test data are only evaluated. About
half an hour of one core for two seeds.

    python benchmarks/starts.py --seeds 2
"""

import argparse
import math
import statistics
import time

import torch
from torch import Tensor

import evigrad
from evigrad.data import load
from evigrad.models import make_model
from evigrad.training.settings import grouped

SHARES = (0.05, 0.1, 0.2, 0.5)
PRECISIONS = (0.1, 1.0)
ROWS, TEST_ROWS, FEATURES = 320, 80, 9

Split = tuple[Tensor, Tensor]


def noisy_table(seed: int) -> tuple[Split, Split]:
    """Standard normal features, and labels of a logistic regression on two of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS + TEST_ROWS, FEATURES, generator=generator)
    probability = torch.sigmoid(0.8 + 0.9 * x[:, 0] - 0.5 * x[:, 1])
    y = (torch.rand(len(x), generator=generator) < probability).long()
    return (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])


def data_of(name: str, seed: int) -> tuple[Split, Split, str]:
    """Train and test data, and the network for them."""
    if name == "noisy table":
        return *noisy_table(seed), "mlp"
    data = load(name, subset=500, seed=seed).with_test_subset(1000, 0)
    return data.train, data.test, {"digits": "digitsnet", "mnist5k": "mininet"}[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--data", nargs="*", default=["noisy table", "digits", "mnist5k"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'data':12} {'precision':>9} {'burn-in':>8} {'test log lik.':>14} {'acc.':>6} {'s':>5}")
    for name in options.data:
        ways = [("MAP", None)] + [(p, s) for p in PRECISIONS for s in SHARES]
        for precision, share in ways:
            rows = []
            for seed in range(options.seeds):
                train, test, network = data_of(name, seed)
                epochs = max(100, -(-2000 // math.ceil(len(train[0]) / 100)))
                named = {"estimator": "map"}
                if share is not None:
                    named = {"precision": precision, "burn_in": max(1, int(share * epochs))}
                model = make_model(network, train[0].shape[1:], int(train[1].max()) + 1, seed)
                start = time.process_time()
                settings = grouped({**named, "epochs": epochs, "eval_every": epochs})
                result = evigrad.fit(model, train, test=test, seed=seed, progress=False, **settings)
                last = result.history[-1]
                spent = time.process_time() - start
                rows.append((last["test_log_likelihood"], last["test_accuracy"], spent))
            lik, accuracy, seconds = map(statistics.mean, zip(*rows, strict=True))
            when = "" if share is None else f"{share:.0%}"
            print(
                f"{name:12} {precision!s:>9} {when:>8} {lik:14.3f} {accuracy:6.1%} {seconds:5.0f}"
            )


if __name__ == "__main__":
    main()
