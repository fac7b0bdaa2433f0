"""A linearization with a Jacobian that the test chose, and dense matrices made from it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evigrad.core.curvature import Curvature, make_curvature
from evigrad.core.curvature.rows import DeferredRows, Rows
from evigrad.core.roots import RootRows
from evigrad.fast.contraction import ProductRows
from evigrad.network import KroneckerUse, Linearization
from evigrad.passes.parameter_blocks import partition_names


class Root(RootRows):
    def part(self, chosen: slice) -> "Root":
        scale = None if self.scale is None else self.scale[chosen]
        present = None if self.present is None else self.present[chosen]
        return Root(self.vectors[chosen], scale, present)


@dataclass(frozen=True)
class Fake(Linearization):
    """jacobian: name → (m, C, *shape); uses: name → [(inputs (m,G,T,i), d output (m,C,G,T,o))]."""

    outputs = torch.zeros(0, 0)  # never read
    mixed = False
    jacobian: Mapping[str, Tensor]
    uses: Mapping[str, Sequence[tuple[Tensor, Tensor]]]

    def rows(self, vectors: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        chosen = list(self.jacobian) if names is None else names
        return {n: torch.einsum("mkc,mc...->mk...", vectors, self.jacobian[n]) for n in chosen}

    def factors(
        self, vectors: Tensor, names: Sequence[str], average: bool = True
    ) -> dict[str, list[KroneckerUse]]:
        return {
            n: [
                KroneckerUse(a, torch.einsum("mkc,mcgto->mkgto", vectors, d))
                for a, d in self.uses[n]
            ]
            for n in names
        }

    def products(
        self, vectors: Tensor, names: Sequence[str]
    ) -> dict[str, list[tuple[Tensor, Tensor]]]:
        uses = self.factors(vectors, names)
        return {n: [(u.inputs[:, 0], u.gradients[:, :, 0]) for u in uses[n]] for n in names}

    def deferred_rows(
        self, root: RootRows, names: Sequence[str], contracted: Collection[str] = ()
    ) -> dict[str, Rows]:
        m, k = root.vectors.shape[:2]
        present = root.present
        if present is None:
            present = torch.ones(m, k, dtype=torch.bool)

        def form(name: str) -> Tensor:
            return self.rows(root.vectors, [name])[name].reshape(m * k, -1)[present.flatten()]

        rows: dict[str, Rows] = {
            n: DeferredRows(partial(form, n), int(present.sum())) for n in names
        }
        for name, pairs in self.products(
            root.vectors, [n for n in names if n in contracted]
        ).items():
            chunk = tuple(t for pair in pairs for t in pair)
            shape = self.jacobian[name].shape[2:]
            rows[name] = ProductRows((chunk,), (present,), int(present.sum()), shape)
        return rows

    def is_closed(self, name: str) -> bool:
        return name in self.jacobian

    def inner(self, vectors: Tensor, cotangents: Mapping[str, Tensor]) -> Tensor:
        rows = self.rows(vectors, list(cotangents))
        return torch.stack([(c * rows[n]).sum() for n, c in cotangents.items()]).sum()

    def part(self, chosen: slice) -> "Fake":
        return Fake(
            {n: j[chosen] for n, j in self.jacobian.items()},
            {n: [(a[chosen], d[chosen]) for a, d in uses] for n, uses in self.uses.items()},
        )


def make_structure(
    name: str,
    weights: Mapping[str, Tensor],
    kronecker: Collection[str] = (),
    parameter_partition: Any = "tensor",
    **settings: Any,
) -> Curvature[Any]:
    blocks = partition_names(list(weights), parameter_partition)
    return make_curvature(name, weights, kronecker=kronecker, blocks=blocks, **settings)


SHAPES = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (2, 2), "scalar": ()}


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def make_fake(
    m: int, outputs: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, seed: int = 0
) -> Fake:
    return Fake(
        {n: random(m, outputs, *s, seed=seed + i) for i, (n, s) in enumerate(shapes.items())}, {}
    )


def weights_of(fake: Fake) -> dict[str, Tensor]:
    return {n: torch.zeros(j.shape[2:], dtype=j.dtype) for n, j in fake.jacobian.items()}


def dense_rows(fake: Fake, root: Root) -> Tensor:
    """All rows over all weights, (m k, P)."""
    rows = [row.reshape(*row.shape[:2], -1) for row in fake.rows(root.vectors).values()]
    whole = torch.cat(rows, dim=2)
    if root.scale is not None:
        whole = whole * root.scale[:, :, None]
    return whole.flatten(0, 1)


def flat_precision(precisions: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([precisions[n].expand_as(w).flatten() for n, w in weights.items()])


def dense_log_det(hessian: Tensor, precision: Tensor) -> Tensor:
    """log|H + P0| − log|P0|, by LU: not how the library does it."""
    sign, value = torch.linalg.slogdet(hessian + torch.diag(precision))
    assert sign > 0
    return value - precision.log().sum()


def accumulated(
    structure: Curvature, fake: Fake, root: Root, sizes: Sequence[int] = (), statistic: Any = None
):
    """The statistic of a batch cut into micro-batches of these sizes and a rest."""
    start = 0
    m = len(root.vectors)
    for stop in [*torch.tensor([0, *sizes]).cumsum(0).tolist()[1:], m]:
        if stop > start:
            part = slice(start, stop)
            statistic = structure.collect(statistic, fake.part(part), root.part(part))
        start = stop
    assert statistic is not None
    return statistic
