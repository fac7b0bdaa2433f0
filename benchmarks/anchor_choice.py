"""Compare choices of anchors by the tightness of the bound, on real data.

A network is trained with learned precisions (and noise). Then the log-determinant of single draws
is compared with the exact value of all rows. The estimators are ``ntk-k-1``, the paper's estimator
without anchors, and ``ntk-k-rows-anchored``, with anchors chosen

* at random, by ``k-centre`` (spread over the inputs), or by score (in regression all scores are
  equal).
* greedily: each new anchor is the row with the largest conditional variance given the previous
  ones, a pivoted Cholesky factorization. The kernel is the one of the last layer, which a cheap
  forward pass provides, or the whole kernel, which is too expensive in practice.

The other rows are in blocks that are correlated given the anchors. In one more case, for
``k-centre``, the blocks are stratified by scores only, which is random if all scores are equal.

The table has mean and standard deviation of a draw, divided by the exact value.

    python benchmarks/anchor_choice.py --data-dir DIR
"""

import argparse
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measure import insert, machine, measured_on, write_csv
from torch import Tensor
from torch.func import functional_call, jacrev

import evigrad
from evigrad import Evidence
from evigrad.blocks.anchors import Anchoring, selection
from evigrad.blocks.anchors.choice import pivots
from evigrad.data import DataSet, load
from evigrad.models import make_model
from evigrad.training.settings import grouped

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
    "prior_update": "adam",
    "progress": False,
}


def choices(
    k: int, data: DataSet, kernels: dict[str, Tensor]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the estimator and its settings for each column of the table."""
    name = f"ntk-{k}-rows-anchored"
    estimators: dict[str, tuple[str, dict[str, Any]]] = {"ntk-k-1": (f"ntk-{k}-1", {})}
    named = ("random", "k-centre", *(["score"] if data.is_classification else []))
    ways = {choice: Anchoring(choice=choice) for choice in named}
    ways |= {f"greedy, {words}": Anchoring(choice="greedy") for words in kernels}
    estimators |= {w: (name, {"anchoring": how}) for w, how in ways.items()}
    plain = Anchoring(choice="k-centre", grouped=False)
    return estimators | {"k-centre, no groups": (name, {"anchoring": plain})}


def whitened(evidence: Evidence, data: DataSet) -> dict[str, Tensor]:
    """Return all rows, a matrix per parameter tensor, by plain automatic differentiation."""
    model, (x, _) = evidence.model, data.train
    weights = {name: w.detach() for name, w in evidence.weights().items()}
    with torch.no_grad():
        f = model(x)
    every = torch.arange(f.shape[1]).expand(len(f), -1)
    rows = evidence.likelihood.root(f, every, "eigen").scaled

    def of_one(point: Tensor) -> dict[str, Tensor]:
        return jacrev(lambda w: functional_call(model, w, (point[None],))[0])(weights)

    jacobians = [of_one(point) for point in x]
    whitened_rows = {}
    for name, precision in evidence.prior.precisions().items():
        j = torch.stack([jacobian[name].flatten(1) for jacobian in jacobians])
        whitened_rows[name] = (rows @ j).flatten(0, 1).detach() / precision.detach().sqrt()
    return whitened_rows


def grams(evidence: Evidence, data: DataSet) -> dict[str, Tensor]:
    """Return the share of each parameter tensor in S of all rows."""
    return {name: rows @ rows.mT for name, rows in whitened(evidence, data).items()}


def kernels(evidence: Evidence, data: DataSet) -> dict[str, Tensor]:
    """Return S of all rows, and the part of the last layer in it."""
    shares = grams(evidence, data)
    last = list(shares)[-1].rpartition(".")[0]
    of_last = [gram for name, gram in shares.items() if name.startswith(f"{last}.")]
    return {
        "last layer": torch.stack(of_last).sum(0).double(),
        "all": torch.stack([*shares.values()]).sum(0).double(),
    }


def greedy(kernel: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return ``pivots`` among the rows with scores. Columns that are always zero have none."""
    num_data, columns = scores.shape
    rows = torch.arange(len(kernel)).reshape(num_data, -1)[:, :columns].flatten()
    return pivots(kernel[rows][:, rows], count)


def chosen_by(kernel: Tensor) -> Any:
    """Return a context in which a kernel of all rows chooses anchors greedily."""

    def choose(_: Anchoring, scores: Tensor, count: int, *__: Any) -> Tensor:
        return greedy(kernel, scores, count)[:count].sort().values

    return patch.object(selection, "choose", choose)


def draws(evidence: Evidence, data: DataSet, count: int) -> list[float]:
    """Return log-determinants of draws, each with its own partition. Some share their anchors."""
    blocks = chain.from_iterable(evidence.blocks(data.train).take(1) for _ in repeat(None))
    return [evidence.estimate(next(blocks)).log_det for _ in range(count)]


def one(name: str, seed: int, data: DataSet, rows: Sequence[int], count: int) -> list[dict]:
    """Return the results of all choices on one network."""
    model = make_model(PROBLEMS[name], data.input_shape, data.num_outputs, seed=seed)
    likelihood = data.likelihood
    trained = evigrad.fit(model, data.train, likelihood=likelihood, seed=seed, **grouped(TRAINING))
    dense = kernels(trained.evidence, data)
    exact = float(torch.linalg.slogdet(dense["all"] + torch.eye(len(dense["all"])).double())[1])
    cases = []
    for k in rows:
        for choice, (estimator, settings) in choices(k, data, dense).items():
            evidence = trained.evidence.with_estimator(estimator, generator=seed, **settings)
            kernel = dense.get(choice.removeprefix("greedy, "))
            with nullcontext() if kernel is None else chosen_by(kernel):
                ratios = [value / exact for value in draws(evidence, data, count)]
            cases.append(
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
            print(cases[-1], flush=True)
    return cases


def as_markdown(cases: list[dict[str, Any]]) -> str:
    """Return a line for each data set and number of rows, with means over the seeds."""
    columns = list(dict.fromkeys(case["choice"] for case in cases))
    lines = [
        f"| data | rows | {' | '.join(columns).replace('centre', 'center')} |",
        "|---|---" + "|---" * len(columns) + "|",
    ]
    for data, rows in dict.fromkeys((case["data"], case["rows"]) for case in cases):
        cells = []
        for choice in columns:
            same = [f for f in cases if (f["data"], f["rows"], f["choice"]) == (data, rows, choice)]
            mean = statistics.mean(f["mean"] for f in same) if same else 0.0
            spread = statistics.mean(f["deviation"] for f in same) if same else 0.0
            cells.append(f"{mean:.2f} ± {spread:.2f}" if same else "–")
        lines.append(f"| {data} | {rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cases, and write the table."""
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
    cases: list[dict[str, Any]] = []
    for name in options.data:
        for seed in options.seeds:
            subset = SUBSET.get(name)
            data = load(name, data_dir=options.data_dir, subset=subset, seed=seed)
            cases += one(name, seed, data, options.rows, options.draws)
    write_csv(options.tables / "anchor_choice.csv", cases)
    text = f"{as_markdown(cases)}\n\n{measured_on([machine()])}"
    print(text)
    if options.page.exists():
        insert(options.page, "anchor_choice", text)


if __name__ == "__main__":
    main()
