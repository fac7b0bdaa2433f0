"""Measure the cost of several processes: time of a step, time of its sum over ranks, bytes sent.

The processes are ranks of Gloo on this machine with one thread each. They run a Wide ResNet whose
rows are formed, and each rank evaluates its own block. ``step`` is the median time of a backward
call. ``sum`` is the time of the sum over ranks, right after a barrier. With more ranks than cores,
times grow with the work per core, and only the bytes are meaningful.

    python benchmarks/ranks.py --csv docs/results/ranks.csv --pages docs/machines.md
"""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measure import machine, measured_on, pass_checks, show, write_csv
from torch import distributed
from torch.multiprocessing.spawn import start_processes

from evigrad import Evidence
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

RANKS = (1, 2, 4)
SHAPE, OUTPUTS, NUM_DATA = (3, 16, 16), 10, 4000
COLUMNS = ("rows", "ranks", "step_ms", "sum_ms", "bytes", "machine")


def make_evidence(rows: int, group: Any) -> Evidence:
    """Return an evidence whose ranks have one block each."""
    return Evidence(
        make_model("wide_resnet", SHAPE, OUTPUTS, seed=0, depth=10, widen_factor=4),
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=f"ntk-{rows}-1",
        num_data=NUM_DATA,
        generator=0,
        process_group=group,
    )


def run(rows: int, repeats: int, group: Any) -> dict[str, float]:
    """Return the measurements of one rank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(NUM_DATA, *SHAPE, generator=generator)
    y = torch.randint(OUTPUTS, (NUM_DATA,), generator=generator)
    evidence = make_evidence(rows, group)
    # Planning and the checks of the first passes are not measured.
    pass_checks(evidence, x[:1], y[:1], passes=repeats + 1)
    blocks, ranks = iter(evidence.blocks((x, y))), evidence.ranks
    steps, sums, sent = [], [], 0
    for _ in range(repeats + 1):
        block, before = next(blocks), ranks.sent
        steps.append(timed(group, lambda block=block: evidence.backward(block)))
        numbers = torch.zeros(sum(p.numel() for p in evidence.hyperparameters().values()) + 7)
        sent = ranks.sent - before
        sums.append(timed(group, lambda numbers=numbers: ranks.sum([numbers.double()])))
    times = {"step_ms": statistics.median(steps[1:]), "sum_ms": statistics.median(sums[1:])}
    return times | {"bytes": sent}


def timed(group: Any, work: Any) -> float:
    """Return milliseconds of a call that all ranks begin together."""
    if group is not None:
        distributed.barrier(group)
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def rank_of(rank: int, count: int, folder: str, rows: int, repeats: int) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    group = None
    if count > 1:
        distributed.init_process_group(
            "gloo", f"file://{folder}/store", rank=rank, world_size=count
        )
        group = distributed.group.WORLD
    torch.save(run(rows, repeats, group), f"{folder}/{rank}.pt")


def measured(rows: int, count: int, repeats: int) -> dict[str, float]:
    """Return the largest number over all ranks, of each kind."""
    with TemporaryDirectory() as folder:
        start_processes(rank_of, (count, folder, rows, repeats), nprocs=count, start_method="spawn")
        results = [torch.load(f"{folder}/{rank}.pt") for rank in range(count)]
    return {key: max(result[key] for result in results) for key in results[0]}


def table_of(rows: list[dict[str, Any]]) -> str:
    """Return the measurements as Markdown."""
    lines = [
        "| rows per block | ranks | step, ms | of which sum, ms | bytes sent per rank |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(str(row[key]) for key in COLUMNS[:-1])} |" for row in rows]
    return "\n".join([*lines, "", measured_on([rows[0]["machine"]])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--pages", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for count in RANKS:
        numbers = measured(arguments.rows, count, arguments.repeats)
        row = {"rows": arguments.rows, "ranks": count}
        row |= {key: f"{numbers[key]:.1f}" for key in ("step_ms", "sum_ms")}
        rows.append(row | {"bytes": f"{int(numbers['bytes']):,}", "machine": machine()})
        print(rows[-1], flush=True)
        if arguments.csv:
            write_csv(arguments.csv, rows)
    show("ranks", table_of(rows), arguments.pages)


if __name__ == "__main__":
    main()
