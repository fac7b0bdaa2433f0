"""The kernel of a network's last layer: a forward pass tells how alike rows are.

The row (n, d) has in the last layer W φ_n + b the derivative R_n[:, d] ⊗ (φ_n, 1), so that the
inner product of two rows is

    (R_n[:, d]ᵀ R_n'[:, d']) (φ_nᵀ φ_n' / δ_W + 1 / δ_b).

The kernel of all layers is larger but similar: anchors and blocks that are chosen by the last
layer's are as good as those by the whole one (``benchmarks/anchor_search.py``). It only steers a
free choice; any kernel leaves the estimate a bound.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evigrad.blocks.anchors.choice import AT_ONCE
from evigrad.blocks.sources import Source
from evigrad.inputs import Inputs, noted_calls
from evigrad.likelihoods import Likelihood


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The linear layer that computes the outputs.

    Attributes:
        features: φ of each datum, the layer's inputs; their mean where a datum has several.
        of_weight: 1/δ_W over the temperature; the mean where weights have their own precisions.
        of_bias: 1/δ_b over the temperature; 0 where there is no bias.
    """

    features: Float[Tensor, "m F"]
    of_weight: float
    of_bias: float

    def kernel(self, vectors: Float[Tensor, "m C"]) -> Float[Tensor, "m m"]:
        """The layer's term of S for rows with these columns of the root."""
        inputs = (self.features * self.of_weight) @ self.features.mT
        return inputs.add_(self.of_bias).mul_(vectors @ vectors.mT)


# The outputs (m, C) for some inputs without a graph, and their last layer, where that is linear.
Look = Callable[[Inputs], tuple[Tensor, LastLayer | None]]


@contextmanager
def watched(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[list[Any]]:
    """Watch which linear layer with one of the weights is called last: module, input, output."""
    own = {id(weight) for weight in weights.values()}
    last: list[Any] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(output, Tensor):
            last[:] = [module, inputs[0], output]

    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    with noted_calls([each for each in layers if id(each.weight) in own], note):
        yield last


def last_layer(
    call: list[Any],
    f: Float[Tensor, "m C"],
    weights: Mapping[str, Tensor],
    precisions: Mapping[str, Tensor],
    temperature: float,
) -> LastLayer | None:
    """The layer of a watched call; None unless its output is C wide, once or more for a datum."""
    if not call:
        return None
    layer, inputs, output = call
    several = output.numel() // f.numel() if f.numel() else 0
    if output.shape[-1] != f.shape[1] or several * f.numel() != output.numel():
        return None
    names = {id(weight): name for name, weight in weights.items()}

    def variance(parameter: Tensor | None) -> float:
        name = names.get(id(parameter))
        if name is None:
            return 0.0
        return float(precisions[name].detach().reciprocal().mean()) / temperature

    features = inputs.detach().reshape(len(f), several, -1).mean(1)
    return LastLayer(features.float(), variance(layer.weight), variance(layer.bias))


class LastLayerKernel:
    """Inner products of rows by the last layer alone, with the weights at the first call.

    Each datum that is needed goes through the network once. Rows are of the root's first K
    columns.
    """

    def __init__(
        self,
        look: Look,
        likelihood: Likelihood,
        root: str,
        source: Source,
        num_columns: int,
    ) -> None:
        self._look_at, self._likelihood, self._root = look, likelihood, root
        self._source, self._num_columns = source, num_columns
        self._place = torch.full((len(source),), -1)  # each datum's place in the lists below
        self._seen = 0
        self._layers: list[LastLayer] = []
        self._vectors: list[Tensor] = []
        self._is_there = True

    def __call__(self, rows: Int[Tensor, " m"]) -> Float[Tensor, "m m"] | None:
        """The kernel of rows n K + d, on the CPU; None without a linear last layer."""
        data, columns = rows // self._num_columns, rows % self._num_columns
        if not len(rows) or not self._is_there:
            return None
        self._look(data.unique())
        if not self._is_there:
            return None
        features = torch.cat([layer.features for layer in self._layers])
        position, columns = (each.to(features.device) for each in (self._place[data], columns))
        together = replace(self._layers[0], features=features[position])
        return together.kernel(torch.cat(self._vectors)[position, columns]).cpu()

    def _look(self, data: Int[Tensor, " n"]) -> None:
        """Store what is needed of new data, or that there is no such layer."""
        listed = torch.arange(self._num_columns)
        new = data[self._place[data] < 0]
        for batch in new.split(AT_ONCE) if len(new) else ():
            f, layer = self._look_at(self._source.fetch(batch)[0])
            if layer is None:
                self._is_there = False
                return
            # A root costs as much for one column of a datum as for several.
            rows = self._likelihood.root(f, listed.to(f.device).expand(len(f), -1), self._root)
            self._vectors.append(rows.scaled.detach().float())
            self._layers.append(layer)
            self._place[batch] = torch.arange(self._seen, self._seen + len(batch))
            self._seen += len(batch)
