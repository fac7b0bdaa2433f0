"""The ranges of a model's transforms, by name."""

from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class Ranged(Protocol):
    """A transform with ranges, as ``AffineInvariance``: half the width of what it draws."""

    @property
    def ranges(self) -> Tensor:
        """The ranges, with a graph to the parameters that are learned."""
        ...

    def named_ranges(self) -> dict[str, float]:
        """The same as numbers, in their order, by the names of their parameters."""
        ...


def ranged_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that have ranges.

    Args:
        model: Any module.

    Returns:
        The modules by their names in the model.
    """
    return {
        path: module
        for path, module in model.named_modules()
        if callable(getattr(module, "named_ranges", None))
    }


def learnable_ranges(module: nn.Module) -> list[str]:
    """Which of a module's ranges can be learned.

    Args:
        module: Of ``ranged_modules``.

    Returns:
        Names of ``named_ranges()`` that are those of trainable parameters.
    """
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    return [name for name in _named(module) if name in trainable]


def range_values(model: nn.Module) -> dict[str, float]:
    """The present ranges, but for those that are zero for good.

    Args:
        model: Any module.

    Returns:
        By their names; with the module's path in front where several modules have ranges.
    """
    modules = ranged_modules(model)
    found: dict[str, float] = {}
    for path, module in modules.items():
        learnable = learnable_ranges(module)
        front = f"{path}." if len(modules) > 1 else ""
        for name, value in _named(module).items():
            if value != 0 or name in learnable:
                found[front + name] = value
    return found


def _named(module: nn.Module) -> dict[str, float]:
    assert isinstance(module, Ranged)
    return module.named_ranges()
