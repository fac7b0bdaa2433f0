"""Choose anchors by a kernel, by their scores, or by their spread over the inputs.

The kernel contains the inner products of rows in the network's last layer W φ_n + b, where φ_n is
the layer's input for example n. A forward pass is enough to compute this kernel. If R_n is a root
of the likelihood's Hessian for example n, the row (n, d) is R_n[:, d] ⊗ (φ_n, 1) in the last layer.
With the prior precisions δ_W and δ_b, two rows have the inner product

    (R_n[:, d]ᵀ R_n'[:, d']) (φ_nᵀ φ_n' / δ_W + 1 / δ_b).

The kernel of all layers is larger but similar, and does not lead to better anchors or blocks
(benchmarks/README.md). The estimate is a bound for any choice of anchors.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evigrad.blocks.sources import Source
from evigrad.core.algebra import is_finite, widened
from evigrad.errors import ConfigurationError, NotFiniteError, nearest
from evigrad.inputs import Inputs, noted_calls
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import check_finite

CHOICES = ("auto", "greedy", "score", "k-centre", "random")

# The greedy choice considers this number of candidates per anchor, but at most MOST_CANDIDATES, or
# twice the anchors if that is more. Half of them have the largest scores, where a trained network
# has its anchors. The other half is random, for a network that is still uncertain about all data.
CANDIDATES = 4
MOST_CANDIDATES = 2048
# Larger inputs are projected at random to this dimension. This keeps distances to within about a
# tenth, and makes each center cheap.
PROJECTED = 64
# Number of examples that are read or evaluated at once.
AT_ONCE = 512

# Maps rows n D + d to their inner products, or to None if these are unknown.
Kernel = Callable[[Int[Tensor, " m"]], Float[Tensor, "m m"] | None]


@dataclass(frozen=True)
class Anchoring:
    """How an anchored estimator chooses anchors and blocks.

    A row corresponds to one output of one example. Its score is its term in the trace of the
    likelihood's Hessian, which is large if the network is uncertain about the output.

    Attributes:
        share: Share of anchors among the rows of a block, in [0, 1).
        choice: Which rows become anchors. ``greedy`` repeatedly adds the row with the largest
            conditional variance under the kernel of the last layer. If this layer is not linear,
            rows are added by score. ``score`` takes the rows with the largest scores. ``k-centre``
            spreads anchors over the inputs, and ``random`` draws them uniformly. ``auto`` is
            ``k-centre`` if all examples have the same scores, as in regression, and ``greedy``
            otherwise.
        refresh: Number of training rounds that use the same anchors. Outside training, each
            iteration over a stream of blocks counts as a round.
        grouped: Whether blocks consist of rows that are similar given the anchors, according to the
            kernel of the last layer. Otherwise, blocks are only stratified by score.

    Raises:
        ConfigurationError: If a value is out of range.

    Examples:
        >>> from evigrad import Anchoring
        >>> Anchoring(share=0.8, choice="greedy").refresh
        3

    See also: docs/theory.md.
    """

    share: float = 0.9
    choice: str = "auto"
    refresh: int = 3
    grouped: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigurationError(f"anchoring.share must lie in [0, 1), got {self.share}.")
        if self.choice not in CHOICES:
            raise ConfigurationError(
                f"anchoring.choice must be one of {', '.join(CHOICES)}, got '{self.choice}'."
                f"{nearest(str(self.choice), CHOICES)}"
            )
        if self.refresh < 1:
            raise ConfigurationError(f"anchoring.refresh must be at least 1, got {self.refresh}.")

    def num_anchors(self, num_rows: int) -> int:
        """Return the number of anchors in a block. At least one row is not an anchor."""
        return min(int(self.share * num_rows), num_rows - 1)


def choose(
    anchoring: Anchoring,
    scores: Float[Tensor, "N D"],
    count: int,
    generator: torch.Generator,
    centres: Callable[[int], Int[Tensor, " k"] | None] | None = None,
    kernel: Kernel | None = None,
) -> Int[Tensor, " Z"]:
    """Return ``count`` rows as anchors, in ascending order. Row (n, d) has the number n D + d.

    ``scores`` contains |R_n[:, d]|² for all rows. ``centres`` returns examples that are spread
    over all inputs. If it returns None, the anchors are random. Without a ``kernel``, the greedy
    choice is by score.
    """
    num_data, num_columns = scores.shape
    choice = anchoring.choice
    if choice == "auto":
        choice = "k-centre" if bool((scores == scores[:1]).all()) else "greedy"
    best: Tensor | None = None
    if choice == "k-centre" and centres is not None:
        data = centres(-(-count // num_columns))
        if data is not None:
            best = (data[:, None] * num_columns + torch.arange(num_columns, device="cpu")).flatten()
    elif choice in ("greedy", "score"):
        best = scores.flatten().argsort(descending=True, stable=True)
        if choice == "greedy" and kernel is not None and 0 < count < len(best):
            half = max(count, min(CANDIDATES * count, MOST_CANDIDATES) // 2)
            others = best[half:]
            drawn = torch.randperm(len(others), generator=generator, device="cpu")[:half]
            candidates = torch.cat([best[:half], others[drawn]])
            gram = kernel(candidates)
            if gram is not None and bool(gram.diagonal().isfinite().all()):
                best = candidates[pivots(gram, count)]
    if best is None:
        best = torch.randperm(num_data * num_columns, generator=generator, device="cpu")
    return best[:count].sort().values


def pivots(kernel: Float[Tensor, "m m"], count: int) -> Int[Tensor, " k"]:
    """Return the first ``count`` pivots of a Cholesky factorization of I + S, for a kernel S.

    Each pivot is the row with the largest variance given the earlier pivots. The function
    ℓ(Z) = log det(I + S_ZZ) is submodular. For the pivots, its value is therefore at least 1 − 1/e
    times the largest value for ``count`` rows (Nemhauser et al., 1978).
    """
    left = kernel.diagonal().clone()
    factor = kernel.new_zeros(count, len(kernel))
    chosen = torch.zeros(count, dtype=torch.int64, device=kernel.device)
    for step in range(count):
        row = left.argmax().reshape(1)
        chosen[step] = row[0]
        before = factor[:step]
        column = kernel.index_select(0, row)[0] - before.index_select(1, row)[:, 0] @ before
        variance = left.index_select(0, row).clamp(min=0.0)
        factor[step] = column / (1.0 + variance).sqrt()
        left = left - factor[step].square()
        left[row] = -torch.inf
    return chosen


class Centres:
    """Centers, which are examples spread over all inputs.

    Each new center is the example farthest from all earlier centers. For any number of centers, the
    largest distance from an example to its nearest center is at most twice the smallest possible
    value (Gonzalez, 1985).
    """

    def __init__(self) -> None:
        self._points: Float[Tensor, "N d"] | None = None
        self._order: list[int] = []
        # Squared distance of each example to the nearest center, −1 for the centers.
        self._left: Float[Tensor, " N"] | None = None

    def first(self, source: Source, count: int) -> Int[Tensor, " k"] | None:
        """Return the positions of the first ``count`` centers.

        If the inputs are not a floating-point tensor, return None.
        """
        if self._points is None:
            self._points = _points(source)
        points = self._points
        if points is None:
            return None
        while len(self._order) < min(count, len(points)):
            left = self._left
            if left is None:  # the first center is farthest from the mean
                left = (points - points.mean(0)).square().sum(1)
            chosen = int(left.argmax())
            distances = (points - points[chosen]).square().sum(1)
            self._left = distances if self._left is None else torch.minimum(self._left, distances)
            # Among equal examples, the chosen ones come last.
            self._left[chosen] = -1.0
            self._order.append(chosen)
        return torch.tensor(self._order[:count], dtype=torch.int64, device="cpu")


def _points(source: Source) -> Float[Tensor, "N d"] | None:
    """Return the inputs as vectors of at most PROJECTED numbers, on the CPU."""
    vectors: list[Tensor] = []
    projection: Tensor | None = None
    for indices in torch.arange(len(source), device="cpu").split(AT_ONCE):
        x, _ = source.fetch(indices)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        flat = x.detach().reshape(len(x), -1).float().cpu()
        if flat.shape[1] > PROJECTED:
            if projection is None:
                generator = torch.Generator().manual_seed(0)
                projection = torch.randn(
                    flat.shape[1], PROJECTED, generator=generator, device="cpu"
                )
            flat = flat @ projection
        vectors.append(flat)
    return torch.cat(vectors)


# ------------------------------------------------------------ the last layer


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The linear layer that computes the outputs.

    Attributes:
        features: Input φ of the layer for each example. If the layer has several inputs per
            example, φ is their mean.
        weight_variance: Prior variance 1/δ_W of the weights, divided by the temperature. If weights
            have separate precisions, it is the mean over the weights.
        bias_variance: Prior variance 1/δ_b of the biases, divided by the temperature. It is 0
            without a bias.
    """

    features: Float[Tensor, "m F"]
    weight_variance: float
    bias_variance: float

    def kernel(self, vectors: Float[Tensor, "m C"]) -> Float[Tensor, "m m"]:
        """Return the inner products of rows in this layer, given their columns of the root."""
        inputs = (self.features * self.weight_variance) @ self.features.mT
        return inputs.add_(self.bias_variance).mul_(vectors @ vectors.mT)


