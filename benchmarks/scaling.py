"""Measure the cost of one hyperparameter step when one size grows and all others stay.

A step is ``Evidence.backward`` on one block of the data set, including drawing and loading it. It
does not depend on N for any stochastic estimator, nor on C for one output per block. In m, width
and depth, it follows the paper's complexities. For ntk, these are O(m p) for rows, O(m^2 p) for
their Gram and O(m^3) for its factor. For kfac, they are O(m p) and the cube of a layer's width. An
anchored estimator is measured by rounds of ten steps as in training. Each round has a new choice of
anchors, among a pool for large data sets. For vocabularies see vocabulary.py, and for ranks see
ranks.py.

    python benchmarks/scaling.py --csv docs/results/scaling.csv
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import machine, seconds, write_csv
from torch import Tensor
from torch.utils.data import Dataset

from evigrad import Anchoring, Evidence
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

FEATURES = 64
STRUCTURES = ("ntk", "kfac")
ROUND = 10  # steps
AXES: dict[str, Sequence[int]] = {
    "N": (1_000, 10_000, 100_000, 1_000_000, 10_000_000),
    "N, a round": (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000),
    "C": (2, 10, 100, 1000),
    "m": (25, 50, 100, 200, 400, 800),
    "width": (32, 64, 128, 256, 512),
    "depth": (1, 2, 4, 8, 16),
}


class Made(Dataset[tuple[Tensor, Tensor]]):
    """A data set that creates each item on request, and stores none."""

    def __init__(self, num_data: int, num_outputs: int) -> None:
        self.num_data, self.num_outputs = num_data, num_outputs

    def __len__(self) -> int:
        return self.num_data

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(FEATURES) * (index % 997 + 1)
        return torch.sin(0.37 * position), torch.tensor(index % self.num_outputs)


def step(structure: str, sizes: dict[str, int]) -> Callable[[], None]:
    """Take one gradient of one block from the data set, or a round of an anchored estimator."""
    estimator = f"{structure}-{sizes['m']}-1"
    if structure == "anchored":
        estimator = f"ntk-{sizes['m']}-rows-anchored"
    hidden = [sizes["width"]] * sizes["depth"]
    model = make_model("mlp", (FEATURES,), sizes["C"], seed=0, hidden=hidden)
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=estimator,
        num_data=sizes["N"],
        anchoring=Anchoring(refresh=1) if structure == "anchored" else None,
        generator=0,
    )
    data = Made(sizes["N"], sizes["C"])
    stream = evidence.blocks(data)
    blocks = iter(stream)

    def work() -> None:
        evidence.backward(next(blocks))

    def anchored_round() -> None:
        for block in stream.take(ROUND):
            evidence.backward(block)

    return anchored_round if structure == "anchored" else work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--structures", nargs="+", default=list(STRUCTURES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(machine())
    rows: list[dict[str, Any]] = []
    for axis in arguments.axes:
        rounds = axis == "N, a round"
        for structure in ["anchored"] if rounds else arguments.structures:
            first = None
            for size in AXES[axis]:
                sizes = {"N": 10_000, "C": 10, "m": 100, "width": 100, "depth": 2}
                varied = "N" if axis.startswith("N,") else axis
                work = step(structure, sizes | {varied: size})
                repeats, warmup = (3, 1) if rounds else (arguments.repeats, 4)
                taken = seconds(work, repeats, warmup=warmup)
                first = first or taken
                row = {"axis": axis, "structure": structure, "size": size}
                row |= {"milliseconds": f"{1e3 * taken:.2f}", "over_first": f"{taken / first:.2f}"}
                row["machine"] = machine()
                rows.append(row)
                print(row, flush=True)
                if arguments.csv:
                    write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
