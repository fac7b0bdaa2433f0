"""The hyperparameters' part of training, beside any loop that trains the weights."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from statistics import mean
from typing import Any

from torch import Tensor

from evigrad.blocks import Block
from evigrad.blocks.anchors import AnchoredStream, DrawnParts
from evigrad.blocks.partitions import Stream
from evigrad.engine.evaluation import Estimate, standard_error
from evigrad.engine.kept import KeptPass
from evigrad.engine.memory import fits
from evigrad.engine.parameters import named_in_errors
from evigrad.engine.problem import PROBE_SIZE
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
from evigrad.inputs import Inputs
from evigrad.invariances.noise import stochastic_modules
from evigrad.invariances.transform import bounded_values, ranged_modules
from evigrad.measure.metrics import hyperparameter_values
from evigrad.training.checkpoint import fitting, load_optimizer, shared_settings
from evigrad.training.data import RunData
from evigrad.training.fixed_point import FixedPoint
from evigrad.training.history import Row
from evigrad.training.optimizers import cosine, make_hyper_optimizer
from evigrad.training.settings import (
    PRETRAINED_DECAY,
    Optimization,
    PlannedSchedule,
    Schedule,
    burn_in_precision,
    check_burn_in,
)

# Damping of the first and of the last fixed-point step: a falling rate averages over blocks.
FIRST_RATE, LAST_RATE = 0.5, 0.05
# A hyperparameter of the model has run away if it grows by this factor. What starts nearer to zero
# than the least start counts as if it started there.
RUNAWAY_FACTOR, LEAST_START = 30.0, 0.1
# So has some hyperparameter if rounds lose so many nats of log likelihood per example.
LOST_NATS = 0.5


@dataclass(frozen=True)
class Round:
    """The estimates of the hyperparameter steps that follow an epoch.

    Attributes:
        estimates: One for each step, made before it.
        is_shared: Whether steps used the same data, so that the spread of the estimates says
            nothing about their error.
        skipped: Steps that were not taken, as an estimate before them failed.
    """

    estimates: list[Estimate]
    is_shared: bool
    skipped: int = 0

    def __repr__(self) -> str:
        """The mean log evidence and the numbers of steps in one line."""
        values = [estimate.per_datum for estimate in self.estimates]
        parts = [f"log evidence {mean(values):.4g} nats per datum"] if values else []
        parts += [f"{len(values)} steps", f"{self.skipped} skipped"]
        return f"Round({', '.join(parts)})"


def is_round(epoch: int, burn_in: int, every: int) -> bool:
    """Return whether hyperparameter steps follow an epoch, counted from 1.

    They follow the last epoch of the burn-in and every ``every``-th epoch from there, as in the
    paper's schedule: with a burn-in of 10 and every 5 epochs, epochs 10, 15, 20, ...
    """
    return epoch >= burn_in and (epoch - burn_in) % every == 0


def count_rounds(epochs: int, burn_in: int, every: int) -> int:
    """The number of epochs for which ``is_round`` is true."""
    return sum(is_round(epoch, burn_in, every) for epoch in range(1, epochs + 1))


@dataclass
class Rounds:
    """The rounds of some hyperparameters, which take ``steps`` steps together, ``taken`` so far."""

    names: list[str]
    every: int
    steps: int
    burn_in: int
    epochs: int
    taken: int = 0

    def is_due(self, epoch: int) -> bool:
        """Whether a round follows an epoch."""
        return is_round(epoch, self.burn_in, self.every)

    @property
    def progress(self) -> float:
        """The share of all steps that are taken, from 0 to 1, where it stays after the last one."""
        planned = count_rounds(self.epochs, self.burn_in, self.every) * self.steps
        return min(1.0, self.taken / planned)


class Learner:
    """Learns the hyperparameters in rounds, while a loop of any kind trains the weights.

    It does between epochs what ``fit`` does, with the same numbers: precisions start from a weight
    decay of 0.01 and move by MacKay's update, after a burn-in, in rounds whose rates fall to the
    last one. The loop is yours::

        learner = Learner(evidence, train, Schedule(epochs=30))
        for epoch in range(30):
            for x, y in loader:
                loss = evidence.map_loss(x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            learner.step()

    A loop with a loss of its own, the mean negative log likelihood, has the prior's decay by
    ``evidence.add_weight_decay()`` after ``backward`` in place of ``map_loss``. The optimiser has
    no ``weight_decay`` in either case: the prior is the decay.

    Args:
        evidence: Its model is trained, its hyperparameters are learned. Made with a ``generator``
            of known seed it gives the same numbers in every run.
        data: All training data, as for ``Evidence.blocks``.
        schedule: Epochs, burn-in and rounds; ``epochs`` is needed, and an epoch is a call of
            ``step``. So a loop with few epochs calls it after each step of its optimiser, and
            gives the number of these as ``epochs``. What it says of batches, evaluations and
            checkpoints is not used.
        optimization: How hyperparameters are updated, and their rates; what it says of the weights
            is not used.
        seed: Seed of what the items of a data set draw, as random transforms.

    Attributes:
        count: Calls of ``step`` so far.
        history: One row for each round of ``step``: ``step``, the calls so far, and the columns of
            ``fit``'s history on log evidence and hyperparameters.

    Raises:
        ConfigurationError: If a setting does not fit, there is nothing to learn, or the ranks have
            other settings or data.
        InputError: If the data do not fit the evidence.
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
                    "There is nothing for the estimator to learn: prior and likelihood are fixed"
                    " and no parameter of the model is named in hyperparameters. Make the prior"
                    " learnable, or train by MAP alone, which is estimator=None of fit."
                )
            if schedule.epochs is None:
                raise ConfigurationError(
                    "The schedule needs epochs=..., how often step() will be called: rounds and"
                    " their rates are spread over them."
                )
            check_burn_in(schedule.burn_in, schedule.epochs)
            device = next(iter(evidence.weights().values())).device
            self.evidence = evidence
            self.data = data if isinstance(data, RunData) else RunData(data, device, seed)
            optimization = optimization or Optimization()
            alike.update(shared_settings({**vars(schedule), **vars(optimization), "seed": seed}))
            if evidence.ranks.count > 1 and not isinstance(data, RunData):  # which fit has compared
                alike["data"] = self.data.fingerprint()
            self.schedule = schedule.for_data(evidence.num_data)
            optimization = optimization.for_data(
                evidence.likelihood.is_classification, evidence.prior
            )
            self.hyper_optimizer = make_hyper_optimizer(hyperparameters, optimization)
            self.rounds = make_rounds(self.schedule, hyperparameters)
            self.fixed_point: FixedPoint | None = None
            if optimization.prior_update == "fixed_point":
                self.fixed_point = FixedPoint(evidence, FIRST_RATE)
                if self.schedule.burn_in:
                    num_data = evidence.num_data
                    zero = burn_in_precision(num_data)
                    self.fixed_point.start(zero, PRETRAINED_DECAY * num_data)
            if self.schedule.prior_blocks is not None:
                x, _ = self.data.first(PROBE_SIZE)
                evidence.check_collect(x, wrt=self.rounds[0].names)
            evidence.blocks(self.data)  # raises now what the first round would, epochs later
        self._blocks: Stream | None = None  # of the data, which are checked once
        self._warned = False  # of precisions that nothing determines
        self._starts = {n: p.detach().clone() for n, p in free_hyperparameters(evidence).items()}
        self._best = -math.inf  # mean log likelihood per example, over rounds
        self._has_fallen = False  # below it, in the last round
        self._warned_of: set[str] = set()  # hyperparameters, and the log likelihood
        self._idle = 0  # rounds without a step since the last one that had one
        self.count = 0
        self.history: list[Row] = []

    @property
    def learned(self) -> list[str]:
        """Names of the hyperparameters that change during training."""
        return [name for rounds in self.rounds for name in rounds.names]

    @property
    def hyper_steps(self) -> int:
        """Steps on hyperparameters so far, of all schedules together."""
        return sum(rounds.taken for rounds in self.rounds)

    def step(self) -> Round | None:
        """Count an epoch of the weights, and learn if a round is due after it.

        The weights and their gradients stay as they are.

        Returns:
            The round; None where none is due.

        Raises:
            EvigradError: If an estimate fails.
        """
        self.count += 1
        self.data.epoch = self.count
        if not self.is_due(self.count):
            return None
        learned = self.learn(self.count)
        self.history.append({"step": self.count, **round_columns(self, learned)})
        return learned

    def is_due(self, epoch: int) -> bool:
        """Whether a round follows an epoch, counted from 1."""
        return any(rounds.is_due(epoch) for rounds in self.rounds)

    def learn(self, epoch: int) -> Round:
        """Take the hyperparameter steps that follow an epoch, on a fresh partition of the data.

        ``step`` calls it when it is due. An estimate that is not finite, or whose matrix has no
        Cholesky factor, ends its round: the steps that are left are skipped, with a warning.

        Args:
            epoch: Counted from 1.

        Returns:
            The estimates, one for each step.

        Raises:
            EvigradError: If an estimate fails in another way, or no step of two rounds on end could
                be taken.
        """
        hyper_round = Round([], False)
        with self.evidence.ranks.together():
            self.data.epoch = epoch
            try:
                for rounds in self.rounds:
                    if rounds.is_due(epoch):
                        hyper_round = self._round(rounds, hyper_round)
            except EvigradError as error:
                raise type(error)(f"Hyperparameter step after epoch {epoch}: {error}") from error
            finally:
                self._clear_gradients()
            self._warn_of_runaways(epoch, hyper_round)
        return hyper_round

    def _round(self, rounds: Rounds, before: Round) -> Round:
        """Take the steps of one kind; returns them with those ``before`` them."""
        if self._blocks is None:
            self._blocks = self.evidence.blocks(self.data)
        estimates, is_shared, failed = list[Estimate](), False, 0
        try:
            # Streams choose anchors as they are iterated, outside of the evidence's own calls.
            with named_in_errors(self.evidence.hyperparameters()):
                blocks, is_shared = blocks_of_a_round(
                    self.evidence,
                    self._blocks,
                    self.data.first(PROBE_SIZE)[0],
                    rounds.names,
                    rounds.steps,
                    self.schedule.prior_blocks if rounds is self.rounds[0] else None,
                )
                name = self.evidence.spec.name
                cheaper = "fewer rows in a block, as its name says"
                with memory_for(f"an estimate by {name}", cheaper):
                    for block in blocks:
                        estimates.append(self._step(rounds, block))
        except (NotFiniteError, NotPositiveDefiniteError) as error:
            # Outputs that are not finite may be the fault of the data, which no step mends.
            if isinstance(error, NotFiniteOutputError) and not self._learns_model:
                raise
            self._idle = 0 if estimates else self._idle + 1
            # Other ranks have another error, and do not know that this one would go on.
            if self._idle > 1 or self.evidence.ranks.count > 1:
                raise
            failed = rounds.steps - len(estimates)
            warnings.warn(
                f"{failed} of {rounds.steps} hyperparameter steps of a round were skipped, as an"
                f" estimate failed: {error}",
                EvigradWarning,
                stacklevel=3,
            )
        else:
            self._idle = 0
        if "prior.log_precision" in rounds.names and not self._warned:
            self._warned = True
            warn_of_unused(self.evidence)
        return Round(
            before.estimates + estimates, before.is_shared or is_shared, before.skipped + failed
        )

    @property
    def _learns_model(self) -> bool:
        """Whether hyperparameters of the model are learned."""
        return any(name.startswith("model.") for name in self.learned)

    def _warn_of_runaways(self, epoch: int, hyper_round: Round) -> None:
        """Warn once of each hyperparameter of the model that grew far beyond its start.

        Large inputs make a network certain of its outputs. These have no curvature then, and the
        evidence of the approximation is high although the network learns nothing by it.
        """
        if not self._learns_model:
            return
        for name, value in free_hyperparameters(self.evidence).items():
            start, value = self._starts[name], value.detach()
            if name not in self._warned_of and (growth := _growth(name, start, value)):
                self._warned_of.add(name)
                self._warn(f"After epoch {epoch} {name} is {growth}.")
        if not hyper_round.estimates:
            return
        likelihood = mean(e.log_likelihood / e.num_data for e in hyper_round.estimates)
        has_fallen = likelihood < self._best - LOST_NATS
        if has_fallen and self._has_fallen and "likelihood" not in self._warned_of:
            self._warned_of.add("likelihood")
            learned = ", ".join(name for name in self.learned if name.startswith("model."))
            self._warn(
                f"The training log likelihood fell to {likelihood:.3g} nats per example in the"
                f" round after epoch {epoch}, from {self._best:.3g} in an earlier one, while"
                f" {learned} changed."
            )
        self._has_fallen = has_fallen  # one round may be a bad draw
        self._best = max(self._best, likelihood)

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"{what} Estimates can reward a transform that runs away: huge inputs make certain"
            " outputs, which have no curvature. Give the transform bounds (Transform.bounds), lower"
            " hyper_lr, or take a kfac estimator such as kfac-100-1. Compare test data.",
            EvigradWarning,
            stacklevel=5,
        )

    def _step(self, rounds: Rounds, block: Block | list[KeptPass]) -> Estimate:
        self._set_rates(rounds.progress)
        self._clear_gradients()
        estimate = self.evidence.backward(block, wrt=rounds.names)
        self.hyper_optimizer.step()
        if self.fixed_point is not None and any(n.startswith("prior.") for n in rounds.names):
            self.fixed_point.step()
        rounds.taken += 1
        return estimate

    def _set_rates(self, progress: float) -> None:
        for group in self.hyper_optimizer.param_groups:
            group["lr"] = cosine(progress, group["lr_first"], group["lr_last"])
        if self.fixed_point is not None:
            self.fixed_point.rate = cosine(progress, FIRST_RATE, LAST_RATE)

    def _clear_gradients(self) -> None:
        for parameter in self.evidence.hyperparameters().values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the evidence and of its rounds; the model keeps its own.

        With the weights, the optimiser's state and the same data it is all that is needed to go on
        with the same numbers.
        """
        return {
            "evidence": self.evidence.state_dict(),
            "hyper_optimizer": self.hyper_optimizer.state_dict(),
            "hyper_steps": [rounds.taken for rounds in self.rounds],
            "count": self.count,
            "idle": self._idle,
            "rounds": [dict(row) for row in self.history],
            "starts": dict(self._starts),
            "best": self._best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of a learner with the same settings and data.

        Args:
            state: What ``state_dict`` returned.

        Raises:
            ConfigurationError: If it does not fit the evidence or the schedule.
        """
        with fitting("The saved state"):
            self.evidence.load_state_dict(state["evidence"])
            load_optimizer(self.hyper_optimizer, state["hyper_optimizer"])
            for rounds, taken in zip(self.rounds, state["hyper_steps"], strict=True):
                rounds.taken = int(taken)
            self.count = self.data.epoch = int(state["count"])
            self._idle = int(state.get("idle", 0))
            self.history = [dict(row) for row in state.get("rounds", [])]
            self._starts |= state.get("starts", {})
            self._best = float(state.get("best", self._best))


