"""Test anchors for the parametric structures.

``blockdiag`` is a sum of entropies log det(1 + A_t A_tᵀ) over parameter tensors, and ``diag`` a sum
over single weights. Both therefore have an anchored bound, ℓ(Z) + Σ ℓ(B | Z). It lies between the
exact value of the structure and its bound on blocks without anchors. The exact value of the
structure limits the gain.

The networks come from ``tightness.py``, after training. The library chooses anchors and blocks of k
rows, with all blocks of a partition. All values are divided by the exact log-determinant. All
structures share the rows and the passes. For k rows, ``ntk`` needs one factorization of k×k,
``blockdiag`` one per parameter tensor, and ``diag`` none.

    python benchmarks/anchored_parametric.py --data-dir DIR --seeds 0 1 2
    python benchmarks/anchored_parametric.py --table
"""

import json
from pathlib import Path
from typing import Any

import torch
from anchor_choice import whitened
from anchor_search import NOW, Problem, entropy
from measure import insert, machine, means, measured_on, write_csv
from tightness import evidence_at, study_parser, trained
from torch import Tensor

from evigrad.data import load

ROWS = (100, 200, 400, 1000)
STRUCTURES = ("ntk", "blockdiag", "diag")


def of_kernels(grams: list[Tensor], anchors: Tensor, parts: list[Tensor]) -> float:
    """Return ℓ(Z) + Σ ℓ(B | Z), summed over some Gram matrices."""
    total = 0.0
    for gram in grams:
        held = entropy(gram[anchors[:, None], anchors]) if len(anchors) else 0.0
        total += held
        for part in parts:
            both = torch.cat([anchors, part])
            total += entropy(gram[both[:, None], both]) - held
    return total


def of_weights(squares: Tensor, anchors: Tensor, parts: list[Tensor]) -> float:
    """Return the anchored bound with one entropy per weight, from squares (rows, P)."""
    held = squares[anchors].sum(0, dtype=torch.float64)
    total = held.log1p().sum()
    for part in parts:
        total = total + (squares[part].sum(0, dtype=torch.float64) / (1 + held)).log1p().sum()
    return float(total)


def measured(
    problem: Problem, squares: Tensor, exact: dict[str, float], k: int, seed: int
) -> list[dict[str, Any]]:
    """Return each structure with and without anchors."""
    generator = torch.Generator().manual_seed(seed)
    count = int(NOW.share * k)
    anchors = problem.anchors(NOW, count, generator)
    parts, _, _ = problem.blocks(NOW, anchors, k - count, generator)
    none = anchors[:0]
    plain = list(torch.randperm(len(squares), generator=generator).split(k))
    rows = []
    for structure in STRUCTURES:
        values = {}
        for name, anchor_rows, blocks in (("anchored", anchors, parts), ("plain", none, plain)):
            if structure == "diag":
                values[name] = of_weights(squares, anchor_rows, blocks)
            else:
                whole = [problem.kernels["all"]] if structure == "ntk" else problem.shares
                values[name] = of_kernels(whole, anchor_rows, blocks)
        assert exact[structure] * (1 - 1e-6) <= values["anchored"]
        relative = {name: value / problem.exact for name, value in values.items()}
        ratio = exact[structure] / problem.exact
        rows.append({"seed": seed, "rows": k, "structure": structure, "exact": ratio, **relative})
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Return a line per structure: its exact value, then plain and anchored bounds by rows."""
    sizes = sorted({row["rows"] for row in rows})
    lines = [
        f"| structure | exact | {' | '.join(f'{k} rows: plain, anchored' for k in sizes)} |",
        "|---" * (2 + len(sizes)) + "|",
    ]
    for structure in STRUCTURES:
        by_size = {row["rows"]: row for row in rows if row["structure"] == structure}
        cells = [f"{by_size[k]['plain']:.2f}, {by_size[k]['anchored']:.2f}" for k in sizes]
        lines.append(f"| {structure} | {by_size[sizes[0]]['exact']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and write the table."""
    parser = study_parser(__doc__, "anchored_parametric", ROWS)
    parser.add_argument("--networks", type=Path, default=Path("results/tightness"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for folder in (options.networks, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    for seed in [] if options.table else options.seeds:
        kept = options.results / f"case-{seed}.json"
        if kept.exists():
            continue
        data = load("mnist", data_dir=options.data_dir, subset=options.num_data, seed=seed)
        files = trained(data, seed, options.epochs, options.networks)
        evidence = evidence_at(files[max(files)], data, seed, "ntk-400-rows-anchored")
        rows = whitened(evidence, data)
        problem = Problem(evidence, data, {name: a @ a.mT for name, a in rows.items()})
        squares = torch.cat([a[problem.rows].square() for a in rows.values()], dim=1)
        exact = {
            "ntk": problem.exact,
            "blockdiag": sum(map(entropy, problem.shares)),
            "diag": float(squares.sum(0, dtype=torch.float64).log1p().sum()),
        }
        rows_of_seed = []
        for k in options.rows:
            rows_of_seed += measured(problem, squares, exact, k, seed)
            print(*rows_of_seed[-len(STRUCTURES) :], sep="\n", flush=True)
        kept.write_text(json.dumps(rows_of_seed, indent=1))
    results = [
        row for path in sorted(options.results.glob("case-*.json"))
        for row in json.loads(path.read_text())
    ]  # fmt: skip
    if not results:
        parser.error(f"there are no results in {options.results}")
    rows_of_table = means(results, ("structure", "rows"), ("exact", "plain", "anchored"))
    write_csv(options.tables / "anchored_parametric.csv", rows_of_table)
    text = f"{as_markdown(rows_of_table)}\n\n{measured_on([machine()])}"
    print(text)
    if options.page.exists():
        insert(options.page, "anchored_parametric", text)


if __name__ == "__main__":
    main()
