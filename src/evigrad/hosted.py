"""Learning hyperparameters inside the training loop of another library, such as Lightning."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from evigrad.blocks.samplers import check_sampler
from evigrad.errors import ConfigurationError, InputError, listed
from evigrad.evidence import Evidence
from evigrad.likelihoods import Gaussian
from evigrad.measure.metrics import hyperparameter_values
from evigrad.passes.checks import check_choice
from evigrad.training.data import RunData
from evigrad.training.effects import OF_FIT, of_one_start, refuse
from evigrad.training.fit import place_of, prepare_evidence
from evigrad.training.history import Row
from evigrad.training.learner import Learner
from evigrad.training.plan import planned
from evigrad.training.settings import Settings, check_burn_in

LOSSES = ("nll", "mse")
# Keys of targets in dictionaries.
TARGETS = ("labels", "label")


class HostedLearner:
    """A learner of hyperparameters for a network that another library trains.

    The prior's weight decay is added to the gradients before each optimizer step. A round of
    hyperparameter steps may follow any optimizer step, because fine-tuning has few epochs. If
    several processes train replicas, all of them run the same rounds with the same seed, and then
    copy the hyperparameters of the first process.

    ``settings`` are the settings of ``fit``, without the number of epochs. ``loss`` is the loss
    that the trainer minimizes: ``nll``, or ``mse`` with the mean over examples and outputs.
    """

    def __init__(self, settings: Settings, loss: Literal["nll", "mse"]) -> None:
        if settings.estimator is None:
            raise ConfigurationError(
                "estimator must be the name of an estimator, got None. Use a name such as"
                " ntk-400-1."
            )
        if settings.schedule.epochs is not None:
            raise ConfigurationError(
                "The schedule must not set epochs, because the trainer determines the length of"
                f" training, got Schedule(epochs={settings.schedule.epochs}). Remove epochs=..."
                " from the schedule."
            )
        check_choice("loss", loss, LOSSES)
        words = "in a callback, because the trainer trains the weights"
        groups = (settings.schedule, settings.optimization)
        refuse(groups, [(OF_FIT, words, "Set it in the trainer")])
        refuse(groups, of_one_start(settings.optimization))
        self.settings, self.loss = settings, loss
        self._learner: Learner | None = None
        self._state: Mapping[str, Any] | None = None

    @property
    def learner(self) -> Learner:
        """Return the learner, or raise an error before training has started."""
        if self._learner is None:
            raise ConfigurationError(
                "The evidence does not exist before training has started. Start training first."
            )
        return self._learner

    @property
    def history(self) -> list[Row]:
        """Return one row per round: optimizer steps so far and the columns of ``fit``'s history."""
        return [] if self._learner is None else self._learner.history

    @property
    def evidence(self) -> Evidence:
        """Return the evidence of the network that is being trained."""
        return self.learner.evidence

    @property
    def learns_in_first_epoch(self) -> bool:
        """Return whether a round takes place in the first epoch or has already taken place."""
        return bool(self.history) or planned(self.learner.schedule.burn_in) <= self._epoch

    def begin(
        self, network: nn.Module, data: Any, optimizer: Optimizer, *, steps: int, epoch: int
    ) -> None:
        """Prepare for ``steps`` optimizer steps in total, with ``epoch`` steps per epoch."""
        s = self.settings.schedule
        check_burn_in(s.burn_in, -(-steps // epoch))
        schedule = replace(
            s,
            epochs=steps,
            burn_in=None if s.burn_in is None else min(s.burn_in * epoch, steps),
            every=None if s.every is None else s.every * epoch,
            hyper_every=None if s.hyper_every is None else s.hyper_every * epoch,
        )
        data = RunData(data, place_of(network), self.settings.seed)
        settings = replace(self.settings, schedule=schedule)
        evidence, settings = prepare_evidence(network, data, settings)
        self._outputs = evidence.problem.plan_of(data.first(2)[0]).num_outputs
        if self.loss == "mse" and not (
            isinstance(evidence.likelihood, Gaussian) and evidence.likelihood.log_noise.ndim == 0
        ):
            raise ConfigurationError(
                "loss='mse' needs a Gaussian likelihood with a single noise for all outputs, got"
                " several noises or another likelihood. Use likelihood='gaussian'."
            )
        take_over(optimizer, evidence)
        self._optimizer, self._epoch = optimizer, epoch
        self._learner = Learner(evidence, data, settings.schedule, settings.optimization)
        if self._state is not None:
            self._learner.load_state_dict(self._state["learner"])
            self._state = None

    def before_step(self) -> None:
        """Add the prior's weight decay to the gradients, and clear hyperparameters' gradients.

        The optimizer may hold hyperparameters of the model or the likelihood, but the training loss
        must not change them.
        """
        for parameter in self.evidence.hyperparameters().values():
            parameter.grad = None
        scale, likelihood = 1.0, self.evidence.likelihood
        if self.loss == "mse" and isinstance(likelihood, Gaussian):
            scale = 2 / self._outputs * (2 * likelihood.log_noise.detach()).exp()
        self.evidence.add_weight_decay(self._optimizer, scale=scale)

    def after_step(self) -> Row | None:
        """Count an optimizer step. If a round is due, run it and return its row of the history."""
        if self.learner.step() is None:
            return None
        if distributed.is_available() and distributed.is_initialized():
            # Rounding differs between devices, and replicas would drift apart without this.
            with torch.no_grad():
                for parameter in self.evidence.hyperparameters().values():
                    distributed.broadcast(parameter, 0)
            self.history[-1].update(hyperparameter_values(self.evidence))
        return self.history[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without the network and the optimizer."""
        if self._learner is None:
            return {} if self._state is None else dict(self._state)
        return {"learner": self._learner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state to load when training starts. An empty state has no effect."""
        self._state = state or None


class HostedCallback:
    """A callback of a trainer, with a ``HostedLearner`` for the settings in its arguments.

    ``arguments`` are the arguments of the constructor: ``data``, ``split``, ``loss`` and the
    settings of ``fit``.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._data, self._split = arguments["data"], arguments["split"]
        self._hosted = HostedLearner(Settings.of(arguments), arguments["loss"])

    @property
    def evidence(self) -> Evidence:
        """Return the evidence of the network, or raise an error before training has started."""
        return self._hosted.evidence

    @property
    def history(self) -> list[Row]:
        """Return one row per round: optimizer steps, log evidence per example, and precisions."""
        return self._hosted.history


def take_over(optimizer: Optimizer, evidence: Evidence) -> None:
    """Check that an optimizer holds all weights of the prior, and set their weight decay to 0."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    weights = evidence.weights()
    if missing := [name for name, weight in weights.items() if id(weight) not in held]:
        raise ConfigurationError(
            f"The optimizer must hold all weights of the prior, but it lacks {listed(missing)}."
            " Pass these weights to the optimizer, or freeze them with requires_grad_(False)."
        )
    weight_ids = {id(weight) for weight in weights.values()}
    for group in optimizer.param_groups:
        if "weight_decay" in group and any(id(p) in weight_ids for p in group["params"]):
            group["weight_decay"] = 0.0


def as_pair(batch: Any) -> tuple[Any, Tensor]:
    """Return the inputs and targets of a pair, or of a dictionary with ``labels`` or ``label``."""
    if isinstance(batch, Mapping):
        for key in TARGETS:
            if key in batch:
                return {name: part for name, part in batch.items() if name != key}, batch[key]
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    what = f"keys {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise InputError(
        "A batch of the training data must be a pair (x, y), or a dictionary with the key"
        f" {' or '.join(TARGETS)}, got {what}. Set split=... to a function from a batch to (x, y)."
    )


def loader_of_pairs(
    loader: DataLoader[Any], split: Callable[[Any], tuple[Any, Tensor]]
) -> DataLoader[Any]:
    """Return a loader of the same data set, whose batches are pairs (x, y)."""
    check_sampler(loader)
    return DataLoader(
        loader.dataset,
        collate_fn=lambda items: split(loader.collate_fn(items)),
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
