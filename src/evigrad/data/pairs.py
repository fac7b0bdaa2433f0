"""Data sets whose items are not pairs (x, y)."""

from collections.abc import Mapping, Sequence
from typing import Any

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
        y: Field of the target.

    Raises:
        InputError: If an item lacks a field, when the item is read.

    Examples:
        >>> import torch
        >>> from evigrad.data import Pairs
        >>> rows = [{"image": torch.zeros(3), "label": 1, "id": 7}]
        >>> Pairs(rows, x="image", y="label")[0]
        (tensor([0., 0., 0.]), 1)

    See also: docs/data.md.
    """

    def __init__(self, dataset: Any, x: Field | Sequence[Field] | None = None, *, y: Field) -> None:
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
        names = [name for name in fields if name != self.y] if self.x is None else self.x
        names = [names] if isinstance(names, str | int) else list(names)
        if missing := [name for name in [*names, self.y] if name not in fields]:
            raise InputError(
                f"Item {index} of the data set has no field {missing[0]!r}. Its fields are"
                f" {', '.join(map(repr, fields))}. Use Pairs(dataset, x=..., y=...) with these"
                " fields."
            )
        if isinstance(self.x, str | int):
            return fields[self.x], fields[self.y]
        return {str(name): fields[name] for name in names}, fields[self.y]
