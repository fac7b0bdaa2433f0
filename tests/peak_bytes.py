"""The peak memory of tensors, on any device and inside function transforms."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Count the bytes of tensors that are created in this context, each storage once.

    Attributes:
        most: The peak so far, in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._created: dict[StorageWeakRef, int] = {}
        self._earlier: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._earlier |= storages((args, kwargs)).keys() - self._created.keys()
        result = func(*args, **kwargs)
        sizes = storages(result).items()
        self._created |= {s: size for s, size in sizes if s not in self._earlier}
        self._created = {s: size for s, size in self._created.items() if not s.expired()}
        self.most = max(self.most, sum(self._created.values()))
        return result


def storages(values: Any) -> dict[StorageWeakRef, int]:
    """Return the storages of all tensors in nested containers, with their bytes."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    held = [tensor.untyped_storage() for tensor in tensors]
    return {StorageWeakRef(storage): storage.nbytes() for storage in held}
