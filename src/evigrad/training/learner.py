"""Learning of hyperparameters alongside any loop that trains the weights."""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from evigrad.blocks import Block
from evigrad.errors import (
    ConfigurationError,
    EvigradError,
    EvigradWarning,
    NotFiniteError,
    NotFiniteOutputError,
    NotPositiveDefiniteError,
    listed,
    memory_for,
)
from evigrad.evidence import Evidence
from evigrad.network.network import PROBE_SIZE
from evigrad.passes.evaluation import Estimate
from evigrad.passes.kept import KeptPass
from evigrad.passes.parameters import named_in_errors
from evigrad.training.checkpoint import fitting, load_optimizer, shared_settings
from evigrad.training.data import RunData
from evigrad.training.effects import OF_FIT, of_learner, of_one_start, refuse
from evigrad.training.fixed_point import FixedPoint
from evigrad.training.history import Row, round_columns
from evigrad.training.optimizers import cosine, make_hyper_optimizer
from evigrad.training.plan import (
    PRETRAINED_DECAY,
    burn_in_precision,
    plan_optimization,
    plan_schedule,
    planned,
)
from evigrad.training.rounds import Round, RoundBlocks, shared_if_possible
from evigrad.training.runaways import Runaways
from evigrad.training.settings import Optimization, Schedule, check_burn_in

# Damping of the first and of the last fixed-point step: a falling rate averages over blocks.
FIRST_RATE, LAST_RATE = 0.5, 0.05


@dataclass
class StepGroup:
    """Hyperparameters that are updated together, with ``steps`` steps per round.

    ``taken`` is the number of steps so far. A round follows the last epoch of the burn-in and every
    ``every``-th epoch after it. With ``burn_in=10`` and ``every=5``, rounds follow epochs 10, 15,
    20, ...
    """

    names: list[str]
    every: int
    steps: int
    burn_in: int
    epochs: int
    taken: int = 0

    def is_due(self, epoch: int) -> bool:
        """Return whether a round follows ``epoch``. Epochs are numbered from 1."""
        return epoch >= self.burn_in and (epoch - self.burn_in) % self.every == 0

    @property
    def rounds(self) -> int:
        """Return the number of rounds in all epochs."""
        return len(range(self.burn_in or self.every, self.epochs + 1, self.every))

    @property
    def progress(self) -> float:
        """Return the fraction of all steps that have been taken, from 0 to 1."""
        return min(1.0, self.taken / (self.rounds * self.steps))


def step_groups(schedule: Schedule, names: Collection[str]) -> list[StepGroup]:
    """Return one group of all hyperparameters, or two: prior and noise, and the model's own."""
    s, every = schedule, planned(schedule.every)
    parts = [([*names], every, s.steps)]
    if s.hyper_every is not None or s.hyper_steps is not None:
        model_names = [name for name in names if name.startswith("model.")]
        other_names = [name for name in names if name not in model_names]
        model_part = (model_names, s.hyper_every or every, s.hyper_steps or s.steps)
        parts = [(other_names, every, s.steps), model_part]
    burn_in, epochs = planned(s.burn_in), planned(s.epochs)
    return [StepGroup(*part, burn_in, epochs) for part in parts if part[0]]


