"""Trials that choose the weight of the log-determinant (see ``weight_choice``).

Each trial trains the network on a part of the data from one start, and predicts held-out data. The
schedule does not differ from the final training. With half of the epochs or rounds, the trials of
one of three sets chose weights that are too large (benchmarks/README.md).
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from evigrad.blocks.sources import Subset
from evigrad.core.names import Estimator
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

# Value of ``validation`` for which each part of the data is predicted before it is learned.
PREQUENTIAL = "prequential"
Part = tuple[RunData, RunData]  # data to train on, and data to predict


def check_choice(settings: Settings, fraction: float | None, validation: object) -> None:
    """Raise ConfigurationError if the settings leave nothing to choose, or are ambiguous."""
    name = "validation_fraction" if validation is None else "validation"
    if fraction is not None and validation is not None:
        raise ConfigurationError(
            "validation_fraction and validation cannot be combined. Pass the data, or the share of"
            " the training data that chooses the weight of the log-determinant."
        )
    if isinstance(validation, str) and validation != PREQUENTIAL:
        raise ConfigurationError(
            "validation must be data such as (x, y), positions of training examples, or"
            f" '{PREQUENTIAL}', got '{validation}'."
        )
    is_fraction = isinstance(fraction, float) and 0 < fraction < 1
    if validation is None and not is_fraction:
        raise ConfigurationError(
            f"validation_fraction must be a number between 0 and 1, such as 0.5, got {fraction!r}."
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
        validation: Data to predict, the share or the positions of the training data to predict, or
            ``PREQUENTIAL``.
        run_dir: Folder of the run. Each trial has a folder inside, and resumes if it was
            interrupted. None writes nothing.
        progress: Whether to print the result of each trial on standard error.
    """
    start = time.perf_counter()
    model, settings, train = trainer.evidence.model, trainer.settings, trainer.data
    parts = _parts(trainer, validation)
    if isinstance(run_dir, RunDirectory):
        if not (run_dir.path / CONFIGURATIONS[0]).exists():  # the folder belongs to this run
            run_dir.write_json(CONFIGURATIONS[0], settings.as_record())
        run_dir = run_dir.path

    def predicted(part: Part, weight: float, name: str) -> tuple[Tensor, Tensor]:
        to_learn, held_out = part
        folder = None if run_dir is None else Path(run_dir) / "trials" / name
        num_data = trainer.evidence.num_data * len(to_learn) // len(train)
        with _restored(model):
            trial = make_trainer(to_learn, _trial_settings(settings, weight, num_data))
            held_out.is_column = trial.data.is_column
            check_data(trial.evidence, held_out, trial.device, len(held_out))
            trial.train(folder, resume=folder is not None, progress=False)
            return log_probabilities_of(model, trial.evidence.likelihood, held_out)

    def predict(weight: float) -> Predictions | None:
        try:
            pairs = [
                predicted(part, weight, f"{weight:g}" if number == 1 else f"{weight:g}-{number}")
                for number, part in enumerate(parts, start=1)
            ]
        except EvigradError as error:
            if weight == 1 or isinstance(error, ConfigurationError):
                raise
            return None
        sums, counts = (torch.cat(values) for values in zip(*pairs, strict=True))
        predictions = Predictions(sums, counts)
        if progress:
            print(
                f"evigrad: weight {weight:g} of the log-determinant: held-out log likelihood"
                f" {predictions.mean:.4g} nats per example",
                file=sys.stderr,
                flush=True,
            )
        return predictions

    choice = replace(search(predict), seconds=time.perf_counter() - start)
    if progress:
        print(f"evigrad: {choice}", file=sys.stderr, flush=True)
    return choice


def _parts(trainer: Trainer, validation: Any) -> list[Part]:
    """Return what the trainings of each trial learn and predict."""
    train, settings = trainer.data, trainer.settings
    if isinstance(validation, float):
        return [_split(train, settings, validation)]
    if isinstance(validation, str):  # the second quarter of the data, and then the second half
        halves = _split(train, settings, 0.5)
        return [_split(halves[0], settings, 0.5), halves]
    if isinstance(validation, Tensor | np.ndarray):
        return [_fold(train, settings, torch.as_tensor(validation, device="cpu"))]
    weight = next(iter(trainer.evidence.weights().values()))
    return [(train, RunData(validation, trainer.device, settings.seed, weight.dtype))]


def _split(data: RunData, settings: Settings, fraction: float) -> Part:
    """Return the data to train on and the data to predict. Classes keep their proportions."""
    count, seed = len(data), derived_seed(settings.seed, "held-out") % 2**32
    number = round(fraction * count)
    if not 0 < number < count:
        raise ConfigurationError(
            f"validation_fraction must leave data to train on and to predict, got {fraction} of"
            f" {count} examples. Use a fraction such as 0.5, or pass validation=(x, y)."
        )
    labels = torch.zeros(count, dtype=torch.int64, device="cpu")
    if make_likelihood(settings.likelihood).is_classification and data.is_held:
        y = data.targets()
        labels = y.flatten(1)[:, 0] if y.ndim > 1 else y
    parts = stratified_split(labels.cpu().numpy(), fraction, seed)
    train, held_out = (_subset(data, settings, torch.from_numpy(part)) for part in parts)
    return train, held_out


def _fold(data: RunData, settings: Settings, positions: Tensor) -> Part:
    """Return the data to train on, and the data at ``positions`` (integers, or a mask)."""
    count = len(data)
    is_held_out = torch.zeros(count, dtype=torch.bool, device="cpu")
    is_mask = positions.dtype == torch.bool and positions.shape == (count,)
    is_list = positions.ndim == 1 and positions.dtype in (torch.int64, torch.int32)
    if is_mask or (is_list and len(positions) and 0 <= positions.min() <= positions.max() < count):
        is_held_out[positions] = True
    number = int(is_held_out.sum())
    if not 0 < number < count:
        raise ConfigurationError(
            f"validation must hold positions of a part of the {count} training examples, from 0 to"
            f" {count - 1}, or a mask, got {positions.dtype} of shape {tuple(positions.shape)} for"
            f" {number} examples."
        )
    return (
        _subset(data, settings, (~is_held_out).nonzero()[:, 0]),
        _subset(data, settings, is_held_out.nonzero()[:, 0]),
    )


def _subset(data: RunData, settings: Settings, positions: Tensor) -> RunData:
    return RunData(Subset(data, positions), data.device, settings.seed)


def _trial_settings(settings: Settings, weight: float, num_data: int) -> Settings:
    """Return the settings of a trial: one start, one cycle, and no evaluations.

    ``settings`` are complete (see ``plan``). Blocks with more than ``num_data`` examples become
    blocks of all examples.
    """
    schedule, optimization = settings.schedule, settings.optimization
    estimator = Estimator.parse(planned(settings.estimator))
    if estimator.exceeds(num_data):
        estimator = replace(estimator, subset=None)
    if optimization.prior_update == "fixed_point":
        optimization = replace(optimization, start_decay=optimization.start_decays[0])
    return replace(
        settings,
        estimator=estimator.name,
        # Training changes these objects.
        likelihood=copy.deepcopy(settings.likelihood),
        prior=copy.deepcopy(settings.prior),
        laplace=replace(settings.laplace, log_det_weight=weight),
        schedule=replace(
            schedule,
            max_epochs=None,
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
