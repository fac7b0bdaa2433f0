"""The blocks of a round of hyperparameter steps."""

from collections.abc import Iterable
from itertools import cycle, islice, repeat

from torch import Tensor

from evigrad.anchors import AnchoredStream
from evigrad.blocks import Block
from evigrad.collected import Collected
from evigrad.draws import stochastic_modules
from evigrad.errors import ConfigurationError, MemoryBudgetError
from evigrad.evidence import Evidence
from evigrad.preparation import PROBE_SIZE


def blocks_of_a_round(
    evidence: Evidence,
    data: tuple[Tensor, Tensor],
    names: list[str],
    steps: int,
    prior_blocks: int | None,
) -> tuple[Iterable[Block | list[Collected]], bool]:
    """What each step of a round is on, and whether steps share passes through the network.

    Where no more than prior and noise are learned, steps share what they would otherwise repeat:
    the only pass there is, where all the data are one block, and that over the anchors, where
    these are chosen for a round.

    Args:
        evidence: Of the model that is trained.
        data: All training data.
        names: Of the hyperparameters that are learned.
        steps: Of the round.
        prior_blocks: Blocks whose passes the steps share; None for a block for each step.

    Returns:
        A block for each step, or kept passes for each: one, or the same ones again and again.
    """
    blocks = evidence.blocks(data)
    anchored = isinstance(blocks, AnchoredStream)
    keepable = (anchored or blocks.is_constant) and is_keepable(evidence, data[0], names)
    if anchored and keepable:
        count = steps if prior_blocks is None else prior_blocks
        if kept := draws_that_share_anchors(evidence, blocks, data[0], names, count):
            if prior_blocks is None:
                return islice(cycle([draw] for draw in kept), steps), True
            return repeat(kept, steps), True
    if prior_blocks is None and blocks.is_constant and keepable:
        prior_blocks = 1
    if prior_blocks is None:
        return blocks.take(steps), False
    kept = [evidence.collect(block, wrt=names) for block in blocks.round(prior_blocks)]
    return repeat(kept, steps), True


def draws_that_share_anchors(
    evidence: Evidence, blocks: AnchoredStream, x: Tensor, names: list[str], count: int
) -> list[Collected]:
    """Draws of one partition, as many of them in a pass as the memory holds.

    Args:
        evidence: Of the model that is trained.
        blocks: Its blocks.
        x: Some inputs.
        names: Of the hyperparameters that are learned.
        count: How many, at most.

    Returns:
        A kept pass for each; none where a pass holds no more than one.
    """
    at_once = count
    while at_once > 1:
        if evidence.shares_anchors(x[:PROBE_SIZE], at_once):
            try:
                passes = [evidence.collect(b, wrt=names) for b in blocks.round(count, at_once)]
                return [draw for collected in passes for draw in collected.draws()]
            except MemoryBudgetError:
                pass  # of the rows; fewer of them may fit
        at_once = -(-at_once // 2)
    return []


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