class Learner:
    """Learn the hyperparameters in rounds, while your own loop trains the weights.

    Between epochs, a learner does what ``fit`` does with a single ``start_decay``. By default,
    precisions start from a weight decay of 0.01 and follow MacKay's update after a burn-in. The
    learning rates of the hyperparameters fall until the last round.

    Use ``evidence.map_loss`` as the loss of your loop. If your loop has its own loss (the mean
    negative log likelihood), call ``evidence.add_weight_decay()`` after ``backward`` instead. In
    both cases, set the optimizer's ``weight_decay`` to 0, because the prior is the weight decay.
    Pass ``evidence.weights().values()`` to the optimizer, so that it does not train
    hyperparameters.

    Args:
        evidence: Evidence whose model your loop trains, and whose hyperparameters are learned. To
            make a run reproducible, give it a seeded ``generator``.
        data: All training data. See ``Evidence.blocks``.
        schedule: Epochs, burn-in and rounds. ``epochs`` is required: the number of times you will
            call ``step``. If your loop has few epochs, call ``step`` after each optimizer step.
            Settings of batches, evaluations and checkpoints raise an error.
        optimization: Update rules and learning rates of the hyperparameters. Settings of the
            weights raise an error.
        seed: Seed of random draws in the items of a data set, such as random transforms.

    Attributes:
        count: Number of calls of ``step`` so far.
        history: One row per round: ``step``, the number of calls so far, and the columns of
            ``fit``'s history for the log evidence and the hyperparameters.

    Raises:
        ConfigurationError: If settings are invalid or have no effect, there is nothing to learn, or
            the ranks differ in settings or data.
        InputError: If the data do not match the evidence.

    Examples:
        >>> import torch
        >>> from evigrad import Evidence, Learner, Schedule
        >>> from evigrad.likelihoods import Categorical
        >>> from evigrad.priors import GaussianPrior
        >>> x = torch.randn(100, 3)
        >>> train = x, (x[:, 0] > 0).long()
        >>> model = torch.nn.Linear(3, 2)
        >>> evidence = Evidence(
        ...     model, Categorical(), GaussianPrior(), estimator="ntk-50-C", num_data=100
        ... )
        >>> learner = Learner(evidence, train, Schedule(epochs=5))
        >>> optimizer = torch.optim.Adam(evidence.weights().values(), lr=3e-3)
        >>> for epoch in range(5):
        ...     loss = evidence.map_loss(*train)
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     _ = learner.step()
        >>> len(learner.history)
        5

    See also: docs/trainers.md.
    """

    def __init__(
        self,
        evidence: Evidence,
        data: Any,
        schedule: Schedule,
        optimization: Optimization | None = None,
        seed: int = 0,
    ) -> None:
        with evidence.ranks.together() as alike:
            hyperparameters = evidence.hyperparameters()
            if not hyperparameters:
                raise ConfigurationError(
                    "There is nothing to learn: the prior and the likelihood are fixed, and the"
                    " argument hyperparameters names no parameter of the model. Make the prior"
                    " learnable, or train by plain MAP (fit with estimator=None)."
                )
            if schedule.epochs is None:
                raise ConfigurationError(
                    "Schedule.epochs is required, got None. Set it to the number of times you will"
                    " call step()."
                )
            check_burn_in(schedule.burn_in, schedule.epochs)
            device = next(iter(evidence.weights().values())).device
            self.evidence = evidence
            in_custom_loop = not isinstance(data, RunData)  # fit and callbacks check their settings
            self.data = RunData(data, device, seed) if in_custom_loop else data
            optimization = optimization or Optimization()
            chosen = (schedule, optimization)
            if in_custom_loop:
                words = "in a Learner, because your own loop trains the weights"
                refuse(chosen, [(OF_FIT, words, "Set it in your loop")])
                refuse(chosen, of_one_start(optimization))
            alike.update(shared_settings({**vars(schedule), **vars(optimization), "seed": seed}))
            if evidence.ranks.count > 1 and in_custom_loop:
                alike["data"] = self.data.fingerprint()
            self.schedule = plan_schedule(schedule, evidence.num_data)
            optimization = plan_optimization(
                optimization, evidence.likelihood, evidence.prior, evidence.num_data
            )
            if in_custom_loop:
                refuse(chosen, of_learner(self.schedule, optimization, evidence))
            self.hyper_optimizer = make_hyper_optimizer(hyperparameters, optimization)
            self.step_groups = step_groups(self.schedule, hyperparameters)
            self.fixed_point: FixedPoint | None = None
            if optimization.prior_update == "fixed_point":
                self.fixed_point = FixedPoint(evidence, FIRST_RATE)
                self.start(optimization.start_decays[0])
            # Raises now what would stop the first round, epochs later.
            stream, x = evidence.blocks(self.data), self.data.first(PROBE_SIZE)[0]
            prior_blocks = [self.schedule.prior_blocks, None]  # the second group is the model's own
            self._blocks = [
                shared_if_possible(
                    RoundBlocks(evidence, stream, x, group.names, group.steps, count)
                )
                for group, count in zip(self.step_groups, prior_blocks, strict=False)
            ]
        self._warned = False  # of precisions that no output depends on
        self._runaways = Runaways(evidence)
        self._idle = 0  # number of rounds without a step since the last step
        # Until the first round, nothing may change these.
        self._unlearned = {
            name: parameter.detach().clone()
            for name, parameter in hyperparameters.items()
            if not name.startswith("prior.")
        }
        self.count = 0
        self.history: list[Row] = []

    @property
    def learned(self) -> list[str]:
        """Return the names of the hyperparameters that change during training."""
        return [name for group in self.step_groups for name in group.names]

    @property
    def _learned_of_model(self) -> list[str]:
        """Return the names of the model's own hyperparameters that change."""
        return [name for name in self.learned if name.startswith("model.")]

    @property
    def hyper_steps(self) -> int:
        """Return the number of hyperparameter steps so far, summed over all groups."""
        return sum(group.taken for group in self.step_groups)

    def step(self) -> Round | None:
        """Count an epoch, and run a round of hyperparameter steps if a round is due.

        The weights and their gradients do not change.

        Returns:
            The round, or None if no round is due.

        Raises:
            ConfigurationError: If a hyperparameter of the model or the likelihood has changed
                before the first round, for example because the optimizer of the weights holds it.
            EvigradError: If an estimate fails and its step cannot be skipped (see ``learn``).
        """
        self._check_unlearned()
        self.count += 1
        self.data.epoch = self.count
        if self.count == self.schedule.epochs + 1:  # pyright: ignore[reportOptionalOperand]
            warnings.warn(
                f"step() was called more than Schedule.epochs={self.schedule.epochs} times, after"
                " which the learning rates of the hyperparameters no longer change. Set epochs to"
                " the number of calls.",
                EvigradWarning,
                stacklevel=2,
            )
        if not self.is_due(self.count):
            return None
        learned = self.learn(self.count)
        self._unlearned.clear()
        columns = round_columns(self.evidence, learned, self.hyper_steps)
        self.history.append({"step": self.count, **columns})
        return learned

    def _check_unlearned(self) -> None:
        """Raise an error if a hyperparameter that no round has learned yet has changed."""
        # Later, checkpoints of the model and copies from other processes may change them.
        named = self.evidence.hyperparameters() if self._unlearned else {}
        for name, start in self._unlearned.items():
            value = named[name].detach()
            start = start.to(value)
            if not torch.equal(value, start):
                entry = int((value - start).abs().argmax())
                before, after = (tensor.flatten()[entry].item() for tensor in (start, value))
                raise ConfigurationError(
                    f"{name} changed from {before:.4g} to {after:.4g} before the first round. Only"
                    " rounds may change hyperparameters, but your optimizer seems to train it on"
                    " the training loss. Pass evidence.weights().values() to your optimizer. If you"
                    " changed it yourself, do so before you create the Learner."
                )

    def start(self, decay: float) -> None:
        """Set the precisions of the burn-in from a weight decay.

        Without a burn-in or without fixed-point updates, do nothing.
        """
        if self.fixed_point is not None and self.schedule.burn_in:
            num_data = self.evidence.num_data
            zero = burn_in_precision(decay, num_data)
            self.fixed_point.start(zero, PRETRAINED_DECAY * num_data)

    def is_due(self, epoch: int) -> bool:
        """Return whether a round follows ``epoch``. Epochs are numbered from 1."""
        return any(group.is_due(epoch) for group in self.step_groups)

    def learn(self, epoch: int) -> Round:
        """Take the hyperparameter steps that follow an epoch.

        ``step`` calls this method when a round is due. If an estimate is not finite, or its matrix
        has no Cholesky factor, the remaining steps of the round are skipped with a warning. With
        several ranks, such an estimate raises an error instead.

        Args:
            epoch: Number of the epoch. Epochs are numbered from 1.

        Returns:
            The estimates, one per step.

        Raises:
            EvigradError: If an estimate fails in another way, or if two consecutive rounds take no
                step.
        """
        hyper_round = Round([], False)
        with self.evidence.ranks.together():
            self.data.epoch = epoch
            try:
                if self.evidence.prior.shape == "g-prior":
                    self.evidence.shape_prior(self.data)
                for group, blocks in zip(self.step_groups, self._blocks, strict=True):
                    if group.is_due(epoch):
                        hyper_round = self._round(group, blocks, hyper_round)
            except EvigradError as error:
                raise type(error)(
                    f"Hyperparameter step after epoch {epoch} failed: {error}"
                ) from error
            finally:
                self._clear_gradients()
            if names := self._learned_of_model:
                self._runaways.check(epoch, names, hyper_round.estimates)
        return hyper_round

    def _round(self, group: StepGroup, blocks: RoundBlocks, before: Round) -> Round:
        """Take the steps of a group, and return their estimates after those of ``before``."""
        estimates, is_shared, failed = list[Estimate](), False, 0
        try:
            # Streams choose anchors as they are iterated, outside of the evidence's own calls.
            with named_in_errors(self.evidence.hyperparameters):
                block_of_steps, is_shared = blocks.take()
                name = self.evidence.estimator.name
                cheaper = "fewer rows in a block, set by the estimator's name"
                with memory_for(f"an estimate by {name}", cheaper):
                    for block in block_of_steps:
                        estimates.append(self._step(group, block))
        except (NotFiniteError, NotPositiveDefiniteError) as error:
            # Outputs that are not finite may be the fault of the data, which no step mends.
            if isinstance(error, NotFiniteOutputError) and not self._learned_of_model:
                raise
            self._idle = 0 if estimates else self._idle + 1
            # Other ranks have another error, and do not know that this one would go on.
            if self._idle > 1 or self.evidence.ranks.count > 1:
                raise
            failed = group.steps - len(estimates)
            warnings.warn(
                f"An estimate failed: {error} The round skipped {failed} of {group.steps}"
                " hyperparameter steps.",
                EvigradWarning,
                stacklevel=3,
            )
        else:
            self._idle = 0
        if "prior.log_precision" in group.names and not self._warned:
            self._warned = True
            warn_of_unused(self.evidence)
        return Round(
            before.estimates + estimates, before.is_shared or is_shared, before.skipped + failed
        )

    def _step(self, group: StepGroup, block: Block | list[KeptPass]) -> Estimate:
        for rates in self.hyper_optimizer.param_groups:
            rates["lr"] = cosine(group.progress, rates["lr_first"], rates["lr_last"])
        if self.fixed_point is not None:
            self.fixed_point.rate = cosine(group.progress, FIRST_RATE, LAST_RATE)
        self._clear_gradients()
        if isinstance(block, Block):
            estimate = self.evidence.backward(block, wrt=group.names)
        else:
            estimate = self.evidence.backward_kept(*block, wrt=group.names)
        self.hyper_optimizer.step()
        if self.fixed_point is not None and any(n.startswith("prior.") for n in group.names):
            self.fixed_point.step()
        group.taken += 1
        return estimate

    def _clear_gradients(self) -> None:
        for parameter in self.evidence.hyperparameters().values():
            parameter.grad = None

    @property
    def _plan(self) -> dict[str, Any]:
        """Return the settings on which the rounds depend."""
        return {name: getattr(self.schedule, name) for name in ("epochs", "burn_in", "every")}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the evidence and of the rounds, without the state of the model.

        To resume with identical results, also save the states of the model, of its optimizer and
        learning rate scheduler, and of random generators (``torch.get_rng_state()``), and use the
        same data.
        """
        return {
            "evidence": self.evidence.state_dict(),
            "hyper_optimizer": self.hyper_optimizer.state_dict(),
            "hyper_steps": [group.taken for group in self.step_groups],
            "count": self.count,
            "schedule": self._plan,
            "idle": self._idle,
            "rounds": [dict(row) for row in self.history],
            "starts": dict(self._runaways.starts),
            "best": self._runaways.best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of a learner with the same settings and data.

        Args:
            state: State from ``state_dict``.

        Raises:
            ConfigurationError: If the state does not match the evidence or the schedule.
        """
        saved = state.get("schedule", self._plan)
        if saved != self._plan:
            raise ConfigurationError(
                f"The saved state has the schedule {saved}, but this learner has {self._plan}. Use"
                " the saved schedule."
            )
        with fitting("The saved state"):
            self.evidence.load_state_dict(state["evidence"])
            load_optimizer(self.hyper_optimizer, state["hyper_optimizer"])
            for group, taken in zip(self.step_groups, state["hyper_steps"], strict=True):
                group.taken = int(taken)
            self.count = self.data.epoch = int(state["count"])
            self._idle = int(state.get("idle", 0))
            self.history = [dict(row) for row in state.get("rounds", [])]
            self._runaways.starts |= state.get("starts", {})
            self._runaways.best = float(state.get("best", self._runaways.best))
            self._unlearned.clear()  # the model's state may be loaded before or after this one


def warn_of_unused(evidence: Evidence) -> None:
    """Warn about learned precisions of weights that no output depends on.

    The log evidence depends on the precision δ of such weights w only through −½ δ ‖w − μ‖², where
    μ is the prior's mean. Until training has moved w to μ, every step lowers δ, and no prediction
    changes.
    """
    prior, reports = evidence.prior, evidence.describe()
    used = {report.group for report in reports if report.rows != "unused"}
    fixed = set(prior.group_names) - set(prior.learned_groups())
    names = [report.name for report in reports if report.group not in used | fixed]
    if names:
        warnings.warn(
            f"No output depends on {listed(names)}, so nothing determines their prior precisions,"
            " which will fall until training ends. Freeze these parameters (requires_grad_(False)),"
            " or remove them from the model.",
            EvigradWarning,
            stacklevel=2,
        )
