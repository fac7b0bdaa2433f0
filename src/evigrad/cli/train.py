"""``evigrad train``: train a network, learn its prior, and compare it with plain MAP training."""

import math
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from rich.console import Console

from evigrad import plots
from evigrad.cli.messages import print_table, results_console, show
from evigrad.cli.parser import NO_ESTIMATOR, Parser, chosen
from evigrad.cli.ranks import started_ranks
from evigrad.cli.resume import (
    CONFIGURATION,
    RESULTS,
    interruptible,
    resumed_configuration,
    resumed_folder,
)
from evigrad.cli.setup import INVARIANCE, MACHINE, NETWORK, Setup, set_up
from evigrad.core.names import Estimator
from evigrad.data import DataSet
from evigrad.distributed import Group, Ranks
from evigrad.errors import ConfigurationError, EvigradError, RankError
from evigrad.measure import EvidenceValue, describe_estimator, evaluate_evidence, tight_estimator
from evigrad.measure.metrics import HYPERPARAMETERS
from evigrad.passes.settings import Memory
from evigrad.priors import STRUCTURES
from evigrad.training import FitResult, RunDirectory, Trainer, fit, learns_likelihood, prepare
from evigrad.training.history import known
from evigrad.training.progress import nats
from evigrad.training.settings import (
    GROUPS,
    Laplace,
    Optimization,
    Schedule,
    Settings,
    grouped,
    label_of,
)

_DESCRIPTION = """\
Train a network and learn its hyperparameters on the training data only.

MAP training learns the weights. Between epochs, gradient steps on an estimate of the log evidence
(the log marginal likelihood) learn the prior precision of each layer, which is its weight decay.
They also learn the ranges of an invariance. The test set is only evaluated.

examples:
  evigrad train                                     scikit-learn's digits and a small network
  evigrad train --data mnist5k --subset 1000 --model mininet --compare-map
  evigrad train --data digits:rotated90 --invariance rotation --estimator kfac-100-1
  evigrad train --config FILE.yaml --epochs 50      later options override the file
  evigrad train --resume runs/digits-...            resume an interrupted run
  evigrad train --estimator kfac-N-C --print-config > FILE.yaml"""

# Descriptions of options where the command line differs from Python.
_WORDS = {
    "estimator": "Evidence estimator, named STRUCTURE-SUBSET-OUTPUTS. STRUCTURE: ntk, full,"
    " blockdiag, kfac or diag. SUBSET: examples per block, or N for all. OUTPUTS: outputs per"
    " block, or C for all. ntk-400-rows-anchored uses 400 Jacobian rows, most of them anchors."
    " The value none trains by plain MAP, without learning hyperparameters.",
    "likelihood": "Likelihood of the targets: categorical, gaussian, student-t (heavy tails),"
    " poisson or negative-binomial (counts), heteroscedastic or natural-gaussian"
    " (input-dependent noise). Default: inferred from the data set.",
}
# Options of ``fit`` itself, and options of the records.
PRIOR = ("estimator", "likelihood", "prior", "precision")
_MEAN = ("prior_mean",)  # in Python that of a ``GaussianPrior``
_RECORD = ("eval_every", "bracket_every", "checkpoint_every")
_PRIOR_TYPES = {"likelihood": str | None, "prior": Literal[STRUCTURES]}
# All options of settings.
SETTINGS = (*PRIOR, *_MEAN, *(setting.name for kind in GROUPS.values() for setting in fields(kind)))
# Rough time of the final evaluation on one core, and its number of blocks of the run's estimator.
_EVALUATION_SECONDS, _BLOCKS = 20.0, 10
# Options of estimates that the run's own estimator keeps in the final evaluation.
_ROWS = ("root", "sharing", "parameter_partition")
# A baseline overfits if its test log likelihood falls by more than this, in nats per example.
_OVERFITS = 0.05
_UNITS = (
    " Ranges are in half images (translation), radians (rotation), and natural logarithms of"
    " factors (scale, shear)."
)


def make_parser() -> Parser:
    """Return the parser for the options of ``evigrad train``."""
    parser = Parser(description=_DESCRIPTION, usage="evigrad train [options]")
    add_training(parser)
    parser.add_group("interrupted runs", resumed_configuration)
    parser.add_group("results", Results)
    parser.add_group("record", Schedule, _RECORD)
    parser.add_group("record", fit, ("progress",))
    parser.add_group("machine", set_up, MACHINE)
    return parser


def add_training(parser: Parser, with_estimator: bool = True) -> None:
    """Add the options for a training run, except options for its files and its machine."""
    add_problem(parser, with_estimator)
    names = [setting.name for setting in fields(Schedule) if setting.name not in _RECORD]
    parser.add_group("schedule", Schedule, names)
    parser.add_group("optimization", Optimization, (), {"start_decay": float | list[float] | None})
    add_details(parser)


