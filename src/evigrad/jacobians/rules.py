"""What a closed form is: it turns the gradients in a call's output into rows in its parameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jaxtyping import Float
from torch import Tensor

from evigrad.jacobians.convolutions import inner_product
from evigrad.jacobians.kronecker import KroneckerUse


@dataclass(frozen=True)
class Match:
    """A function call that a closed form covers.

    Attributes:
        input: The tensor that the parameters act on; dim 0 must count the data, each in the same
            number F of consecutive parts.
        slots: The call's parameters by their role, for example "weight" or "bias".
        settings: The other arguments that the rows depend on.
    """

    input: Tensor
    slots: dict[str, Tensor]
    settings: dict[str, Any]


class Rule(ABC):
    """The closed form of one function.

    Dim 0 of the input counts m data times F consecutive parts of each, for example augmentation
    samples or patches; F is 1 where it counts the data alone. Gradients in the output have separate
    dimensions for the two, and a datum's rows are sums over its parts.

    Attributes:
        name: For ``JacobianPlan.describe()``.
        kronecker: Slots whose rows have Kronecker factors.
    """

    name: str
    kronecker: frozenset[str] = frozenset()

    @abstractmethod
    def match(self, *args: Any, **kwargs: Any) -> Match | None:
        """Read a call's arguments, in the function's signature; None if no closed form holds."""

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call the function, with detached parameters, or a faster equivalent."""
        return function(*args, **kwargs)

    @abstractmethod
    def rows(self, slot: str, match: Match, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
        """The rows in one parameter, (m, k, *parameter shape), from the gradient in the output."""

    def inner(
        self,
        slot: str,
        match: Match,
        gradient: Float[Tensor, "m k F *out"],
        cotangent: Float[Tensor, "m k *parameter"],
    ) -> Float[Tensor, ""]:
        """Σ cotangent · rows in one parameter; the cotangent gets no gradient."""
        parts, numel = gradient.shape[2], prod(cotangent.shape[2:])
        if parts > 1 and numel <= prod(gradient.shape[3:]):
            # Each part as a datum of its own: the derivative in the gradients, a few numbers for
            # each part, is then never expanded in memory.
            gradient = gradient.transpose(1, 2).flatten(0, 1).unsqueeze(2)
            cotangent = cotangent.repeat_interleave(parts, dim=0)
        return inner_product(self.rows(slot, match, gradient), cotangent)

    def factors(self, match: Match, gradient: Float[Tensor, "m k F *out"]) -> KroneckerUse:
        """The Kronecker factors of the rows in the weight."""
        raise NotImplementedError(f"{self.name} has no Kronecker factors")


def aligned(values: Tensor, gradient: Float[Tensor, "m k F *out"]) -> Tensor:
    """Values of the data and their parts, (m F, ...), as (m, 1, F, ...) like the gradients."""
    return values.unflatten(0, (gradient.shape[0], gradient.shape[2]))[:, None]


def given(**slots: Tensor | None) -> dict[str, Tensor]:
    """The slots that hold a tensor."""
    return {slot: tensor for slot, tensor in slots.items() if tensor is not None}


def sum_to(
    values: Float[Tensor, "m k F *out"], shape: Sequence[int]
) -> Float[Tensor, "m k *parameter"]:
    """Sum over the dimensions along which a parameter of this shape was broadcast."""
    out = values.shape[2:]
    sizes = list(shape)[-len(out) :]
    sizes = [1] * (len(out) - len(sizes)) + sizes
    dims = [2 + i for i, (a, b) in enumerate(zip(sizes, out, strict=True)) if a == 1 and b != 1]
    if dims:
        values = values.sum(dims)
    return values.reshape(*values.shape[:2], *shape)


def sum_to_channels(values: Float[Tensor, "m k F c *space"]) -> Float[Tensor, "m k c"]:
    """Sum over all dimensions but the channels."""
    return values.sum((2, *range(4, values.dim())))
