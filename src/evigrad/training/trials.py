"""Trials that choose the weight of the log-determinant (see ``weight_choice``).

Each trial trains the network on a part of the data from one start, and predicts held-out data. The
schedule does not differ from the final training. With half of the epochs or rounds, the trials of
one of three sets chose weights that are too large (benchmarks/README.md). All trials share the
burn-in, which does not depend on the weight.

If the noise is learned, the posterior predicts. A network with few data may fit them so well that
only the posterior's variance accounts for its errors.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
from evigrad.inputs import Inputs
from evigrad.likelihoods import Likelihood, make_likelihood
from evigrad.likelihoods.weighted import Weighted
from evigrad.measure.metrics import log_probabilities_of
from evigrad.posterior import Posterior
from evigrad.training.convergence import approximations
from evigrad.training.data import RunData, derived_seed
from evigrad.training.data_checks import check_data, learns_likelihood
from evigrad.training.plan import planned
from evigrad.training.rounds import is_keepable
from evigrad.training.run_directory import (
    CONFIGURATIONS,
    RunDirectory,
    read_state,
    write_state,
)
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
    parts = _parts(trainer, validation)
    if isinstance(run_dir, RunDirectory):
        if not (run_dir.path / CONFIGURATIONS[0]).exists():  # the folder belongs to this run
            run_dir.write_json(CONFIGURATIONS[0], trainer.record)
        run_dir = run_dir.path

    folder = None
    if run_dir is not None and trainer.evidence.ranks.is_first:
        folder = Path(run_dir) / "trials"
    runs = [
        _PartTrials(make_trainer, trainer, part, folder, "" if number == 1 else f"-{number}")
        for number, part in enumerate(parts, start=1)
    ]
    choice = replace(search(_Trials(runs, progress)), seconds=time.perf_counter() - start)
    if progress:
        print(f"evigrad: {choice}", file=sys.stderr, flush=True)
    return choice


class _Trials:
    """Trials on one or more parts of the data (see ``weight_choice.Trials``)."""

    def __init__(self, parts: Sequence["_PartTrials"], progress: bool) -> None:
        self._parts, self._progress = parts, progress
        self._diverged: set[float] = set()

    def halfway(self, weight: float) -> Predictions | None:
        if not all(part.has_halfway for part in self._parts):
            return None
        return self._predictions(weight, lambda part: part.halfway(weight))

    def end(self, weight: float) -> Predictions | None:
        predictions = self._predictions(weight, lambda part: part.end(weight))
        if self._progress and predictions is not None:
            print(
                f"evigrad: weight {weight:g} of the log-determinant: held-out log likelihood"
                f" {predictions.mean:.4g} nats per example",
                file=sys.stderr,
                flush=True,
            )
        return predictions

    def _predictions(
        self, weight: float, predict: Callable[["_PartTrials"], Predictions]
    ) -> Predictions | None:
        if weight in self._diverged:
            return None
        try:
            parts = [predict(part) for part in self._parts]
        except EvigradError as error:
            if weight == 1 or isinstance(error, ConfigurationError):
                raise
            self._diverged.add(weight)
            return None
        sums, counts = (torch.cat([getattr(p, n) for p in parts]) for n in ("sums", "counts"))
        return Predictions(sums, counts)


class _PartTrials:
    """Trials on one part of the data. Each trains to a point, and from there to the end.

    Args:
        make_trainer: See ``choose_weight``.
        trainer: See ``choose_weight``.
        part: Data to train on, and data to predict.
        folder: Folder of the trials, or None to keep their states in memory.
        suffix: Ending of the names of the trials' folders.
    """

    def __init__(
        self,
        make_trainer: Callable[[RunData, Settings], Trainer],
        trainer: Trainer,
        part: Part,
        folder: Path | None,
        suffix: str,
    ) -> None:
        self._make, self._whole, self._part = make_trainer, trainer, part
        self._folder, self._suffix = folder, suffix
        self._states: dict[str, dict[str, Any]] = {}  # without a folder
        schedule = trainer.schedule
        self._has_noise = learns_likelihood(trainer.evidence.likelihood)
        # The first round follows the last epoch of the burn-in.
        self._shared = planned(schedule.burn_in) - 1
        self._halfway = planned(schedule.epochs) // 2
        # Trials need less precise estimates, so all steps of a round use one block if they can.
        assert trainer.learner is not None
        names = trainer.learner.step_groups[0].names
        is_one = is_keepable(trainer.evidence, trainer.probe, names)
        self._prior_blocks = schedule.prior_blocks or (1 if is_one else None)

    @property
    def has_halfway(self) -> bool:
        """Return whether trials can be compared halfway. The posterior predicts only at the end."""
        return not self._has_noise and self._halfway > self._shared

    def halfway(self, weight: float) -> Predictions:
        """Return the predictions of the network in the middle of a trial."""
        name, ranks = f"{weight:g}{self._suffix}/halfway.pt", self._whole.evidence.ranks
        if (saved := ranks.shared(self._kept(name))) is None:
            return self._advance(weight, to_end=False)
        return Predictions(**saved)

    def end(self, weight: float) -> Predictions:
        """Return the predictions at the end of a trial, by the posterior if noise is learned."""
        return self._advance(weight, to_end=True)

    def _advance(self, weight: float, *, to_end: bool) -> Predictions:
        """Train from the last state of a trial to the middle or to the end, and predict."""
        whole, (to_learn, held_out), name = self._whole, self._part, f"{weight:g}{self._suffix}"
        num_data = whole.evidence.num_data * len(to_learn) // len(whole.data)
        directory = None
        if self._folder is not None:
            directory = RunDirectory(self._folder / name, resume=True)
        paused: Predictions | None = None
        with _restored(whole.evidence.model):
            settings = _trial_settings(whole.settings, weight, num_data, self._prior_blocks)
            trial = self._make(to_learn, settings)
            held_out.is_column = trial.data.is_column
            check_data(trial.evidence, held_out, trial.device, len(held_out))

            def stop() -> bool:
                nonlocal paused
                if weight == 1 and len(trial.history) == self._shared:
                    self._keep(f"shared{self._suffix}.pt", trial.state())
                if to_end or len(trial.history) != self._halfway:
                    return False
                paused = self._predictions(trial)
                self._keep(f"{name}/halfway.pt", vars(paused))
                return True

            begin = self._kept(f"{name}/paused") or self._kept(f"shared{self._suffix}.pt")
            if begin is not None:
                begin["settings"] = {**begin["settings"], "log_det_weight": weight}
            try:
                trial.train(
                    directory,
                    resume=directory is not None,
                    progress=False,
                    stop=stop,
                    begin=begin,
                )
            except KeyboardInterrupt:
                if paused is None:
                    raise
                if directory is None:  # otherwise, the folder has a checkpoint
                    self._keep(f"{name}/paused", trial.state())
                return paused
            self._states.pop(f"{name}/paused", None)
            return self._predictions(trial, by_posterior=self._has_noise)

    def _predictions(self, trial: Trainer, *, by_posterior: bool = False) -> Predictions:
        evidence, (to_learn, held_out) = trial.evidence, self._part
        densities = None
        if by_posterior:
            posterior = evidence.posterior(to_learn, **approximations(evidence, to_learn)[-1])
            densities = partial(_log_densities, posterior, evidence.likelihood)
        return Predictions(
            *log_probabilities_of(evidence.model, evidence.likelihood, held_out, densities)
        )

    def _keep(self, name: str, state: dict[str, Any]) -> None:
        if self._folder is None:
            self._states[name] = copy.deepcopy(state)
        else:
            write_state(self._folder / name, state)

    def _kept(self, name: str) -> dict[str, Any] | None:
        """Return a state that a trial has kept, or None."""
        if self._folder is None:
            return copy.deepcopy(self._states.get(name))
        return read_state(file) if (file := self._folder / name).exists() else None


def _log_densities(posterior: Posterior, likelihood: Likelihood, x: Inputs, y: Tensor) -> Tensor:
    """Return the log density of each target, times its weight if targets have weights."""
    if not isinstance(likelihood, Weighted):
        return posterior(x).log_prob(y)
    targets, weights = likelihood.split(y)
    log_densities = posterior(x).log_prob(targets)
    return weights.to(log_densities) * log_densities


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


def _trial_settings(
    settings: Settings, weight: float, num_data: int, prior_blocks: int | None
) -> Settings:
    """Return the settings of a trial: one start, at most three cycles, and no evaluations.

    ``settings`` are complete (see ``plan``). Blocks with more than ``num_data`` examples become
    blocks of all examples. A trial has at most twice the usual epochs.
    """
    schedule, optimization = settings.schedule, settings.optimization
    most = schedule.max_epochs and min(schedule.max_epochs, 2 * planned(schedule.epochs))
    estimator = Estimator.parse(planned(settings.estimator))
    if estimator.exceeds(num_data):
        estimator = replace(estimator, subset=None, scaled=False)
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
            max_epochs=most,
            prior_blocks=prior_blocks,
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
