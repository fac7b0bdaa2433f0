"""Rounds of hyperparameter steps: when they take place, and the blocks that they work on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

from evigrad.blocks import Block
from evigrad.blocks.anchors import AnchoredStream, DrawnParts
from evigrad.blocks.partitions import Stream
from evigrad.engine.kept import KeptPass
from evigrad.engine.memory import fits
from evigrad.engine.problem import PROBE_SIZE
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.inputs import Inputs
from evigrad.invariances.noise import stochastic_modules
from evigrad.training.settings import PlannedSchedule


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


def make_rounds(s: PlannedSchedule, names: Iterable[str]) -> list[Rounds]:
    """The rounds: prior and noise, then the model's own, or one for all."""
    known = list(names)
    own = [name for name in known if name.startswith("model.")]
    rest = [name for name in known if name not in own]
    parts = [(known, s.every, s.steps)]
    if s.hyper_every is not None or s.hyper_steps is not None:
        parts = [
            (rest, s.every, s.steps),
            (own, s.hyper_every or s.every, s.hyper_steps or s.steps),
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

    Steps on prior and noise alone share passes: the only pass there is, where one block holds all
    data, and the pass over the anchors, where these are chosen for a round.

    Args:
        evidence: Its model is the one that is trained.
        blocks: Its blocks of the training data.
        x: Some inputs.
        names: Names of the learned hyperparameters.
        steps: Steps of the round.
        prior_blocks: Blocks whose passes the steps share; None for a block for each step.
    """
    anchored = isinstance(blocks, AnchoredStream)
    keepable = (anchored or blocks.is_constant) and is_keepable(evidence, x, names)
    if anchored and keepable and evidence.shares_anchors(x, 2):
        drawn = blocks.drawn(prior_blocks or steps, whole=prior_blocks is not None)
        passes = passes_over(evidence, drawn, x, names)
        if prior_blocks is None and drawn.draws:
            return ([own] for each in passes for own in each.draws()), False
    elif prior_blocks is None and not (blocks.is_constant and keepable):
        return blocks.take(steps), False
    else:
        passes = (evidence.collect(b, wrt=names) for b in blocks.round(prior_blocks or 1))
    kept = list(passes)
    if len(kept) > 1:  # their draws may be of different number
        kept = [own for each in kept for own in each.draws()]
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
        block, found = drawn.block(start, at_once), list[KeptPass]()
        if at_once == 1:
            found.append(collect(block))
        elif not fits(lambda own=block, kept=found: kept.append(collect(own))):
            at_once = -(-at_once // 2)
            continue
        start += at_once
        yield found.pop()


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
    try:
        evidence.check_collect(x[:PROBE_SIZE], wrt=names)
    except ConfigurationError:
        return False
    return True
