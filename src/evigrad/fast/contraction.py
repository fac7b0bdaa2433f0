"""Keep the Jacobian rows of a matrix as products of the layer's inputs and output gradients.

The matrix is applied at positions t to inputs a, and the outputs have gradients g. The row of
example n and output j is Σ_t g_(n,j,t) ⊗ a_(n,t). Inner products of rows need only inner products
of inputs and inner products of gradients. For few positions and a large matrix, this takes far less
time and memory than forming the rows. The method is *Jacobian contraction* with *structured
derivatives* (Novak, Sohl-Dickstein, Schoenholz, 2022, *Fast Finite Width Neural Tangent Kernel*).
The choice by operation count (``contracted``) also comes from this paper.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import Function

from evigrad.core.algebra import first_order_only
from evigrad.core.curvature.rows import DenseRows, Rows, between

# A multiplication of looked-up numbers takes as long as this number of them in a matrix product.
_SCATTERED = 8
# A device that is not the CPU could do about this number of multiplications while it launches a
# kernel (5 µs). An estimate from data sheets.
_LAUNCH = 2**26
# Kernels for a part of positions, for products with a lookup by position and row, and for lookups.
_PART_LAUNCHES, _CROSSED_LAUNCHES, _LOOKUP_LAUNCHES = 6, 5, 30
# Largest number of entries of a temporary matrix (8 MiB in float32). The system clears matrices of
# 32 MiB and more at each use, which takes longer than their products. If a matrix covers several
# pairs of positions, it should fit the cache of a CPU.
_NUMBERS, _CPU_NUMBERS = 2**21, 2**17
# Where a fused product of one pair of positions is faster than the sum over several.
_FUSING = "cpu"


@dataclass(frozen=True)
class MatrixUse:
    """Sizes of one use of a weight as a matrix.

    Attributes:
        positions: T, the number of times that the matrix is applied to an example, including all
            augmentation samples. For a lookup, the number of rows that are looked up.
        inputs: Number of columns of the matrix.
        outputs: Number of rows of the matrix.
        looked_up: Whether rows are looked up, as in an embedding.
    """

    positions: int
    inputs: int
    outputs: int
    looked_up: bool = False

    @property
    def numbers(self) -> int:
        """The number of stored entries for an example with a single Jacobian row."""
        return self.positions * (self.inputs + (1 if self.looked_up else self.outputs))


@dataclass(frozen=True, eq=False)
class ProductRows(Rows):
    """Jacobian rows that are stored as products.

    The prior precision is one number, or varies along one axis. Then it scales one of the factors.

    Attributes:
        chunks: One tuple per micro-batch. It contains inputs (m, T, i) and gradients (m, k, T, o)
            for each use of the parameter. If rows of the parameter are looked up, it contains row
            numbers (m, T) and gradients (m, k, T, i) instead.
        present: For each micro-batch, which of the rows (m, k) are not padding.
        count: The number of rows without padding, R.
        shape: Shape of the parameter.
        transposed: Whether the parameter has the shape (in, out) instead of (out, in).
        factors: A cache for precisions along an axis.
    """

    chunks: tuple[tuple[Tensor, ...], ...]
    present: tuple[Bool[Tensor, "_ _"], ...]
    count: int
    shape: torch.Size
    transposed: bool = False
    factors: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_rows(self) -> int:
        return self.count

    def __add__(self, other: Rows) -> Rows:
        if not isinstance(other, ProductRows) or len(other.chunks[0]) != len(self.chunks[0]):
            return self.dense() + other  # another micro-batch has no closed form
        return replace(
            self,
            chunks=self.chunks + other.chunks,
            present=self.present + other.present,
            count=self.count + other.count,
        )

    def tensors(self) -> list[Tensor]:
        return [t for chunk in self.chunks for t in chunk if t.is_floating_point()]

    def with_tensors(self, tensors: Iterator[Tensor]) -> "ProductRows":
        chunks = tuple(
            tuple(next(tensors) if t.is_floating_point() else t for t in chunk)
            for chunk in self.chunks
        )
        return replace(self, chunks=chunks)

    def part(self, rows: slice, data: slice) -> "ProductRows":
        tensors = (between(parts, data) for parts in zip(*self.chunks, strict=True))
        present, count = between(self.present, data), rows.stop - rows.start
        return replace(self, chunks=(tuple(tensors),), present=(present,), count=count)

    def stored(self, store: Callable[[Tensor], Tensor]) -> "ProductRows":
        # A copy, which may be overwritten, or the tensor itself if it has a graph.
        chunks = tuple(
            tuple(store(t if t.requires_grad else t.detach().clone()) for t in chunk)
            for chunk in self.chunks
        )
        return replace(self, chunks=chunks)

    def dense(self) -> DenseRows:
        chunks = []
        for chunk, present in zip(self.chunks, self.present, strict=True):
            pairs = zip(chunk[::2], chunk[1::2], strict=True)
            rows = reduce(torch.add, (self._dense(a, g) for a, g in pairs))
            chunks.append(rows.flatten(2)[present.to(rows.device)])
        return DenseRows(tuple(chunks))

    def _dense(self, a: Tensor, g: Float[Tensor, "m k T o"]) -> Float[Tensor, "m k _ _"]:
        if a.is_floating_point():
            rows = torch.einsum("mkto,mti->mkoi", g, a)
            return rows.mT if self.transposed else rows
        return g.new_zeros(*g.shape[:2], *self.shape).scatter_add(
            2, a[:, None, :, None].expand(g.shape), g
        )

    def gram(self, like: Tensor, precision: Tensor | None = None) -> Float[Tensor, "R R"]:
        whole = self._whole(like)
        if precision is None:
            return uses_gram(whole)
        return uses_gram([self._scaled(*pair, precision) for pair in whole])

    def differentiable_gram(self, like: Tensor, precision: Tensor) -> Float[Tensor, "R R"]:
        if precision.numel() == 1:
            return self.gram(like) * precision.to(like).reciprocal()
        if not self._has_one_position:
            return self.gram(like, precision)
        root, is_first = self._root(precision.to(like))
        return _ScaledGram.apply(root, *self._factors(like, is_first == self.transposed))

    @property
    def _has_one_position(self) -> bool:
        return all(
            len(chunk) == 2 and chunk[0].is_floating_point() and chunk[0].shape[1] == 1
            for chunk in self.chunks
        ) and not any(t.requires_grad for t in self.tensors())

    def _factors(self, like: Tensor, scales_inputs: bool) -> tuple[Tensor, Tensor]:
        """Return the factor that precisions scale (R, n), and the Gram of the other factor."""
        key = (scales_inputs, like.dtype, like.device)
        if key not in self.factors:
            ((a, g),) = self._whole(like)
            a, g = a[:, 0].repeat_interleave(g.shape[1], 0), g[:, :, 0].flatten(0, 1)
            scaled, fixed = (a, g) if scales_inputs else (g, a)
            self.factors[key] = scaled, fixed @ fixed.mT
        return self.factors[key]

    def write_cotangent(self, cotangent: Float[Tensor, "R R"], precision: Tensor) -> Tensor:
        with torch.enable_grad():  # only indexing, copies and scaling are differentiated
            precision = precision.detach().requires_grad_()
            leaves = self.with_tensors(iter([t.detach().requires_grad_() for t in self.tensors()]))
            whole = [leaves._scaled(*pair, precision) for pair in leaves._whole(cotangent)]
        detached = [(a.detach(), g.detach()) for a, g in whole]
        pair_cotangents = uses_cotangents(detached, cotangent)
        ends = [t for pair in whole for t in pair if t.requires_grad]
        end_cotangents = [t for pair in pair_cotangents for t in pair if t is not None]
        inputs = [precision, *leaves.tensors()]
        precision_cotangent, *cotangents = torch.autograd.grad(ends, inputs, end_cotangents)
        for tensor, tensor_cotangent in zip(self.tensors(), cotangents, strict=True):
            tensor.copy_(tensor_cotangent)
        return precision_cotangent

    def _scaled(self, a: Tensor, g: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        """Return a use's pair with the factor that the precision belongs to times P0^{-1/2}."""
        root, is_first = self._root(precision.to(g))
        if a.is_floating_point():
            return (a * root, g) if is_first == self.transposed else (a, g * root)
        # The first axis has one precision for each row that is looked up.
        return a, g * (root[a][:, None, :, None] if is_first else root)

    def _root(self, precision: Tensor) -> tuple[Float[Tensor, "*n"], bool]:
        """Return P0^{-1/2} of one factor, and whether it is along the parameter's first axis."""
        root = precision.rsqrt()
        if root.numel() == 1:
            return root.reshape(()), False
        is_first = root.shape[0] > 1
        return (root if is_first else root.expand(1, *self.shape[1:])).reshape(-1), is_first

    def _whole(self, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each use's pairs for all examples. With padding, each row counts as an example."""
        widths = {part.shape[1] for part in self.present}
        is_padded = len(widths) > 1 or self.count < sum(part.numel() for part in self.present)
        whole: list[tuple[Tensor, Tensor]] = []
        # For each tensor of a micro-batch, the tensors of all micro-batches.
        tensors_of_uses = list(zip(*self.chunks, strict=True))
        for inputs, gradients in zip(tensors_of_uses[::2], tensors_of_uses[1::2], strict=True):
            pairs = [
                (a.to(like) if a.is_floating_point() else a.to(like.device), g.to(like))
                for a, g in zip(inputs, gradients, strict=True)
            ]
            if is_padded:
                pairs = [
                    (a[present.nonzero()[:, 0]], g[present][:, None])
                    for (a, g), present in zip(pairs, self.present, strict=True)
                ]
            if len(pairs) == 1:
                whole += pairs
                continue
            # Examples with fewer positions are padded with zeros, which add nothing.
            most = max(a.shape[1] for a, _ in pairs)
            pairs = [
                (
                    F.pad(a, (*[0, 0] * (a.dim() - 2), 0, most - a.shape[1])),
                    F.pad(g, (0, 0, 0, most - g.shape[2])),
                )
                for a, g in pairs
            ]
            whole.append((torch.cat([a for a, _ in pairs]), torch.cat([g for _, g in pairs])))
        return whole


class _ScaledGram(Function):
    """Autograd function for (V D Vᵀ) ∘ K, with D = diag(root²), differentiable in the root."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, factor: Tensor, fixed_gram: Tensor) -> Tensor:
        ctx.save_for_backward(root, factor, fixed_gram)
        scaled = factor * root
        return (scaled @ scaled.mT).mul_(fixed_gram)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        root, factor, fixed_gram = ctx.saved_tensors
        product = ((cotangent + cotangent.mT) * fixed_gram) @ factor
        return (product * factor).sum(0) * root, None, None


def contracted(
    uses: Mapping[str, Sequence[MatrixUse]],
    num_data: int,
    rows_per_datum: int,
    device: torch.device,
) -> dict[str, Sequence[MatrixUse]]:
    """Return the weights whose Gram matrix takes fewer multiplications if rows are not formed.

    On a device that is not the CPU, launches of kernels are counted as multiplications.
    """
    rows, cheap = num_data * rows_per_datum, {}
    launch = 0 if device.type == "cpu" else _LAUNCH
    for name, weight_uses in uses.items():
        size = weight_uses[0].inputs * weight_uses[0].outputs
        by_rows = rows**2 * size + launch
        for use in weight_uses:
            by_rows += rows * (size if use.looked_up else size * use.positions) + 2 * launch
        pairs = [(a, b) for i, a in enumerate(weight_uses) for b in weight_uses[: i + 1]]
        by_pairs = sum(
            _operations(a, b, num_data, rows) + launch * _launches(a, b, rows, rows_per_datum)
            for a, b in pairs
        )
        if by_pairs < by_rows:
            cheap[name] = weight_uses
    return cheap


def _launches(one: MatrixUse, other: MatrixUse, rows: int, rows_per_datum: int) -> int:
    """Return the number of kernels for products of two uses of a weight by positions."""
    if one.looked_up and other.looked_up:
        return _LOOKUP_LAUNCHES
    if one.looked_up or other.looked_up:
        product_use = other if one.looked_up else one
        return _CROSSED_LAUNCHES * rows_per_datum * product_use.positions
    entries = rows**2 * one.positions * other.positions
    return _PART_LAUNCHES * -(-entries // _NUMBERS)


def _operations(one: MatrixUse, other: MatrixUse, num_data: int, rows: int) -> float:
    """Return the number of multiplications for products of two uses of a weight by positions."""
    at_one, at_other = rows * one.positions, rows * other.positions
    if not (one.looked_up or other.looked_up):
        inputs = num_data**2 * one.positions * other.positions * one.inputs
        return inputs + at_one * at_other * (one.outputs + 1)
    if one.looked_up and other.looked_up:
        # The expected number of matches if rows are looked up uniformly.
        return _SCATTERED * at_one * one.inputs * (1 + at_other / one.outputs)
    return at_one * at_other * (one.inputs + _SCATTERED)


def uses_gram(uses: Sequence[tuple[Tensor, Tensor]]) -> Float[Tensor, "R R"]:
    """Return the Gram matrix of a weight's rows, which are sums over uses and are not formed."""
    products = [use for use in uses if use[0].is_floating_point()]
    lookups = [use for use in uses if not use[0].is_floating_point()]
    crossed = [contraction_gram(a, b) for i, a in enumerate(products) for b in products[:i]]
    grams = [contraction_gram(use, use) for use in products]
    if lookups:  # several lookups are one with more positions
        numbers, gradients = zip(*lookups, strict=True)
        lookup = torch.cat(numbers, 1), torch.cat(gradients, 2)
        grams.append(lookup_gram(*lookup))
        crossed += [_products_with_lookup(use, lookup) for use in products]
    return reduce(torch.add, [*grams, *(gram + gram.mT for gram in crossed)])


def contraction_gram(
    one: tuple[Float[Tensor, "m T i"], Float[Tensor, "m k T o"]],
    other: tuple[Float[Tensor, "m U i"], Float[Tensor, "m k U o"]],
) -> Float[Tensor, "R R"]:
    """Return the inner products between the rows of two uses, without forming the rows.

    The rows are Σ_t g_(n,j,t) ⊗ a_(n,t). Their inner products are Σ_(t,t') (a_(n,t)·a_(n',t'))
    (g_(n,j,t)·g_(n',j',t')). Each use has R = m k rows, k for each of its m examples. The rows of
    an example are adjacent.
    """
    (a, g), (b, h) = ((a.movedim(1, 0), g.movedim(2, 0)) for a, g in (one, other))
    (positions, m, k), (num_others, n, k_other) = g.shape[:3], h.shape[:3]
    gram = a.new_zeros(m, k, n, k_other)
    limit = 1 if a.device.type == _FUSING else _NUMBERS
    for at, data, others in _parts(positions, m, num_others, k * n * k_other, limit):
        t, u = at.stop - at.start, others.stop - others.start
        inputs = _products(a[at, data], b[others])
        gradients = _products(g[at, data], h[others])
        if t == u == 1:
            gram[data].addcmul_(inputs.view(-1, 1, n, 1), gradients.view(-1, k, n, k_other))
        else:
            products = inputs.view(t, -1, 1, u, n, 1) * gradients.view(t, -1, k, u, n, k_other)
            gram[data] += products.sum((0, 3))
    return gram.view(m * k, n * k_other)


def _products_with_lookup(
    one: tuple[Float[Tensor, "m T i"], Float[Tensor, "m k T o"]],
    other: tuple[Int[Tensor, "m U"], Float[Tensor, "m k U i"]],
) -> Float[Tensor, "R R"]:
    (a, g), (looked_up, h) = one, other
    entries = _Entries.of(looked_up, h)
    (m, k), rows = g.shape[:2], []
    for j in range(k):
        total = a.new_zeros(m, *entries.values.shape[:2])
        for t in range(a.shape[1]):
            inputs = torch.einsum("mi,kei->mke", a[:, t], entries.values)
            total = total + g[:, j, t].index_select(1, entries.numbers)[:, None] * inputs
        data_products = a.new_zeros(m, k, m).index_add(2, entries.data, total)
        rows.append(data_products.transpose(1, 2))  # (m, m', k')
    return torch.stack(rows, 1).reshape(m * k, m * k)


@dataclass(frozen=True)
class _Entries:
    """The rows of a matrix that examples looked up, each row once per example.

    Attributes:
        data: The example of each entry, (E,).
        numbers: The row number of each entry, (E,).
        values: The sum of each entry's gradients, (k, E, i).
    """

    data: Int[Tensor, " E"]
    numbers: Int[Tensor, " E"]
    values: Float[Tensor, "k E i"]

    @classmethod
    def of(cls, looked_up: Int[Tensor, "m T"], gradients: Float[Tensor, "m k T i"]) -> "_Entries":
        m = len(looked_up)
        # Sorted by numbers first, so that equal numbers are adjacent.
        keys = looked_up * m + torch.arange(m, device=looked_up.device)[:, None]
        keys, entry = keys.unique(return_inverse=True)
        flat = gradients.transpose(0, 1).flatten(1, 2)
        values = flat.new_zeros(flat.shape[0], len(keys), flat.shape[2])
        return cls(keys % m, keys // m, values.index_add(1, entry.flatten(), flat))


def lookup_gram(
    looked_up: Int[Tensor, "m T"], gradients: Float[Tensor, "m k T i"]
) -> Float[Tensor, "R R"]:
    """Return the Gram matrix of an embedding's rows without forming the rows.

    The rows are Σ_t e_(v_nt) ⊗ g_(n,j,t), where e_v is the unit vector for index v. Only examples
    that share an index have a nonzero product. For each c, the indices that exactly c examples
    share are processed together.
    """
    (m, k), entries = gradients.shape[:2], _Entries.of(looked_up, gradients)
    gram = gradients.new_zeros(m * k * m * k)
    _, counts = entries.numbers.unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    for count in counts.unique().tolist():
        start = first[counts == count]
        indices = start[:, None] + torch.arange(count, device=start.device)  # (n, c)
        values = entries.values[:, indices].permute(1, 2, 0, 3).flatten(1, 2)  # (n, c k, i)
        offsets = torch.arange(k, device=start.device)
        rows = (entries.data[indices][..., None] * k + offsets).flatten(1)  # (n, c k)
        places = rows[:, :, None] * (m * k) + rows[:, None]
        gram = gram.index_add(0, places.flatten(), (values @ values.mT).flatten())
    return gram.view(m * k, m * k)


def uses_cotangents(
    uses: Sequence[tuple[Tensor, Tensor]], cotangent: Float[Tensor, "R R"]
) -> list[tuple[Tensor | None, Tensor]]:
    """Return the gradients of ⟨cotangent, ``uses_gram``⟩ with respect to the pairs of tensors.

    The gradient of row numbers is None. ``cotangent`` must be symmetric.
    """
    if len(uses) == 1 and uses[0][0].is_floating_point():
        return [contraction_cotangents(*uses[0], cotangent)]
    with torch.enable_grad():
        leaves = [
            (a.detach().requires_grad_(a.is_floating_point()), g.detach().requires_grad_())
            for a, g in uses
        ]
        gram = uses_gram(leaves)
    leaf_tensors = [t for pair in leaves for t in pair if t.requires_grad]
    gradients = iter(torch.autograd.grad(gram, leaf_tensors, cotangent))
    return [(next(gradients) if a.requires_grad else None, next(gradients)) for a, _ in leaves]


def contraction_cotangents(
    inputs: Float[Tensor, "m T i"],
    gradients: Float[Tensor, "m k T o"],
    cotangent: Float[Tensor, "R R"],
) -> tuple[Float[Tensor, "m T i"], Float[Tensor, "m k T o"]]:
    """Return the gradients of ⟨cotangent, ``contraction_gram``⟩ for one use.

    ``cotangent`` must be symmetric.
    """
    a, g = inputs.movedim(1, 0).contiguous(), gradients.movedim(2, 0).contiguous()
    positions, m, k = g.shape[:3]
    input_cotangent, gradient_cotangent = torch.zeros_like(a), torch.zeros_like(g)
    cotangents = cotangent.reshape(m, k, 1, m, k)
    limit = _CPU_NUMBERS if a.device.type == _FUSING else _NUMBERS
    for at, data, others in _parts(positions, m, positions, k * m * k, limit):
        t, u = at.stop - at.start, others.stop - others.start
        b, h = a[others].flatten(0, 1), g[others].flatten(0, 2)
        left = _products(a[at, data], b).view(t, -1, 1, u, m, 1) * cotangents[data]
        gradient_cotangent[at, data] += (left.reshape(-1, len(h)) @ h).view(t, -1, k, g.shape[3])
        right = _products(g[at, data], h).view(t, -1, k, u, m, k) * cotangents[data]
        right = right.sum((2, 5)) if k > 1 else right
        input_cotangent[at, data] += (right.reshape(-1, len(b)) @ b).view(t, -1, a.shape[2])
    return input_cotangent.mul_(2).movedim(0, 1), gradient_cotangent.mul_(2).movedim(0, 2)


def _products(one: Float[Tensor, "*A n"], other: Float[Tensor, "*B n"]) -> Float[Tensor, "A B"]:
    return one.flatten(0, -2) @ other.flatten(0, -2).mT


def _parts(
    positions: int, num_data: int, num_others: int, numbers: int, limit: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Return slices of positions, examples and other positions that cover all of their triples.

    ``numbers`` is the number of entries of a triple. Parts with several pairs of positions have at
    most ``limit`` entries.
    """
    data = max(1, min(num_data, _NUMBERS // numbers))
    others = max(1, min(num_others, limit // (numbers * data)))
    at = max(1, limit // (numbers * data * others))
    sizes = ((positions, at), (num_data, data), (num_others, others))
    slices = [[slice(i, min(i + step, n)) for i in range(0, n, step)] for n, step in sizes]
    return product(slices[0], slices[1], slices[2])