def add_problem(parser: Parser, with_estimator: bool = True) -> None:
    """Add the options for data, network, prior and estimator."""
    prior = PRIOR if with_estimator else PRIOR[1:]
    parser.add_group("what to train", set_up, NETWORK)
    parser.add_group("invariance", set_up, INVARIANCE)
    parser.add_group("prior and evidence", fit, prior, _PRIOR_TYPES, {"likelihood": None}, _WORDS)
    parser.add_group("prior and evidence", Settings, _MEAN)


def add_details(parser: Parser) -> None:
    """Add rarely used options for the estimates."""
    parser.add_group("Laplace approximation", Laplace)
    parser.add_group("memory", Memory)


def run(parser: Parser, options: Namespace) -> int:
    """Check the options, train, and return the exit code."""
    with started_ranks(options.device) as group, ExitStack() as stack:
        folder, ranks = None, Ranks(group)
        with ranks.together():
            if file := resumed_configuration(options.resume):
                folder = resumed_folder(parser, options, file)
                is_drawn = not options.figures or (folder / "figures").is_dir()
                if is_drawn and (folder / RESULTS).is_file():
                    show("note", f"The run in {folder} is complete. Nothing is left to do.")
                    return 0
            setup = set_up(**chosen(set_up, options))
            options.model = setup.model_name
            if options.evaluate_with != "auto":
                Estimator.parse(options.evaluate_with)
        runs = prepare_runs(setup, options, group, strict=file is None)
        directory = None
        with ranks.together():
            if ranks.is_first:
                method = "map" if options.estimator == NO_ESTIMATOR else options.estimator
                default = Path("runs") / folder_name(setup.data.name, setup.model_name, method)
                named = folder or options.run_dir or default
                directory = RunDirectory(named, resume=file is not None)
                stack.enter_context(directory.locked())
        path = Path(ranks.shared("" if directory is None else str(directory.path)))
        interruption = stack.enter_context(interruptible(path))
        with ranks.together():
            if file is None and directory is not None:
                recorded = options.clone()  # flat, whichever files the options came from
                recorded.pop("config", None)
                recorded.pop("resume", None)
                # The last digits of results depend on it.
                recorded.threads = torch.get_num_threads()
                directory.write_text(CONFIGURATION, parser.dump(recorded))
        weights = sum(w.numel() for w in runs[-1].evidence.weights().values())
        network = f"{setup.describe_model()}, with {weights:,} weights on {setup.device}"
        show("note", f"{setup.data.describe()}; {network}")
        together = f", {ranks.count} processes together" if ranks.count > 1 else ""
        show("note", f"Writing to {path}{together}")
        results = {}
        try:
            for run in runs:
                destination = path / "map" if run is not runs[-1] else directory or path
                with interruption.patient() as stop:
                    result = run.train(
                        destination, resume=True, progress=options.progress, stop=stop
                    )
                results[run.name] = result
        except RankError as error:
            words = f"{error} To resume: evigrad train --resume {shlex.quote(str(path))}"
            raise RankError(words) from error
        if directory is not None:
            report(results, setup, directory, options)
    return 0


@dataclass(frozen=True)
class Results:
    """Set which results the command computes and where it saves them.

    Attributes:
        compare_map: Whether to train by MAP first, with the same settings but no hyperparameter
            steps, and to show both runs. MAP training learns the noise of a gaussian likelihood
            from the training loss.
        evaluate_with: Estimator of the log evidence in the final table, the same for all rows. The
            value auto selects the tightest estimator that takes at most about 20 seconds, or the
            run's own estimator if it has anchors or uses all data. The table also shows the run's
            own estimator.
        run_dir: Folder of the run. If it is not empty, the run uses the first free name among
            NAME-2, NAME-3, ... Default: runs/DATA-MODEL-ESTIMATOR.
        figures: Whether to save figures of learning curves and precisions in the folder.
    """

    compare_map: bool = False
    evaluate_with: str = "auto"
    run_dir: str | None = None
    figures: bool = True


