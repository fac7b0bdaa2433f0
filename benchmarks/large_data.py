"""Compare lengths of training on large data sets, to choose the default number of epochs.

The targets of the synthetic tables come from a random network, so the best possible test log
likelihood is known. Each row trains a new network with ``fit``'s defaults for 1/4 to 2 times its
default number of epochs. The seed draws the initial weights and the order of training. The script
stores every finished run and resumes where it was stopped.

    python benchmarks/large_data.py --results docs/results --pages benchmarks/README.md
"""

from collections.abc import Sequence

import torch
from learning import Result, Results, make_parser, parse
from measure import show, summaries, with_error
from torch import Tensor, nn
from torch.nn import functional as F

import evigrad
from evigrad.training.plan import plan_schedule, planned

INPUTS, UNITS, CLASSES, NOISE, TEST = 10, 20, 4, 0.3, 20_000
SETS = ("regression-40000", "classification-40000", "regression-160000", "classification-160000")
LENGTHS = (0.25, 0.5, 1, 2)  # times the default
KEYS = ("below_the_truth", "log_likelihood", "log_evidence", "mode_gap", "seconds")
COLUMNS = ("row", "seed", *KEYS, "epochs", "steps")
Pair = tuple[Tensor, Tensor]


def table(kind: str, num_data: int) -> tuple[Pair, Pair, float]:
    """Return training data, test data, and the test log likelihood of the true distribution."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    outputs = 1 if kind == "regression" else CLASSES
    inner, outer = normal(INPUTS, UNITS) / 2, normal(UNITS, outputs) / 3
    x = normal(num_data + TEST, INPUTS)
    f = (x @ inner + normal(UNITS)).tanh() @ outer
    if kind == "regression":
        y = f + NOISE * normal(*f.shape)
        truth = torch.distributions.Normal(f, NOISE).log_prob(y)[num_data:].mean()
    else:
        y = (3 * f).softmax(1).multinomial(1, generator=generator)[:, 0]
        truth = -F.cross_entropy(3 * f[num_data:], y[num_data:])
    return (x[:num_data], y[:num_data]), (x[num_data:], y[num_data:]), truth.item()


def run(name: str, length: float, seed: int) -> Result:
    """Return the columns of a training on a data set named KIND-N."""
    kind, _, size = name.partition("-")
    train, test, truth = table(kind, int(size))
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(INPUTS, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU()),
        nn.Linear(64, 1 if kind == "regression" else CLASSES),
    )
    default = plan_schedule(evigrad.Schedule(), int(size))
    schedule = evigrad.Schedule(epochs=int(length * planned(default.epochs)), eval_every=0)
    result = evigrad.fit(
        model,
        train,
        likelihood="gaussian" if kind == "regression" else "categorical",
        schedule=schedule,
        test=test,
        seed=seed,
        progress=False,
    )
    score = result.test_metrics["log_likelihood"]
    evidence = [row["log_evidence"] for row in result.history if row["log_evidence"] is not None]
    return {
        "below_the_truth": truth - score,
        "log_likelihood": score,
        "log_evidence": evidence[-1] if evidence else None,
        "mode_gap": result.mode_gap,
        "seconds": result.seconds,
        "epochs": schedule.epochs,
        "steps": planned(schedule.epochs) * -(-int(size) // default.batch_size),
    }


def table_of(runs: Sequence[Result]) -> str:
    """Return means of the seeds as Markdown, with a column for each length."""
    names = [f"{length:g} × the default" if length != 1 else "default" for length in LENGTHS]
    lines = [f"| data | {' | '.join(names)} | seeds |", f"|{'---|' * (len(names) + 2)}"]
    for name in SETS:
        rows = [f"{name}: {length:g}" for length in LENGTHS]
        means = {s["row"]: s for s in summaries(runs, rows, KEYS)}
        if len(means) == len(rows):
            cells = [
                with_error(means[row]["below_the_truth"], means[row]["below_the_truth_error"], 4)
                for row in rows
            ]
            kind, _, size = name.partition("-")
            seeds = means[rows[0]]["seed_spans"]
            lines.append(f"| {kind}, {int(size):,} rows | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    options = parse(parser, arguments)
    results = Results(options.results / "large_data.csv", COLUMNS)
    for seed in options.seeds:
        for name in options.sets:
            for length in LENGTHS:
                row = f"{name}: {length:g}"
                if not results.has(row, seed):
                    columns = run(name, length, seed)
                    print(row, seed, columns, flush=True)
                    results.add({"row": row, "seed": seed, **columns})
    show("large data", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
