"""The results of ``evigrad train``: the log evidence of each run, a table, figures and a file."""

import math
from collections.abc import Mapping
from dataclasses import asdict

from jsonargparse import Namespace
from rich.console import Console

from evigrad import plots
from evigrad.cli.messages import print_table, results_console, show
from evigrad.cli.setup import Setup
from evigrad.core.names import Estimator
from evigrad.data import DataSet
from evigrad.errors import EvigradError
from evigrad.measure import EvidenceValue, describe_estimator, evaluate_evidence, tight_estimator
from evigrad.measure.metrics import HYPERPARAMETERS
from evigrad.training import FitResult, RunDirectory
from evigrad.training.history import known
from evigrad.training.progress import nats
from evigrad.training.settings import label_of

# The last file that a run writes.
RESULTS = "results.json"
# Rough time of the final evaluation on one core, and its number of blocks of the run's estimator.
_EVALUATION_SECONDS, _BLOCKS = 20.0, 10
# A baseline overfits if its test log likelihood falls by more than this, in nats per example.
_OVERFITS = 0.05

Results = Mapping[str, FitResult]


def report(results: Results, setup: Setup, directory: RunDirectory, options: Namespace) -> None:
    """Evaluate the trained networks, print the table of results, and draw the figures."""
    learned = [result for result in results.values() if result.estimator is not None]
    if options.figures:
        _draw(results, directory, label_of(learned[-1].estimator) if learned else None)
    if (directory.path / RESULTS).exists():
        return
    own_name = learned[-1].evidence.estimator.name if learned else None
    name, settings = options.evaluate_with, {}
    if name == "auto":
        name = judge_of(results, setup, own_name)
        if name == own_name:
            kept = ("root", "sharing", "parameter_partition")
            settings = {**{key: options.laplace[key] for key in kept}, "blocks": _BLOCKS}
    values: dict[str, EvidenceValue] = {}
    words = f"Evaluating the log evidence with {name}"
    show("note", words)
    try:
        for key, result in results.items():
            with Console(stderr=True).status(words):  # moves in a terminal
                values[key] = evaluate_evidence(result.evidence, setup.data.train, name, **settings)
    except EvigradError as error:  # the training is done, so the other results are still written
        show("warning", f"Could not evaluate the log evidence with {name}: {error}")
        values = {}
    _print_results(results, values, setup.data)
    if words := comparison(results, setup.data):
        results_console().print(words)
    records = {}
    for key, result in results.items():
        test = result.test_metrics
        records[key] = {
            "evidence": asdict(values[key]) if key in values else None,
            "train": result.train_metrics,
            "test": test,
            **({"test_rmse": _rmse(test, setup.data)} if "squared_error" in test else {}),
            "seconds": result.seconds,
            "mode_gap": result.mode_gap,
            "starts": {f"{decay:g}": value for decay, value in result.starts.items()},
            "hyperparameters": {
                name: value
                for name, value in result.history[-1].items()
                if name.partition("/")[0] in HYPERPARAMETERS
            },
        }
    directory.write_json(RESULTS, records)


def judge_of(results: Results, setup: Setup, own_name: str | None) -> str:
    """Return the estimator of the final table, from sizes only, because times vary between runs.

    ``own_name`` is the estimator of the run.
    """
    evidence, (x, _) = next(iter(results.values())).evidence, setup.data.train
    name = tight_estimator(
        sum(w.numel() for w in evidence.weights().values()),
        len(x),
        evidence.likelihood.num_rows(setup.data.num_outputs),
        _EVALUATION_SECONDS,
    )
    if own_name is None or Estimator.parse(name).subset in (None, len(x)):
        return name
    spec = Estimator.parse(own_name)
    # Blocks of this many examples without anchors would be looser.
    return own_name if spec.anchored or spec.subset is None else name


def comparison(results: Results, data: DataSet) -> str:
    """Return a comparison with fixed weight decay on test data, or "" if there is none."""
    if len(results) < 2:
        return ""
    base, learned = results.values()
    scores = [result.test_metrics["log_likelihood"] for result in (base, learned)]
    if not all(map(math.isfinite, scores)):
        return ""
    best, epoch = max(
        (known(row).get("test_log_likelihood", -math.inf), row["epoch"]) for row in base.history
    )
    before, after, best_score = nats(*scores, best)
    (metric, other), (_, value) = (_metric(result, data) for result in (base, learned))
    words = (
        f"With evigrad, the test log likelihood is {after} instead of {before}, and the {metric} is"
        f" {value} instead of {other}. Training took {learned.seconds / base.seconds:.1f} times as"
        " long."
    )
    if best - scores[0] > _OVERFITS:
        first, last = base.history[0], base.history[-1]
        is_learned = any("noise" in name.split("/") and first[name] != last[name] for name in first)
        words += (
            f" Fixed weight decay overfits{', and its noise is too small' if is_learned else ''}."
            f" Its test log likelihood was {best_score} after epoch {epoch}, so early stopping is a"
            " stronger baseline."
        )
    return words


