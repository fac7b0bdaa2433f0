"""Which rows become anchors: greedily by a kernel, by their scores, or spread over the inputs.

The kernel is that of the network's last layer: a forward pass tells how alike rows are.
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

from evigrad.blocks.sources import Source
from evigrad.core.algebra import is_finite
from evigrad.errors import ConfigurationError, NotFiniteError, nearest
from evigrad.inputs import Inputs, noted_calls
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import check_finite

CHOICES = ("auto", "greedy", "score", "k-centre", "random")

# The greedy choice is among so many rows for each anchor, but at most MOST_CANDIDATES, or twice the
# anchors if that is more. Half of them have the largest scores, where a trained network has its
# anchors; the others are random, for a network that is not sure of anything yet.
CANDIDATES = 4
MOST_CANDIDATES = 2048
# Inputs with more numbers are projected at random to so many: this keeps distances to within about
# a tenth, and each centre has to read little.
PROJECTED = 64
# Data that are read, or go through the network, at once.
AT_ONCE = 512

# From rows n D + d to their inner products, or to None where unknown.
Kernel = Callable[[Int[Tensor, " m"]], Float[Tensor, "m m"] | None]


@dataclass(frozen=True)
class Anchoring:
    """How an anchored estimator chooses anchors and blocks.

    Attributes:
        share: The share of a block's rows that are anchors, in [0, 1).
        choice: ``greedy`` takes one row after the other, always the one of largest conditional
            variance by the kernel of the network's last layer, if linear (else by score);
            ``score`` the rows of the largest norms |R_n[:, d]|² of the likelihood's root, the data
            that the network is unsure of; ``k-centre`` those of data spread over all inputs;
            ``random`` any; ``auto`` greedily, but k-centre where all data have the same scores, as
            in regression.
        refresh: Streams of blocks (in training, rounds) from one choice of anchors to the next.
        grouped: Whether rows that have much in common given the anchors, by the kernel of the last
            layer, lie in one block; else blocks are stratified by scores alone.

    Raises:
        ConfigurationError: If a value is out of its range.
    """

    share: float = 0.9
    choice: str = "auto"
    refresh: int = 3
    grouped: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigurationError(f"anchors: share must lie in [0, 1), not {self.share}.")
        if self.choice not in CHOICES:
            raise ConfigurationError(
                f"anchors: choice is one of {', '.join(CHOICES)}, not '{self.choice}'."
                f"{nearest(str(self.choice), CHOICES)}"
            )
        if self.refresh < 1:
            raise ConfigurationError(f"anchors: refresh must be at least 1, not {self.refresh}.")

    def num_anchors(self, num_rows: int) -> int:
        """How many of a block's rows are anchors; at least one is left for its part."""
        return min(int(self.share * num_rows), num_rows - 1)


def choose(
    anchoring: Anchoring,
    scores: Float[Tensor, "N D"],
    count: int,
    generator: torch.Generator,
    centres: Callable[[int], Int[Tensor, " k"] | None] | None = None,
    kernel: Kernel | None = None,
) -> Int[Tensor, " Z"]:
    """Return the anchors among all rows, as n D + d in ascending order.

    ``scores`` are |R_n[:, d]|² of every row (n, d). ``centres`` gives data spread over all inputs,
    or None where inputs have no distances; rows are then random. Without a ``kernel`` greedy is by
    score.
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
    """Return the first ``count`` pivots, in order, of a Cholesky factorisation of I + S, for S ≥ 0.

    Given those before, each has the largest variance S_rr|Z, and so the largest entropy
    ½ log(1 + S_rr|Z); with the greedy choice ℓ(Z) is at least 1 − 1/e of the largest of so many
    rows, since it is submodular (Nemhauser et al., 1978).
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
    """Data spread over all inputs: the farthest-first traversal, continued where more are wanted.

    Where every row has the same score, as in regression, scores do not tell the network's
    uncertainty, and anchors should represent as many of the others as they can. Always taking the
    datum farthest from those chosen so far leaves no datum further from its centre than twice the
    smallest possible radius (Gonzalez, 1985).
    """

    def __init__(self) -> None:
        self._points: Float[Tensor, "N d"] | None = None
        self._order: list[int] = []
        # Squared distance of each datum to the nearest centre.
        self._left: Float[Tensor, " N"] | None = None

    def first(self, source: Source, count: int) -> Int[Tensor, " k"] | None:
        """Positions of the first centres; None where inputs have no distances, as tokens."""
        if self._points is None:
            self._points = _points(source)
        points = self._points
        if points is None:
            return None
        while len(self._order) < min(count, len(points)):
            left = self._left
            if left is None:  # the first centre is farthest from the mean of all
                left = (points - points.mean(0)).square().sum(1)
            chosen = int(left.argmax())
            distances = (points - points[chosen]).square().sum(1)
            self._left = distances if self._left is None else torch.minimum(self._left, distances)
            # Among equal data, those already chosen come last.
            self._left[chosen] = -1.0
            self._order.append(chosen)
        return torch.tensor(self._order[:count], dtype=torch.int64, device="cpu")


def _points(source: Source) -> Float[Tensor, "N d"] | None:
    """The inputs as vectors of few numbers, on the CPU."""
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
    columns. If outputs are not coupled, a row needs its own column only: all K columns of every
    datum would be N K C numbers.
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
        self._place = torch.full(
            (len(source),), -1, device="cpu"
        )  # each datum's place in the lists below
        self._seen = 0
        self._layers: list[LastLayer] = []
        self._vectors: list[Tensor] = []  # all K columns; the outputs if these are not coupled
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
        position, columns = (t.to(features.device) for t in (self._place[data], columns))
        together = replace(self._layers[0], features=features[position])
        vectors = torch.cat(self._vectors)
        if self._likelihood.couples_outputs:
            vectors = vectors[position, columns]
        else:
            root = self._likelihood.root(vectors[position], columns[:, None], self._root)
            vectors = root.scaled.detach()[:, 0].float()
        kernel = together.kernel(vectors).cpu()
        if not is_finite(kernel):
            raise NotFiniteError(
                "Products of the last layer's inputs are NaN or infinite: weights or"
                " hyperparameters have diverged. Lower their learning rates."
            )
        return kernel

    def _look(self, data: Int[Tensor, " n"]) -> None:
        """Store what is needed of new data, or that there is no such layer."""
        listed = torch.arange(self._num_columns, device="cpu")
        new = data[self._place[data] < 0]
        for batch in new.split(AT_ONCE) if len(new) else ():
            f, layer = self._look_at(self._source.fetch(batch)[0])
            if layer is None:
                self._is_there = False
                return
            check_finite("The model's outputs", f)
            if self._likelihood.couples_outputs:
                # A root costs as much for one column of a datum as for several.
                columns = listed.to(f.device).expand(len(f), -1)
                rows = self._likelihood.root(f, columns, self._root)
                self._vectors.append(rows.scaled.detach().float())
            else:
                self._vectors.append(f.detach())
            self._layers.append(layer)
            self._place[batch] = torch.arange(self._seen, self._seen + len(batch), device="cpu")
            self._seen += len(batch)