def free_hyperparameters(evidence: Evidence) -> dict[str, Tensor]:
    """The learned hyperparameters of the model by name, without ranges and those with bounds."""
    held = set(bounded_values(evidence.model))
    for module in ranged_modules(evidence.model).values():
        held |= {id(parameter) for parameter in module.parameters()}
    return {
        name: parameter
        for name, parameter in evidence.hyperparameters().items()
        if name.startswith("model.") and id(parameter) not in held
    }


def _growth(name: str, start: Tensor, value: Tensor) -> str:
    """In words, by how much an entry has run away; an empty string if none has."""
    # Shrinking is no fault: a range that does not help goes to zero, as the scale of a feature.
    start, value = start.double().flatten(), value.double().flatten()
    if name.rpartition(".")[2].startswith("log_"):  # where a factor is a difference
        growth = value - start
        entry = int(growth.argmax())
        factor = math.exp(min(float(growth[entry]), 700.0))
    else:
        growth = value.abs() / start.abs().clamp(min=LEAST_START)
        entry = int(growth.argmax())
        factor = float(growth[entry])
    if not factor > RUNAWAY_FACTOR:
        return ""
    where = "" if len(value) == 1 else f" in entry {entry}"
    return (
        f"{float(value[entry]):.3g}{where} and began at {float(start[entry]):.3g}, which is growth"
        f" by a factor of more than {RUNAWAY_FACTOR:.0f}"
    )


