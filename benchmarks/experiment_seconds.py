"""How long a job of an experiment takes: fits the rates of ``evigrad.experiments.cost``.

Reads what jobs of a folder of results took, and finds the seconds of a unit of work that fit them
best on a logarithmic scale. Prints them as they stand in the module, and how far the expectation
is off for the jobs that it was fitted to.

    python benchmarks/experiment_seconds.py --results results/experiments
"""

import argparse
import json
import statistics
from dataclasses import asdict, fields
from pathlib import Path

import torch

from evigrad.experiments.cost import Work, work_of
from evigrad.experiments.jobs import Job

# Seconds of a unit to begin with, and to stay near where no job says anything else.
START = {
    "jobs": 0.5,
    "steps": 2e-3,
    "estimates": 1e-2,
    "passes": 2e-11,
    "values": 1e-9,
    "row_passes": 2e-11,
    "row_values": 1e-9,
    "products": 1e-11,
    "dense": 1e-11,
}
NAMES = [field.name for field in fields(Work)]
# Below this a job is all noise, and of no importance for a plan.
LEAST = 0.5


def measured(folder: Path) -> list[tuple[Work, float]]:
    """Work and seconds of all jobs of a folder that are done and known."""
    found, trainings = [], {}
    files = sorted(folder.glob("*/*/result.json"), key=lambda f: f.parts[-3] != "train")
    for file in files:
        described = json.loads((file.parent / "job.json").read_text())
        needs = described.get("needs")
        if needs is not None and needs not in trainings:
            continue
        job = Job(described["kind"], described["config"], trainings.get(needs))
        if needs is None:
            trainings[f"train/{file.parent.name}"] = job
        seconds = json.loads(file.read_text())["job_seconds"]
        work = work_of(job)
        if work is not None and seconds > LEAST:
            found.append((work, seconds))
    return found


def fitted(jobs: list[tuple[Work, float]]) -> Work:
    """The rates with the least squares of logarithms of expected over measured."""
    amounts = torch.tensor([list(asdict(w).values()) for w, _ in jobs], dtype=torch.float64)
    seconds = torch.tensor([s for _, s in jobs], dtype=torch.float64)
    start = torch.tensor([START[name] for name in NAMES], dtype=torch.float64)
    logs = start.log().requires_grad_()
    optimizer = torch.optim.LBFGS([logs], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        # Held near where one begins, for what the jobs say nothing about.
        value = ((amounts @ logs.exp()).log() - seconds.log()).square().mean()
        value = value + 1e-2 * (logs - start.log()).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    return Work(*(float(f"{value:.3g}") for value in logs.detach().exp().tolist()))


def main(arguments: list[str] | None = None) -> None:
    """Fit, and say how well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results/experiments"))
    options = parser.parse_args(arguments)
    jobs = measured(options.results)
    if not jobs:
        parser.error(f"there are no results in {options.results}")
    rates = fitted(jobs)
    print(rates)
    ratios = sorted(work.seconds(rates) / seconds for work, seconds in jobs)
    within = sum(0.5 < ratio < 2 for ratio in ratios) / len(ratios)
    deciles = statistics.quantiles(ratios, n=10)
    total = sum(w.seconds(rates) for w, _ in jobs) / sum(s for _, s in jobs)
    print(
        f"{len(jobs)} jobs: expected over measured {statistics.median(ratios):.2f} (median),"
        f" {deciles[0]:.2f} to {deciles[-1]:.2f} (eight of ten), {100 * within:.0f} % within a"
        f" factor of two; of all together {total:.2f}"
    )


if __name__ == "__main__":
    main()
