"""Compare results with references. Errors state what differs, by how much and where."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from evigrad.errors import ConformanceError

# Tolerances relative to the largest entry, for exact formulas and for finite differences.
EXACT = 1e-8
DIFFERENCES = 1e-5
# Entries of a tensor without larger entries are compared as if the largest entry had this size.
_SMALLEST = 1e-3
_STEP = 1e-5


def agree(what: str, actual: Tensor, expected: Tensor, tolerance: float | Tensor = EXACT) -> None:
    """Raise an error if two tensors differ. A tensor as tolerance is absolute.

    Raises:
        ConformanceError: If shapes or values differ, or a value is NaN or infinite.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    if actual.shape != expected.shape:
        raise ConformanceError(
            f"{what} must have the shape {tuple(expected.shape)}, got {tuple(actual.shape)}."
        )
    if not actual.numel():
        return
    difference = (actual - expected).abs()
    if not isinstance(tolerance, Tensor):
        tolerance = tolerance * torch.clamp(expected.abs().amax(), min=_SMALLEST)
    excess = (difference - tolerance).nan_to_num(nan=torch.inf)
    if bool((excess > 0).any()):
        index = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        where = f" at index {list(index)}" if index else ""
        raise ConformanceError(
            f"{what}{where} must be {expected[index]:.6g}, got {actual[index]:.6g}, a difference"
            f" of {difference[index]:.3g}. {int((excess > 0).sum())} of {excess.numel()} numbers"
            " differ."
        )


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers in float64, which do not change the global random state."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def gradients(value: Tensor, arguments: Iterable[Tensor], graph: bool = False) -> list[Tensor]:
    """Return the gradient of a value, with zeros for arguments on which it does not depend."""
    arguments = list(arguments)
    if not value.requires_grad or not arguments:
        return [torch.zeros_like(argument) for argument in arguments]
    slopes = torch.autograd.grad(
        value,
        arguments,
        retain_graph=True,
        create_graph=graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(slopes)


def same_gradients(
    what: str,
    actual: Tensor,
    expected: Tensor,
    arguments: Mapping[str, Tensor],
    tolerance: float = EXACT,
) -> None:
    """Compare the gradients of two values in arguments by name."""
    pairs = (gradients(value, arguments.values()) for value in (actual, expected))
    for name, one, other in zip(arguments, *pairs, strict=True):
        agree(f"The derivative of {what} with respect to {name}", one, other, tolerance)


def difference_quotients(
    function: Callable[[], Tensor], argument: Tensor, directions: Iterable[Tensor]
) -> list[Tensor]:
    """Return central differences of a function along directions of an argument.

    The argument, which the function reads, is changed in place and restored. Autograd does not
    notice, so graphs that contain the argument remain valid.
    """
    quotients, start = list[Tensor](), argument.detach().clone()
    with torch.no_grad():
        for direction in directions:
            ends = list[Tensor]()
            for sign in (1.0, -1.0):
                argument.data.copy_(start + sign * _STEP * direction)
                ends.append(function().detach().double())
            quotients.append((ends[0] - ends[1]) / (2 * _STEP))
        argument.data.copy_(start)
    return quotients


def unit_directions(argument: Tensor) -> list[Tensor]:
    """Return a direction for each entry of a tensor."""
    return list(
        torch.eye(argument.numel(), dtype=argument.dtype, device=argument.device).view(
            -1, *argument.shape
        )
    )


def doubled(value: object) -> object:
    """Return an argument, or a copy in float64 if it is a parameter or a tensor of real numbers."""
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().double().clone(), value.requires_grad)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().clone()
    return value


def leaves(values: Sequence[object]) -> dict[str, Tensor]:
    """Return the tensors that require gradients and are not parameters, by position."""
    return {
        f"argument {i}": value
        for i, value in enumerate(values)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.requires_grad
    }
