"""Measure the tightness of single draws of each estimator, and their cost.

MiniNet is trained on 1,000 MNIST digits for 500 epochs with layerwise precisions. Its weights and
precisions are stored at 0, 20, 50 and 100 % of the training. At each of these stages, the
estimators of k rows are

* ``ntk-k-1``: one random output of k examples (the paper's). ``ntk-(k/10)-C``: all outputs of k/10
  examples.
* ``kfac-k-1``, which is not a bound.
* ``ntk-k-rows``: single rows of the eigen root. ``ntk-k-rows-anchored``: the same given anchors.

The log-determinant of many draws is divided by the exact one of all 10,000 rows, for mean and
standard deviation. The seconds refer to a step on the precisions, in rounds of ten as in
training, in turns on one machine. The script stores every finished case.

    python benchmarks/tightness.py --data-dir DIR --seeds 0 1 2
    python benchmarks/tightness.py --table
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from measure import insert, machine, measured_on, write_csv
from torch import Tensor

import evigrad
from evigrad import Evidence, Memory
from evigrad.blocks import Block
from evigrad.blocks.anchors import Anchoring
from evigrad.data import DataSet, load
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.passes.kept import KeptPass
from evigrad.priors import GaussianPrior
from evigrad.training.rounds import RoundBlocks, shared_if_possible
from evigrad.training.settings import grouped

DATA, MODEL = "mnist", "mininet"
NUM_DATA, EPOCHS = 1000, 500
STAGES = (0, 100, 250, 500)
ROWS = (50, 100, 200, 400, 1000)
DRAWS, TIMED = 40, 5
ROUND = 10  # steps between two epochs
ALONE = "anchored, a pass for each step"
SCHEDULE: dict[str, Any] = {
    "estimator": "ntk-400-rows-anchored",
    "batch_size": 250,
    "lr": 1e-3,
    "lr_min": 1e-9,
    "burn_in": 10,
    "every": 5,
    "steps": 10,
    "prior_update": "adam",
    "prior_lr": 0.1,
    "prior_lr_min": 0.01,
    "progress": False,
}


def names(k: int) -> dict[str, str]:
    """Return the estimator of each row of the table, all with k rows."""
    return {
        "ntk-k-1": f"ntk-{k}-1",
        "ntk-(k/10)-C": f"ntk-{k // 10}-C",
        "kfac-k-1": f"kfac-{k}-1",
        "ntk-k-rows": f"ntk-{k}-rows",
        "ntk-k-rows-anchored": f"ntk-{k}-rows-anchored",
    }


def make(data: DataSet, seed: int) -> tuple[torch.nn.Module, GaussianPrior]:
    model = make_model(MODEL, data.input_shape, data.num_outputs, seed=seed)
    return model, GaussianPrior("layerwise", precision=1.0)


def trained(data: DataSet, seed: int, epochs: int, folder: Path) -> dict[int, Path]:
    """Return checkpoints of a training at each stage."""
    stages = [stage * epochs // EPOCHS for stage in STAGES]
    files = {stage: folder / f"weights-{seed}-{stage}.pt" for stage in stages}
    if all(path.exists() for path in files.values()):
        return files
    model, prior = make(data, seed)

    def keep(epoch: int) -> None:
        if epoch in files:
            torch.save({"model": model.state_dict(), "prior": prior.state_dict()}, files[epoch])

    prior.bind(dict(model.named_parameters()))
    keep(0)
    evigrad.fit(
        model,
        data.train,
        **grouped(
            dict(
                prior=prior,
                epochs=epochs,
                seed=seed,
                callbacks=[lambda row: keep(int(row["epoch"] or 0))],
                **SCHEDULE,
            )
        ),
    )
    return files


def evidence_at(path: Path, data: DataSet, seed: int, estimator: str) -> Evidence:
    """Return the evidence of a checkpoint by an estimator."""
    model, prior = make(data, seed)
    evidence = Evidence(
        model,
        Categorical(),
        prior,
        estimator=estimator,
        num_data=len(data.train[0]),
        memory=Memory(micro_batch=100 if "-N-" in estimator else None),
        generator=seed,
    )
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    prior.load_state_dict(state["prior"])
    return evidence


def blocks(evidence: Evidence, data: tuple[Tensor, Tensor]) -> Iterator[Block]:
    """Yield first blocks of independent partitions. Some share their anchors."""
    return chain.from_iterable(evidence.blocks(data).take(1) for _ in repeat(None))


def draws(evidence: Evidence, data: tuple[Tensor, Tensor], count: int) -> list[float]:
    """Return log-determinants of independent draws."""
    source = blocks(evidence, data)
    return [evidence.estimate(next(source)).log_det for _ in range(count)]


def one_case(
    path: Path,
    data: DataSet,
    seed: int,
    rows: list[int],
    count: int,
    earlier: dict[str, Any],
    again: list[str],
) -> dict[str, Any]:
    """Return the results of all estimators at one checkpoint, with the earlier ones kept."""
    case = dict(earlier)
    if "exact" not in earlier:
        start = time.perf_counter()
        exact = evidence_at(path, data, seed, "ntk-N-C").estimate(*data.train).log_det
        case |= {"exact": exact, "exact_seconds": time.perf_counter() - start}
    exact = case["exact"]
    for k in rows:
        for row, name in names(k).items():
            if f"{row} {k}" in earlier and row not in again:
                continue
            values = draws(evidence_at(path, data, seed, name), data.train, count)
            ratios = [value / exact for value in values]
            case[f"{row} {k}"] = {
                "mean": statistics.mean(ratios),
                "deviation": statistics.stdev(ratios),
            }
            print(seed, path.stem, name, case[f"{row} {k}"], flush=True)
    return case


def timings(path: Path, data: DataSet, seed: int, rows: list[int], repeats: int) -> dict[str, Any]:
    """Return seconds of a step with its gradient in a round on k rows, with estimators in turns.

    A round begins with a partition and, for some rounds of the anchored bound, with a choice of
    anchors, as in training. The time covers the rounds from one choice to the next. Steps of the
    anchored bound share the pass over their anchors. The cost of a step with its own pass, as for
    hyperparameters of the model, is timed too.
    """
    seconds: dict[str, Any] = {}
    rounds = Anchoring().refresh
    for k in rows:
        estimators = names(k) | {ALONE: f"ntk-{k}-rows-anchored"}
        evidences = {row: evidence_at(path, data, seed, name) for row, name in estimators.items()}
        times: dict[str, list[float]] = {row: [] for row in evidences}
        counts: dict[str, list[int]] = {row: [] for row in evidences}
        for turn in range(repeats + 1):
            for row, evidence in evidences.items():
                start, count = time.perf_counter(), 0
                for _ in range(rounds):
                    for block in steps_of_a_round(evidence, data, alone=row == ALONE):
                        if isinstance(block, Block):
                            evidence.backward(block)
                        else:
                            evidence.backward_kept(*block)
                        count += rows_of(block, data.num_outputs)
                if turn:  # the first one plans and checks
                    times[row].append(time.perf_counter() - start)
                    counts[row].append(count)
        for row, taken in times.items():
            # Of k rows: a partition's last block may be smaller.
            per_row = [t / c for t, c in zip(taken, counts[row], strict=True)]
            seconds[f"{row} {k}"] = k * statistics.median(per_row)
    return seconds


def steps_of_a_round(
    evidence: Evidence, data: DataSet, alone: bool
) -> Iterable[Block | list[KeptPass]]:
    """Return the blocks of a round's steps. With ``alone``, each step has its own pass."""
    if alone:
        return evidence.blocks(data.train).take(ROUND)
    learned = list(evidence.hyperparameters())
    stream, x = evidence.blocks(data.train), data.train[0]
    return shared_if_possible(RoundBlocks(evidence, stream, x, learned, ROUND)).take()[0]