def report(
    results: dict[str, FitResult],
    setup: Setup,
    directory: RunDirectory,
    options: Namespace,
) -> None:
    """Evaluate the trained networks, print the table of results, and draw the figures."""
    evaluate_with = options.evaluate_with
    if options.figures:
        _draw(results, directory)
    if (directory.path / RESULTS).exists():
        return
    learned = [result for result in results.values() if result.estimator is not None]
    run_estimator = learned[-1].evidence.spec.name if learned else None
    name = _judge(results, setup, run_estimator) if evaluate_with == "auto" else evaluate_with
    own_settings = {**{name: options[name] for name in _ROWS}, "blocks": _BLOCKS}
    kept = own_settings if evaluate_with == "auto" and name == run_estimator else {}
    values = _evaluated(results, setup, name, kept)
    in_training: dict[str, EvidenceValue] = {}
    if run_estimator is not None and run_estimator != name:
        in_training = _evaluated(results, setup, run_estimator, own_settings)
    _print_results(results, values, in_training, setup.data)
    if words := _comparison(results, setup.data):
        results_console().print(words)
    records: dict[str, Any] = {}
    for key, result in results.items():
        records[key] = {
            "evidence": asdict(values[key]) if key in values else None,
            "evidence_as_in_training": asdict(in_training[key]) if key in in_training else None,
            "train": result.train_metrics,
            "test": result.test_metrics,
        }
        if "squared_error" in result.test_metrics:
            records[key]["test_rmse"] = _rmse(result.test_metrics, setup.data)
        records[key]["seconds"] = result.seconds
        records[key]["mode_gap"] = result.mode_gap
        records[key]["starts"] = {f"{decay:g}": value for decay, value in result.starts.items()}
        records[key]["hyperparameters"] = {
            name: value
            for name, value in result.history[-1].items()
            if name.partition("/")[0] in HYPERPARAMETERS
        }
    directory.write_json(RESULTS, records)


def _judge(results: dict[str, FitResult], setup: Setup, run_estimator: str | None) -> str:
    """Return the estimator of the final table, from sizes only, because times vary between runs."""
    evidence, (x, _) = next(iter(results.values())).evidence, setup.data.train
    name = tight_estimator(
        sum(w.numel() for w in evidence.weights().values()),
        len(x),
        evidence.likelihood.num_rows(setup.data.num_outputs),
        _EVALUATION_SECONDS,
    )
    if run_estimator is None or Estimator.parse(name).subset in (None, len(x)):
        return name
    spec = Estimator.parse(run_estimator)
    # Blocks of this many examples without anchors would be looser.
    return run_estimator if spec.anchored or spec.subset is None else name


def _evaluated(
    results: dict[str, FitResult], setup: Setup, name: str, settings: Mapping[str, Any]
) -> dict[str, EvidenceValue]:
    """Return the log evidence of each run by one estimator, or nothing if it fails."""
    values: dict[str, EvidenceValue] = {}
    words = f"Evaluating the log evidence with {name}"
    show("note", words)
    try:
        for key, result in results.items():
            with Console(stderr=True).status(words):  # moves in a terminal
                values[key] = evaluate_evidence(result.evidence, setup.data.train, name, **settings)
    except EvigradError as error:  # the training is done, so the other results are still written
        show("warning", f"Could not evaluate the log evidence with {name}: {error}")
        return {}
    return values


def _draw(results: dict[str, FitResult], directory: RunDirectory) -> None:
    histories = {label_of(result.estimator): result.history for result in results.values()}
    learned = [label_of(r.estimator) for r in results.values() if r.estimator is not None]
    try:
        files = plots.save_all(histories, directory.figures, learned[-1] if learned else None)
    except (EvigradError, OSError) as error:  # the numbers matter more than the figures
        show("warning", f"Could not draw the figures: {error}")
        return
    show("note", "Figures: " + ", ".join(map(str, files)))


def settings_of(setup: Setup, options: Namespace) -> Settings:
    """Return the settings of the training run that the options specify."""
    named = {name: options[name] for name in SETTINGS}
    named["likelihood"] = named["likelihood"] or setup.data.likelihood
    if named["estimator"] == NO_ESTIMATOR:
        named["estimator"] = None
    return Settings(**grouped(named), hyperparameters=setup.hyperparameters, seed=setup.seed)


def prepare_runs(
    setup: Setup, options: Namespace, group: Group | None = None, strict: bool = False
) -> list[Trainer]:
    """Return the trainers that options specify. With ``compare_map``, the first trains by MAP.

    If ``strict`` is True, options without effect raise an error.

    Raises:
        ConfigurationError: If the options are invalid or do not match each other.
    """
    settings = settings_of(setup, options)
    all_settings = [settings]
    if options.compare_map:
        if settings.estimator is None:
            raise ConfigurationError(
                "compare_map needs an estimator to compare with MAP, got none. Set estimator, or"
                " remove compare_map."
            )
        fair = learns_likelihood(settings.likelihood)
        optimization = replace(settings.optimization, noise_on_loss=fair)
        usual = replace(settings, schedule=replace(settings.schedule, max_epochs=None))
        all_settings.insert(0, replace(usual, estimator=None, optimization=optimization))
    data = setup.data
    return [
        prepare(
            setup.make_model(),
            data.train,
            run_settings,
            test=data.test,
            network=setup.network,
            process_group=group,
            strict=strict and run_settings is settings,
        )
        for run_settings in all_settings
    ]