def make_rounds(s: PlannedSchedule, names: Iterable[str]) -> list[Rounds]:
    """The rounds: prior and noise, then the model's own, or one for all."""
    all_names = list(names)
    model_names = [name for name in all_names if name.startswith("model.")]
    other_names = [name for name in all_names if name not in model_names]
    parts = [(all_names, s.every, s.steps)]
    if s.hyper_every is not None or s.hyper_steps is not None:
        parts = [
            (other_names, s.every, s.steps),
            (model_names, s.hyper_every or s.every, s.hyper_steps or s.steps),
        ]
    return [Rounds(part, every, steps, s.burn_in, s.epochs) for part, every, steps in parts if part]


def blocks_of_a_round(
    evidence: Evidence,
    blocks: Stream,
    x: Inputs,
    names: list[str],
    steps: int,
    prior_blocks: int | None,
) -> tuple[Iterable[Block | list[KeptPass]], bool]:
    """Return a block or kept passes for each step of a round, and whether all have the same one.

    Several steps on prior and noise alone share passes: the only pass there is, where one block
    holds all data, and the pass over the anchors, where these are chosen for a round.
    ``prior_blocks`` is the number of blocks whose passes all steps share; None is a block for each
    step.
    """
    anchored = isinstance(blocks, AnchoredStream)
    keepable = (anchored or blocks.is_constant) and is_keepable(evidence, x, names)
    if anchored and keepable and evidence.shares_anchors(x, 2):
        drawn = blocks.drawn(prior_blocks or steps, whole=prior_blocks is not None)
        passes = passes_over(evidence, drawn, x, names)
        if prior_blocks is None and drawn.draws:
            return ([draw] for kept_pass in passes for draw in kept_pass.draws()), False
    elif prior_blocks is None and (steps == 1 or not (blocks.is_constant and keepable)):
        return blocks.take(steps), False
    else:
        passes = (evidence.collect(b, wrt=names) for b in blocks.round(prior_blocks or 1))
    kept = list(passes)
    if len(kept) > 1:  # their draws may be of different number
        kept = [draw for kept_pass in kept for draw in kept_pass.draws()]
    return repeat(kept, steps), True


