"""Trials that choose the weight of the log-determinant (see ``weight_choice``).

Each trial trains the network on a part of the data with one start and fewer epochs, and predicts
the held-out part.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from evigrad.blocks.sources import Subset
from evigrad.data.dataset import stratified_split
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.likelihoods import make_likelihood
from evigrad.measure.metrics import log_probabilities_of
from evigrad.training.data import RunData, derived_seed
from evigrad.training.data_checks import check_data
from evigrad.training.plan import planned
from evigrad.training.run_directory import CONFIGURATIONS, RunDirectory
from evigrad.training.settings import Settings
from evigrad.training.trainer import Trainer
from evigrad.training.weight_choice import Predictions, WeightChoice, search

# Length of a trial relative to the training that follows. On scikit-learn's digits, trials of this
# length order the weights 0.25 and 1 as whole trainings do. A network that overfits late prefers
# smaller weights in short trials: on 600 lines of text, 0.25 instead of 4.
SHARE = 1 / 3


def check_choice(settings: Settings, fraction: float | None, validation: object) -> None:
    """Raise ConfigurationError if the settings leave nothing to choose, or are ambiguous."""
    name = "validation_fraction" if validation is None else "validation"
    if fraction is not None and validation is not None:
        raise ConfigurationError(
            "validation_fraction and validation cannot be combined. Pass the data, or the share of"
            " the training data that chooses the weight of the log-determinant."
        )
    is_fraction = isinstance(fraction, float) and 0 < fraction < 1
    if validation is None and not is_fraction:
        raise ConfigurationError(
            f"validation_fraction must be a number between 0 and 1, such as 0.1, got {fraction!r}."
        )
    if settings.estimator is None:
        raise ConfigurationError(
            f"{name} requires an estimator, because it chooses the weight of its log-determinant,"
            " but estimator is None. Set an estimator, or pass the data as test=..."
        )
    weight = settings.laplace.log_det_weight
    if weight != 1:
        raise ConfigurationError(
            f"{name} chooses log_det_weight, but log_det_weight is {weight}. Omit one of them."
        )


def choose_weight(
    make_trainer: Callable[[RunData, Settings], Trainer],
    trainer: Trainer,
    validation: Any,
    run_dir: str | Path | RunDirectory | None,
    *,
    progress: bool,
) -> WeightChoice:
    """Return the weight of the log-determinant that predicts held-out data best.

    The model is the same afterwards as before.

    Args:
        make_trainer: Returns a trainer of the model for some data and settings.
        trainer: Trainer of the model on all data, with weight 1, which has not started training.
        validation: Data to predict, or the share of the training data to predict.
        run_dir: Folder of the run. Each trial has a folder inside, and resumes if it was
            interrupted. None writes nothing.
        progress: Whether to print the result of each trial on standard error.
    """
    start = time.perf_counter()
    model, settings, train = trainer.evidence.model, trainer.settings, trainer.data
    if isinstance(validation, float):
        train, held_out = _split(train, settings, validation)
    else:
        weight = next(iter(trainer.evidence.weights().values()))
        held_out = RunData(validation, trainer.device, settings.seed, weight.dtype)
    if isinstance(run_dir, RunDirectory):
        if not (run_dir.path / CONFIGURATIONS[0]).exists():  # the folder belongs to this run
            run_dir.write_json(CONFIGURATIONS[0], settings.as_record())
        run_dir = run_dir.path

    def predict(weight: float) -> Predictions | None:
        folder = None if run_dir is None else Path(run_dir) / "trials" / f"{weight:g}"
        with _restored(model):
            trial = make_trainer(train, _trial_settings(settings, weight))
            held_out.is_column = trial.data.is_column
            check_data(trial.evidence, held_out, trial.device, len(held_out))
            try:
                result = trial.train(folder, resume=folder is not None, progress=False)
            except ConfigurationError:
                raise
            except EvigradError:
                if weight == 1:
                    raise
                return None
            predictions = Predictions(
                *log_probabilities_of(model, result.evidence.likelihood, held_out)
            )
        if progress:
            words = f"{predictions.mean:.4g} nats per example"
            print(
                f"evigrad: weight {weight:g} of the log-determinant, trial of"
                f" {len(result.history)} epochs: held-out log likelihood {words}",
                file=sys.stderr,
                flush=True,
            )
        return predictions

    choice = replace(search(predict), seconds=time.perf_counter() - start)
    if progress:
        print(f"evigrad: {choice}", file=sys.stderr, flush=True)
    return choice


def _split(data: RunData, settings: Settings, fraction: float) -> tuple[RunData, RunData]:
    """Return the data to train on and the data to predict. Classes keep their proportions."""
    count, seed = len(data), derived_seed(settings.seed, "held-out") % 2**32
    number = round(fraction * count)
    if not 0 < number < count:
        raise ConfigurationError(
            f"validation_fraction must leave data to train on and to predict, got {fraction} of"
            f" {count} examples. Use a fraction such as 0.1, or pass validation=(x, y)."
        )
    labels = torch.zeros(count, dtype=torch.int64, device="cpu")
    if make_likelihood(settings.likelihood).is_classification and data.is_held:
        y = data.targets()
        labels = y.flatten(1)[:, 0] if y.ndim > 1 else y
    parts = stratified_split(labels.cpu().numpy(), fraction, seed)
    train, held_out = (
        RunData(Subset(data, torch.from_numpy(part)), data.device, settings.seed) for part in parts
    )
    return train, held_out


def _trial_settings(settings: Settings, weight: float) -> Settings:
    """Return the settings of a trial: fewer epochs, one start, and no evaluations.

    ``settings`` are complete (see ``plan``).
    """
    schedule, optimization = settings.schedule, settings.optimization

    def shorter(epochs: int | None) -> int:
        return max(1, round(SHARE * planned(epochs)))

    hyper_every = None if schedule.hyper_every is None else shorter(schedule.hyper_every)
    if optimization.prior_update == "fixed_point":
        optimization = replace(optimization, start_decay=optimization.start_decays[0])
    return replace(
        settings,
        # Training changes these objects.
        likelihood=copy.deepcopy(settings.likelihood),
        prior=copy.deepcopy(settings.prior),
        laplace=replace(settings.laplace, log_det_weight=weight),
        schedule=replace(
            schedule,
            epochs=shorter(schedule.epochs),
            max_epochs=None,
            burn_in=round(SHARE * planned(schedule.burn_in)),
            every=shorter(schedule.every),
            hyper_every=hyper_every,
            eval_every=0,
            bracket_every=0,
        ),
        optimization=optimization,
    )


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers and modes of a model at the end."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]
    before = [tensor.detach().clone() for tensor in tensors]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        for module, mode in modes:
            module.training = mode
