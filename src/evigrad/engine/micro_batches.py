"""Data that pass through the network at once: a given number, or as many as fit into memory."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evigrad.errors import MemoryBudgetError
from evigrad.errors.users_code import is_out_of_memory

# Part of the free memory to use; the rest is for fragmentation and for other processes.
FREE_SHARE = 0.7
# Peak memory of a pass over what autograd holds: gradients are as large as the activations, and
# kernels need workspace.
PEAK_FACTOR = 2.0


class HeldBytes(TorchDispatchMode):
    """Counts the memory of tensors made inside that is still held, each storage once.

    It works on every device, and sees the operations themselves: what autograd keeps counts also
    inside function transforms, where hooks on saved tensors are an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}
        self._given: set[StorageWeakRef] = set()

    @property
    def total(self) -> int:
        """Bytes held now."""
        return sum(size for storage, size in self._made.items() if not storage.expired())

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and note the storages that it makes."""
        kwargs = kwargs or {}
        self._given |= {s for s in _storages((args, kwargs)) if s not in self._made}
        result = func(*args, **kwargs)
        for storage, size in _storages(result).items():
            if storage not in self._given:
                self._made[storage] = size
        return result


def _storages(values: Any) -> dict[StorageWeakRef, int]:
    """The storages of all tensors in nested containers, with their bytes."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    storages = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


@dataclass
class MicroBatches:
    """The sizes of micro-batches, by kind of pass and size of a datum.

    Attributes:
        asked: A number of data, None for all at once, or ``"auto"``.
        budget: Bytes that a pass may take, or None for a share of what is free.
        chosen: The sizes found so far, for passes that are automatic or ran out of memory.
    """

    asked: int | str | None
    budget: int | None = None
    chosen: dict[str, int] = field(default_factory=dict)

    def size(self, kind: str, total: int, per_datum: Callable[[], float], free: int | None) -> int:
        """Return how many data to take next, from 1 to ``total``.

        Args:
            kind: The kind of pass.
            total: Data at hand.
            per_datum: Measures the bytes that a datum takes in such a pass.
            free: Free bytes, or None where the system does not tell.
        """
        if kind not in self.chosen and self.asked == "auto":
            budget = self.budget
            if budget is None and free is not None:
                budget = int(FREE_SHARE * free)
            if budget is not None:
                needed = max(1.0, PEAK_FACTOR * per_datum())
                self.chosen[kind] = max(1, int(budget / needed))
        limits = [total]
        if self.asked == "auto" and kind in self.chosen:
            limits.append(self.chosen[kind])
        if isinstance(self.asked, int):
            limits.append(self.asked)
        return min(limits)

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore the sizes if an exception is raised inside."""
        chosen = dict(self.chosen)
        try:
            yield
        except BaseException:
            self.chosen = chosen
            raise

    def halve(self, kind: str, failed: int) -> None:
        """From here on take half of the number that did not fit.

        Raises:
            MemoryBudgetError: If it was a single datum.
        """
        if failed == 1:
            raise MemoryBudgetError(
                "A pass over a single datum does not fit into memory. Take a smaller network,"
                " fewer augmentation samples, or a machine with more memory."
            )
        self.chosen[kind] = failed // 2


def fits(work: Callable[[], Any]) -> bool:
    """Return whether memory sufficed for ``work``; if not, free what it took.

    ``work`` must be repeatable, and leave nothing behind where it fails.
    """
    try:
        work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    # Outside of the handler, whose traceback kept the tensors of the failed pass.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False
