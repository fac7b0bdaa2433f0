"""Noise for forward passes that does not depend on the size of the micro-batches.

A module that draws noise (``Stochastic``) uses the evidence's generator. The noise of a block is
drawn in pages. A page has a fixed number of examples and a separate seed. So each example has the
same noise in every pass, and memory holds only the noise of the current examples.

``PackedModel`` turns a model into a deterministic function of one tensor, which contains the inputs
and the noise. Each row of the tensor corresponds to one example, so inputs and noise stay together
when examples are split, vectorized or repeated.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import reduce
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.inputs import (
    AtPositions,
    Inputs,
    Transparent,
    called,
    called_at,
    inside,
    layout,
    tensors_of,
)

# Number of examples whose noise is drawn at once. Few micro-batches are smaller, and the noise
# takes little memory compared with their activations.
PAGE = 64
# Seeds of consecutive pages are this far apart (2^64 over the golden ratio, as in SplitMix64).
_STRIDE = 0x9E3779B97F4A7C15

_samples: ContextVar[int] = ContextVar("samples", default=1)


@runtime_checkable
class Stochastic(Protocol):
    """A module whose forward pass draws noise, such as ``evigrad.invariances.Averaged``."""

    def draw(self, num_data: int, generator: torch.Generator) -> Tensor:
        """Return random numbers (num_data, ...) on the CPU, one draw per example."""
        ...

    def held(self, noise: Tensor) -> AbstractContextManager[None]:
        """Use this noise in every forward pass inside the context, instead of drawing noise."""
        ...


@contextmanager
def sampled(num_samples: int) -> Iterator[None]:
    """Declare that batches inside this context have ``num_samples`` rows for each example."""
    token = _samples.set(_samples.get() * num_samples)
    try:
        yield
    finally:
        _samples.reset(token)


def current_samples() -> int:
    """Return the number of rows per example in a batch, which is 1 outside of ``sampled``."""
    return _samples.get()


def stochastic_modules(model: nn.Module) -> list[Stochastic]:
    """Return the modules of a model that draw noise, in the model's order."""
    return [module for module in model.modules() if isinstance(module, Stochastic)]


class Noise:
    """The noise of the examples in a block, for all ``modules`` that draw noise.

    The noise at each position in the block is determined by ``seed``. Example i uses the noise at
    ``positions[i]``, or at position i if ``positions`` is None. ``positions`` must be ascending.
    """

    def __init__(
        self, modules: Sequence[Stochastic], seed: int, positions: Tensor | None = None
    ) -> None:
        self._modules, self._seed, self._positions = list(modules), seed, positions
        self._pages: dict[int, list[Tensor]] = {}

    def slice(self, start: int, stop: int) -> list[Tensor]:
        """Return the noise of examples ``start`` to ``stop − 1``, one tensor per module."""
        if not self._modules:
            return []
        chosen = None if self._positions is None else self._positions[start:stop]
        if chosen is not None:
            start, stop = int(chosen[0]), int(chosen[-1]) + 1
        first, last = start // PAGE, (stop - 1) // PAGE
        self._pages = {page: self._page(page) for page in range(first, last + 1)}
        offset = first * PAGE
        where = slice(start - offset, stop - offset) if chosen is None else chosen - offset
        whole = (torch.cat(parts) for parts in zip(*self._pages.values(), strict=True))
        return [noise[where] for noise in whole]

    def _page(self, page: int) -> list[Tensor]:
        if page in self._pages:
            return self._pages[page]
        generator = torch.Generator().manual_seed((self._seed + page * _STRIDE) % 2**63)
        drawn = [module.draw(PAGE, generator) for module in self._modules]
        for module, noise in zip(self._modules, drawn, strict=True):
            if len(noise) != PAGE or not noise.is_floating_point():
                raise ConfigurationError(
                    f"{type(module).__name__}.draw({PAGE}, generator) must return {PAGE} rows of"
                    f" floating-point noise, got shape {tuple(noise.shape)} and type {noise.dtype}."
                )
        return drawn


class PackedModel(Transparent):
    """A model as a function of one tensor, which contains all parts of the inputs and the noise.

    ``x`` and ``noise`` are examples that determine the shapes and types. If the outputs are needed
    only at some positions, ``layer`` computes only these outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Inputs,
        noise: Sequence[Tensor],
        layer: nn.Linear | None = None,
    ) -> None:
        super().__init__(model)
        self.__dict__["_layer"] = layer
        self._drawing = stochastic_modules(model)
        self._example = None if isinstance(x, Tensor) else x
        self._inputs = layout(x)
        parts = [*tensors_of(x), *noise]
        self._layouts = [(part.shape[1:], part.dtype) for part in parts]
        types = [p.dtype if p.is_floating_point() else torch.float64 for p in parts]
        self._carrier = reduce(torch.promote_types, types)

    def fits(self, x: Inputs) -> bool:
        """Return whether inputs have the parts, shapes and types that this model expects."""
        return layout(x) == self._inputs

    @property
    def numbers(self) -> int:
        """Return how many numbers an example has, including its noise."""
        return sum(prod(shape) for shape, _ in self._layouts)

    def pack(self, x: Inputs, noise: Sequence[Tensor]) -> Tensor:
        """Return inputs and noise (m, ...) as one tensor (m, D) on the inputs' device."""
        # An example that is a single number has no dimension of its own.
        parts = [part.to(x.device).unsqueeze(-1) for part in (*tensors_of(x), *noise)]
        return torch.cat([part.flatten(1).to(self._carrier) for part in parts], dim=1)

    def forward(self, packed: Tensor) -> Any:
        """Return the model's outputs for packed inputs."""
        parts = packed.split([prod(shape) for shape, _ in self._layouts], dim=1)
        tensors = [
            part.reshape(-1, *shape).to(dtype)
            for part, (shape, dtype) in zip(parts, self._layouts, strict=True)
        ]
        leaves, noise = tensors[: len(self._inputs)], tensors[len(self._inputs) :]
        x = leaves[0] if self._example is None else self._example.with_leaves(leaves)
        with ExitStack() as stack:
            for module, part in zip(self._drawing, noise, strict=True):
                stack.enter_context(module.held(part))
            layer = self.__dict__["_layer"]
            if layer is not None and isinstance(x, AtPositions):
                return called_at(inside(self), layer, x)
            return called(inside(self), x)
