"""Check on real data that the model does not mix examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from evigrad.core.block import Block, MicroBatch
from evigrad.core.protocols import Purpose
from evigrad.network import Linearization
from evigrad.passes.sweep import MicroBatchSweep

State = TypeVar("State")


@dataclass(frozen=True, eq=False)
class VerifiedSweep:
    """A ``Sweep`` that checks every micro-batch without a graph: no output mixes examples.

    Attributes:
        sweep: The sweep that goes through the network.
    """

    sweep: MicroBatchSweep

    def linearize(self, batch: MicroBatch, *, graph: bool) -> Linearization:
        """See ``Sweep.linearize``."""
        linearization = self.sweep.linearize(batch, graph=graph)
        if not graph:
            self.sweep.check_separate(batch, linearization.outputs)
        return linearization

    def outputs(self, batch: MicroBatch) -> Tensor:
        """See ``Sweep.outputs``."""
        f = self.sweep.outputs(batch)
        self.sweep.check_separate(batch, f)
        return f

    def holds_graph(self, batch: MicroBatch) -> bool:
        """Return False, because passes with a graph are not checked."""
        del batch
        return False

    # ------------------------------------------------------------ the same as in the inner sweep

    @property
    def purpose(self) -> Purpose:
        """See ``Sweep.purpose``."""
        return self.sweep.purpose

    @property
    def block(self) -> Block:
        """See ``Sweep.block``."""
        return self.sweep.block

    def fold(
        self, step: Callable[[State, MicroBatch], State], start: State, *, graph: bool = False
    ) -> State:
        """See ``Sweep.fold``."""
        return self.sweep.fold(step, start, graph=graph)

    def log_probabilities(self, f: Tensor, batch: MicroBatch) -> Tensor:
        """See ``Sweep.log_probabilities``."""
        return self.sweep.log_probabilities(f, batch)

    def total(self, statistic: Any) -> Any:
        """See ``Sweep.total``."""
        return self.sweep.total(statistic)