def _draw(results: Results, directory: RunDirectory, learned: str | None) -> None:
    histories = {label_of(result.estimator): result.history for result in results.values()}
    try:
        files = plots.save_all(histories, directory.figures, learned)
    except (EvigradError, OSError) as error:  # the numbers matter more than the figures
        show("warning", f"Could not draw the figures: {error}")
        return
    show("note", "Figures: " + ", ".join(map(str, files)))


def _print_results(results: Results, values: Mapping[str, EvidenceValue], data: DataSet) -> None:
    per_datum = [value.per_datum for value in values.values()]
    tests = [result.test_metrics["log_likelihood"] for result in results.values()]
    shown = dict(zip(values, nats(*per_datum), strict=True))
    scores = nats(*tests)
    rows = []
    for (key, result), score in zip(results.items(), scores, strict=True):
        metric, value = _metric(result, data)
        noise = result.history[-1].get("noise")
        row = {
            "method": label_of(result.estimator),
            "log evidence": shown.get(key, "–"),
            "test log lik.": score,
            metric: value,
            **({} if noise is None else {"noise": f"{noise:.3f}"}),
            "seconds": f"{result.seconds:.1f}",
        }
        ranges = [  # of the transforms at the end
            f"{name.removeprefix('range/')} {value:.3g}"
            for name, value in result.history[-1].items()
            if "range/" in name
        ]
        rows.append(row | ({"ranges": "\n".join(ranges)} if ranges else {}))
    title = "Trained on the training data only"
    print_table(title, notes_of(results, values, data), rows, left=("method", "ranges"))


def notes_of(results: Results, values: Mapping[str, EvidenceValue], data: DataSet) -> str:
    """Return what a reader of the table needs to know."""
    judged = "The log evidence could not be evaluated."
    if value := next(iter(values.values()), None):  # all by the same estimator
        what = describe_estimator(value.estimator, value.blocks)
        kind = "a lower bound" if value.is_bound else "an estimate"
        kind = "exact" if what.endswith("exact") else f"{kind} by {what.partition(',')[0]}"
        judged = f"The log evidence is {kind}."
    notes = [
        "Log evidence and test log likelihood are in nats per example, and higher is better.",
        judged,
    ]
    per_datum = [value.per_datum for value in values.values()]
    tests = [result.test_metrics["log_likelihood"] for result in results.values()]
    if len(per_datum) == 2 and (per_datum[0] > per_datum[1]) != (tests[0] > tests[1]):
        notes.append(
            "They disagree here, as they can if a network memorizes its training data, because its"
            " log evidence is then too high."
        )
    if any("range/" in name for result in results.values() for name in result.history[-1]):
        notes.append(
            "Ranges are in half images (translation), radians (rotation), and natural logarithms of"
            " factors (scale, shear)."
        )
    if data.target_mean is not None and data.target_std is not None:
        mean, deviation = data.target_mean.item(), data.target_std.item()
        notes.append(
            "The RMSE is in the original units. The other values are of standardized targets (mean"
            f" {mean:.4g}, standard deviation {deviation:.4g}). In the original units, log evidence"
            f" and log likelihood are lower by {math.log(deviation):.2f}."
        )
    return " ".join(notes)


def _metric(result: FitResult, data: DataSet) -> tuple[str, str]:
    """Return the name and the value of the test accuracy, or of the test error of a regression."""
    test = result.test_metrics
    if "accuracy" in test:
        return "test accuracy", f"{100 * test['accuracy']:.1f} %"
    value = _rmse(test, data)
    return "test RMSE", f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _rmse(metrics: Mapping[str, float], data: DataSet) -> float:
    """Return the root mean squared error in the targets' own units."""
    deviation = 1.0 if data.target_std is None else data.target_std.item()
    return deviation * math.sqrt(metrics["squared_error"])
