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
        """The ranges as numbers, in their order, by the names of their parameters."""
        ...


def ranged_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that have ranges, by their names in the model."""
    return {
        path: module
        for path, module in model.named_modules()
        if callable(getattr(module, "named_ranges", None))
    }


def learnable_ranges(module: nn.Module) -> list[str]:
    """The names of a module's ranges that are trainable parameters."""
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    return [name for name in _named(module) if name in trainable]


def range_values(model: nn.Module) -> dict[str, float]:
    """The ranges by name, without those fixed at zero; with paths if several modules have some."""
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
