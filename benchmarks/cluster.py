"""What many GPUs would do, on paper: bytes, multiplications and rows a second of one step.

Nothing here is measured. A step is the gradient in one precision for each weight matrix; the
formulas are those of docs/machines.md and of the paper's complexities, and the rates are guesses of
what an H100 and its links sustain: 10^12 multiplications a second in float32 and in bfloat16
(--products), 10^9 bytes a second within a machine and between machines (--links). Each row of a
matrix that acts at T positions takes 3 T multiplications a weight (forward, backward, and the sum
of outer products), and B for the kernel of B rows.

* ``replicas``: each rank has a block of its own, in float32, a layer at a time;
* ``shared``: all have one block, rows in float32, a layer at a time, products in bfloat16
  (``Memory(split_blocks=True)``).

    python benchmarks/cluster.py --pages docs/performance.md
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from measure import show

RANKS = (1, 8, 64, 1000)
NODE = 8  # GPUs with the faster links


@dataclass(frozen=True)
class Network:
    """Sizes of a transformer: weights, those of its largest matrix, matrices and positions."""

    name: str
    weights: float
    largest: float
    matrices: int
    positions: int


CASES = (
    ("replicas", Network("86 million weights, 197 positions", 86e6, 768 * 3072, 50, 197), 400, 4),
    ("shared", Network("a billion weights, 512 positions", 1e9, 2048 * 8192, 150, 512), 1000, 4),
)


def line(
    way: str, net: Network, rows: int, item: int, ranks: int, rates: tuple[float, float]
) -> str:
    """A line of the table; ``rates`` are multiplications and bytes a second."""
    own = rows if way == "replicas" else rows / ranks
    forming = 3 * own * net.positions * net.weights
    kernel = own * rows * net.weights
    others = (ranks - 1) / ranks
    sent = 16 * (ranks - 1) + 16 * others * (net.matrices + 7)
    if way == "shared":
        sent += others * (item * own * net.weights + 8 * rows**2 * net.matrices)
    computing, sending = (forming + kernel) / rates[0], sent / rates[1]
    all_rows = rows * ranks if way == "replicas" else rows
    cells = [
        f"{way}: {net.name}",
        f"{ranks:,}",
        words(item * own * net.largest),
        words(sent),
        f"{(forming + kernel) / 1e12:.3g}",
        f"{computing:.2g}",
        f"{sending:.2g}" if sending > 1e-3 else "< 0.001",
        f"{float(f'{all_rows / (computing + sending):.2g}'):,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def words(count: float) -> str:
    """A number of bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return (
                f"{count / scale:.2g} {unit}"
                if count < 100 * scale
                else f"{count / scale:.0f} {unit}"
            )
    return f"{count:.0f} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--products", type=float, nargs=2, default=(20.0, 150.0))
    parser.add_argument("--links", type=float, nargs=2, default=(300.0, 40.0))
    parser.add_argument("--pages", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    lines = [
        "| | GPUs | largest layer's rows on each | sent by each | 10¹² multiplications of each"
        " | seconds for them | seconds to send | rows a second |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (way, net, rows, item), products in zip(CASES, given.products, strict=True):
        for ranks in RANKS:
            link = given.links[0] if ranks <= NODE else given.links[1]
            lines.append(line(way, net, rows, item, ranks, (products * 1e12, link * 1e9)))
    show("cluster", "\n".join(lines), given.pages)


if __name__ == "__main__":
    main()