# Maps inputs to their outputs (m, C) without a graph, and to the last layer if that is linear.
Look = Callable[[Inputs], tuple[Tensor, LastLayer | None]]


@contextmanager
def watched(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[list[Any]]:
    """Record the last call of a linear layer whose weight is one of the ``weights``."""
    weight_ids = {id(weight) for weight in weights.values()}
    last: list[Any] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(output, Tensor):
            last[:] = [module, inputs[0], output]

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    with noted_calls([layer for layer in layers if id(layer.weight) in weight_ids], note):
        yield last


def last_layer(
    call: list[Any],
    f: Float[Tensor, "m C"],
    weights: Mapping[str, Tensor],
    precisions: Mapping[str, Tensor],
    temperature: float,
) -> LastLayer | None:
    """Return the layer of a ``watched`` call.

    Return None if there was no call, or if the shape of its outputs does not match ``f``.
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
    return LastLayer(widened(features), variance(layer.weight), variance(layer.bias))


class LastLayerKernel:
    """Inner products, in the last layer, of rows that belong to the first K columns of the root.

    Each example passes through the network at most once, so the weights must not change. If the
    likelihood does not couple outputs, outputs are stored instead of roots to save memory.
    """

    def __init__(
        self, look: Look, likelihood: Likelihood, root: str, source: Source, num_columns: int
    ) -> None:
        self._look_at, self._likelihood, self._root = look, likelihood, root
        self._source, self._num_columns = source, num_columns
        # The place of each example in the lists below, or -1.
        self._place = torch.full((len(source),), -1, device="cpu")
        self._seen = 0
        self._layers: list[LastLayer] = []
        self._vectors: list[Tensor] = []  # all K columns, or outputs that are not coupled
        self._targets: list[Tensor] = []  # of outputs that are not coupled
        self._is_there = True

    def __call__(self, rows: Int[Tensor, " m"]) -> Float[Tensor, "m m"] | None:
        """Return the kernel of rows n K + d, on the CPU, or None without a linear last layer."""
        data, columns = rows // self._num_columns, rows % self._num_columns
        if not len(rows) or not self._is_there:
            return None
        self._look(data.unique())
        if not self._is_there:
            return None
        features = torch.cat([layer.features for layer in self._layers])
        position, columns = (t.to(features.device) for t in (self._place[data], columns))
        together = replace(self._layers[0], features=features[position])
        vectors = torch.cat(self._vectors)
        if self._likelihood.couples_outputs:
            vectors = vectors[position, columns]
        else:
            likelihood = self._likelihood.at(torch.cat(self._targets)[position])
            root = likelihood.root(vectors[position], columns[:, None], self._root)
            vectors = widened(root.scaled.detach()[:, 0])
        kernel = together.kernel(vectors).cpu()
        if not is_finite(kernel):
            raise NotFiniteError(
                "Products of the last layer's inputs are NaN or infinite, so the weights or"
                " hyperparameters have diverged. Lower their learning rates."
            )
        return kernel

    def _look(self, data: Int[Tensor, " n"]) -> None:
        """Store the features and vectors of new examples, or that the last layer is not linear."""
        listed = torch.arange(self._num_columns, device="cpu")
        new = data[self._place[data] < 0]
        for batch in new.split(AT_ONCE) if len(new) else ():
            x, y = self._source.fetch(batch)
            f, layer = self._look_at(x)
            if layer is None:
                self._is_there = False
                return
            check_finite("The model's outputs", f)
            if self._likelihood.couples_outputs:
                # A root costs the same for one column of an example as for several.
                columns = listed.to(f.device).expand(len(f), -1)
                rows = self._likelihood.at(y).root(f, columns, self._root)
                self._vectors.append(widened(rows.scaled.detach()))
            else:
                self._vectors.append(f.detach())
                self._targets.append(y)
            self._layers.append(layer)
            self._place[batch] = torch.arange(self._seen, self._seen + len(batch), device="cpu")
            self._seen += len(batch)
