"""Compare lengths of training on large data sets, to choose the default number of epochs.

The targets of the synthetic tables come from a random network, so the best possible test log
likelihood is known. Each row trains a new network with ``fit``'s defaults for a number of epochs.
The longest run of each data set has 100 epochs, or as many as time allows.

    python benchmarks/large_data.py --data regression-40000 --epochs 12 25 50 100
    python benchmarks/large_data.py --data mnist-60000 --data-dir DIR --epochs 8 17 33 100
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import machine, write_csv
from torch import Tensor, nn
from torch.nn import functional as F

import evigrad
from evigrad.data import load
from evigrad.models import make_model

COLUMNS, UNITS, CLASSES, NOISE, TEST = 10, 20, 4, 0.3, 20_000
Pair = tuple[Tensor, Tensor]


def table(kind: str, num_data: int) -> tuple[Pair, Pair, float]:
    """Return training data, test data, and the test log likelihood of the true distribution."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    outputs = 1 if kind == "regression" else CLASSES
    inner, outer = normal(COLUMNS, UNITS) / 2, normal(UNITS, outputs) / 3
    x = normal(num_data + TEST, COLUMNS)
    f = (x @ inner + normal(UNITS)).tanh() @ outer
    if kind == "regression":
        y = f + NOISE * normal(*f.shape)
        truth = torch.distributions.Normal(f, NOISE).log_prob(y)[num_data:].mean()
    else:
        y = (3 * f).softmax(1).multinomial(1, generator=generator)[:, 0]
        truth = -F.cross_entropy(3 * f[num_data:], y[num_data:])
    return (x[:num_data], y[:num_data]), (x[num_data:], y[num_data:]), truth.item()


def measured(name: str, epochs: int, data_dir: str | None) -> dict[str, Any]:
    """Return the results of a training run on a data set named KIND-N."""
    kind, _, size = name.rpartition("-")
    if kind.startswith("mnist"):
        data = load("mnist", data_dir=data_dir, subset=int(size), seed=0)
        train, test, truth = data.train, data.test, None
        network = "mininet" if kind == "mnist-mininet" else "mlp"
        model: nn.Module = make_model(network, data.input_shape, data.num_outputs, seed=0)
    else:
        train, test, truth = table(kind, int(size))
        torch.manual_seed(0)
        outputs = 1 if kind == "regression" else CLASSES
        model = nn.Sequential(
            *(nn.Linear(COLUMNS, 64), nn.SiLU()),
            *(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs)),
        )
    likelihood = "gaussian" if kind == "regression" else "categorical"
    schedule = evigrad.Schedule(epochs=epochs, eval_every=0)
    result = evigrad.fit(
        model, train, likelihood=likelihood, schedule=schedule, test=test, progress=False
    )
    score = result.test_metrics["log_likelihood"]
    evidence = [row["log_evidence"] for row in result.history if row["log_evidence"] is not None]
    return {
        "data": name,
        "epochs": epochs,
        "steps": epochs * -(-int(size) // schedule.batch_size),
        "rounds": len(evidence),
        "test_log_likelihood": score,
        "below_the_truth": None if truth is None else truth - score,
        "accuracy": result.test_metrics.get("accuracy"),
        "log_evidence": evidence[-1] if evidence else None,
        "mode_gap": result.mode_gap,
        "seconds": result.seconds,
        "machine": machine(),
    }


def main() -> None:
    """Train on one data set for several numbers of epochs, and write a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", default="regression-40000", help="KIND-N")
    parser.add_argument("--epochs", type=int, nargs="+", default=[12, 25, 50, 100])
    parser.add_argument("--data-dir", default=None, help="folder with mnist_train.parquet")
    parser.add_argument("--out", type=Path, default=None, help="CSV file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for epochs in options.epochs:
        rows.append(measured(options.data, epochs, options.data_dir))
        print(rows[-1], flush=True)
        if options.out is not None:
            write_csv(options.out, rows)


if __name__ == "__main__":
    main()
