"""The blocks of a round of hyperparameter steps."""

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from torch import Tensor

from evigrad.blocks import Block
from evigrad.blocks.anchors import AnchoredStream, Drawn
from evigrad.blocks.sources import as_source
from evigrad.engine.kept import KeptPass
from evigrad.engine.micro_batches import fits
from evigrad.engine.plans import PROBE_SIZE
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.invariances.noise import stochastic_modules


def blocks_of_a_round(
    evidence: Evidence,
    data: Any,
    names: list[str],
    steps: int,
    prior_blocks: int | None,
) -> tuple[Iterable[Block | list[KeptPass]], bool]:
    """What each step of a round is on, and whether that is the same for all of them.

    Where no more than prior and noise are learned, steps share what they would otherwise repeat:
    the only pass there is, where all the data are one block, and that over the anchors, where
    these are chosen for a round.

    Args:
        evidence: Of the model that is trained.
        data: All training data, as for ``Evidence.blocks``.
        names: Of the hyperparameters that are learned.
        steps: Of the round.
        prior_blocks: Blocks whose passes the steps share; None for a block for each step.

    Returns:
        A block or a kept pass for each step, or the same kept passes again and again: the second is
        whether these are the same.
    """
    source = as_source(data)
    blocks = evidence.blocks(source)
    x, _ = source.first(PROBE_SIZE)
    anchored = isinstance(blocks, AnchoredStream)
    keepable = (anchored or blocks.is_constant) and is_keepable(evidence, x, names)
    if anchored and keepable and evidence.shares_anchors(x, 2):
        drawn = blocks.drawn(prior_blocks or steps, whole=prior_blocks is not None)
        passes = passes_over(evidence, drawn, x, names)
        if prior_blocks is None and drawn.draws:
            return ([own] for each in passes for own in each.draws()), False
        kept = list(passes)
        if len(kept) > 1:  # their draws may be of different number
            kept = [own for each in kept for own in each.draws()]
        return repeat(kept, steps), True
    if prior_blocks is None and blocks.is_constant and keepable:
        prior_blocks = 1
    if prior_blocks is None:
        return blocks.take(steps), False
    kept = [evidence.collect(block, wrt=names) for block in blocks.round(prior_blocks)]
    return repeat(kept, steps), True


def passes_over(
    evidence: Evidence, drawn: Drawn, x: Tensor, names: list[str]
) -> Iterator[KeptPass]:
    """Kept passes over draws, each over as many as fit into memory.

    Whatever fits, the draws are the same, and so are those of all later rounds.

    Args:
        evidence: Of the model that is trained.
        drawn: The draws.
        x: Some inputs.
        names: Of the hyperparameters that are learned.

    Yields:
        Passes in the order of the draws, one after the other as they are asked for.
    """

    def collect(block: Block) -> KeptPass:
        # A seed for the model is drawn, which draws nothing, in each pass of however many.
        state = evidence.generator.get_state()
        kept = evidence.collect(block, wrt=names)
        evidence.generator.set_state(state)
        return kept

    number, start = len(drawn.draws) or 1, 0
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


def draws_at_once(evidence: Evidence, x: Tensor, count: int) -> int:
    """How many draws of an anchored estimator a pass is worth having for.

    Args:
        evidence: Of the model that is trained.
        x: Some inputs.
        count: How many there are.

    Returns:
        That many, or fewer; 1 where none are shared.
    """
    while count > 1 and not evidence.shares_anchors(x[:PROBE_SIZE], count):
        count = -(-count // 2)
    return count


def is_keepable(evidence: Evidence, x: Tensor, names: list[str]) -> bool:
    """Whether passes are the same for all steps of a round.

    Args:
        evidence: Of the model that is trained.
        x: Some inputs.
        names: Of the hyperparameters that are learned.

    Returns:
        True where the model draws nothing and no more than prior and noise are learned.
    """
    # A model that draws, as an average over transforms does, draws anew in each pass.
    if stochastic_modules(evidence.model):
        return False
    try:
        evidence.check_collect(x[:PROBE_SIZE], wrt=names)
    except ConfigurationError:
        return False
    return True
