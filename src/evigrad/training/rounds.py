"""The blocks of a round of hyperparameter steps."""

from collections.abc import Iterable
from itertools import repeat

from torch import Tensor

from evigrad.assembly import Collected
from evigrad.blocks import Block
from evigrad.draws import stochastic_modules
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.preparation import PROBE_SIZE
from evigrad.streams import Stream


def blocks_of_a_round(
    evidence: Evidence,
    data: tuple[Tensor, Tensor],
    names: list[str],
    steps: int,
    prior_blocks: int | None,
) -> tuple[Iterable[Block | list[Collected]], bool]:
    """What each step of a round is on, and whether that is the same for all of them.

    Where all the data are one block, and no more than prior and noise are learned, the steps
    share one pass through the network: they would repeat the same one.

    Args:
        evidence: Of the model that is trained.
        data: All training data.
        names: Of the hyperparameters that are learned.
        steps: Of the round.
        prior_blocks: Blocks whose passes the steps share; None for a block for each step.

    Returns:
        A block for each step, or the same kept passes again and again.
    """
    blocks = evidence.blocks(data)
    if prior_blocks is None and shares_passes(evidence, blocks, data[0], names):
        prior_blocks = 1
    if prior_blocks is None:
        return blocks.take(steps), False
    kept = [evidence.collect(block, wrt=names) for block in blocks.round(prior_blocks)]
    return repeat(kept, steps), True


def shares_passes(evidence: Evidence, blocks: Stream, x: Tensor, names: list[str]) -> bool:
    """Whether all steps would repeat the same pass, and can share it.

    Args:
        evidence: Of the model that is trained.
        blocks: Its blocks.
        x: Some inputs.
        names: Of the hyperparameters that are learned.

    Returns:
        True where nothing is drawn and no more than prior and noise are learned.
    """
    # A model that draws, as an average over transforms does, draws anew in each pass.
    if not blocks.is_constant or stochastic_modules(evidence.model):
        return False
    try:
        evidence.check_collect(x[:PROBE_SIZE], wrt=names)
    except ConfigurationError:
        return False
    return True
