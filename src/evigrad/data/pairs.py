"""Data sets whose items are not pairs (x, y)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from evigrad.errors import InputError

Field = str | int


class Pairs(Dataset[tuple[Any, Any]]):
    """Use a data set of mappings or tuples as a data set of pairs (x, y).

    The items may be mappings, such as the rows of a Hugging Face data set, or tuples with more than
    two entries.

    Args:
        dataset: Map-style data set. If it has ``__getitems__``, whole batches are read in one call.
        x: Field of the inputs: a key, or a position in a tuple. With several fields, x is a
            dictionary, whose keys are the fields. Default: all fields except ``y``.
        y: Field of the target. With several fields of numbers, y is one tensor (D,) of float64
            values. Its order is the order of ``likelihood.targets``: first the target, then its
            conditions or its weight, or the targets of the heads of a ``Joint`` likelihood.

    Raises:
        InputError: When an item is read that lacks a field, or has a target without numbers.

    Examples:
        >>> import torch
        >>> from evigrad.data import Pairs
        >>> rows = [{"image": torch.zeros(3), "label": 1, "id": 7}]
        >>> Pairs(rows, x="image", y="label")[0]
        (tensor([0., 0., 0.]), 1)
        >>> rows = [{"age": torch.ones(1), "deaths": 3, "years": 20.5}]
        >>> Pairs(rows, x="age", y=["deaths", "years"])[0]  # Poisson(exposure=True)
        (tensor([1.]), tensor([ 3.0000, 20.5000], dtype=torch.float64))

    See also: docs/fit.md.
    """

    def __init__(
        self,
        dataset: Any,
        x: Field | Sequence[Field] | None = None,
        *,
        y: Field | Sequence[Field],
    ) -> None:
        self.dataset, self.x, self.y = dataset, x, y

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return the inputs and the target of an item."""
        return self._pair(self.dataset[index], index)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return several pairs."""
        if hasattr(self.dataset, "__getitems__"):
            items = self.dataset.__getitems__(indices)
        else:
            items = [self.dataset[index] for index in indices]
        return [self._pair(*pair) for pair in zip(items, indices, strict=True)]

    def _pair(self, item: Any, index: int) -> tuple[Any, Any]:
        fields: dict[Any, Any]
        if isinstance(item, Mapping):
            fields = dict(item)
        elif isinstance(item, tuple | list):
            fields = dict(enumerate(item))
        else:
            raise InputError(
                f"Item {index} of the data set must be a mapping or a tuple, got a"
                f" {type(item).__name__}. Return its fields by name."
            )
        targets = _listed(self.y)
        if self.x is None:
            names = [name for name in fields if name not in targets]
        else:
            names = _listed(self.x)
        if missing := [name for name in [*names, *targets] if name not in fields]:
            raise InputError(
                f"Item {index} of the data set has no field {missing[0]!r}. Its fields are"
                f" {', '.join(map(repr, fields))}. Use Pairs(dataset, x=..., y=...) with these"
                " fields."
            )
        is_single = isinstance(self.y, str | int)
        y = fields[self.y] if is_single else _joined([fields[name] for name in targets], index)
        if isinstance(self.x, str | int):
            return fields[self.x], y
        return {str(name): fields[name] for name in names}, y


def _listed(names: Field | Sequence[Field]) -> list[Field]:
    return [names] if isinstance(names, str | int) else list(names)


def _joined(values: Sequence[Any], index: int) -> Tensor:
    """Return numbers and vectors in one tensor."""
    try:
        parts = [torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in values]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"The targets of item {index} must be numbers, got {', '.join(map(repr, values))}."
        ) from error
    return torch.cat([part.reshape(-1) for part in parts])
