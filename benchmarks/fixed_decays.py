"""Compare log evidences of networks trained with fixed weight decays, where the default loses.

The power data set has three times as many examples as the network has weights. Networks are trained
with a fixed weight decay and noise learned on the training loss, as ``map-noise`` in ``rivals.py``.
For each, the script computes the log evidence of all data with the exact Gauss-Newton matrix and
with Kronecker factors. It shows which weight decay each of them prefers, and which one is best on
test data. Decays were fixed before the first run.

``full``, ``kfac`` and ``at_mode`` are log evidences in nats per example. ``at_mode`` is ``full``
plus the mode gap. ``log_det_full`` and ``log_det_kfac`` are half the log-determinants per example.

    python benchmarks/fixed_decays.py --data-dir DIR --results docs/results \
        --pages benchmarks/README.md
"""

from collections.abc import Sequence

from learning import Result, Results, make_parser, parse
from measure import show, summaries, with_error
from rivals import Task, judged, make_task, train

from evigrad import Optimization

DECAYS = (1e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)
SET = "power"
LOG_DETS = ("log_det_full", "log_det_kfac")
KEYS = ("log_likelihood", "noise", "full", "at_mode", "kfac", *LOG_DETS)
COLUMNS = ("row", "seed", *KEYS)


def row_of(decay: float) -> str:
    return f"{SET}: {decay:g}"


def run(task: Task, decay: float) -> Result:
    """Return the columns of a training with a fixed decay."""
    fitted = train(task, decay=decay, optimization=Optimization(noise_on_loss=True))
    (x, y), evidence = task.data.train, fitted.evidence
    assert evidence is not None
    exact = evidence.with_estimator("full-N-C").estimate(x, y, at_mode=True)
    kfac = evidence.with_estimator("kfac-N-C").estimate(x, y)
    assert exact.at_mode is not None
    return {
        "log_likelihood": judged(task, fitted)["log_likelihood"],
        "noise": fitted.noise,
        "full": exact.per_datum,
        "at_mode": exact.at_mode / len(x),
        "kfac": kfac.per_datum,
        "log_det_full": 0.5 * float(exact.log_det) / len(x),
        "log_det_kfac": 0.5 * float(kfac.log_det) / len(x),
    }


def table_of(runs: Sequence[Result]) -> str:
    """Return the means over the seeds as Markdown."""
    lines = [
        "| weight decay | test log likelihood | log evidence, exact | at the mode"
        " | log evidence, Kronecker factors | half log-determinant, exact | Kronecker factors"
        " | noise | seeds |",
        f"|{'---|' * 9}",
    ]
    for s in summaries(runs, list(map(row_of, DECAYS)), KEYS):
        keys = ("log_likelihood", "full", "at_mode", "kfac", *LOG_DETS, "noise")
        cells = [with_error(s[key], s[f"{key}_error"], 3) for key in keys]
        decay = s["row"].partition(": ")[2]
        lines.append(f"| {' | '.join([decay, *cells, s['seed_spans']])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    options = parse(make_parser(__doc__), arguments)
    results = Results(options.results / "fixed_decays.csv", COLUMNS)
    for seed in options.seeds:
        task = make_task(SET, seed, options.data_dir)
        for decay in DECAYS:
            if not results.has(row := row_of(decay), seed):
                results.add({"row": row, "seed": seed, **run(task, decay)})
    show("fixed decays", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
