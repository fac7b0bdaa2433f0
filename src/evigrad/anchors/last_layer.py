"""The kernel of a network's last layer: what a forward pass tells of how alike rows are.

The row (n, d) has in the last layer W φ_n + b the derivative R_n[:, d] ⊗ (φ_n, 1), so that of two
rows the products are

    (R_n[:, d]ᵀ R_n'[:, d']) (φ_nᵀ φ_n' / δ_W + 1 / δ_b).

The kernel of all layers is larger, and looks alike: anchors that are chosen by the last layer's are
as good as those by the whole one (``benchmarks/anchor_search.py``). It only steers a choice that is
free; no number depends on whether it is right.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evigrad.likelihoods import Likelihood


@runtime_checkable
class Network(Protocol):
    """What the choice of anchors needs of a network."""

    def outputs(self, x: Tensor) -> Float[Tensor, "m C"]:
        """Outputs, without a graph."""
        ...

    def last_layer(self, x: Tensor) -> "tuple[Float[Tensor, 'm C'], LastLayer | None]":
        """Outputs, and the last layer where there is one that is linear."""
        ...


@dataclass(frozen=True, eq=False)
class LastLayer:
    """A linear layer that the outputs come from.

    Attributes:
        features: φ of each datum, its inputs; the mean where it has several.
        of_weight: 1/δ_W, over the temperature; the mean where weights have their own.
        of_bias: 1/δ_b, as well; 0 where there is none.
    """

    features: Float[Tensor, "m F"]
    of_weight: float
    of_bias: float

    def kernel(self, vectors: Float[Tensor, "m C"]) -> Float[Tensor, "m m"]:
        """The share of the layer in S.

        Args:
            vectors: The root's column of each row; the features are those of its datum.

        Returns:
            Inner products of the rows.
        """
        inputs = self.of_weight * (self.features @ self.features.mT) + self.of_bias
        return (vectors @ vectors.mT) * inputs


@contextmanager
def watched(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[list[Any]]:
    """Watch which linear layer is called last.

    Args:
        model: The network.
        weights: Its weights by name; layers without any of them do not count.

    Yields:
        A list that holds the last call so far: module, input and output.
    """
    own = {id(weight) for weight in weights.values()}
    last: list[Any] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(output, Tensor):
            last[:] = [module, inputs[0], output]

    handles = [
        module.register_forward_hook(note)
        for module in model.modules()
        if isinstance(module, nn.Linear) and id(module.weight) in own
    ]
    try:
        yield last
    finally:
        for handle in handles:
            handle.remove()


def last_layer(
    call: list[Any],
    f: Float[Tensor, "m C"],
    weights: Mapping[str, Tensor],
    precisions: Mapping[str, Tensor],
    temperature: float,
) -> LastLayer | None:
    """The last layer, from what was watched.

    Args:
        call: The last call of a linear layer.
        f: The outputs that it led to.
        weights: By name.
        precisions: Of the prior, by name.
        temperature: T.

    Returns:
        The layer, or None where no linear layer gives as many numbers as there are outputs.
    """
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


def kernel_of_rows(
    network: Network,
    likelihood: Likelihood,
    root: str,
    inputs: Float[Tensor, "n ..."],
    data: Int[Tensor, " m"],
    columns: Int[Tensor, " m"],
    batch_size: int,
) -> Float[Tensor, "m m"] | None:
    """What the last layer says of rows.

    Args:
        network: Gives outputs and last layer.
        likelihood: Gives their root.
        root: Its kind.
        inputs: Distinct data.
        data: The datum of each row, as a position among them.
        columns: Of the root, of each row.
        batch_size: Data that go through the network at once.

    Returns:
        The kernel, on the CPU; None where the network has no such layer.
    """
    layers: list[LastLayer] = []
    vectors: list[Tensor] = []
    listed = torch.arange(int(columns.max()) + 1)
    for x in inputs.split(batch_size):
        f, layer = network.last_layer(x)
        if layer is None:
            return None
        # A root costs as much for one column of a datum as for several.
        rows = likelihood.root(f, listed.to(f.device).expand(len(f), -1), root)
        own = rows.vectors if rows.scale is None else rows.vectors * rows.scale[..., None]
        vectors.append(own.detach().float())
        layers.append(layer)
    features = torch.cat([layer.features for layer in layers])
    data, columns = data.to(features.device), columns.to(features.device)
    together = replace(layers[0], features=features[data])
    return together.kernel(torch.cat(vectors)[data, columns]).cpu()
