"""Compare steps of the weights on the loss itself and on σ² times the loss.

The gradient of a Gaussian negative log likelihood grows like 1/σ². ``fit`` therefore takes its
steps on σ² times the loss. This script repeats its runs with steps on the loss itself. Networks,
splits and predictions come from ``default, posterior`` in ``rivals.py``. The script
stores every finished run and resumes where it was stopped.

    python benchmarks/noise_steps.py --data-dir DIR --results docs/results --pages docs/start.md
"""

from itertools import product
from unittest.mock import patch

from learning import Result, Results, make_parser, parse
from measure import mean_and_error, show, spans, with_error
from rivals import SEEDS, make_task, run_default_posterior

from evigrad.training import Trainer

SETS = ("yacht", "boston", "energy", "wine_red", "power", "naval")
WAYS = ("σ² times the loss", "the loss itself")
KEYS = ("plug_in", "posterior", "rmse")
COLUMNS = ("row", "seed", *KEYS, "threads")


def run(name: str, way: str, seed: int, data_dir: str | None) -> Result:
    """Return test log likelihoods of MAP and posterior for one training by the defaults."""
    task = make_task(name, seed, data_dir)
    if way == WAYS[0]:
        plug_in, posterior = run_default_posterior(task)
    else:
        with patch.object(Trainer, "_noise_variance", return_value=1.0):
            plug_in, posterior = run_default_posterior(task)
    both = {"plug_in": plug_in["log_likelihood"], "posterior": posterior["log_likelihood"]}
    return both | {"rmse": plug_in["rmse"]}


def table_of(runs: list[Result]) -> str:
    """Return means over the splits, and differences split by split, as Markdown."""
    lines = [
        "| data set | loss | test log likelihood, MAP | posterior | largest RMSE | splits |",
        "|---|---|---|---|---|---|",
    ]
    for name in SETS:
        by_way = {way: {r["seed"]: r for r in runs if r["row"] == f"{name}: {way}"} for way in WAYS}
        for way, by_seed in by_way.items():
            if by_seed:
                cells = [_mean([r[key] for r in by_seed.values()]) for key in KEYS[:2]]
                cells += [f"{max(r['rmse'] for r in by_seed.values()):.3f}", spans(by_seed)]
                lines.append(f"| {name} | {way} | {' | '.join(cells)} |")
        first, second = by_way.values()
        if both := sorted(first.keys() & second.keys()):
            cells = [_mean([first[s][key] - second[s][key] for s in both]) for key in KEYS[:2]]
            lines.append(f"| {name} | *difference* | {' | '.join(cells)} | – | {spans(both)} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    return with_error(*mean_and_error(values), 3)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__, seeds=None)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    options = parse(parser, arguments)
    results = Results(options.results / "noise_steps.csv", COLUMNS)
    for name, way in product(options.sets, WAYS):
        row = f"{name}: {way}"
        for seed in SEEDS[name] if options.seeds is None else options.seeds:
            if results.has(row, seed):
                continue
            columns = run(name, way, seed, options.data_dir)
            results.add({"row": row, "seed": seed, "threads": options.threads} | columns)
            print(row, seed, {key: columns[key] for key in KEYS}, flush=True)
    show("noise_steps", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