def folder_name(*parts: str) -> str:
    """Return the parts of a folder's name joined by hyphens, without special characters."""
    return "-".join(parts).replace("/", "-").replace(":", "-")


def _print_results(
    results: dict[str, FitResult],
    values: dict[str, EvidenceValue],
    in_training: dict[str, EvidenceValue],
    data: DataSet,
) -> None:
    columns: dict[str, dict[str, str]] = {}
    for name, estimates in (("log evidence", values), ("as in training", in_training)):
        shown = nats(*(estimates[key].per_datum for key in estimates))
        columns[name] = dict(zip(estimates, shown, strict=True))
    if columns["as in training"] == columns["log evidence"]:
        in_training = {}
    judged = "The log evidence could not be evaluated"
    if value := next(iter(values.values()), None):  # all by the same estimator
        what = describe_estimator(value.estimator, value.blocks)
        kind = "a lower bound" if value.is_bound else "an estimate"
        kind = "exact" if what.endswith("exact") else f"{kind} by {what.partition(',')[0]}"
        judged = f"The log evidence is {kind}"
    if training_value := next(iter(in_training.values()), None):
        judged += f", and the next column shows the value by {training_value.estimator}"
    units = ""
    if data.target_mean is not None and data.target_std is not None:
        mean, deviation = data.target_mean.item(), data.target_std.item()
        units = (
            " The RMSE is in the original units. The other values are of standardized targets (mean"
            f" {mean:.4g}, standard deviation {deviation:.4g}), and lower by"
            f" {math.log(deviation):.2f} in the original units."
        )
    ranges = {  # of each run's transforms at the end, one per line
        key: "\n".join(
            f"{name.removeprefix('range/')} {value:.3g}"
            for name, value in result.history[-1].items()
            if "range/" in name
        )
        for key, result in results.items()
    }
    scores = nats(*(result.test_metrics["log_likelihood"] for result in results.values()))
    rows = []
    for (key, result), score in zip(results.items(), scores, strict=True):
        test = result.test_metrics
        row = {"method": label_of(result.estimator)}
        row["log evidence"] = columns["log evidence"].get(key, "–")
        if in_training:
            row["as in training"] = columns["as in training"][key]
        row["test log lik."] = score
        if "accuracy" in test:
            row["test accuracy"] = f"{100 * test['accuracy']:.1f} %"
        else:
            row["test RMSE"] = _digits(_rmse(test, data))
        row["seconds"] = f"{result.seconds:.1f}"
        if any(ranges.values()):
            row["ranges"] = ranges[key]
        rows.append(row)
    print_table(
        "Trained on the training data only",
        "Log evidence and test log likelihood are in nats per example, and higher is better."
        f" {judged}.{_UNITS if any(ranges.values()) else ''}{units}",
        rows,
        left=("method", "ranges"),
    )


def _comparison(results: Mapping[str, FitResult], data: DataSet) -> str:
    """Return a comparison with fixed weight decay on test data, or "" if there is none."""
    if len(results) < 2:
        return ""
    base, learned = results.values()
    scores = [r.test_metrics["log_likelihood"] for r in (base, learned)]
    if not all(map(math.isfinite, scores)):
        return ""
    best, epoch = max(
        (known(row).get("test_log_likelihood", -math.inf), row["epoch"]) for row in base.history
    )
    before, after, best_score = nats(*scores, best)
    words = f"With evigrad, the test log likelihood is {after} instead of {before}"
    if "squared_error" in base.test_metrics:
        before, after = (_digits(_rmse(r.test_metrics, data)) for r in (base, learned))
        words += f", and the test RMSE is {after} instead of {before}"
    else:
        before, after = (f"{100 * r.test_metrics['accuracy']:.1f}" for r in (base, learned))
        words += f", and the test accuracy is {after} % instead of {before} %"
    words += f". Training took {learned.seconds / base.seconds:.1f} times as long."
    if best - scores[0] > _OVERFITS:
        first, last = base.history[0], base.history[-1]
        is_learned = any("noise" in name.split("/") and first[name] != last[name] for name in first)
        words += (
            f" Fixed weight decay overfits{' its noise' if is_learned else ''}. Its test log"
            f" likelihood was {best_score} after epoch {epoch}, so early stopping is a stronger"
            " baseline."
        )
    return words


def _rmse(metrics: Mapping[str, float], data: DataSet) -> float:
    """Return the root mean squared error in the targets' own units."""
    deviation = 1.0 if data.target_std is None else data.target_std.item()
    return deviation * math.sqrt(metrics["squared_error"])


def _digits(value: float) -> str:
    """Return a positive number with three significant digits, or more before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
