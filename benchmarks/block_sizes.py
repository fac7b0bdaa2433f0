"""Show how the examples in a block of scaled curvature change the effective number of parameters.

The networks are those of ``evigrad`` in ``large_images.py``, whose runs are read from ``--runs``.
The effective number of parameters γ is a mean over blocks, at the learned precisions. ``share`` is
the effective number of examples, (Σ t)² / (N Σ t²), where t is the trace of the Hessian of an
example's negative log likelihood in its outputs. If it is small, few examples have most of the
curvature, and a small block often has too few of them.

    python benchmarks/block_sizes.py --sets mnist-60000-long --data-dir DIR \
        --results docs/results --pages benchmarks/README.md
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from large_images import NETWORKS, SETS, read
from learning import Result, Results, make_parser, parse
from measure import show, summaries, with_error
from rivals import Fitted

import evigrad
from evigrad.models import make_model
from evigrad.training.fixed_point import FixedPoint

# Examples of a block, and blocks.
BLOCKS = {222: 40, 400: 20, 1000: 8, 2222: 4, 6000: 2}
KEYS = ("effective", "log_evidence", "share")
COLUMNS = ("row", "seed", *KEYS)


def run(name: str, examples: int | None, seed: int, data_dir: str | None, runs: Path) -> Result:
    """Return the columns of an estimator, which uses all examples if ``examples`` is None."""
    data, (kind, _, _) = read(name, seed, data_dir), SETS[name]
    network, settings = NETWORKS[kind]
    model = make_model(network, data.input_shape, data.num_outputs, seed, **settings)
    evidence = evigrad.load(runs / f"{name}-evigrad-{seed}" / "run", model).evidence
    p = Fitted(model).outputs(data.train[0]).softmax(-1)
    trace = 1 - p.square().sum(-1)
    share = trace.sum() ** 2 / trace.square().sum() / len(trace)
    estimator = "kfac-N-C" if examples is None else f"kfac-{examples}-C-scaled"
    evidence = evidence.with_estimator(estimator)
    update, effective, values = FixedPoint(evidence), list[float](), list[float]()
    for block in evidence.blocks(data.train).take(1 if examples is None else BLOCKS[examples]):
        evidence.prior.zero_grad()
        values.append(evidence.backward(block, wrt="prior").per_datum)
        effective.append(float(update.effective_parameters().sum()))
    return {
        "effective": float(torch.tensor(effective).mean()),
        "log_evidence": float(torch.tensor(values).mean()),
        "share": float(share),
    }


def table_of(runs: Sequence[Result]) -> str:
    """Return the means over the seeds as Markdown."""
    lines = [
        "| data set | examples of a block | effective parameters | log evidence"
        " | effective share of examples, % | seeds |",
        f"|{'---|' * 6}",
    ]
    for s in summaries(runs, list(dict.fromkeys(r["row"] for r in runs)), KEYS):
        name, _, examples = s["row"].partition(": ")
        cells = [
            with_error(s["effective"], s["effective_error"], 0),
            with_error(s["log_evidence"], s["log_evidence_error"], 4),
            with_error(100 * s["share"], 100 * s["share_error"], 1),
        ]
        lines.append(f"| {' | '.join([name, examples, *cells, s['seed_spans']])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["mnist-60000-long"])
    parser.add_argument("--runs", type=Path, default=Path("runs/large_images"))
    options = parse(parser, arguments)
    results = Results(options.results / "block_sizes.csv", COLUMNS)
    for seed in options.seeds:
        for name in options.sets:
            for examples in (*BLOCKS, None):
                row = f"{name}: {'all' if examples is None else format(examples, ',')}"
                if not results.has(row, seed):
                    columns = run(name, examples, seed, options.data_dir, options.runs)
                    results.add({"row": row, "seed": seed, **columns})
    show("block sizes", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
