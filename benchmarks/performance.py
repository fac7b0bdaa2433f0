"""Write the tables of benchmarks/README.md from the CSV files of the other benchmarks.

Run it after one of them, from any folder: ``python benchmarks/performance.py``.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from measure import insert, measured_on

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"
STRUCTURES = ("ntk", "kfac-expand", "kfac-reduce")
Row = Mapping[str, str]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def step_cost(rows: Sequence[Row]) -> str:
    """Return ratios to a training step, one line for each size."""
    sizes = dict.fromkeys((r["m"], r["micro_batch"]) for r in rows)
    lines = []
    for m, micro_batch in sizes:
        mine = {r["structure"]: r for r in rows if r["m"] == m}
        step = float(next(iter(mine.values()))["step_seconds"])
        ratios = [f"{mine[s]['ratio']} ×" if s in mine else "–" for s in STRUCTURES]
        lines.append([m, micro_batch, f"{1e3 * step:.0f} ms", *ratios])
    return markdown(["m", "micro-batch", "training step", *STRUCTURES], lines)


def step_cost_of_models(rows: Sequence[Row]) -> str:
    """Return ratios to a training step, one line for each network."""
    lines = []
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = {r["structure"]: r for r in rows if r["model"] == model}
        step = float(next(iter(mine.values()))["step_seconds"])
        lines.append(
            [model, f"{1e3 * step:.0f} ms", *(f"{mine[s]['ratio']} ×" for s in STRUCTURES)]
        )
    return markdown(["network", "training step", *STRUCTURES], lines)


def memory(rows: Sequence[Row]) -> str:
    """Return peaks in MiB, one line for each size."""
    columns = [(s, way) for way in ("two-pass", "one-graph") for s in ("kfac", "ntk")]
    lines = []
    for m in dict.fromkeys(r["m"] for r in rows):
        peaks = {(r["structure"], r["way"]): r for r in rows if r["m"] == m}
        cells = [peaks[c]["MiB"] or peaks[c]["note"] if c in peaks else "–" for c in columns]
        held = peaks.get(("ntk", "two-pass"), {}).get("rows_MiB", "")
        lines.append([m, cells[0], cells[1], held, *cells[2:]])
    header = ["m", "kfac", "ntk", "ntk: of which rows", "kfac, one graph", "ntk, one graph"]
    return markdown(header, lines)


def prior_steps(rows: Sequence[Row]) -> str:
    """Return times of one step and of several, one line for each case."""
    lines = []
    for r in rows:
        one, many = float(r["one_step_seconds"]), float(r["many_steps_seconds"])
        named = [r["model"], r["estimator"], r["learned"]]
        lines.append([*named, f"{1e3 * one:.0f} ms", f"{1e3 * many:.0f} ms", f"{r['ratio']} ×"])
    steps = rows[0]["steps"]
    header = ["model", "estimator", "learned", "1 step", f"{steps} steps", "ratio"]
    return markdown(header, lines)


def axes_cost(rows: Sequence[Row]) -> str:
    """Return times for one precision per tensor and per unit, one line for each case."""
    lines = []
    for r in rows:
        times = [f"{1e3 * float(r[f'{kind}_seconds']):.0f} ms" for kind in ("layerwise", "units")]
        named = [r["network"], r["precisions"], r["estimator"], r["work"]]
        lines.append([*named, *times, f"{r['ratio']} ×"])
    header = ["network", "precisions", "estimator", "work", "one per tensor", "one per unit"]
    return markdown([*header, "ratio"], lines)


def peers(rows: Sequence[Row]) -> str:
    """Return the times of evigrad and of another package, one line for each case."""
    lines = []
    for r in rows:
        times = [f"{1e3 * float(r[f'{name}_seconds']):.0f} ms" for name in ("peer", "evigrad")]
        lines.append([r["network"], r["estimator"], r["peer"], *times, f"{r['ratio']} ×"])
    header = ["network", "estimator", "package", "its time", "evigrad", "faster by"]
    return markdown(header, lines)


# Marker in the page → file, required values of its rows, and the table.
TABLES: dict[str, tuple[str, Mapping[str, str], Callable[[Sequence[Row]], str]]] = {
    "wrn precisions": ("step_cost_wrn_precisions", {}, step_cost),
    "wrn invariances": ("step_cost_wrn_invariances", {}, step_cost),
    "mininet precisions": ("step_cost_mininet", {"learned": "precisions"}, step_cost),
    "mininet invariances": ("step_cost_mininet", {"learned": "invariances"}, step_cost),
    "sequences": ("step_cost_sequences", {}, step_cost_of_models),
    "memory": ("memory", {}, memory),
    "prior steps": ("prior_steps*", {}, prior_steps),
    "axes": ("axes_cost", {}, axes_cost),
    "laplace-torch": ("peers", {}, peers),
    "paper": ("peers_paper", {}, peers),
}


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    for marker, (name, required_values, table) in TABLES.items():
        paths = sorted(RESULTS.glob(f"{name}.csv"))
        if not paths:
            print(f"{name}.csv is missing. Its table does not change")
            continue
        rows = [r for path in paths for r in read(path) if required_values.items() <= r.items()]
        machines = measured_on(row["machine"] for row in rows)
        insert(HERE / "README.md", marker, f"{table(rows)}\n\n{machines}")


if __name__ == "__main__":
    main()
