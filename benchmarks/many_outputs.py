"""Time estimates, posteriors and predictions of a network with an output for each pixel.

The network is conv 3 → 16, ReLU, conv 16 → 3 with initial weights, and the data are random images.
``estimate`` chooses anchors and makes one estimate with the default estimator, and ``fit`` trains
for two epochs with it. ``passes`` is the time of one backward pass over all images for each output,
extrapolated from 32 passes. Seconds are CPU seconds on one thread. The peak is the memory of the
process above the start of the work. Each kind of work runs in a new process.

    python benchmarks/many_outputs.py --csv docs/results/many_outputs.csv
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Clock, Peak, in_own_process, machine, write_csv
from torch import nn

from evigrad import Evidence, Schedule, fit
from evigrad.likelihoods import Gaussian
from evigrad.priors import GaussianPrior

PREDICTED, TIMED_PASSES = 5, 32
POSTERIORS = ("kfac", "last-layer", "diag", "kfac, covariances", "kfac, variances")
WORKS = ("estimate", "fit", *POSTERIORS, "passes")


def work_of(images: int, side: int, name: str) -> tuple[Callable[[], object], float]:
    """Return one kind of work, and the factor that multiplies its time."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))
    model = nn.Sequential(*layers, nn.Flatten())
    x = torch.rand(images, 3, side, side)
    y = x.flatten(1)
    if name == "passes":
        f, weights = model(x), list(model.parameters())
        outputs = torch.linspace(0, f.shape[1] - 1, TIMED_PASSES).long().tolist()

        def passes() -> None:
            for output in outputs:
                torch.autograd.grad(f[:, output].sum(), weights, retain_graph=True)

        return passes, f.shape[1] / TIMED_PASSES
    if name == "fit":
        schedule = Schedule(epochs=2, burn_in=1)
        return lambda: fit(model, (x, y), likelihood=Gaussian(), schedule=schedule), 1.0
    structure, _, prediction = name.partition(", ")
    evidence = Evidence(model, Gaussian(), GaussianPrior("layerwise"), num_data=images)
    if name == "estimate":
        return lambda: evidence.estimate(next(iter(evidence.blocks((x, y))))), 1.0
    if not prediction:
        return lambda: evidence.posterior((x, y), structure=structure), 1.0
    posterior = evidence.posterior((x, y), structure=structure)
    return lambda: posterior(x[:PREDICTED], correlated=prediction == "covariances"), 1.0


def main() -> None:
    """Print and write the time and memory of all kinds of work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--work", choices=WORKS, help="Only this work, with JSON as output.")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.work:
        work, factor = work_of(arguments.images, arguments.side, arguments.work)
        with Peak() as peak, Clock() as clock:
            work()
        print(json.dumps({"seconds": factor * clock.seconds, "bytes": peak.bytes}))
        return
    rows = []
    for name in WORKS:
        case = ["--images", arguments.images, "--side", arguments.side, "--work", name]
        measured = in_own_process(__file__, [str(part) for part in case], timeout=600)
        row = {"work": name, "images": arguments.images, "outputs": 3 * arguments.side**2}
        row["seconds"] = f"{measured['seconds']:.2f}"
        row["GiB"] = f"{measured['bytes'] / 2**30:.2f}"
        rows.append(row | {"machine": machine()})
        print(rows[-1], flush=True)
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
