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
from evigrad.training.settings import GROUPS, Laplace, Optimization, Schedule, Settings, grouped

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
# Gain in nats per example above which a ratio of probabilities is not helpful.
_PLAIN_GAIN = 2.0
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
    if words := _gain(results):
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
    try:
        for key, result in results.items():
            words = f"Evaluating the log evidence of {key} with {name}"
            show("note", words)
            with Console(stderr=True).status(words):  # moves in a terminal
                values[key] = evaluate_evidence(result.evidence, setup.data.train, name, **settings)
    except EvigradError as error:  # the training is done, so the other results are still written
        show("warning", f"Could not evaluate the log evidence with {name}: {error}")
        return {}
    return values


def _draw(results: dict[str, FitResult], directory: RunDirectory) -> None:
    histories = {key: result.history for key, result in results.items()}
    learned = [key for key, result in results.items() if result.estimator is not None]
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
    judged = "Could not evaluate the log evidence."
    for value in values.values():  # all by the same estimator
        what = describe_estimator(value.estimator, value.blocks)
        judged = f"The log evidence is estimated by {what}."
        if not value.is_bound:
            judged = f"The log evidence is estimated by {what}, which is not a bound."
        elif not what.endswith("exact"):
            judged = (
                f"The log evidence is estimated by {what}, a lower bound on the exact value. If"
                " precisions differ much between methods, the exact order may differ. For exact"
                " values, use --evaluate-with ntk-N-C."
            )
    if training_value := next(iter(in_training.values()), None):
        blocks = "1 block" if training_value.blocks == 1 else f"{training_value.blocks} blocks"
        judged += f" Training used {training_value.estimator}, here on {blocks} at the end."
    units = ""
    if data.target_mean is not None and data.target_std is not None:
        mean, deviation = data.target_mean.item(), data.target_std.item()
        units = (
            f" The targets were standardized (training mean {mean:.4g}, standard deviation"
            f" {deviation:.4g}), and log likelihoods are of standardized targets. In the original"
            f" units they are lower by {math.log(deviation):.4f}. The test RMSE is in the original"
            " units."
        )
    ranges = {  # of each run's transforms at the end, one per line
        key: "\n".join(
            f"{name.removeprefix('range/')} {value:.3g}"
            for name, value in result.history[-1].items()
            if "range/" in name
        )
        for key, result in results.items()
    }
    gaps = "".join(
        f" With the weights of {key} at the mode, the log evidence would be higher by"
        f" {result.mode_gap:.3f} (mode gap)."
        for key, result in results.items()
        if result.mode_gap is not None
    )
    rows = []
    for key, result in results.items():
        test = result.test_metrics
        row = {"method": key if result.estimator is None else f"{key}, learned"}
        row["log evidence"] = f"{values[key].per_datum:.4f}" if key in values else "–"
        if in_training:
            row["as in training"] = f"{in_training[key].per_datum:.4f}"
        row["test log lik."] = f"{test['log_likelihood']:.4f}"
        if "accuracy" in test:
            row["test accuracy"] = f"{100 * test['accuracy']:.2f} %"
        else:
            row["test RMSE"] = f"{_rmse(test, data):.4g}"
        row["seconds"] = f"{result.seconds:.1f}"
        if any(ranges.values()):
            row["ranges"] = ranges[key]
        rows.append(row)
    print_table(
        "Trained on the training data only",
        f"Log evidence and test log likelihood are in nats per example; higher is better. {judged}"
        f"{gaps} Seconds are training time, without evaluation. The MAP row has a fixed prior, and"
        ' a fixed noise unless it says "learned noise": the training loss learned that noise. In'
        " rows with an estimator, the evidence learned both."
        + (_UNITS if any(ranges.values()) else "")
        + units,
        rows,
        left=("method", "ranges"),
    )


def _gain(results: dict[str, FitResult]) -> str:
    """Return a sentence on the gain over MAP on test data, or an empty string without a MAP run."""
    if len(results) < 2:
        return ""
    (name, base), (learner, learned) = results.items()
    gain = learned.test_metrics["log_likelihood"] - base.test_metrics["log_likelihood"]
    if not math.isfinite(gain):
        return ""
    words = (
        f"Learning by {learner} {'raised' if gain >= 0 else 'lowered'} the test log likelihood by"
        f" {abs(gain):.3f} nats per example"
    )
    if "squared_error" in base.test_metrics:
        ratio = learned.test_metrics["squared_error"] / base.test_metrics["squared_error"]
        change = 100 * (math.sqrt(ratio) - 1)
        words += f" and {'lowered' if change <= 0 else 'raised'} the test RMSE by {abs(change):.0f}"
        words += f" % compared with {name}"
    elif abs(gain) < _PLAIN_GAIN:
        change = 100 * math.expm1(gain)
        words += f" compared with {name}. A test target is {abs(change):.0f} %"
        words += f" {'more' if gain >= 0 else 'less'} probable (geometric mean)"
    else:
        words += f" compared with {name}"
    return f"{words}. Training took {learned.seconds / base.seconds:.1f} times as long."


def _rmse(metrics: Mapping[str, float], data: DataSet) -> float:
    """Return the root mean squared error in the targets' own units."""
    deviation = 1.0 if data.target_std is None else data.target_std.item()
    return deviation * math.sqrt(metrics["squared_error"])
