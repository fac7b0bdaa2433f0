"""Share a backward pass between outputs that depend on different positions of every layer.

KFAC of all data needs the gradients of each output with respect to the outputs of each layer. For C
outputs, these are C backward passes. In a convolutional network with an output for each pixel, most
of these gradients are zero. Only a few positions of a layer, around the pixel, have others.

If the positions of two outputs do not overlap in any layer, the gradient of their sum contains both
gradients, at different positions. Sums over outputs and positions of outer products of gradients
then follow from one backward pass for all outputs with the same color. This is the method of
Curtis, Powell and Reid (1974, *On the Estimation of Sparse Jacobian Matrices*) for Jacobians of
layers.

The positions are found in a pass over all outputs. Other examples may have nonzero gradients at
other positions. So each shared pass is checked: a second pass multiplies each output by a random
factor. The gradient at each position must be multiplied by the factor of the output that owns the
position. This has probability zero if another output adds to the gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# The mean number of outputs of a color must be at least this, because a color takes two passes.
FEWEST_SHARED = 4
# Largest difference between a gradient and the expected gradient, relative to the norm of the
# gradients of all examples. It allows for rounding. An output that is mistaken for zero has at most
# about three times this relative norm.
_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
# How often positions are recorded. Later passes over examples that do not fit take all outputs.
MOST_RECORDS = 4
_MOST_NUMBERS = 2**27


@dataclass(frozen=True, eq=False)
class Coloring:
    """Colors of the outputs. Outputs of the same color share no position.

    Attributes:
        colors: The color of each output, from 0.
        owners: For each layer, the output of each color at each position, or −1 for none.
        factors: A random factor for each output.
    """

    colors: Int[Tensor, " C"]
    owners: Mapping[str, Int[Tensor, "K T"]]
    factors: Float[Tensor, " C"]

    @property
    def num_colors(self) -> int:
        """The number of colors, K."""
        return int(self.colors.max()) + 1

    @classmethod
    def of(cls, reached: Mapping[str, Bool[Tensor, "C T"]]) -> "Coloring":
        """Return a coloring in which each output takes the first color that has room for it."""
        joined = torch.cat([of_layer.cpu() for of_layer in reached.values()], 1)
        num_outputs, num_positions = joined.shape
        taken = torch.zeros(num_outputs, num_positions, dtype=torch.bool, device="cpu")
        colors = torch.zeros(num_outputs, dtype=torch.long, device="cpu")
        num_colors = 0
        for output, positions in enumerate(joined):
            where = positions.nonzero()[:, 0]
            overlaps = taken[: num_colors + 1, where].any(1)
            color = int((~overlaps).nonzero()[0, 0])  # the next color is not taken anywhere
            colors[output] = color
            taken[color, where] = True
            num_colors = max(num_colors, color + 1)
        owners = {}
        for name, of_layer in reached.items():
            outputs, positions = of_layer.cpu().nonzero(as_tuple=True)
            of_colors = torch.full((num_colors, of_layer.shape[1]), -1, device="cpu")
            of_colors[colors[outputs], positions] = outputs
            owners[name] = of_colors.to(of_layer.device)
        generator = torch.Generator().manual_seed(0)
        factors = 1 + torch.rand(
            num_outputs, generator=generator, dtype=torch.float64, device="cpu"
        )
        device = next(iter(reached.values())).device
        return cls(colors.to(device), owners, factors.to(device))

    def vectors(
        self, root: Float[Tensor, "m C"], colors: slice, factors: bool = False
    ) -> Float[Tensor, "m k C"]:
        """Return the sum of the rows of all outputs of each color, for the diagonal ``root``."""
        numbers = torch.arange(colors.start, colors.stop, device=self.colors.device)
        is_of_color = (self.colors == numbers[:, None]).to(root)
        rows = root * self.factors.to(root) if factors else root
        return is_of_color * rows[:, None]

    def agrees(
        self,
        name: str,
        colors: slice,
        gradients: Float[Tensor, "m k G T o"],
        multiplied: Float[Tensor, "m k G T o"],
    ) -> bool:
        """Return whether each gradient belongs only to the output that owns its position.

        ``multiplied`` are the gradients after multiplying each output by its factor. Inputs of
        another shape may have other positions, or other uses of a parameter.
        """
        if name not in self.owners or self.owners[name].shape[1] != gradients.shape[3]:
            return False
        owners = self.owners[name][colors]
        expected = self.factors.to(gradients)[owners.clamp(min=0)] * (owners >= 0)
        difference = torch.addcmul(multiplied, gradients, expected[:, None, :, None], value=-1.0)
        allowed = _TOLERANCES[gradients.dtype] * gradients.norm()
        return bool(difference.norm() <= allowed)

    def rows(
        self, name: str, colors: slice, terms: Float[Tensor, "m k T n"]
    ) -> Float[Tensor, "m d n"]:
        """Return the sums over the positions of each of the d outputs with one of the colors."""
        owners = self.owners[name][colors].flatten()
        chosen = (self.colors >= colors.start) & (self.colors < colors.stop)
        places = chosen.cumsum(0) - 1
        count = int(chosen.sum())
        # Positions without an owner, where terms are zero, are added to a place that is removed.
        places = torch.where(owners >= 0, places[owners.clamp(min=0)], count)
        sums = terms.new_zeros(len(terms), count + 1, terms.shape[3])
        return sums.index_add_(1, places, terms.flatten(1, 2))[:, :count]


@dataclass(eq=False)
class Reach:
    """Which positions of each layer each output reaches, as far as examples have shown.

    Attributes:
        coloring: A coloring by these positions, or None if there is none yet.
        num_records: How often all outputs were recorded.
        is_local: Whether outputs reach few positions.
    """

    coloring: Coloring | None = None
    num_records: int = 0
    is_local: bool = True
    _reached: dict[str, Tensor] = field(default_factory=dict)
    _now: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def records(self) -> bool:
        """Whether to record another pass over all outputs."""
        return self.is_local and self.num_records < MOST_RECORDS

    @property
    def has_learned(self) -> bool:
        """Whether a pass has shown anything."""
        return self.num_records > 0 or not self.is_local

    def as_record(self) -> dict[str, Any]:
        """Return a record from which ``from_record`` restores this object."""
        coloring = self.coloring
        owners = {} if coloring is None else coloring.owners
        return {
            "num_records": self.num_records,
            "is_local": self.is_local,
            "num_outputs": 0 if coloring is None else len(coloring.colors),
            "owners": {name: numbers.int().cpu() for name, numbers in owners.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], device: torch.device) -> "Reach":
        """Restore an object on a device, so that later passes take the same outputs together."""
        reached = {}
        for name, owners in record["owners"].items():
            _, positions = (owners >= 0).nonzero(as_tuple=True)
            of_layer = torch.zeros(
                record["num_outputs"], owners.shape[1], dtype=torch.bool, device="cpu"
            )
            of_layer[owners[owners >= 0].long(), positions] = True
            reached[name] = of_layer.to(device)
        coloring = Coloring.of(reached) if reached else None
        return cls(coloring, record["num_records"], record["is_local"], reached)

    def start(self) -> None:
        """Start to record a pass over all outputs."""
        self._now = {}

    def add(self, name: str, gradients: Float[Tensor, "m k G T o"], num_outputs: int) -> None:
        """Record the next k outputs' gradients with respect to the outputs of a layer."""
        # Without a copy of the gradients. NaN reaches its position too.
        at_most, least = gradients.amax((0, 2, 4)), gradients.amin((0, 2, 4))
        reached = ~((at_most == 0) & (least == 0))
        self._now.setdefault(name, []).append(reached)
        numbers = num_outputs * reached.shape[1]
        # The positions of the outputs of a color are at most all positions.
        if FEWEST_SHARED * float(reached.float().mean()) > 1 or numbers > _MOST_NUMBERS:
            self.is_local = False

    def finish(self) -> None:
        """Color the outputs after a pass over all of them."""
        now = {name: torch.cat(parts) for name, parts in self._now.items()}
        self._now, self.num_records = {}, self.num_records + 1
        before, self._reached = self._reached, now
        if {n: r.shape for n, r in now.items()} == {n: r.shape for n, r in before.items()}:
            self._reached = {name: reached | before[name] for name, reached in now.items()}
        coloring = Coloring.of(self._reached)
        if FEWEST_SHARED * coloring.num_colors > len(coloring.colors):
            self.is_local, coloring = False, None
        self.coloring = coloring
