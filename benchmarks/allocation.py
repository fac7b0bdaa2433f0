"""Time steps with freed memory kept for the next step, and with memory returned to the system.

The cases are a training step on m images, and a hyperparameter step of m rows for layerwise
precisions. If the network averages over S random transforms, the steps have m times S images and
also learn the ranges. Times do not depend on the data, which are random. Each case runs twice in a
separate process, first with the default, because earlier work affects the allocator.

    python benchmarks/allocation.py --csv docs/results/allocation.csv
"""

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from measure import in_own_process, machine, seconds, write_csv
from step_cost import NUM_DATA, SHAPES, training_step

from evigrad import Evidence, kept_memory
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

# Model, S, and m.
CASES = (("mininet", 1, 250), ("mininet", 8, 250), ("wrn16-4", 1, 16))


def works(name: str, samples: int, count: int) -> dict[str, Callable[[], object]]:
    """Return the two steps."""
    network = make_model(name, SHAPES[name], 10, seed=0)
    x, y = torch.rand(count, *SHAPES[name]), torch.randint(10, (count,))
    hyperparameters: list[str] = []
    model: torch.nn.Module = network
    if samples > 1:
        model = Averaged(network, AffineInvariance(), num_samples=samples)
        hyperparameters = ["invariance"]
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=f"ntk-{count}-1",
        num_data=NUM_DATA,
        hyperparameters=hyperparameters,
        generator=0,
    )
    for _ in range(4):  # planning, and the checks of passes 1, 2 and 4
        evidence.backward(x[:2], y[:2])
    return {
        "training": training_step(model, x, y, count),
        "hyperparameters": lambda: evidence.backward(x, y),
    }


def measure(case: tuple[str, int, int], kept: bool, repeats: int) -> dict[str, float]:
    """Return the seconds of both steps for one setting."""
    with kept_memory() if kept else nullcontext():
        steps = works(*case)
        return {step: seconds(work, repeats, warmup=2) for step, work in steps.items()}


def main() -> None:
    """Measure all cases, or a single one in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--case", type=int, help="a single one")
    parser.add_argument("--kept", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.case is not None:
        print(json.dumps(measure(CASES[arguments.case], arguments.kept, arguments.repeats)))
        return
    print(machine())
    rows: list[dict[str, Any]] = []
    for number, (model, samples, count) in enumerate(CASES):
        common = [f"--{k}={getattr(arguments, k)}" for k in ("repeats", "threads")]
        common.append(f"--case={number}")
        usual = in_own_process(__file__, common, timeout=600)
        kept = in_own_process(__file__, [*common, "--kept"], timeout=600)
        if failed := usual.get("failed") or kept.get("failed"):
            raise SystemExit(f"{model}, S = {samples}: {failed}")
        for step in usual:
            rows.append(
                {
                    "model": model,
                    "samples": samples,
                    "m": count,
                    "step": step,
                    "usual_seconds": f"{usual[step]:.4f}",
                    "kept_seconds": f"{kept[step]:.4f}",
                    "ratio": f"{usual[step] / kept[step]:.2f}",
                    "machine": machine(),
                }
            )
            print({k: v for k, v in rows[-1].items() if k != "machine"}, flush=True)
        if arguments.csv:
            write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
