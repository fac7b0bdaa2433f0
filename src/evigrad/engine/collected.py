"""A pass over a block that is kept: what the log evidence needs of the data, whatever the prior."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from evigrad.blocks import Block
from evigrad.curvature import Conditioning, Structure
from evigrad.engine.passes import Chunk
from evigrad.engine.preparation import Prepared

if TYPE_CHECKING:
    from evigrad.engine.assembly import Assembly


@dataclass(frozen=True, eq=False)
class Collected:
    """One pass over a block: all that the log evidence needs of the data, whatever the prior.

    Attributes:
        owner: The assembly that made it.
        prepared: The structure that the statistic belongs to.
        log_likelihood: (1/T) log p(D|w,h), scaled to the whole data set, in nats.
        statistic: Of the structure.
        block: That was passed over, without its data.
        splits_outputs: Whether the block holds some of a datum's rows only.
        outputs: Micro-batches without inputs, with their outputs: what the likelihood's own
            hyperparameters need. Kept on demand.
        log_probs: log p(y|w,h) of each datum of the block.
        follows: Names of the hyperparameters of which it holds whatever they become.
        versions: Of all else that it was made with.
    """

    owner: "Assembly"
    prepared: Prepared
    log_likelihood: Tensor
    statistic: Any
    block: Block
    splits_outputs: bool
    outputs: Sequence[tuple[Chunk, Tensor]] = ()
    log_probs: Tensor | None = None
    follows: frozenset[str] = frozenset()
    versions: tuple[tuple[int, int, int], ...] = ()

    def draws(self) -> Iterator["Collected"]:
        """Each draw of an anchored block by itself: ℓ(Z) + w ℓ(B|Z), on the same pass.

        Yields:
            Passes whose mean estimate is that of this one, which share all that they hold.
        """
        if len(self.block.draws) < 2 or self.log_probs is None:
            yield self
            return
        temperature = self.owner.settings.temperature
        for number in range(len(self.block.draws)):
            block = self.block.of_draw(number)
            weights = block.likelihood_weights
            yield replace(
                self,
                block=block,
                statistic=conditioned(self.prepared.structure, self.statistic, block),
                log_likelihood=weighted_sum(weights, self.log_probs) / temperature,
                outputs=[
                    (replace(chunk, likelihood_weights=weights[chunk.data]), f)
                    for chunk, f in self.outputs
                ],
            )


def weighted_sum(weights: Tensor, log_probs: Tensor) -> Tensor:
    """Σ w_n log p(y_n), float64.

    Args:
        weights: Of the data, (m,).
        log_probs: Of the data, (m,).

    Returns:
        A scalar.
    """
    return (weights.to(log_probs) * log_probs).sum().double()


def conditioned(structure: Structure[Any], statistic: Any, block: Block) -> Any:
    """The statistic of a block, given its anchors where it has some.

    Args:
        structure: Of the statistic.
        statistic: Of all rows of the block.
        block: Says which of them are anchors, and takes what they and the parts were found to hold.

    Returns:
        Another statistic of the same rows, or the same.
    """
    if block.parts is None or block.columns is None:
        return statistic
    parts = block.parts[block.columns >= 0]
    conditioning = Conditioning(parts, block.part_weights, block.entropies, block.offset)
    return structure.condition(statistic, conditioning)
