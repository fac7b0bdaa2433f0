"""``evigrad train``: train a network, learn its prior, and compare it with plain MAP training."""

import shlex
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import Namespace

from evigrad.blocks.anchors import Anchoring
from evigrad.cli.messages import show
from evigrad.cli.parser import NO_ESTIMATOR, PARTS, Parser
from evigrad.cli.ranks import started_ranks
from evigrad.cli.report import RESULTS, report
from evigrad.cli.resume import (
    CONFIGURATION,
    interruptible,
    resumed_configuration,
    resumed_folder,
)
from evigrad.cli.setup import INVARIANCE, MACHINE, NETWORK, Setup, set_up, set_up_from
from evigrad.core.names import Estimator
from evigrad.distributed import Group, Ranks
from evigrad.errors import ConfigurationError, EvigradWarning, RankError
from evigrad.priors import STRUCTURES
from evigrad.training import RunDirectory, Trainer, fit, learns_likelihood, prepare
from evigrad.training.settings import Settings
from evigrad.training.trials import check_choice, choose_weight

_DESCRIPTION = """\
All options of evigrad train. In a YAML file, fields of a group are nested, as in
"schedule: {every: 5}". --every 5 and "every: 5" mean --schedule.every 5. Options of the type bool
also have the forms --NAME and --no-NAME. --NAME+ VALUE adds a value to a list."""
# Arguments of ``fit`` itself that are options under the same names.
_FIT = ("estimator", "prior", "precision")
_TYPES = {"prior": Literal[STRUCTURES]}


def make_parser() -> Parser:
    """Return the parser for the options of ``evigrad train``."""
    parser = Parser("evigrad train", _DESCRIPTION)
    add_problem(parser)
    for part in ("schedule", "optimization"):
        parser.add_group(part, PARTS[part], part=part)
    parser.add_group("prior and evidence", fit, ("validation_fraction",))
    parser.add_group("results", Results)
    parser.add_group("results", fit, ("progress",))
    parser.add_group("results", resumed_configuration)
    parser.add_group("machine", set_up, MACHINE)
    return parser


def add_problem(parser: Parser) -> None:
    """Add the options for data, network and estimates."""
    parser.add_group("what to train", set_up, NETWORK)
    parser.add_group("invariance", set_up, INVARIANCE)
    parser.add_group("prior and evidence", fit, _FIT, types=_TYPES)
    parser.add_group("prior and evidence", Settings, ("prior_mean",))
    for part in ("laplace", "memory", "anchoring"):
        parser.add_group(part, PARTS[part], part=part)


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
            setup = set_up_from(options)
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
                recorded = options.clone()  # without the files that the options came from
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
            for trainer in runs:
                destination = directory or path
                if trainer is not runs[-1]:
                    destination = path / "map"
                elif options.validation_fraction is not None:
                    trainer = _with_chosen_weight(trainer, setup, options, destination, group)
                with interruption.patient() as stop:
                    results[trainer.name] = trainer.train(
                        destination, resume=True, progress=options.progress, stop=stop
                    )
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
        compare_map: Whether to first train by MAP with a fixed weight decay and the same schedule,
            and to show both runs. The weight decay is 5e-4, or precision / N if precision is set.
            MAP training learns the noise of a gaussian likelihood from the training loss.
        evaluate_with: Estimator of the log evidence in the final table, the same for all rows. The
            value auto selects the tightest estimator that takes at most about 20 seconds, or the
            run's own estimator if it has anchors or uses all data.
        run_dir: Folder of the run. If it is not empty, the run uses the first free name among
            NAME-2, NAME-3, ... Default: runs/DATA-MODEL-ESTIMATOR.
        figures: Whether to save figures of learning curves and precisions in the folder.
    """

    compare_map: bool = False
    evaluate_with: str = "auto"
    run_dir: str | None = None
    figures: bool = True


def settings_of(setup: Setup, options: Namespace) -> Settings:
    """Return the settings of the training run that the options specify."""
    return Settings(
        likelihood=options.likelihood or setup.data.likelihood,
        estimator=None if options.estimator == NO_ESTIMATOR else options.estimator,
        prior=options.prior,
        precision=options.precision,
        prior_mean=options.prior_mean,
        hyperparameters=setup.hyperparameters,
        seed=setup.seed,
        **parts_of(options),
    )


def parts_of(options: Namespace) -> dict[str, Any]:
    """Return the arguments of ``fit`` that are dataclasses, as far as there are options."""
    parts = {name: kind(**vars(options[name])) for name, kind in PARTS.items() if name in options}
    if parts["anchoring"] == Anchoring():  # an error for estimators without anchors
        parts["anchoring"] = None
    return parts


def prepare_runs(
    setup: Setup, options: Namespace, group: Group | None = None, strict: bool = False
) -> list[Trainer]:
    """Return the trainers that options specify. With ``compare_map``, the first trains by MAP.

    If ``strict`` is True, options without effect raise an error.

    Raises:
        ConfigurationError: If the options are invalid or do not match each other.
    """
    settings = settings_of(setup, options)
    if options.validation_fraction is not None:
        check_choice(settings, options.validation_fraction, None)
    all_settings = [settings]
    if options.compare_map:
        if settings.estimator is None:
            raise ConfigurationError(
                "compare_map needs an estimator to compare with MAP, got none. Set estimator, or"
                " remove compare_map."
            )
        schedule, optimization = settings.schedule, settings.optimization
        base = replace(
            settings,
            estimator=None,
            anchoring=None,
            schedule=replace(schedule, max_epochs=None),
            optimization=replace(
                optimization, noise_on_loss=learns_likelihood(settings.likelihood)
            ),
        )
        # The fixed point starts from start_decay, so the precision is the baseline's only.
        if optimization.prior_update != "adam" and schedule.burn_in != 0:
            settings = replace(settings, precision=None)
        all_settings = [base, settings]
    data = setup.data
    return [
        prepare(
            setup.make_model(),
            data.train,
            run,
            test=data.test,
            network=setup.network,
            process_group=group,
            strict=strict and run is settings,
        )
        for run in all_settings
    ]


def _with_chosen_weight(
    trainer: Trainer,
    setup: Setup,
    options: Namespace,
    destination: RunDirectory | Path,
    group: Group | None,
) -> Trainer:
    """Return the trainer for the weight of the log-determinant that predicts held-out data best."""
    make = partial(prepare, trainer.evidence.model, network=setup.network, process_group=group)
    with warnings.catch_warnings():  # the trainer has already shown them
        warnings.simplefilter("ignore", EvigradWarning)
        choice = choose_weight(
            make, trainer, options.validation_fraction, destination, progress=options.progress
        )
        laplace = replace(trainer.settings.laplace, log_det_weight=choice.weight)
        settings = replace(trainer.settings, laplace=laplace)
        return make(setup.data.train, settings, test=setup.data.test)


def folder_name(*parts: str) -> str:
    """Return the parts of a folder's name joined by hyphens, without special characters."""
    return "-".join(parts).replace("/", "-").replace(":", "-")
