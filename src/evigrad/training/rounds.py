"""The rounds of hyperparameter steps, and how the steps of a round take their blocks.

Steps that learn only prior and noise can reuse the network passes of other steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import mean

from evigrad.blocks import Block
from evigrad.blocks.anchors import AnchoredStream, DrawnParts
from evigrad.blocks.streams import Stream
from evigrad.core.protocols import Purpose
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.inputs import Inputs
from evigrad.invariances.noise import stochastic_modules
from evigrad.network.network import PROBE_SIZE
from evigrad.passes.evaluation import Estimate
from evigrad.passes.kept import KeptPass, not_keepable
from evigrad.passes.memory import run_if_it_fits
from evigrad.passes.parameters import divided, held_constant


@dataclass(frozen=True)
class Round:
    """The estimates of a round of hyperparameter steps. Each estimate was computed before its step.

    If steps used the same data (``is_shared``), the spread of the estimates does not measure their
    error. ``skipped`` is the number of steps that were not taken because an estimate failed.
    """

    estimates: list[Estimate]
    is_shared: bool
    skipped: int = 0

    def __repr__(self) -> str:
        """Return the mean log evidence and the numbers of steps in one line."""
        values = [estimate.per_datum for estimate in self.estimates]
        parts = [f"log evidence {mean(values):.4g} nats per example"] if values else []
        parts += [f"{len(values)} steps", f"{self.skipped} skipped"]
        return f"Round({', '.join(parts)})"


@dataclass(frozen=True)
class RoundBlocks:
    """The blocks of a round's steps. Each step has its own block.

    ``x`` are inputs of a few examples, and ``prior_blocks`` is the number of blocks that all steps
    share, if it is set.
    """

    evidence: Evidence
    stream: Stream
    x: Inputs
    names: list[str]
    steps: int
    prior_blocks: int | None = None

    def take(self) -> tuple[Iterable[Block | list[KeptPass]], bool]:
        """Return a block or kept passes for each step of a round, and whether all share them."""
        return self.stream.take(self.steps), False


class SharedBlocks(RoundBlocks):
    """The blocks of a round. All steps average over them, and their passes are kept."""

    def take(self) -> tuple[Iterable[list[KeptPass]], bool]:
        blocks = self.stream.round(self.prior_blocks or 1)
        return self.average(self.evidence.collect(block, wrt=self.names) for block in blocks)

    def average(self, passes: Iterable[KeptPass]) -> tuple[Iterable[list[KeptPass]], bool]:
        """Return all passes for each step."""
        kept = list(passes)
        if len(kept) > 1:  # their numbers of draws may differ
            kept = [draw for kept_pass in kept for draw in kept_pass.draws()]
        return repeat(kept, self.steps), True


class SharedAnchors(SharedBlocks):
    """The blocks of a round, which share the pass over their anchors."""

    def take(self) -> tuple[Iterable[list[KeptPass]], bool]:
        assert isinstance(self.stream, AnchoredStream)
        is_whole = self.prior_blocks is not None
        drawn = self.stream.drawn(self.prior_blocks or self.steps, whole=is_whole)
        passes = passes_over(self.evidence, drawn, self.x, self.names)
        if drawn.draws and not is_whole:
            return ([draw] for kept_pass in passes for draw in kept_pass.draws()), False
        return self.average(passes)


def shared_if_possible(blocks: RoundBlocks) -> RoundBlocks:
    """Return the blocks, with shared passes if the steps can share them.

    Raises:
        ConfigurationError: If steps cannot share ``prior_blocks``.
    """
    evidence, stream, x, names = blocks.evidence, blocks.stream, blocks.x, blocks.names
    is_set, is_anchored = blocks.prior_blocks is not None, isinstance(stream, AnchoredStream)
    if is_set and (reason := why_not_kept(evidence, x, names)):
        raise ConfigurationError(reason)
    is_kept = (is_anchored or stream.is_constant) and is_keepable(evidence, x, names)
    if is_kept and is_anchored and shares_anchors(evidence, x, 2):
        return SharedAnchors(**vars(blocks))
    if is_set or (is_kept and stream.is_constant and blocks.steps > 1):
        return SharedBlocks(**vars(blocks))
    return blocks


def passes_over(
    evidence: Evidence, drawn: DrawnParts, x: Inputs, names: list[str]
) -> Iterator[KeptPass]:
    """Yield network passes over drawn parts of the data, kept for several steps, in order.

    Each pass is computed when it is requested, and covers as many parts as fit into memory. The
    available memory does not change which parts are drawn.
    """

    def collect(block: Block) -> KeptPass:
        # Each pass draws a seed for the model, although the model draws nothing here. The state is
        # restored, so that the number of passes does not change later draws.
        state = evidence.generator.get_state()
        kept = evidence.collect(block, wrt=names)
        evidence.generator.set_state(state)
        return kept

    # If all rows are anchors, only these; if there are few parts, a rank may have none.
    number, start = len(drawn.draws) if drawn.partition.num_parts else 1, 0
    at_once = draws_at_once(evidence, x, number)
    while start < number:
        block, passes = drawn.block(start, at_once), list[KeptPass]()
        if at_once == 1:
            passes.append(collect(block))
        elif not run_if_it_fits(lambda draws=block, kept=passes: kept.append(collect(draws))):
            at_once = -(-at_once // 2)
            continue
        start += at_once
        yield passes.pop()


def draws_at_once(evidence: Evidence, x: Inputs, count: int) -> int:
    """Return how many of ``count`` draws of an anchored estimator can share one pass."""
    while count > 1 and not shares_anchors(evidence, x[:PROBE_SIZE], count):
        count = -(-count // 2)
    return count


def shares_anchors(evidence: Evidence, x: Inputs, draws: int) -> bool:
    """Return whether one pass over several draws is cheaper than a pass over each draw.

    A draw is a random part of the rows that is used together with the anchors. ``x`` are inputs of
    a few examples. A shared pass is cheaper if steps on the prior need only inner products of the
    rows, and if it does not need more of these products than separate passes. The products must
    fit into memory: at most one gibibyte or the memory of the rows, whichever is larger, and at
    most the memory budget.
    """
    if evidence.anchors is None or draws < 2:
        return False
    rows_per_draw = evidence.estimator.subset or 0
    anchors = evidence.anchors.anchoring.num_anchors(rows_per_draw)
    rows = anchors + draws * (rows_per_draw - anchors)
    problem = evidence.problem
    cost = problem.curvature(problem.plan_of(x)).cost(rows, Purpose.STEPS)
    budget = problem.settings.memory_budget
    return (
        rows**2 <= draws * rows_per_draw**2
        and cost.drops_rows
        and (budget is None or cost.total <= budget)
    )


def is_keepable(evidence: Evidence, x: Inputs, names: list[str]) -> bool:
    """Return whether steps that learn ``names`` can share passes. A random model prevents this."""
    # A random model, such as an average over transforms, draws again in each pass.
    return not stochastic_modules(evidence.model) and why_not_kept(evidence, x, names) is None


def why_not_kept(
    evidence: Evidence, x: Inputs, wrt: str | Sequence[str] | None = None
) -> str | None:
    """Return why ``collect(..., wrt=wrt)`` would raise an error for a block, or None."""
    changing, others = divided(evidence.hyperparameters(), wrt)
    plan = evidence.problem.plan_of(x[:PROBE_SIZE])
    with held_constant(others):
        return not_keepable(evidence.problem, plan, list(changing))
