"""Estimator ``auto`` on the network at hand: the candidates, their times and their draws."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from evigrad.blocks import Block
from evigrad.curvature import available_bytes
from evigrad.errors import EvigradError
from evigrad.estimators import EstimatorSpec
from evigrad.evidence import Evidence
from evigrad.micro_batches import FREE_SHARE
from evigrad.out_of_memory import is_out_of_memory
from evigrad.preparation import PROBE_SIZE
from evigrad.sources import as_source
from evigrad.training.budget import choose
from evigrad.training.candidates import Candidate, Draws, Family, even
from evigrad.training.choice import Choice
from evigrad.training.estimator_options import as_bytes, estimator_options
from evigrad.training.randomness import Use, stream
from evigrad.training.rounds import blocks_of_a_round, is_keepable
from evigrad.training.schedules import Schedule, count_rounds
from evigrad.training.settings import Settings

# What anchored estimators are tried with, beside the share that is asked for.
SHARES = (0.5, 0.75, 0.9)
# Rows of the first measurement of a family.
_FIRST = 25
# Sides of the largest matrices of full and blockdiag, which cost the cube of that.
_MOST_WEIGHTS = 2000
# Steps of a measurement: one to warm up, and some of which the fastest counts, as whatever else
# the machine does makes a step slower and never faster.
_TIMED = 2

# Tests have a clock of their own.
clock: Callable[[], float] = time.perf_counter


def placeholder(settings: Settings, num_data: int) -> str:
    """An estimator that exists for any data, until the choice.

    Args:
        settings: With estimator ``auto``.
        num_data: N.

    Returns:
        The name of one that takes note of the network's outputs, where the root has anchors.
    """
    subset = min(num_data, 100)
    return f"ntk-{subset}-1" if settings.root == "subblock" else f"ntk-{subset}-rows-anchored"


def evidence_of(
    known: Evidence,
    settings: Settings,
    name: str,
    share: float | None,
    root: str | None,
    use: Use = "evidence",
) -> Evidence:
    """The evidence of a run under another estimator, with all its settings.

    Args:
        known: The run's; it shares what it has found out.
        settings: Of the run.
        name: Of the estimator.
        share: The part of its rows that are anchors; None where it has none.
        root: Its root; None for the estimator's own.
        use: Of its random numbers.

    Returns:
        Another evidence of the same model, prior and likelihood.
    """
    given = vars(settings) | {"estimator": name, "root": root}
    given["anchor_share"] = settings.anchor_share if share is None else share
    if settings.micro_batch != "auto":
        given["memory_budget"] = None  # what the choice alone keeps to
    options = estimator_options(given)
    made = known.with_estimator(name, generator=stream(settings.seed, use), **options)
    made.take_over(known)
    return made


def choose_estimator(
    known: Evidence, data: Any, settings: Settings, schedule: Schedule, step_seconds: float
) -> Choice:
    """Choose an estimator for the hyperparameter steps of a run.

    Weights, hyperparameters, their gradients and all random streams of the run stay as they are.

    Args:
        known: The run's evidence so far.
        data: All training data, as for ``Evidence.blocks``.
        settings: Of the run.
        schedule: Of the costliest steps.
        step_seconds: Of a step of the weights.

    Returns:
        The choice.
    """
    meter = NetworkMeter(known, data, settings, schedule)
    families, fallback = families_for(known, meter.probe[0], settings, schedule)
    rounds = count_rounds(schedule.epochs, schedule.burn_in, schedule.every)
    steps = rounds * schedule.steps
    return choose(families, fallback, meter, step_seconds, settings.step_budget, steps)


def families_for(
    known: Evidence, x: Tensor, settings: Settings, schedule: Schedule
) -> tuple[list[Family], list[Family]]:
    """The estimators that may be chosen.

    Args:
        known: The run's evidence so far.
        x: Some training inputs.
        settings: Of the run.
        schedule: Of the costliest steps.

    Returns:
        Families of bounds, and what remains where none can be used.
    """
    n, c, root = known.num_data, known.num_outputs(x), settings.root
    sizes = [w.numel() for w in known.weights().values()]
    # Of the prior's steps those that are on all the data share one pass.
    alone = is_of_model(schedule) or settings.prior_blocks is not None
    sharing = 1.0 if alone else float(schedule.steps)

    coupled = known.likelihood.couples_outputs

    def of_data(structure: str, size: int, outputs: int = c, own: str | None = root) -> Candidate:
        data, width = str(size) if size < n else "N", str(outputs) if outputs < c else "C"
        spec = EstimatorSpec.parse(f"{structure}-{data}-{width}")
        is_bound = spec.is_bound(own or spec.default_root, coupled and outputs < c)
        is_exact = spec.name in ("ntk-N-C", "full-N-C")
        return Candidate(spec.name, None, None if outputs == c else own, is_bound, is_exact)

    def all_outputs(structure: str, first: int) -> Family:
        return Family(
            make=lambda size: of_data(structure, size),
            first=even(min(first, n), n),
            largest=n,
            rounded=lambda size: even(size, n),
            sharing=sharing,
        )

    def some_outputs(structure: str, own: str | None) -> Family:
        """One output of ever more data, then of all data ever more outputs."""
        return Family(
            make=lambda size: of_data(structure, size, max(1, size // n), own),
            first=even(min(_FIRST, n), n),
            largest=n * c,
            rounded=lambda size: even(size, n) if size < n else n * even(size // n, c),
            sharing=sharing,
        )

    def anchored(share: float) -> Callable[[int], Candidate]:
        def make(size: int) -> Candidate:
            if size == n * c:
                return of_data("ntk", n)
            return Candidate(f"ntk-{size}-rows-anchored", share, root)

        return make

    families = [all_outputs("ntk", max(1, _FIRST // c))]
    if root != "subblock":
        others = tuple(anchored(share) for share in SHARES if share != settings.anchor_share)
        own, first = anchored(settings.anchor_share), min(_FIRST, n * c)
        saved = sharing
        shares = sharing > 1 and known.shares_anchors(x, schedule.steps)
        if shares and is_keepable(known, x, schedule.names):
            # Of the steps' passes over anchors there is only one at any size.
            saved = settings.anchor_share + sharing * (1 - settings.anchor_share)
        families.insert(0, Family(own, first, n * c, sharing=saved, variants=others))
    if c > 1:
        # The root by which outputs that are coupled are split in a bound.
        families.append(some_outputs("ntk", root or ("fisher" if coupled else None)))
    if sum(sizes) <= _MOST_WEIGHTS:
        # The kernel of all rows or the matrix of all weights, whichever is smaller, is tried first.
        families.insert(0 if sum(sizes) < n * c else len(families), all_outputs("full", _FIRST))
    by_tensor = settings.parameter_partition == "tensor"
    if (max(sizes) if by_tensor else sum(sizes)) <= _MOST_WEIGHTS:
        families.append(all_outputs("blockdiag", _FIRST))
    bounds = [each for each in families if each.make(each.first).is_bound]
    return bounds, [some_outputs("kfac", root)]


class NetworkMeter:
    """Measures estimators at the present weights and hyperparameters.

    Args:
        known: The run's evidence so far.
        data: All training data, as for ``Evidence.blocks``.
        settings: Of the run.
        schedule: Of the costliest steps.

    Attributes:
        probe: Some of the data.
    """

    def __init__(self, known: Evidence, data: Any, settings: Settings, schedule: Schedule) -> None:
        self._known, self._data = known, as_source(data)
        self.probe = self._data.first(PROBE_SIZE)
        self._settings, self._schedule = settings, schedule
        self._of_prior = [n for n in known.hyperparameters() if not n.startswith("model.")]
        self._begun = clock()
        self._per_datum: float | None = None
        self._latest: Evidence | None = None
        self._drawn: dict[Candidate, tuple[Evidence, Iterator[Block]]] = {}

    def elapsed(self) -> float:
        """Seconds since the search began."""
        return clock() - self._begun

    def seconds(self, candidate: Candidate) -> float | str:
        """Time of a hyperparameter step, as a round of the run has them.

        What a round begins with, as the choice of anchors or passes that its steps share, counts
        by its part.

        Args:
            candidate: The estimator.

        Returns:
            Seconds, or why it cannot be used.
        """
        problem = ""
        try:
            evidence = self._evidence(candidate)
            if self._settings.prior_blocks is not None:
                evidence.check_collect(self.probe[0], wrt=self._of_prior)
            problem = self._does_not_fit(evidence)
            if not problem:
                with untouched_gradients(evidence.hyperparameters()):
                    self._round(evidence, 1)
                    return self._round(evidence, _TIMED)
        except EvigradError as error:
            problem = str(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            problem = "The memory does not suffice."
        # Outside of the handlers: a traceback keeps the tensors of what failed.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return problem

    def draws(self, candidate: Candidate, count: int) -> Draws:
        """The next draws of the log-determinant.

        Args:
            candidate: The estimator.
            count: How many.

        Returns:
            Their values, and the largest lower bound that anchored blocks prove: of ``ℓ(Z ∪ B)``.
        """
        if candidate not in self._drawn:
            evidence = self._evidence(candidate)
            self._drawn[candidate] = evidence, iter(evidence.blocks(self._data))
        evidence, blocks = self._drawn[candidate]
        values: list[float] = []
        lower: float | None = None
        for block in islice(blocks, count):
            values.append(evidence.estimate(block).log_det)
            if block.entropies:
                lower = max(sum(block.entropies), lower or 0.0)
        return Draws(values, lower)

    def _evidence(self, candidate: Candidate) -> Evidence:
        c = candidate
        made = evidence_of(self._known, self._settings, c.name, c.share, c.root, "auto")
        if self._latest is not None:
            made.take_over(self._latest)  # which has had the checks of its first passes
        self._latest = made
        return made

    def _round(self, evidence: Evidence, steps: int) -> float:
        """Seconds of a step, from some steps of a round."""
        names, whole = self._schedule.names, self._schedule.steps
        count = None if is_of_model(self._schedule) else self._settings.prior_blocks
        start = clock()
        blocks, shared = blocks_of_a_round(evidence, self._data, names, whole, count)
        waits: list[float] = []  # for what each step is on: drawn blocks, or passes over some
        least, kept = float("inf"), False
        for block in blocks:
            drawn = clock()
            waits.append(drawn - start)
            evidence.backward(block, wrt=names)
            start = clock()
            least = min(least, start - drawn)
            kept = isinstance(block, list)
            # Passes that some steps share come between them: those of all the round count.
            if len(waits) >= (whole if kept and not shared else steps):
                break
        choosing = 0.0
        if (period := evidence.blocks(self._data).period) > 1:
            times = self._beginnings(evidence, period)
            # What was timed is a round that has not chosen anchors.
            choosing = sum(times) / period - min(times)
            if not kept:
                waits[0] = min(times)
        if kept:
            return least + ((waits[0] if shared else sum(waits)) + choosing) / whole
        drawing = waits[-1] if len(waits) > 1 else 0.0
        return least + drawing + max(0.0, waits[0] + choosing - drawing) / whole

    def _beginnings(self, evidence: Evidence, period: int) -> list[float]:
        """Seconds until a round has its first block, where some of them have less to do for it."""
        times: list[float] = []
        for _ in range(period):
            start = clock()
            next(iter(evidence.blocks(self._data)))
            times.append(clock() - start)
        return times

    def _does_not_fit(self, evidence: Evidence) -> str:
        """Why the memory does not suffice, as far as can be said beforehand; else nothing."""
        (x, y), settings, spec = self.probe, self._settings, evidence.spec
        budget = as_bytes("memory_budget", settings.memory_budget)
        if budget is None:
            free = available_bytes(x.device)
            if free is None:
                return ""
            budget = int(FREE_SHARE * free)
        needed = float(evidence.predicted_bytes(x))
        if settings.micro_batch != "auto":
            if self._per_datum is None:
                one = evidence_of(self._known, settings, "ntk-1-C", None, None, "auto")
                self._per_datum = one.pass_bytes(x[:2], y[:2])
            subset = min(spec.subset or len(self._data), len(self._data))
            at_once = settings.micro_batch if isinstance(settings.micro_batch, int) else subset
            needed += self._per_datum * min(subset, at_once)
        if needed <= budget:
            return ""
        return (
            f"{spec.name} needs {needed / 2**20:.3g} MiB, and there are {budget / 2**20:.3g}"
            " for it."
        )


def is_of_model(schedule: Schedule) -> bool:
    """Whether steps learn hyperparameters of the model, of which passes are never shared.

    Args:
        schedule: Of the steps.

    Returns:
        True where one of them belongs to the model.
    """
    return any(name.startswith("model.") for name in schedule.names)


@contextmanager
def untouched_gradients(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Throw away the gradients that are computed inside.

    Args:
        parameters: Whose gradients stay as they were.
    """
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.grad = None
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