def rows_of(block: Block | list[KeptPass], num_outputs: int) -> int:
    """Return the number of rows of a step."""
    if isinstance(block, Block):
        return block.num_rows or len(block.indices) * num_outputs
    (collected,) = block
    assert collected.block.anchored is not None
    return int((collected.block.anchored.labels >= 0).sum())


def table(results: list[dict[str, Any]], stage: int) -> list[dict[str, Any]]:
    """Return means over the seeds at one stage."""
    cases = [r for r in results if r["stage"] == stage]
    rows = []
    for key in (key for key in cases[0] if isinstance(cases[0][key], dict)):
        row, _, k = key.rpartition(" ")
        values = [case[key] for case in cases]
        rows.append(
            {
                "stage": f"{100 * stage // max(r['stage'] for r in results)} %",
                "estimator": row,
                "rows": int(k),
                "mean": statistics.mean(v["mean"] for v in values),
                "deviation": statistics.mean(v["deviation"] for v in values),
                "seeds": len(cases),
            }
        )
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Return one line for each stage and number of rows."""
    columns = list(dict.fromkeys(row["estimator"] for row in rows))
    lines = [
        f"| training | rows | {' | '.join(columns)} |",
        "|---|---" + "|---" * len(columns) + "|",
    ]
    for stage, k in dict.fromkeys((row["stage"], row["rows"]) for row in rows):
        cells = []
        for column in columns:
            (row,) = [
                r for r in rows if (r["stage"], r["rows"], r["estimator"]) == (stage, k, column)
            ]
            cells.append(f"{row['mean']:.2f} ± {row['deviation']:.2f}")
        lines.append(f"| {stage} | {k} | {' | '.join(cells)} |")
    return "\n".join(lines)


def times_as_markdown(times: dict[str, Any]) -> str:
    """Return milliseconds, and ratios to the paper's estimator."""
    keys = [key.rpartition(" ") for key in times if " " in key]
    columns = list(dict.fromkeys(row for row, _, _ in keys))
    lines = [f"| rows | {' | '.join(columns)} |", "|---" + "|---" * len(columns) + "|"]
    for k in dict.fromkeys(k for _, _, k in keys):
        first = times[f"{columns[0]} {k}"]
        cells = [
            f"{1e3 * times[f'{column} {k}']:.0f} ms ({times[f'{column} {k}'] / first:.2f} ×)"
            for column in columns
        ]
        lines.append(f"| {k} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{measured_on([times['machine']])}"


def times_as_rows(times: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each estimator and size."""
    keys = [key.rpartition(" ") for key in times if " " in key]
    return [
        {
            "estimator": row,
            "rows": int(k),
            "seconds": times[f"{row} {k}"],
            "ratio": times[f"{row} {k}"] / times[f"{keys[0][0]} {k}"],
            "machine": times["machine"],
        }
        for row, _, k in keys
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-dir", default=None, help="folder with mnist_train.parquet")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--num-data", type=int, default=NUM_DATA)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("results/tightness"))
    parser.add_argument("--tables", type=Path, default=Path("docs/results"))
    parser.add_argument("--page", type=Path, default=Path("benchmarks/README.md"))
    parser.add_argument("--table", action="store_true", help="only write the tables")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--again", nargs="*", default=[], metavar="ROW", help="measure these again")
    parser.add_argument("--time", action="store_true", help="only measure times again")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    folder: Path = options.results
    folder.mkdir(parents=True, exist_ok=True)
    for seed in [] if options.table else options.seeds:
        data = load(DATA, data_dir=options.data_dir, subset=options.num_data, seed=seed)
        files = trained(data, seed, options.epochs, folder)
        last = max(files)
        if options.time or not (folder / "times.json").exists():
            seconds = timings(files[last], data, seed, options.rows, TIMED)
            (folder / "times.json").write_text(json.dumps({"machine": machine(), **seconds}))
        for stage, path in files.items() if not options.time else ():
            kept = folder / f"case-{seed}-{stage}.json"
            if not kept.exists() or options.again:
                earlier = json.loads(kept.read_text()) if kept.exists() else {}
                settings = options.rows, options.draws, earlier, options.again
                case = one_case(path, data, seed, *settings)
                kept.write_text(json.dumps({"seed": seed, "stage": stage, **case}, indent=1))
    cases = sorted(folder.glob("case-*.json"))
    if not (folder / "times.json").exists() or not (cases or options.time):
        parser.error(f"there are no results in {folder}")
    times = json.loads((folder / "times.json").read_text())
    write_csv(options.tables / "tightness_times.csv", times_as_rows(times))
    print(times_as_markdown(times))
    if options.page.exists():
        insert(options.page, "tightness times", times_as_markdown(times))
    if options.time:
        return
    results = [json.loads(path.read_text()) for path in cases]
    rows = [row for s in sorted({r["stage"] for r in results}) for row in table(results, s)]
    write_csv(options.tables / "tightness.csv", rows)
    print(as_markdown(rows))
    if options.page.exists():
        insert(options.page, "tightness", as_markdown(rows))


if __name__ == "__main__":
    main()
