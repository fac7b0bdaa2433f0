"""Time a gradient for one prior precision per unit, relative to one precision per tensor.

``gradient`` is ``Evidence.backward`` on a drawn block. ``10 steps`` stores a pass over the block
and takes 10 gradients from it. Both kinds of precisions run in turns on the same blocks. The
multilayer perceptron has two hidden layers of 256 units, and MiniNet is the paper's. Times do not
depend on the data, which are random.

    python benchmarks/axes_cost.py --csv docs/results/axes_cost.csv
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine, paired, pass_checks, write_csv
from torch import nn

from evigrad import Evidence
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

NUM_DATA, STEPS = 5000, 10
ESTIMATORS = ("ntk-400-rows", "ntk-100-1", "kfac-400-1")
NETWORKS = ("perceptron", "mininet")


def network(name: str) -> nn.Module:
    """Return a network for images of 28 times 28 pixels and ten classes."""
    if name == "perceptron":
        return make_model("mlp", (1, 28, 28), 10, hidden=(256, 256), seed=0)
    return make_model(name, (1, 28, 28), 10, seed=0)


def measure(name: str, estimator: str, repeats: int) -> list[dict[str, Any]]:
    """Return the rows of a network and an estimator."""
    model = network(name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 1, 28, 28, generator=generator)
    y = torch.randint(10, (NUM_DATA,), generator=generator)
    weights = [name for name, _ in model.named_parameters()]
    priors = {
        "layerwise": GaussianPrior("layerwise"),
        "units": GaussianPrior({weight: {weight: 0} for weight in weights}),
    }
    gradients: dict[str, Callable[[], object]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for kind, prior in priors.items():
        evidence = Evidence(
            model, Categorical(), prior, estimator=estimator, num_data=NUM_DATA, generator=0
        )
        (block,) = evidence.blocks((x, y)).take(1)
        pass_checks(evidence, x[:40], y[:40], passes=2 + 2 * repeats)

        def ten_steps(evidence: Evidence = evidence, block: Any = block) -> None:
            kept = evidence.collect(block, wrt="prior")
            for _ in range(STEPS):
                evidence.backward_kept(kept, wrt="prior")

        gradients[kind] = lambda evidence=evidence, block=block: evidence.backward(block)
        steps[kind] = ten_steps
    rows = []
    for work, works in (("gradient", gradients), (f"{STEPS} steps", steps)):
        times = paired(works, repeats)
        rows.append(
            {
                "network": name,
                "precisions": int(sum(w.shape[0] for w in model.parameters())),
                "estimator": estimator,
                "work": work,
                "layerwise_seconds": f"{times['layerwise']:.4f}",
                "units_seconds": f"{times['units']:.4f}",
                "ratio": f"{times['units'] / times['layerwise']:.2f}",
                "machine": machine(),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for name in options.networks:
        for estimator in options.estimators:
            rows += measure(name, estimator, options.repeats)
            if options.csv:
                write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
