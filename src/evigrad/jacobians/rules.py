"""What a closed form is: the gradients in a call's output turned into rows in its parameters."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Match:
    """A function call that a closed form covers.

    Attributes:
        input: What the parameters act on; dim 0 must turn out to be the data.
        slots: The call's parameters by their role, "weight" or "bias" for example.
        settings: The other arguments that the rows depend on.
    """

    input: Tensor
    slots: dict[str, Tensor]
    settings: dict[str, Any]


@dataclass(frozen=True)
class KroneckerUse:
    """One use of a weight as a matrix, the same at T positions.

    The rows of the weight, reshaped to (G, out, in), are Σ_T gradients ⊗ inputs; G is the number
    of channel groups, whose blocks are stacked along the weight's dim 0.

    Attributes:
        inputs: What the matrix is multiplied with.
        gradients: Gradients of the rows in the product.
    """

    inputs: Float[Tensor, "m G T i"]
    gradients: Float[Tensor, "m k G T o"]


class Rule(ABC):
    """The closed form of one function.

    Attributes:
        name: For people, in ``JacobianPlan.describe()``.
        kronecker: Slots whose rows have Kronecker factors.
    """

    name: str
    kronecker: frozenset[str] = frozenset()

    @abstractmethod
    def match(self, *args: Any, **kwargs: Any) -> Match | None:
        """Read a call's arguments, in the function's own signature.

        Returns:
            None where the closed form does not hold for these arguments.
        """

    @abstractmethod
    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k *out"]) -> Tensor:
        """The rows in one parameter, (m, k, *parameter shape), from the gradient in the output."""

    def factors(self, match: Match, gradient: Float[Tensor, "m k *out"]) -> KroneckerUse:
        """The Kronecker factors of the rows in the weight."""
        raise NotImplementedError(f"{self.name} has no Kronecker factors")


def given(**slots: Tensor | None) -> dict[str, Tensor]:
    """The slots that hold a tensor."""
    return {slot: tensor for slot, tensor in slots.items() if tensor is not None}


def sum_to(
    values: Float[Tensor, "m k *out"], shape: Sequence[int]
) -> Float[Tensor, "m k *parameter"]:
    """Sum over the dimensions along which a parameter of this shape was broadcast."""
    out = values.shape[2:]
    aligned = list(shape)[-len(out) :] if out else []
    aligned = [1] * (len(out) - len(aligned)) + aligned
    dims = [2 + i for i, (a, b) in enumerate(zip(aligned, out, strict=True)) if a == 1 and b != 1]
    if dims:
        values = values.sum(dims)
    return values.reshape(*values.shape[:2], *shape)


def sum_to_channels(values: Float[Tensor, "m k c *space"]) -> Float[Tensor, "m k c"]:
    """Sum over all dimensions behind the channels."""
    return values.flatten(3).sum(-1) if values.dim() > 3 else values