def passes_over(
    evidence: Evidence, drawn: DrawnParts, x: Inputs, names: list[str]
) -> Iterator[KeptPass]:
    """Yield kept passes over draws, in their order, each over as many draws as fit into memory.

    Each is computed when it is asked for. The memory changes neither these draws nor later ones.
    """

    def collect(block: Block) -> KeptPass:
        # Each pass draws a seed for the model, which draws nothing here. The state is restored, so
        # that the number of passes changes no later draw.
        state = evidence.generator.get_state()
        kept = evidence.collect(block, wrt=names)
        evidence.generator.set_state(state)
        return kept

    # Where all rows are anchors, these alone; of few parts a rank may have none.
    number, start = len(drawn.draws) if drawn.partition.num_parts else 1, 0
    at_once = draws_at_once(evidence, x, number)
    while start < number:
        block, passes = drawn.block(start, at_once), list[KeptPass]()
        if at_once == 1:
            passes.append(collect(block))
        elif not fits(lambda draws=block, kept=passes: kept.append(collect(draws))):
            at_once = -(-at_once // 2)
            continue
        start += at_once
        yield passes.pop()


def draws_at_once(evidence: Evidence, x: Inputs, count: int) -> int:
    """How many of ``count`` draws of an anchored estimator share a pass; 1 if none do."""
    while count > 1 and not evidence.shares_anchors(x[:PROBE_SIZE], count):
        count = -(-count // 2)
    return count


def is_keepable(evidence: Evidence, x: Inputs, names: list[str]) -> bool:
    """Whether steps can share passes: a model without draws; only prior and noise are learned."""
    # A random model, as an average over transforms, draws again in each pass.
    if stochastic_modules(evidence.model):
        return False
    return evidence.can_collect(x[:PROBE_SIZE], wrt=names)


def warn_of_unused(evidence: Evidence) -> None:
    """Warn of precisions that are learned although no output depends on their weights.

    The rows of P such weights with precision δ are zero. Then (P/2) log δ of the prior cancels with
    −½ log|P0 + H|, and the log evidence depends on δ by −½ δ ‖w − μ‖² alone: as long as training
    has not taken w to its mean μ, every step lowers δ, and no prediction changes with it.
    """
    prior, reports = evidence.prior, evidence.describe()
    used = {report.group for report in reports if report.rows != "unused"}
    fixed = set(prior.group_names) - {prior.group_names[i] for i in prior.learned_groups()}
    names = [report.name for report in reports if report.group not in used | fixed]
    if names:
        warnings.warn(
            f"No output depends on {listed(names)}: nothing determines their prior precisions,"
            " which will fall until training ends. Freeze these parameters (requires_grad_(False)),"
            " or take them out of the model.",
            EvigradWarning,
            stacklevel=2,
        )


def evidence_columns(learned: Round | None) -> Row:
    """Means of the log evidence and its log-determinant, the former's error, and skipped steps."""
    skipped: Row = {"skipped_steps": 0 if learned is None else learned.skipped}
    if learned is None or not learned.estimates:
        return dict.fromkeys(("log_evidence", "log_det_term", "log_evidence_sem")) | skipped
    estimates = learned.estimates
    values = [e.per_datum for e in estimates]
    many = len(values) > 1 and not learned.is_shared
    return {
        "log_evidence": mean(values),
        "log_det_term": mean(-0.5 * e.log_det / e.num_data for e in estimates),
        "log_evidence_sem": standard_error(values) if many else None,
        **skipped,
    }


def round_columns(learner: Learner, hyper_round: Round | None) -> Row:
    """Return the columns of a history after a round, besides the number that counts it."""
    return {
        **evidence_columns(hyper_round),
        "hyper_steps": learner.hyper_steps,
        **hyperparameter_values(learner.evidence),
    }
