"""The rows that the kernel side keeps, and products of them without a copy, or without the rows.

Rows are kept per parameter and micro-batch, in the dtype and on the device asked for, and read in
slabs of columns: there is never a second copy of all, and the derivative of ℓ in the rows can
overwrite the rows.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import Function

from evigrad.curvature.base import Statistic
from evigrad.curvature.linalg import MatrixSpectrum, Spectra
from evigrad.jacobians import MatrixUse
from evigrad.jacobians.kronecker import first_order_only
from evigrad.jacobians.patch_grams import add_gram, mirrored

# Bytes of a slab of columns: enough for matrix products at full speed, little beside the rows.
SLAB_BYTES = 2**25
# A multiplication of looked-up numbers takes the time of so many in a product of matrices.
_SCATTERED = 8


@dataclass(frozen=True)
class Storage:
    """How rows are kept.

    Attributes:
        dtype: Type of the kept rows; None leaves it. Products are in ``working_dtype``.
        device: Where they are; None leaves them there. The CPU of a machine with a GPU keeps them
            in pinned memory, which copies at full speed.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def keep(self, rows: Tensor) -> Tensor:
        """The rows, or what they are products of, as they are kept."""
        if self.dtype is not None and rows.is_floating_point():
            rows = rows.to(self.dtype)
        if self.device is None or self.device == rows.device:
            return rows
        if rows.dim() != 2 or not rows.is_floating_point():
            return rows.to(self.device)
        pinned = self.device.type == "cpu" and rows.is_cuda
        return by_columns(rows, torch.empty(0, device=self.device), pinned)


def by_columns(matrix: Float[Tensor, "R n"], like: Tensor, pinned: bool) -> Float[Tensor, "R n"]:
    """A copy on the device of ``like`` with contiguous columns, so that slabs copy in one piece."""
    turned = torch.empty(
        matrix.shape[::-1], dtype=matrix.dtype, device=like.device, pin_memory=pinned
    )
    turned.copy_(matrix.detach().mT.contiguous())
    return turned.mT


