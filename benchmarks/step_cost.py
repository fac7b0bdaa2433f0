"""What a hyperparameter gradient costs, in plain training steps on the same images.

The yardstick is the forward and backward pass of the training loss of the weights on m images, or
on m times S where the network averages over S transforms, in the same process and in turns with
the gradient; both by the same micro-batches. "precisions" learns layerwise precisions alone,
"invariances" the ranges of an affine invariance as well, exactly, in two passes.

    python benchmarks/step_cost.py --model mininet --csv docs/results/step_cost_mininet.csv
    python benchmarks/step_cost.py --model wrn16-4 --data 64 --csv docs/results/step_cost_wrn.csv
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine, paired, write_csv
from torch import Tensor, nn

from evigrad import Evidence, Memory
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

SHAPES = {"mininet": (1, 28, 28), "wrn16-4": (3, 32, 32)}
STRUCTURES = {"ntk": {}, "kfac-expand": {"sharing": "expand"}, "kfac-reduce": {"sharing": "reduce"}}
NUM_DATA = 50_000


def training_step(model: nn.Module, x: Tensor, y: Tensor, micro_batch: int) -> Callable[[], None]:
    """Forward and backward of the mean negative log likelihood, in micro-batches."""
    weights = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        model.train()
        for start in range(0, len(x), micro_batch):
            part = slice(start, start + micro_batch)
            loss = nn.functional.cross_entropy(model(x[part]), y[part], reduction="sum")
            torch.autograd.grad(loss / len(x), weights)

    return step


def measure(
    name: str, num_data: int, samples: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """All structures on one network and size, beside the training step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = make_model(name, SHAPES[name], 10, seed=0).to(device)
    with torch.no_grad():  # Fixup starts with zeros, which would make most rows zero
        for p in network.parameters():
            if not p.any():
                p.normal_(std=0.05)
    x = torch.rand(num_data, *SHAPES[name], device=device)
    y = torch.randint(10, (num_data,), device=device)
    if arguments.channels_last:
        network = network.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    images = arguments.images or num_data * samples
    micro_batch = max(1, images // samples)
    repeated = x.repeat_interleave(samples, 0)
    step = training_step(network, repeated, y.repeat_interleave(samples), micro_batch * samples)
    works: dict[str, Callable[[], object]] = {"step": step}
    for label in arguments.structures:
        model: nn.Module = network
        hyperparameters: list[str] = []
        if samples > 1:
            model = Averaged(network, AffineInvariance().to(device), num_samples=samples)
            hyperparameters = ["invariance"]
        structure, settings = label.split("-")[0], STRUCTURES[label]
        evidence = Evidence(
            model,
            Categorical(),
            GaussianPrior("layerwise"),
            estimator=f"{structure}-{num_data}-1",
            num_data=NUM_DATA,
            hyperparameters=hyperparameters,
            memory=Memory(
                micro_batch=micro_batch, autocast=torch.bfloat16 if arguments.autocast else None
            ),
            generator=0,
            **settings,
        )
        for number in range(4):  # planning, and the checks of passes 1, 2 and 4
            if number < 1 or num_data * samples <= 64:
                evidence.backward(x, y)
        evidence._problem.plans._passes = 4  # the next check is four passes away
        works[label] = lambda evidence=evidence: evidence.backward(x, y)
    times = paired(works, arguments.repeats, warmup=0)
    kind = "precisions" if samples == 1 else "invariances"
    rows = []
    for label in arguments.structures:
        rows.append(
            {
                "model": name,
                "learned": kind,
                "samples": samples,
                "m": num_data,
                "micro_batch": micro_batch,
                "structure": label,
                "step_seconds": f"{times['step']:.4f}",
                "seconds": f"{times[label]:.4f}",
                "ratio": f"{times[label] / times['step']:.2f}",
                "machine": machine(),
            }
        )
        print(
            f"{name} {kind:11} S={samples} m={num_data:4} {label:12} {times[label]:8.3f} s"
            f" = {times[label] / times['step']:5.2f} steps of {times['step']:.3f} s",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(SHAPES), default="mininet")
    parser.add_argument("--data", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--structures", nargs="+", default=list(STRUCTURES))
    parser.add_argument("--images", type=int, help="images per micro-batch (default: all at once)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="passes in bfloat16")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(machine())
    rows = []
    for samples in arguments.samples:
        for num_data in arguments.data:
            rows += measure(arguments.model, num_data, samples, arguments)
            if arguments.csv:
                write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
