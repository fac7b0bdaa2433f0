"""One model for all items that a person chose from, such as the two texts of a comparison."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, InputError, raised_in
from evigrad.inputs import Transparent, Tree, as_inputs, called, inside, mapped, tensors_of

FEWEST_ITEMS = 2


class Choices(Transparent):
    """Score each item of an example with the same model, for targets that are choices.

    The model maps one item to one score, its reward. The outputs (m, k) are the scores of the k
    items of each example. With ``Categorical()``, the target is the index of the chosen item, and
    its probability is the softmax of the scores. For two items, this is the Bradley-Terry model of
    pairwise preferences: the probability that a beats b is sigmoid(r_a − r_b). The module has the
    model's parameters and buffers under the same names.

    Args:
        model: Module that returns one score per item, in the shape (n, 1) or (n,), or an object
            with such ``logits``.
        items: Entries of the inputs that hold the items, in the order of the outputs: keys of a
            mapping, or positions in a tuple. Each entry is what the model takes, a tensor or
            nested containers of tensors, and shapes may differ between items. Default: None, so
            dimension 1 of every input tensor (m, k, ...) counts the items.

    Raises:
        ConfigurationError: If ``items`` has fewer than two entries.

    Examples:
        >>> import torch
        >>> from evigrad.models import Choices
        >>> model = Choices(torch.nn.Linear(3, 1))
        >>> model(torch.zeros(5, 2, 3)).shape  # five pairs of items with three features
        torch.Size([5, 2])

    See also: docs/likelihoods.md.
    """

    def __init__(self, model: nn.Module, items: Sequence[str | int] | None = None) -> None:
        super().__init__(model)
        if items is not None and (isinstance(items, str) or len(items) < FEWEST_ITEMS):
            raise ConfigurationError(
                f"items must name at least two entries of the inputs, got {items!r}. Use"
                ' items=("a", "b"), for example.'
            )
        self.__dict__["_items"] = None if items is None else tuple(items)

    def forward(self, *positional: Any, **named: Any) -> Float[Tensor, "m k"]:
        """Return the scores of all items of each example."""
        value = named or (positional[0] if len(positional) == 1 else positional)
        model, items = inside(self), self.__dict__["_items"]
        if items is None:
            return _scores_of_stacked(model, value)
        parts = []
        for item in items:
            with raised_in(f"items={item!r} of the inputs"):
                parts.append(value[item])
        return torch.stack([_scores(model, part) for part in parts], dim=1)

    def extra_repr(self) -> str:
        """Return the entries of the items for the module's repr."""
        items = self.__dict__["_items"]
        return "" if items is None else f"items={items}"


def _scores_of_stacked(model: nn.Module, value: Any) -> Float[Tensor, "m k"]:
    """Return the scores of items that dimension 1 of each tensor counts, in one call."""
    tensors = tensors_of(as_inputs(value))
    shapes = {tuple(part.shape[:2]) for part in tensors}
    num_data, *counts = next(iter(shapes))
    if len(shapes) > 1 or not counts or counts[0] < FEWEST_ITEMS:
        raise InputError(
            "Dimension 1 of each input tensor must count the items of an example, at least two, got"
            f" the shapes {', '.join(str(tuple(part.shape)) for part in tensors)}. If the items are"
            ' separate entries of the inputs, use Choices(model, items=("a", "b")).'
        )
    merged = mapped(lambda part: part.flatten(0, 1), value)
    return _scores(model, merged).view(num_data, counts[0])


def _scores(model: nn.Module, value: Any) -> Float[Tensor, " n"]:
    inputs = as_inputs(value)
    assert isinstance(inputs, Tensor | Tree)
    scores, count = called(model, inputs), len(inputs)
    if not isinstance(scores, Tensor) or tuple(scores.shape) not in ((count,), (count, 1)):
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(
            f"The model in Choices must return one score per item, in the shape ({count}, 1), got"
            f" {shape}."
        )
    return scores.reshape(count)
