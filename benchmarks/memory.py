"""Measure the peak memory of the gradient in the ranges of an invariance, against the subset size.

Each case runs in a separate process. The peak is the memory above what the process held after one
gradient of a single micro-batch, plus the memory of that first gradient. On a WRN-16-4 with S
augmentation samples and a fixed micro-batch, the memory of kfac does not depend on m. The memory of
ntk grows with its rows (m x P numbers). The one-graph twin stores everything.

    python benchmarks/memory.py --csv docs/results/memory.csv
"""

import argparse
import json
import resource
from pathlib import Path
from typing import Any

import torch
from measure import MIB, Peak, in_own_process, machine, pass_checks, write_csv
from one_graph import OneGraph

from evigrad import Evidence, Memory
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

NUM_DATA = 50_000
MODELS = {"wrn16-4": (3, 32, 32), "mininet": (1, 28, 28), "resnet50": (3, 64, 64)}


def one_case(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the peak memory of one gradient, in this process."""
    (m,), (structure,), (way,) = arguments.data, arguments.structures, arguments.ways
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = MODELS[arguments.model]
    settings = {"width": arguments.width} if arguments.width else {}
    network = make_model(arguments.model, shape, arguments.outputs, seed=0, **settings).to(device)
    model = Averaged(network, AffineInvariance().to(device), num_samples=arguments.samples)
    kind = Evidence if way == "two-pass" else OneGraph
    evidence = kind(
        model,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=f"{structure}-{m}-1",
        num_data=NUM_DATA,
        hyperparameters=["invariance"],
        memory=Memory(
            micro_batch=arguments.micro_batch if way == "two-pass" else None,
            rows_dtype=torch.bfloat16 if arguments.bfloat16_rows else None,
        ),
        generator=0,
    )
    if arguments.limit and not torch.cuda.is_available():
        # An allocation beyond it fails instead of the machine.
        resource.setrlimit(resource.RLIMIT_AS, (arguments.limit * MIB * 1024,) * 2)
    x = torch.rand(m, *shape)
    y = torch.randint(arguments.outputs, (m,))
    x, y = x.to(device), y.to(device)
    pass_checks(evidence, x[:3], y[:3], passes=1)  # and plan, which is not measured
    with Peak() as peak:
        evidence.backward(x, y)
    return {"bytes": peak.bytes, "weights": sum(p.numel() for p in network.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(MODELS), default="wrn16-4")
    parser.add_argument("--width", type=int, help="initial channels")
    parser.add_argument("--outputs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--data", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--structures", nargs="+", default=["kfac", "ntk"])
    ways = ["two-pass", "one-graph"]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--limit", type=int, help="memory limit of a process, in GiB")
    parser.add_argument("--bfloat16-rows", action="store_true")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.one:
        print(json.dumps(one_case(arguments)))
        return
    print(machine())
    rows: list[dict[str, Any]] = []
    for way in arguments.ways:
        for structure in arguments.structures:
            for m in arguments.data:
                case = ["--one", "--model", arguments.model, "--samples", str(arguments.samples)]
                case += ["--micro-batch", str(arguments.micro_batch), "--data", str(m)]
                case += ["--structures", structure, "--ways", way]
                case += ["--outputs", str(arguments.outputs)]
                case += ["--width", str(arguments.width)] if arguments.width else []
                case += ["--limit", str(arguments.limit)] if arguments.limit else []
                case += ["--bfloat16-rows"] if arguments.bfloat16_rows else []
                measurement = in_own_process(__file__, case, arguments.timeout)
                row = {"structure": structure, "way": way, "m": m, "samples": arguments.samples}
                row |= {"micro_batch": arguments.micro_batch if way == "two-pass" else m}
                if "failed" in measurement:
                    out_of_memory = "allocate memory" in measurement["failed"]
                    note = "does not fit" if out_of_memory else measurement["failed"]
                    row |= {"MiB": "", "rows_MiB": "", "note": note}
                else:
                    held = 4 * m * measurement["weights"] / MIB if structure == "ntk" else 0.0
                    row |= {"MiB": f"{measurement['bytes'] / MIB:.0f}", "rows_MiB": f"{held:.0f}"}
                row["machine"] = machine()
                rows.append(row)
                print(row, flush=True)
                if arguments.csv:
                    write_csv(arguments.csv, rows)
                if "failed" in measurement:
                    break  # larger ones fail too


if __name__ == "__main__":
    main()
