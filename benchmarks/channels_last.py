"""Time work with channels last in memory, relative to channels first.

The work is a training step and an evaluation of the network, and the gradient of estimators on the
same images. Both layouts run in turns in one process. Seconds are medians.

    python benchmarks/channels_last.py --threads 1 --csv docs/results/channels_last.csv
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine, paired, write_csv
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
GREY, COLOUR = (1, 28, 28), (3, 32, 32)
# By what is shown: arguments of make_model and the number of images.
NETWORKS: dict[str, tuple[tuple[str, tuple[int, ...], int], dict[str, int], int]] = {
    "digitsnet": (("digitsnet", (1, 8, 8), 10), {}, 250),
    "mininet": (("mininet", GREY, 10), {}, 250),
    "cnn": (("cnn", COLOUR, 10), {}, 100),
    "resnet18 of width 8": (("resnet18", COLOUR, 10), {"width": 8}, 50),
    "wide_resnet 16-1": (("wide_resnet", COLOUR, 10), {"depth": 16, "widen_factor": 1}, 50),
}


def works_of(
    network: nn.Module, x: Tensor, y: Tensor, estimators: list[str]
) -> dict[str, Callable[[], object]]:
    """Return the timed work by name."""
    weights = list(network.parameters())

    def step() -> None:
        torch.autograd.grad(nn.functional.cross_entropy(network(x), y), weights)

    @torch.no_grad()
    def evaluation() -> None:
        network(x)

    works: dict[str, Callable[[], object]] = {"training step": step, "evaluation": evaluation}
    for estimator in estimators:
        prior = GaussianPrior("layerwise")
        evidence = Evidence(
            network, Categorical(), prior, estimator=estimator, num_data=1000, generator=0
        )
        m = int(estimator.split("-")[1])
        for _ in range(4):  # planning, and the checks of the first passes
            evidence.backward(x[:m], y[:m])
        works[estimator] = lambda evidence=evidence, m=m: evidence.backward(x[:m], y[:m])
    return works


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the times of all work on one network."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    architecture, settings, images = NETWORKS[name]
    network = make_model(*architecture, seed=0, **settings).to(device)
    x = torch.rand(images, *architecture[1], device=device)
    y = torch.randint(architecture[2], (images,), device=device)
    layouts = {}
    for layout, form in LAYOUTS.items():
        formed = copy.deepcopy(network).to(memory_format=form)
        layouts[layout] = works_of(formed, x, y, arguments.estimators)
    rows = []
    for work in layouts["first"]:
        both = {layout: works[work] for layout, works in layouts.items()}
        times = paired(both, arguments.repeats, warmup=2)
        rows.append(
            {
                "network": name,
                "images": images,
                "work": work,
                "first_seconds": f"{times['first']:.5f}",
                "last_seconds": f"{times['last']:.5f}",
                "ratio": f"{times['last'] / times['first']:.2f}",
                "threads": torch.get_num_threads(),
                "machine": machine(),
            }
        )
        print(f"{name:20} {work:14} {times['first']:8.4f} s  {rows[-1]['ratio']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument(
        "--estimators", nargs="+", default=["ntk-50-1", "ntk-50-C", "kfac-50-1", "kfac-50-C"]
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(machine())
    rows = []
    for name in arguments.network:
        rows += measure(name, arguments)
        if arguments.csv:
            write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
