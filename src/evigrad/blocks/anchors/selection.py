"""Choose anchors during training, based on the network's latest outputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evigrad.blocks.anchors.choice import AT_ONCE, Anchoring, Centres, LastLayerKernel, Look, choose
from evigrad.blocks.anchors.partition import AnchoredPartition, Groups, Scores, form_groups
from evigrad.blocks.anchors.stream import AnchoredStream, EntropyPredictor
from evigrad.blocks.pool import Pool
from evigrad.blocks.sources import Source
from evigrad.core.algebra import widened
from evigrad.core.block import Block
from evigrad.distributed import Ranks
from evigrad.errors import InputError
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import check_finite, log_probabilities


class OutputMemory:
    """The latest outputs of each example of a pool, as computed by training and estimates.

    The outputs may be a few steps old or come from a different random transform. This is harmless,
    because the estimate is a bound for any choice of anchors.
    """

    def __init__(self, num_data: int) -> None:
        self.num_data = num_data
        self._outputs: Float[Tensor, "N C"] | None = None
        self._seen: Bool[Tensor, " N"] = torch.zeros(num_data, dtype=torch.bool, device="cpu")

    def update(self, indices: Tensor, f: Float[Tensor, "m C"]) -> None:
        """Store outputs (m, C), without a graph, for the examples at these places in the pool."""
        where, values = indices.cpu(), widened(f.detach()).cpu()
        if self._outputs is None or self._outputs.shape[1:] != values.shape[1:]:
            self._outputs = values.new_zeros(self.num_data, values.shape[1])
            self._seen.zero_()
        self._outputs = self._outputs.to(values.dtype)  # older checkpoints have float32
        self._outputs[where] = values
        self._seen[where] = True

    def missing(self) -> Int[Tensor, " n"]:
        """Return the places of the examples that have no outputs yet."""
        return (~self._seen).nonzero().squeeze(1)

    @property
    def outputs(self) -> Float[Tensor, "N C"]:
        """Return the latest outputs on the CPU, or raise an error if any example has none."""
        if self._outputs is None or not bool(self._seen.all()):
            raise InputError(
                "The outputs of some examples have not been computed yet. Call update() first."
            )
        return self._outputs

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors for a checkpoint."""
        return {"outputs": self._outputs, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict`` for the same number of examples."""
        outputs = state["outputs"]
        self._outputs = None if outputs is None else outputs.clone()
        self._seen = state["seen"].clone()


class AnchorSelection:
    """Choose anchors, and replace them on the schedule of ``anchoring``.

    ``num_rows`` counts the rows of a block. ``root`` is the kind of root of the likelihood's
    Hessian. ``look`` returns the outputs for some inputs, and the last layer if it is linear.
    """

    def __init__(
        self,
        anchoring: Anchoring,
        num_data: int,
        num_rows: int,
        root: str,
        likelihood: Likelihood,
        look: Look,
        generator: torch.Generator,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self.anchoring = anchoring
        self.pool = Pool(num_data)
        self.memory = OutputMemory(len(self.pool))
        self._num_rows, self._root = num_rows, root
        self._likelihood, self._look_at, self._generator = likelihood, look, generator
        self._anchors: Int[Tensor, " Z"] | None = None
        self._groups = Groups()
        self._streams = 0  # since the last choice
        self._num_outputs = 0
        self._predictor = EntropyPredictor()
        self._centres = Centres()

    def stream(self, source: Source) -> AnchoredStream:
        """Return the stream of blocks. Each iteration first chooses anchors if new ones are due."""
        return AnchoredStream(
            source,
            self.anchoring.refresh,
            self._num_rows,
            lambda: self._prepare(source),
            self._predictor,
            self._generator,
            self._ranks,
        )

    def observe(self, evaluated: Iterable[tuple[Block, Sequence[float]]]) -> None:
        """Calibrate the predicted entropies with the computed entropies of evaluated blocks."""
        observations = [
            (draw.key, draw.guess, entropies[block.anchored.label(draw)])
            for block, entropies in evaluated
            if block.anchored is not None
            for draw in block.anchored.draws
        ]
        tables = self._ranks.gather(
            torch.tensor(observations, dtype=torch.float64, device="cpu").reshape(-1, 3)
        )
        for key, guess, seen in torch.cat(tables).tolist():
            self._predictor.observe(int(key), guess, seen)

    def refresh(self, source: Source) -> float:
        """Return log p(D|w,h) of all examples in nats, and update the stored outputs.

        The next iteration of a stream chooses new anchors.
        """
        log_likelihood = self._look(source, torch.arange(self.pool.num_data, device="cpu"))
        self._anchors = None
        return log_likelihood

    def note(self, indices: Tensor, f: Float[Tensor, "m C"], y: Tensor) -> None:
        """Store outputs that were computed elsewhere, for examples at these data set positions."""
        if indices.shape != (len(f),):
            raise InputError(
                f"{len(f)} outputs need {len(f)} positions in the data set, got positions of shape"
                f" {tuple(indices.shape)}. Pass a tensor with one position per output."
            )
        self._num_outputs = f.shape[1]
        condensed = self._likelihood.at(y).condensed(f.detach(), self._root)
        self.memory.update(*self.pool.restrict(indices.cpu(), condensed))

    def scores(self) -> Scores:
        """Return the scores |R_n[:, d]|² of all rows, for the stored outputs."""
        check_finite("The model's outputs", self.memory.outputs)
        heads: list[Tensor] = []
        tails: list[Tensor] = []
        for batch in self.memory.outputs.to(self._device()).split(AT_ONCE):
            head, tail = self._likelihood.row_scores(batch, self._root)
            heads.append(head.cpu())
            if tail is not None:
                tails.append(tail.cpu())
        head = torch.cat(heads)
        if not tails:
            return Scores(head, head.new_zeros(len(head)), 0)
        return Scores(head, torch.cat(tails), self._num_outputs - head.shape[1])

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "memory": self.memory.state_dict(),
            "anchors": self._anchors,
            "groups": (self._groups.parts, self._groups.shares),
            "streams": self._streams,
            "masses": self._predictor.state_dict(),
            "num_outputs": self._num_outputs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict`` of the same estimator."""
        self.memory.load_state_dict(state["memory"])
        self._anchors, self._streams = state["anchors"], state["streams"]
        self._groups = Groups(*state.get("groups", ()))
        self._predictor.load_state_dict(state["masses"])
        self._num_outputs = state["num_outputs"]

    def _prepare(self, source: Source) -> Callable[[], AnchoredPartition]:
        """Return a function that draws partitions of all rows except the current anchors."""
        is_new = self._anchors is None or self._streams >= self.anchoring.refresh
        # Training may not reach the examples of a pool for a long time, and a rank does not have
        # the outputs of other ranks' batches.
        looks_at_all = (is_new and not self.pool.is_all) or self._ranks.count > 1
        places = (
            torch.arange(len(self.pool), device="cpu") if looks_at_all else self.memory.missing()
        )
        if len(places):
            self._look(source, self.pool.data(places))
        scores = self.scores()
        if self._anchors is None or is_new:
            self._anchors, self._groups = self._chosen(self.pool.of(source), scores)
            self._streams = 0
        self._streams += 1
        return partial(
            AnchoredPartition.draw,
            self._anchors,
            scores,
            self._num_rows,
            self._generator,
            self._groups,
            self.pool,
        )

    def _chosen(self, source: Source, scores: Scores) -> tuple[Int[Tensor, " Z"], Groups]:
        heads = scores.head.numel()
        count = min(self.anchoring.num_anchors(self._num_rows), heads)
        if self._num_rows >= scores.num_rows:
            count = heads  # all rows fit: nothing is drawn, or only the whole tail
        kernel = LastLayerKernel(
            self._look_at, self._likelihood, self._root, source, scores.head.shape[1]
        )
        centres = partial(self._centres.first, source)
        anchors = choose(self.anchoring, scores.head, count, self._generator, centres, kernel)
        if not self.anchoring.grouped:
            return anchors, Groups()
        groups = form_groups(scores.head, anchors, self._num_rows, kernel, self._generator)
        return anchors, groups

    def _look(self, source: Source, indices: Int[Tensor, " n"]) -> float:
        total, seen, num_outputs = 0.0, [], 0
        with self._ranks.together():
            # A rank without examples evaluates one, to get the number of outputs.
            local_indices = indices[self._ranks.part(len(indices))]
            for batch in (local_indices if len(local_indices) else indices[:1]).split(AT_ONCE):
                x, y = source.fetch(batch)
                f, _ = self._look_at(x)
                total += float(log_probabilities(self._likelihood, f, y).detach().double().sum())
                condensed = self._likelihood.at(y).condensed(f, self._root)
                seen.append(widened(self.pool.restrict(batch, condensed)[1]).cpu())
                num_outputs = f.shape[1]
        # Store outputs last, so that an error in the data changes nothing.
        outputs = torch.cat(seen)[: len(local_indices)]
        _, places = self.pool.find(indices)
        self.memory.update(places, torch.cat(self._ranks.gather(outputs)))
        self._num_outputs = num_outputs
        terms = torch.tensor(
            total if len(local_indices) else 0.0, dtype=torch.float64, device="cpu"
        )
        return float(self._ranks.sum([terms])[0])

    def _device(self) -> torch.device:
        parameters = [*self._likelihood.parameters(), *self._likelihood.buffers()]
        return parameters[0].device if parameters else torch.device("cpu")
