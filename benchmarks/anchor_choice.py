"""Which rows should be anchors? Choices compared by the tightness of the bound, on real data.

A network is trained with precisions (and noise) learned. Then the log-determinant of single draws
is compared with the exact one of all rows: ``ntk-k-1``, the paper's, without anchors, and
``ntk-k-rows-anchored`` with anchors chosen at random, by k-centre, and by score. In regression all
scores are the same, and no score is shown. Mean and standard deviation of a draw over the exact.

    python benchmarks/anchor_choice.py --data-dir DIR
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from measure import insert, machine, write_csv

import evigrad
from evigrad import Evidence
from evigrad.anchors import Anchoring
from evigrad.data import DataSet, load
from evigrad.models import make_model

PROBLEMS = {"energy": "mlp", "wine_red": "mlp", "digits": "digitsnet"}
SUBSET = {"wine_red": 1000, "digits": 400}
ROWS = (50, 100, 200)
DRAWS, SEEDS = 40, (0, 1, 2)
TRAINING: dict[str, Any] = {
    "estimator": "ntk-100-1",
    "epochs": 150,
    "batch_size": 100,
    "lr": 1e-2,
    "lr_min": 1e-5,
    "burn_in": 10,
    "progress": False,
}


def choices(k: int, data: DataSet) -> dict[str, tuple[str, dict[str, Any]]]:
    """Column of the table → estimator and its settings."""
    name = f"ntk-{k}-rows-anchored"
    found: dict[str, tuple[str, dict[str, Any]]] = {"ntk-k-1": (f"ntk-{k}-1", {})}
    shown = ("random", "k-centre", *(["score"] if data.is_classification else []))
    return found | {each: (name, {"anchoring": Anchoring(choice=each)}) for each in shown}


def draws(evidence: Evidence, data: DataSet, count: int) -> list[float]:
    """Log-determinants of independent draws, each with a partition of its own."""
    blocks = chain.from_iterable(evidence.blocks(data.train).take(1) for _ in repeat(None))
    return [evidence.estimate(next(blocks)).log_det for _ in range(count)]


def one(name: str, seed: int, data: DataSet, rows: Sequence[int], count: int) -> list[dict]:
    """All choices on one network."""
    model = make_model(PROBLEMS[name], data.input_shape, data.num_outputs, seed=seed)
    likelihood = data.likelihood
    trained = evigrad.fit(model, data.train, likelihood=likelihood, seed=seed, **TRAINING)
    exact_one = trained.evidence.with_estimator("ntk-N-C", micro_batch=100)
    exact = exact_one.estimate(*data.train).log_det
    found = []
    for k in rows:
        for choice, (estimator, settings) in choices(k, data).items():
            evidence = trained.evidence.with_estimator(estimator, generator=seed, **settings)
            ratios = [value / exact for value in draws(evidence, data, count)]
            found.append(
                {
                    "data": name,
                    "seed": seed,
                    "rows": k,
                    "choice": choice,
                    "mean": statistics.mean(ratios),
                    "deviation": statistics.stdev(ratios),
                    "exact": exact,
                }
            )
            print(found[-1], flush=True)
    return found


def as_markdown(found: list[dict[str, Any]]) -> str:
    """A line for each data set and number of rows; means over the seeds."""
    columns = list(dict.fromkeys(each["choice"] for each in found))
    lines = [f"| data | rows | {' | '.join(columns)} |", "|---|---" + "|---" * len(columns) + "|"]
    for data, rows in dict.fromkeys((each["data"], each["rows"]) for each in found):
        cells = []
        for choice in columns:
            same = [f for f in found if (f["data"], f["rows"], f["choice"]) == (data, rows, choice)]
            mean = statistics.mean(f["mean"] for f in same) if same else 0.0
            spread = statistics.mean(f["deviation"] for f in same) if same else 0.0
            cells.append(f"{mean:.2f} ± {spread:.2f}" if same else "–")
        lines.append(f"| {data} | {rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-dir", default=None, help="folder with uci/NAME.parquet")
    parser.add_argument("--data", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tables", type=Path, default=Path("docs/results"))
    parser.add_argument("--page", type=Path, default=Path("docs/results.md"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found: list[dict[str, Any]] = []
    for name in options.data:
        for seed in options.seeds:
            subset = SUBSET.get(name)
            data = load(name, data_dir=options.data_dir, subset=subset, seed=seed)
            found += one(name, seed, data, options.rows, options.draws)
    write_csv(options.tables / "anchor_choice.csv", found)
    text = f"{as_markdown(found)}\n\n{machine()}"
    print(text)
    if options.page.exists():
        insert(options.page, "anchor_choice", text)


if __name__ == "__main__":
    main()
