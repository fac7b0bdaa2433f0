"""What several processes cost and save: time of a step, bytes sent, memory of a shared block.

Ranks of Gloo on this machine, one thread each, on a Wide ResNet whose rows are formed:

* ``own blocks``: each rank evaluates a block of its own. ``step`` is the median time of a backward
  call, ``sum`` that of the sum over ranks alone, right after a barrier: with more ranks than cores
  the first grows with what each core has to do, and only the bytes mean something.
* ``shared``: all evaluate one block (``Memory(split_blocks=True)``) for precisions alone, a layer
  at a time; ``shared, two passes``: also for a hyperparameter of the network, for which all rows
  are kept. ``MiB`` is the largest peak of a rank above what it held before, ``over one`` is that
  over the peak of one process.

    python benchmarks/ranks.py --csv docs/results/ranks.csv --pages docs/machines.md
"""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measure import MIB, Peak, give_back, machine, pass_checks, show, write_csv
from torch import distributed, nn
from torch.multiprocessing.spawn import start_processes

from evigrad import Evidence, Memory
from evigrad.invariances import InputScale
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

RANKS = (1, 2, 4)
WAYS = ("own blocks", "shared", "shared, two passes")
SHAPE, OUTPUTS, NUM_DATA = (3, 16, 16), 10, 4000
COLUMNS = ("way", "rows", "ranks", "step_ms", "sum_ms", "bytes", "MiB", "over_one", "machine")


def made(way: str, rows: int, group: Any) -> Evidence:
    """The evidence of one way."""
    network = make_model("wide_resnet", SHAPE, OUTPUTS, seed=0, depth=10, widen_factor=4)
    scaled = way == WAYS[2]
    return Evidence(
        nn.Sequential(InputScale(SHAPE[-1]), network) if scaled else network,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=f"ntk-{rows}-1",
        num_data=NUM_DATA,
        hyperparameters=["0"] if scaled else [],
        memory=Memory(micro_batch=4 if scaled else None, split_blocks=way != WAYS[0]),
        generator=0,
        process_group=group,
    )


def run(way: str, rows: int, repeats: int, group: Any) -> dict[str, float]:
    """What one rank measures."""
    own = torch.Generator().manual_seed(0)
    x = torch.rand(NUM_DATA, *SHAPE, generator=own)
    y = torch.randint(OUTPUTS, (NUM_DATA,), generator=own)
    evidence = made(way, rows, group)
    few = group.size() if group is not None else 1  # each rank has one example of a shared block
    # Planning is not what is measured either.
    pass_checks(evidence, x[:few], y[:few], passes=repeats + 1)
    blocks, ranks = iter(evidence.blocks((x, y))), evidence.ranks
    if way != WAYS[0]:
        give_back()
        before, block = ranks.sent, next(blocks)
        with Peak() as peak:
            evidence.backward(block)
        return {"bytes": ranks.sent - before, "MiB": peak.bytes / MIB}
    steps, sums, before = [], [], 0
    for _ in range(repeats + 1):
        block, before = next(blocks), ranks.sent
        steps.append(timed(group, lambda block=block: evidence.backward(block)))
        numbers = torch.zeros(sum(p.numel() for p in evidence.hyperparameters().values()) + 7)
        sent = ranks.sent - before
        sums.append(timed(group, lambda numbers=numbers: ranks.sum([numbers.double()])))
    times = {"step_ms": statistics.median(steps[1:]), "sum_ms": statistics.median(sums[1:])}
    return times | {"bytes": sent}


def timed(group: Any, work: Any) -> float:
    """Milliseconds of a call that all ranks begin together."""
    if group is not None:
        distributed.barrier(group)
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def rank_of(rank: int, count: int, folder: str, way: str, rows: int, repeats: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    group = None
    if count > 1:
        distributed.init_process_group(
            "gloo", f"file://{folder}/store", rank=rank, world_size=count
        )
        group = distributed.group.WORLD
    torch.save(run(way, rows, repeats, group), f"{folder}/{rank}.pt")


def measured(way: str, rows: int, count: int, repeats: int) -> dict[str, float]:
    """The largest number of all ranks, of each kind."""
    with TemporaryDirectory() as folder:
        start_processes(
            rank_of, (count, folder, way, rows, repeats), nprocs=count, start_method="spawn"
        )
        found = [torch.load(f"{folder}/{rank}.pt") for rank in range(count)]
    return {key: max(own[key] for own in found) for key in found[0]}


def table_of(rows: list[dict[str, Any]]) -> str:
    """The measurements as Markdown."""
    lines = [
        "| | rows of a block | ranks | step, ms | of it the sum, ms | bytes sent by a rank"
        " | peak of a rank, MiB | over one rank's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [str(row.get(key) or "–") for key in COLUMNS[:-1]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", rows[0]["machine"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--pages", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for way in arguments.ways:
        alone = None
        for count in RANKS:
            numbers = measured(way, arguments.rows, count, arguments.repeats)
            row = {"way": way, "rows": arguments.rows, "ranks": count, "machine": machine()}
            row |= {key: f"{numbers[key]:.1f}" for key in ("step_ms", "sum_ms") if key in numbers}
            row["bytes"] = f"{int(numbers['bytes']):,}"
            if "MiB" in numbers:
                alone = alone or numbers["MiB"]
                row |= {"MiB": f"{numbers['MiB']:.0f}", "over_one": f"{numbers['MiB'] / alone:.2f}"}
            found.append({key: row.get(key, "") for key in COLUMNS})
            print(found[-1], flush=True)
            if arguments.csv:
                write_csv(arguments.csv, found)
    show("ranks", table_of(found), arguments.pages)


if __name__ == "__main__":
    main()
