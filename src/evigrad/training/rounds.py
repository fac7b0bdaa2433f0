"""The network passes of a round. Several steps on prior and noise can share them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from evigrad.blocks import Block
from evigrad.blocks.anchors import AnchoredStream, DrawnParts
from evigrad.blocks.streams import Stream
from evigrad.core.protocols import Purpose
from evigrad.evidence import Evidence
from evigrad.inputs import Inputs
from evigrad.invariances.noise import stochastic_modules
from evigrad.network.network import PROBE_SIZE
from evigrad.passes.kept import KeptPass, not_keepable
from evigrad.passes.memory import run_if_it_fits
from evigrad.passes.parameters import divided, held_constant


def blocks_of_a_round(
    evidence: Evidence,
    blocks: Stream,
    x: Inputs,
    names: list[str],
    steps: int,
    prior_blocks: int | None,
) -> tuple[Iterable[Block | list[KeptPass]], bool]:
    """Return a block or kept passes for each step of a round, and whether all steps share them.

    Steps that learn only prior and noise can reuse the network passes of other steps.
    ``prior_blocks`` is the number of blocks whose passes all steps share. If it is None, each step
    has its own block, unless one block holds all data. With an anchored estimator, steps with
    different blocks can still share the pass over the anchors.
    """
    anchored = isinstance(blocks, AnchoredStream)
    keepable = (anchored or blocks.is_constant) and is_keepable(evidence, x, names)
    if anchored and keepable and shares_anchors(evidence, x, 2):
        drawn = blocks.drawn(prior_blocks or steps, whole=prior_blocks is not None)
        passes = passes_over(evidence, drawn, x, names)
        if prior_blocks is None and drawn.draws:
            return ([draw] for kept_pass in passes for draw in kept_pass.draws()), False
    elif prior_blocks is None and (steps == 1 or not (blocks.is_constant and keepable)):
        return blocks.take(steps), False
    else:
        passes = (evidence.collect(b, wrt=names) for b in blocks.round(prior_blocks or 1))
    kept = list(passes)
    if len(kept) > 1:  # their numbers of draws may differ
        kept = [draw for kept_pass in kept for draw in kept_pass.draws()]
    return repeat(kept, steps), True


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
    rows_per_draw = evidence.spec.subset or 0
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
