"""Time 50 hyperparameter steps on one stored pass, relative to one step.

The prior and the noise enter after the network. After a pass over a block, a step of Adam on
layerwise precisions is cheap. It costs R²L + R³/3 operations for R rows and L parameter tensors
(ntk), or a few per eigenvalue (kfac). "one step" and "50 steps" pass over the block once, store the
pass and take their steps on it. "without keeping" is the gradient on the block itself and one step.
"precisions" learns layerwise precisions of a classifier. "noise" also learns one noise level of a
regression on ten outputs. The cost of a step does not depend on the network, so the ratio falls
with its size: MiniNet (15,000 weights) is the hard case. Times do not depend on the data, which are
random. They are medians of runs in turns.

    python benchmarks/prior_steps.py --csv docs/results/prior_steps.csv
    python benchmarks/prior_steps.py --model wrn16-4 --estimators kfac-400-1 --repeats 3
    python benchmarks/prior_steps.py --csv docs/results/prior_steps.csv --table
"""

import argparse
import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import machine, paired, write_csv
from torch import Tensor

from evigrad import Evidence
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

SHAPES = {"mininet": (1, 28, 28), "wrn16-4": (3, 32, 32)}
OUTPUTS = 10
NUM_DATA = 60_000
ESTIMATORS = ("ntk-400-1", "kfac-400-1", "ntk-1000-1")
GOAL = 1.5
# Planning, and checks against plain automatic differentiation at passes 1, 2, 4 and 8.
WARMUP = 3


def make(
    name: str, estimator: str, learned: str, device: torch.device
) -> tuple[Evidence, Tensor, Tensor]:
    """Return an evidence and a block of data for it."""
    model = make_model(name, SHAPES[name], OUTPUTS, seed=0).to(device)
    generator = torch.Generator().manual_seed(0)
    num_rows = int(estimator.split("-")[1])
    x = torch.rand(num_rows, *SHAPES[name], generator=generator)
    if learned == "noise":
        likelihood: Any = Gaussian(0.5)
        y = torch.randn(num_rows, OUTPUTS, generator=generator)
    else:
        likelihood = Categorical()
        y = torch.randint(OUTPUTS, (num_rows,), generator=generator)
    evidence = Evidence(
        model,
        likelihood,
        GaussianPrior("layerwise", precision=1.0),
        estimator=estimator,
        num_data=NUM_DATA,
        generator=0,
    )
    return evidence, x.to(device), y.to(device)


def steps(
    evidence: Evidence, x: Tensor, y: Tensor, count: int, keep: bool = True
) -> Callable[[], None]:
    """Take steps of Adam from an equal start in every run."""
    parameters = list(evidence.hyperparameters().values())
    start = [p.detach().clone() for p in parameters]

    def work() -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        kept = evidence.collect(x, y) if keep else None
        for _ in range(count):
            optimizer.zero_grad()
            if kept is None:
                evidence.backward(x, y)
            else:
                evidence.backward_kept(kept)
            optimizer.step()

    return work


def measure(name: str, estimator: str, learned: str, repeats: int, count: int) -> dict[str, Any]:
    """Return one row of the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    evidence, x, y = make(name, estimator, learned, device)
    works = {
        "without keeping": steps(evidence, x, y, 1, keep=False),
        "one": steps(evidence, x, y, 1),
        "many": steps(evidence, x, y, count),
    }
    times = paired(works, repeats, warmup=WARMUP)
    return {
        "model": name,
        "estimator": estimator,
        "learned": learned,
        "steps": count,
        "without_keeping_seconds": f"{times['without keeping']:.4f}",
        "one_step_seconds": f"{times['one']:.4f}",
        "many_steps_seconds": f"{times['many']:.4f}",
        "ratio": f"{times['many'] / times['one']:.2f}",
        "threads": torch.get_num_threads(),
        "machine": machine(),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown, with their machine."""
    lines = [
        f"Goal: a ratio of at most {GOAL}. {'; '.join(dict.fromkeys(r['machine'] for r in rows))}",
        "",
        "| model | estimator | learned | steps | one step, without keeping the pass | one step"
        " | all steps | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = [
            f"{1e3 * float(row[f'{name}_seconds']):.0f} ms"
            for name in ("without_keeping", "one_step", "many_steps")
        ]
        named = [row[name] for name in ("model", "estimator", "learned", "steps")]
        cells = (*named, *seconds, row["ratio"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=list(SHAPES), default="mininet")
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS))
    parser.add_argument("--learned", nargs="+", choices=("precisions", "noise"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path)
    parser.add_argument(
        "--table", action="store_true", help="only print the file of --csv as Markdown"
    )
    arguments = parser.parse_args()
    if arguments.table:
        if arguments.csv is None:
            parser.error("--table requires the --csv of a run")
        with arguments.csv.open(newline="") as file:
            print(table(list(csv.DictReader(file))))
        return
    torch.set_num_threads(arguments.threads)
    rows = []
    for learned in arguments.learned or ("precisions", "noise"):
        for estimator in arguments.estimators:
            row = measure(arguments.model, estimator, learned, arguments.repeats, arguments.steps)
            rows.append(row)
            print(
                f"{arguments.model} {estimator:11} {learned:10} one step"
                f" {row['one_step_seconds']} s, {arguments.steps} steps"
                f" {row['many_steps_seconds']} s: {row['ratio']} x"
                f" (one without keeping {row['without_keeping_seconds']} s,"
                f" {row['threads']} threads)",
                flush=True,
            )
            if arguments.csv:
                write_csv(arguments.csv, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