@dataclass(frozen=True)
class NtkStatistic(Statistic):
    """The rows of every micro-batch, without prior and scale.

    Attributes:
        rows: One (R_i, n) matrix per micro-batch for each parameter whose rows are formed.
        factors: For each other parameter, per micro-batch and for each use of it, in pairs, what
            the rows are products of (``evigrad.jacobians.layers.Rule.products``).
        scale: One number for each row, or None where all are 1.
        present: Which of the rows (m_i, k) are no padding, per micro-batch; ``rows`` and ``scale``
            hold these alone, ``factors`` hold all.
        grams: A cache of Gram matrices, filled by ``kept_gram``.
        spectra: A cache of their eigenvalues.
    """

    rows: dict[str, tuple[Tensor, ...]]
    factors: dict[str, tuple[tuple[Tensor, ...], ...]]
    scale: Float[Tensor, " R"] | None
    present: tuple[Bool[Tensor, "_ _"], ...]
    grams: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)
    spectra: Spectra = field(default_factory=Spectra, repr=False, compare=False)

    @cached_property
    def num_rows(self) -> int:
        """R, the number of rows so far."""
        return sum(int(part.sum()) for part in self.present)

    @property
    def carries_graph(self) -> bool:
        """Whether the rows themselves (not their scale) are differentiable."""
        return any(tensor.requires_grad for tensor in self._kept())

    def __add__(self, other: "NtkStatistic") -> "NtkStatistic":
        """The rows of both; cached Grams are dropped, as they lack the products between them."""
        scales = [part.scale for part in (self, other)]
        scale = next((s for s in scales if s is not None), None)
        if scale is not None:
            sizes = (self.num_rows, other.num_rows)
            pairs = zip(scales, sizes, strict=True)
            scale = torch.cat([scale.new_ones(n) if s is None else s for s, n in pairs])
        return NtkStatistic(
            {name: chunks + other.rows[name] for name, chunks in self.rows.items()},
            {name: chunks + other.factors[name] for name, chunks in self.factors.items()},
            scale,
            self.present + other.present,
        )

    def with_scale(self, scale: Float[Tensor, " R"]) -> "NtkStatistic":
        """The same rows and cached Grams under another scale (a step on the noise)."""
        return replace(self, scale=scale)

    def tensors(self) -> list[Tensor]:
        """All rows, all factors, then the scale, if any."""
        return self._kept() + ([] if self.scale is None else [self.scale])

    def with_tensors(self, tensors: Sequence[Tensor]) -> "NtkStatistic":
        """The same statistic with other rows, factors and scale, and no cached Grams."""
        remaining_tensors = iter(tensors)
        rows = {
            name: tuple(next(remaining_tensors) for _ in chunks)
            for name, chunks in self.rows.items()
        }
        factors = {
            name: tuple(
                tuple(next(remaining_tensors) if t.is_floating_point() else t for t in chunk)
                for chunk in chunks
            )
            for name, chunks in self.factors.items()
        }
        return NtkStatistic(rows, factors, next(remaining_tensors, None), self.present)

    def _kept(self) -> list[Tensor]:
        rows = [chunk for chunks in self.rows.values() for chunk in chunks]
        factors = [t for chunks in self.factors.values() for chunk in chunks for t in chunk]
        return rows + [tensor for tensor in factors if tensor.is_floating_point()]

    # ------------------------------------------------------------ products

    def gram(self, name: str, like: Tensor, precision: Tensor | None = None) -> Tensor:
        """Return A Aᵀ of one parameter's rows, or A P0^{-1} Aᵀ, (R, R), without a graph.

        It is computed on the device and in the dtype of ``like``; ``precision`` is the diagonal of
        P0, one number or one for each element.
        """
        gram = like.new_zeros(self.num_rows, self.num_rows)
        if name in self.factors:
            gram = uses_gram(self._whole_factors(self.factors[name], like))
            return gram if precision is None else gram / precision.to(gram)  # one for all
        varies = precision is not None and precision.numel() > 1
        root = precision.reshape(-1).to(like).rsqrt() if precision is not None and varies else None
        for columns, slab in slabs(self.rows[name], like):
            add_gram(gram[None], (slab if root is None else slab * root[columns])[None])
        mirrored(gram[None])
        return gram if precision is None or varies else gram / precision.to(gram)

    def kept_gram(
        self,
        names: Sequence[str],
        like: Tensor,
        part: Callable[[str], "NtkStatistic"] | None = None,
    ) -> Float[Tensor, "R R"]:
        """Return the sum of several parameters' Grams, computed once and cached.

        ``part`` makes the same rows of one parameter alone; None: all are here.
        """
        # Another structure may read the same statistic with other groups or another dtype.
        key = (*names, like.dtype)
        if key not in self.grams:
            with torch.no_grad():
                gram = like.new_zeros(self.num_rows, self.num_rows)
                for name in names:
                    gram += (self if part is None else part(name)).gram(name, like)
            self.grams[key] = gram
        return self.grams[key]

    def taken_gram(self, names: Sequence[str], like: Tensor) -> Float[Tensor, "R R"]:
        """``kept_gram``, which is then kept no longer and may be overwritten."""
        gram = self.kept_gram(names, like)
        del self.grams[(*names, like.dtype)]
        return gram

    def spectrum(
        self, names: Sequence[str], like: Tensor, rank: int, keep: bool
    ) -> MatrixSpectrum | None:
        """Return the eigenvalues of ``kept_gram``, which is not kept without ``keep``.

        None at the first call; ``rank`` as for ``Spectra.at_second_use``.
        """
        gram = partial(self.kept_gram if keep else self.taken_gram, names, like)
        return self.spectra.at_second_use((*names, like.dtype), gram, rank)

    def write_cotangent(
        self, name: str, cotangent: Float[Tensor, "R R"], precision: Tensor
    ) -> Tensor:
        """Return a function's derivative in P0, and overwrite a parameter's rows with that in them.

        ``cotangent`` is the derivative in A P0^{-1} Aᵀ, symmetric; ``precision`` is the diagonal of
        P0, one number or one for each element, and the result has its shape.
        """
        inverse = precision.detach().reshape(-1).to(cotangent).reciprocal()
        of_precision = torch.zeros_like(inverse)
        if name in self.factors:
            chunks = self.factors[name]
            with torch.enable_grad():  # only its indices and copies are differentiated
                leaves = [
                    tuple(t.detach().requires_grad_(t.is_floating_point()) for t in chunk)
                    for chunk in chunks
                ]
                whole = self._whole_factors(leaves, cotangent)
            detached = [(a.detach(), g.detach()) for a, g in whole]
            pair_cotangents = uses_cotangents(detached, cotangent * inverse)
            # The Gram is quadratic in the gradients: ⟨cotangent, it⟩ is half of these products.
            products = [
                (of_g * g).sum()
                for (_, of_g), (_, g) in zip(pair_cotangents, detached, strict=True)
            ]
            of_precision.copy_(-0.5 * torch.stack(products).sum() * inverse)
            leaf_tensors = [t for chunk in leaves for t in chunk if t.requires_grad]
            kept = [t for chunk in chunks for t in chunk if t.is_floating_point()]
            ends = [t for pair in whole for t in pair if t.requires_grad]
            of_ends = [t for pair in pair_cotangents for t in pair if t is not None]
            parts = torch.autograd.grad(ends, leaf_tensors, of_ends)
            for tensor, part in zip(kept, parts, strict=True):
                tensor.copy_(part)
            return of_precision.reshape(precision.shape)
        for columns, slab in slabs(self.rows[name], cotangent):
            product = 2 * (cotangent @ slab)  # (S̄ + S̄ᵀ) A
            weight = part_of(inverse, columns)
            add_part(of_precision, columns, -0.5 * weight**2 * (product * slab).sum(0))
            product *= weight
            start = 0
            for chunk in self.rows[name]:
                part = product[start : start + len(chunk)]
                if chunk.device == part.device:
                    chunk[:, columns] = part
                else:  # by columns, the memory layout of ``by_columns``
                    chunk.mT[columns] = part.mT.to(chunk.dtype).contiguous().to(chunk.device)
                start += len(chunk)
        return of_precision.reshape(precision.shape)

    def rows_before(self, datum: int) -> int:
        """How many rows the data before this position have."""
        return int(torch.cat([part.sum(1) for part in self.present])[:datum].sum())

    def part(self, data: slice) -> "NtkStatistic":
        """Return the part of consecutive data, without the scales, as a single micro-batch."""
        span = slice(self.rows_before(data.start), self.rows_before(data.stop))
        rows = {name: (_between(chunks, span),) for name, chunks in self.rows.items()}
        factors = {
            name: (tuple(_between(tensors, data) for tensors in zip(*chunks, strict=True)),)
            for name, chunks in self.factors.items()
        }
        return NtkStatistic(rows, factors, None, (_between(self.present, data),))

    def _whole_factors(
        self, chunks: Sequence[Sequence[Tensor]], like: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """The pairs of each use, of all data; with padding, every row is a datum of its own."""
        # For each tensor of a micro-batch, those of all micro-batches.
        tensor_parts = [list(tensors) for tensors in zip(*chunks, strict=True)]
        widths = {part.shape[1] for part in self.present}
        is_padded = len(widths) > 1 or not all(bool(part.all()) for part in self.present)
        factors: list[tuple[Tensor, Tensor]] = []
        for inputs, gradients in zip(tensor_parts[::2], tensor_parts[1::2], strict=True):
            pairs = [
                (a.to(like) if a.is_floating_point() else a.to(like.device), g.to(like))
                for a, g in zip(inputs, gradients, strict=True)
            ]
            if is_padded:
                pairs = [
                    (a[present.nonzero()[:, 0]], g[present][:, None])
                    for (a, g), present in zip(pairs, self.present, strict=True)
                ]
            # Data of fewer positions have zeros in the others, which add nothing.
            most = max(a.shape[1] for a, _ in pairs)
            pairs = [
                (
                    F.pad(a, (*[0, 0] * (a.dim() - 2), 0, most - a.shape[1])),
                    F.pad(g, (0, 0, 0, most - g.shape[2])),
                )
                for a, g in pairs
            ]
            factors.append((torch.cat([a for a, _ in pairs]), torch.cat([g for _, g in pairs])))
        return factors


def slabs(chunks: Sequence[Tensor], like: Tensor) -> Iterator[tuple[slice, Float[Tensor, "R _"]]]:
    """Yield slices of columns, and all micro-batches' rows in them, like ``like``."""
    num_rows, width = sum(len(chunk) for chunk in chunks), chunks[0].shape[1]
    step = max(1, SLAB_BYTES // max(1, num_rows * like.element_size()))
    for start in range(0, width, step):
        columns = slice(start, min(start + step, width))
        parts = [chunk[:, columns].to(like) for chunk in chunks]
        yield columns, parts[0] if len(parts) == 1 else torch.cat(parts)


def part_of(values: Float[Tensor, " n"], columns: slice) -> Tensor:
    """The entries of some columns; the only entry where one number serves all columns."""
    return values[columns] if values.numel() > 1 else values


def add_part(values: Float[Tensor, " n"], columns: slice, part: Tensor) -> None:
    """The adjoint of ``part_of``, added in place."""
    if values.numel() > 1:
        values[columns] += part
    else:
        values += part.sum()


def _between(chunks: Sequence[Tensor], span: slice) -> Tensor:
    """Entries of several tensors concatenated along dim 0; a view where one holds them all."""
    parts, start = [], 0
    for chunk in chunks:
        stop = start + len(chunk)
        first, last = max(span.start, start), min(span.stop, stop)
        if first < last:
            parts.append(chunk[first - start : last - start])
        start = stop
    if not parts:
        return chunks[0][:0]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# ------------------------------------------------------------ derivatives without copies


class MixedGrams(Function):
    """Σ weight · Gram over kept Grams, without a scaled copy of each."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *grams: Tensor) -> Tensor:
        """The sum, with one weight for each Gram."""
        ctx.save_for_backward(*grams)
        total = weights[0] * grams[0]
        for weight, gram in zip(weights[1:], grams[1:], strict=True):
            total.addcmul_(weight, gram)
        return total

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """The derivative in the weights; the Grams have none."""
        flat = cotangent.reshape(-1)
        products = [torch.dot(gram.reshape(-1), flat) for gram in ctx.saved_tensors]
        return torch.stack(products), *[None] * len(products)


class RowsGram(Function):
    """A P0^{-1} Aᵀ of the rows A of one parameter in several chunks.

    The backward pass keeps only the inputs (autograd would keep a scaled copy of all rows), and
    reads the rows once for both cotangents.
    """

    @staticmethod
    def forward(ctx: Any, like: Tensor, precision: Tensor, *chunks: Tensor) -> Tensor:
        """The Gram matrix of the chunks' rows, like ``like``."""
        ctx.like = like
        ctx.save_for_backward(precision, *chunks)
        num_rows = sum(map(len, chunks))
        gram = like.new_zeros(num_rows, num_rows)
        for columns, slab in slabs(chunks, like):
            slab = slab * part_of(precision.to(like), columns).rsqrt()
            gram += slab @ slab.mT
        return gram

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """The derivatives in precision and rows."""
        precision, *chunks = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        inverse = precision.to(ctx.like).reciprocal()
        of_precision = torch.zeros_like(inverse) if needs_grad[1] else None
        of_chunks = [
            torch.empty_like(c) if needs else None
            for c, needs in zip(chunks, needs_grad[2:], strict=True)
        ]
        for columns, slab in slabs(chunks, ctx.like):
            weight = part_of(inverse, columns)
            # ⟨S̄, A P0^{-1} Aᵀ⟩ has the cotangent (S̄ + S̄ᵀ) A P0^{-1} for A.
            product = ((cotangent + cotangent.mT) @ slab).mul_(weight)
            if of_precision is not None:
                add_part(of_precision, columns, -0.5 * weight * (product * slab).sum(0))
            parts = product.split([len(chunk) for chunk in chunks])
            for chunk, part in zip(of_chunks, parts, strict=True):
                if chunk is not None:
                    chunk[:, columns] = part.to(chunk)
        of_precision = None if of_precision is None else of_precision.to(precision.dtype)
        return None, of_precision, *of_chunks


# ------------------------------------------------------------ Grams without the rows


def contracted(
    uses: Mapping[str, Sequence[MatrixUse]], num_data: int, rows_per_datum: int
) -> dict[str, Sequence[MatrixUse]]:
    """The weights whose Gram takes fewer multiplications without forming the rows."""
    rows, cheap = num_data * rows_per_datum, {}
    for name, weight_uses in uses.items():
        size = weight_uses[0].inputs * weight_uses[0].outputs
        formed = rows**2 * size
        for use in weight_uses:
            formed += rows * (size if use.looked_up else size * use.positions)
        pairs = [(a, b) for i, a in enumerate(weight_uses) for b in weight_uses[: i + 1]]
        if sum(_operations(a, b, num_data, rows) for a, b in pairs) < formed:
            cheap[name] = weight_uses
    return cheap


def _operations(one: MatrixUse, other: MatrixUse, num_data: int, rows: int) -> float:
    """Multiplications of the Gram of two uses of a weight, by positions."""
    at_one, at_other = rows * one.positions, rows * other.positions
    if not (one.looked_up or other.looked_up):
        inputs = num_data**2 * one.positions * other.positions * one.inputs
        return inputs + at_one * at_other * (one.outputs + 1)
    if one.looked_up and other.looked_up:
        # As many pairs as meet where rows are looked up evenly.
        return _SCATTERED * at_one * one.inputs * (1 + at_other / one.outputs)
    return at_one * at_other * (one.inputs + _SCATTERED)


def uses_gram(uses: Sequence[tuple[Tensor, Tensor]]) -> Float[Tensor, "R R"]:
    """The Gram of a weight's rows, the sum of its uses (``Rule.products``), not forming them."""
    products = [use for use in uses if use[0].is_floating_point()]
    lookups = [use for use in uses if not use[0].is_floating_point()]
    crossed = [contraction_gram(a, b) for i, a in enumerate(products) for b in products[:i]]
    grams = [contraction_gram(use, use) for use in products]
    if lookups:  # several are one with more positions
        numbers, gradients = zip(*lookups, strict=True)
        lookup = torch.cat(numbers, 1), torch.cat(gradients, 2)
        grams.append(lookup_gram(*lookup))
        crossed += [_products_with_lookup(use, lookup) for use in products]
    return reduce(torch.add, [*grams, *(product + product.mT for product in crossed)])


def contraction_gram(
    one: tuple[Float[Tensor, "m T i"], Float[Tensor, "m k T o"]],
    other: tuple[Float[Tensor, "m U i"], Float[Tensor, "m k U o"]],
) -> Float[Tensor, "R R"]:
    """Return products of a matrix's rows Σ_t g_(n,j,t) ⊗ a_(n,t) in two uses, not forming them.

    Σ_(t,t') (a_(n,t)·a_(n',t')) (g_(n,j,t)·g_(n',j',t')) over positions t is, for few positions and
    a large matrix, far cheaper than the rows, in operations and in memory. *Jacobian contraction*
    and *NTK-vector products by structured derivatives* in Novak, Sohl-Dickstein, Schoenholz (2022),
    *Fast Finite Width Neural Tangent Kernel*; the choice by operation count (``contracted``) is
    theirs too. R = m k, the rows of a datum side by side.
    """
    (a, g), (b, h) = one, other
    k, total = g.shape[1], a.new_zeros(())
    for t in range(a.shape[1]):
        for u in range(b.shape[1]):
            total = total + _spread(a[:, t] @ b[:, u].mT, k) * (_flat(g, t) @ _flat(h, u).mT)
    return total


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
        of_data = a.new_zeros(m, k, m).index_add(2, entries.data, total)
        rows.append(of_data.transpose(1, 2))  # (m, m', k')
    return torch.stack(rows, 1).reshape(m * k, m * k)


@dataclass(frozen=True)
class _Entries:
    """What data looked up, each row of the matrix once for each datum.

    Attributes:
        data: The datum of each entry, (E,).
        numbers: The number of the row, (E,).
        values: The sum of its gradients, (k, E, i).
    """

    data: Int[Tensor, " E"]
    numbers: Int[Tensor, " E"]
    values: Float[Tensor, "k E i"]

    @classmethod
    def of(cls, looked_up: Int[Tensor, "m T"], gradients: Float[Tensor, "m k T i"]) -> "_Entries":
        m = len(looked_up)
        # By the numbers first, so that equal ones are neighbours.
        keys = looked_up * m + torch.arange(m, device=looked_up.device)[:, None]
        keys, entry = keys.unique(return_inverse=True)
        flat = gradients.transpose(0, 1).flatten(1, 2)
        values = flat.new_zeros(flat.shape[0], len(keys), flat.shape[2])
        return cls(keys % m, keys // m, values.index_add(1, entry.flatten(), flat))


def lookup_gram(
    looked_up: Int[Tensor, "m T"], gradients: Float[Tensor, "m k T i"]
) -> Float[Tensor, "R R"]:
    """Return the Gram of an embedding's rows Σ_t e_(v_nt) ⊗ g_(n,j,t), not forming them.

    Only data that look up the same row of the matrix have a product: the numbers that c data share
    are taken together for each c, in matrices of c × c.
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
    """Cotangents of ``uses_gram``'s pairs, without those of numbers; the Gram's is symmetric."""
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
    """Cotangents of a use whose ``contraction_gram`` with itself has this symmetric one."""
    (m, k), positions = gradients.shape[:2], inputs.shape[1]
    twice = 2 * cotangent
    of_inputs, of_gradients = torch.zeros_like(inputs), torch.zeros_like(gradients)
    for t in range(positions):
        for u in range(positions):
            left = _spread(inputs[:, t] @ inputs[:, u].mT, k)
            of_gradients[:, :, t] += ((twice * left) @ _flat(gradients, u)).unflatten(0, (m, k))
            right = twice * (_flat(gradients, t) @ _flat(gradients, u).mT)
            of_inputs[:, t] += right.reshape(m, k, m, k).sum((1, 3)) @ inputs[:, u]
    return of_inputs, of_gradients


def _flat(gradients: Float[Tensor, "m k T o"], position: int) -> Float[Tensor, "R o"]:
    return gradients[:, :, position].flatten(0, 1)


def _spread(products: Float[Tensor, "m m"], k: int) -> Float[Tensor, "R R"]:
    """Repeat the number of each pair of data for each pair of their rows."""
    if k == 1:
        return products
    return products.repeat_interleave(k, 0).repeat_interleave(k, 1)
