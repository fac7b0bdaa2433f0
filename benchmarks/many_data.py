"""Test the anchored bound on a large data set: all 50,000 images of CIFAR-10.

A small Wide ResNet is trained for a few epochs. Its 500,000 rows are too many for an exact
log-determinant. The script therefore compares single draws of ``ntk-k-1`` and
``ntk-k-rows-anchored``: mean and standard deviation, divided by the mean of the tightest estimator,
which is a bound itself. It also reports the share of the anchors, ℓ(Z). Seconds refer to a step
with its gradient, in rounds of ten as in training, including the choice of anchors. ``of a pool``
chooses anchors among a random part of the data, as the library does for even more data.

    python benchmarks/many_data.py --data-dir DIR
"""

import argparse
import json
import statistics
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from measure import insert, machine, measured_on, write_csv

import evigrad
from evigrad import Evidence, Memory
from evigrad.blocks import pool
from evigrad.data import DataSet, load
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior
from evigrad.training.settings import grouped

ROWS = (200, 400, 1000)
OF_A_POOL = ", of a pool"
ESTIMATORS = ("ntk-{k}-1", "ntk-{k}-rows-anchored", "ntk-{k}-rows-anchored" + OF_A_POOL)
DRAWS, ROUND, MANY = 12, 10, pool.MANY
PRECISION = 25.0  # weight decay 5e-4 for 50,000 examples
MODEL: dict[str, Any] = {"depth": 10, "widen_factor": 1}
TRAINING: dict[str, Any] = {
    "estimator": None,
    "batch_size": 100,
    "optimizer": "sgd",
    "lr": 0.1,
    "progress": False,
}


def trained(data: DataSet, epochs: int, path: Path) -> Evidence:
    """Return the network, trained or from the file."""
    model = make_model("wide_resnet", data.input_shape, data.num_outputs, seed=0, **MODEL)
    prior = GaussianPrior("layerwise", precision=PRECISION)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        evigrad.fit(
            model, data.train, prior=prior, seed=0, **grouped(dict(**TRAINING, epochs=epochs))
        )
        torch.save(model.state_dict(), path)
    return Evidence(
        model,
        Categorical(),
        prior,
        estimator="ntk-400-rows-anchored",
        num_data=len(data.train[0]),
        memory=Memory(micro_batch=100),
        generator=0,
    )


def measured(evidence: Evidence, data: DataSet, name: str, count: int) -> dict[str, Any]:
    """Return draws of an estimator, each with its own partition, and the time of a step."""
    pool.MANY = 0 if name.endswith(OF_A_POOL) else MANY
    estimator = name.removesuffix(OF_A_POOL)
    other = evidence.with_estimator(estimator, generator=0, memory=Memory(micro_batch=100))
    values, of_anchors = [], 0.0
    for block in chain.from_iterable(other.blocks(data.train).take(1) for _ in repeat(None, count)):
        estimate = other.estimate(block)
        values.append(estimate.log_det)
        of_anchors = estimate.entropies[0] if estimate.entropies else 0.0
    stream = other.blocks(data.train)
    start = time.perf_counter()
    for _ in range(stream.period):
        for block in stream.take(ROUND):
            other.backward(block)
    return {
        "estimator": name,
        "mean": statistics.mean(values),
        "deviation": statistics.stdev(values),
        "anchors": of_anchors,
        "seconds": (time.perf_counter() - start) / (ROUND * stream.period),
    }


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Return a line for each estimator."""
    tightest = min(row["mean"] for row in rows)
    lines = [
        "| estimator | estimate, × the tightest | share of the anchors, ℓ(Z) | seconds per step |",
        "|---|---|---|---|",
    ]
    for row in rows:
        held = f"{row['anchors'] / tightest:.2f}" if row["anchors"] else "–"
        spread = f"{row['mean'] / tightest:.2f} ± {row['deviation'] / tightest:.2f}"
        lines.append(f"| {row['estimator']} | {spread} | {held} | {row['seconds']:.2f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-dir", default=None, help="folder with cifar10_train.parquet")
    parser.add_argument("--num-data", type=int, default=None, help="default: all")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("results/many_data"))
    parser.add_argument("--tables", type=Path, default=Path("docs/results"))
    parser.add_argument("--page", type=Path, default=Path("docs/results.md"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.results.mkdir(parents=True, exist_ok=True)
    data = load("cifar10", data_dir=options.data_dir, subset=options.num_data, seed=0)
    evidence = trained(data, options.epochs, options.results / "weights.pt")
    names = [name.format(k=k) for k in options.rows for name in ESTIMATORS]
    kept = options.results / "found.json"
    rows = json.loads(kept.read_text()) if kept.exists() else []
    for name in names:
        if name not in {row["estimator"] for row in rows}:
            rows.append(measured(evidence, data, name, options.draws))
            print(rows[-1], flush=True)
            kept.write_text(json.dumps(rows, indent=1))
    write_csv(options.tables / "many_data.csv", rows)
    text = f"{as_markdown(rows)}\n\n{measured_on([machine()])}"
    print(text)
    if options.page.exists():
        insert(options.page, "many_data", text)


if __name__ == "__main__":
    main()
