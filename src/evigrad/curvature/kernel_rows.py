"""The rows that the kernel side keeps, and the products that read them.

Rows are kept per parameter and micro-batch, in the dtype and on the device asked for, and read in
slabs of columns: there is never a second copy of all, and the derivative of ℓ in the rows can
overwrite the rows.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evigrad.curvature.base import Statistic
from evigrad.curvature.contraction import contraction_cotangents, contraction_gram

# Bytes of a slab of columns: enough for matrix products at full speed, little beside the rows.
SLAB_BYTES = 2**25
# A Gram matrix is symmetric: four strips need five eighths of the products. Strips of fewer than 64
# rows would multiply below full speed.
STRIPS, STRIP = 4, 64


@dataclass(frozen=True)
class Storage:
    """How rows are kept.

    Attributes:
        dtype: Of the kept rows; None leaves it. Products are in ``working_dtype``.
        device: Of the kept rows; None leaves them there. The CPU of a machine with a GPU keeps them
            in pinned memory, which copies at full speed.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def keep_all(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of several parameters as kept; those of this device share one allocation.

        Many tensors of a few megabytes between others would fragment the memory of the process.
        All of them have a graph or none has.
        """
        if any(r.requires_grad or self.device not in (None, r.device) for r in rows.values()):
            return {name: self.keep(matrix) for name, matrix in rows.items()}
        kept: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(self.dtype or matrix.dtype for matrix in rows.values()):
            mine = {n: r for n, r in rows.items() if (self.dtype or r.dtype) == dtype}
            first = next(iter(mine.values()))
            sizes = [matrix.numel() for matrix in mine.values()]
            whole = torch.empty(sum(sizes), dtype=dtype, device=first.device)
            for (name, matrix), part in zip(mine.items(), whole.split(sizes), strict=True):
                kept[name] = part.view(matrix.shape).copy_(matrix)
        return {name: kept[name] for name in rows}

    def keep(self, rows: Tensor) -> Tensor:
        """The rows as they are kept."""
        if self.dtype is not None:
            rows = rows.to(self.dtype)
        if self.device is None or self.device == rows.device:
            return rows
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
        factors: For each other parameter, its inputs (m_i, T, i) and gradients (m_i, k, T, o) per
            micro-batch; the rows are their products.
        scales: One vector (R_i,) per micro-batch, or None for 1.
        present: Which of the rows (m_i, k) are no padding, per micro-batch; ``rows`` and ``scales``
            hold these alone, ``factors`` hold all.
        grams: A cache of Gram matrices, filled by ``kept_gram``.
    """

    rows: dict[str, tuple[Tensor, ...]]
    factors: dict[str, tuple[tuple[Tensor, Tensor], ...]]
    scales: tuple[Tensor | None, ...]
    present: tuple[Bool[Tensor, "_ _"], ...]
    grams: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        """R, the number of rows so far."""
        return sum(int(part.sum()) for part in self.present)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows and the factors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept())

    @property
    def carries_graph(self) -> bool:
        """Whether the rows themselves (not their scale) are differentiable."""
        return any(tensor.requires_grad for tensor in self._kept())

    def __add__(self, other: "NtkStatistic") -> "NtkStatistic":
        """The rows of both; cached Grams are dropped, as they lack the products between them."""
        return NtkStatistic(
            {name: chunks + other.rows[name] for name, chunks in self.rows.items()},
            {name: chunks + other.factors[name] for name, chunks in self.factors.items()},
            self.scales + other.scales,
            self.present + other.present,
        )

    def scale(self) -> Float[Tensor, " R"] | None:
        """The scales of all rows, None where all are 1."""
        given = next((scale for scale in self.scales if scale is not None), None)
        if given is None:
            return None
        return torch.cat(
            [
                given.new_ones(int(part.sum())) if scale is None else scale
                for scale, part in zip(self.scales, self.present, strict=True)
            ]
        )

    def with_scale(self, scale: Float[Tensor, " R"]) -> "NtkStatistic":
        """The same rows and cached Grams under another scale (a step on the noise)."""
        sizes = [int(part.sum()) for part in self.present]
        return replace(self, scales=tuple(scale.split(sizes)))

    def tensors(self) -> list[Tensor]:
        """All rows, all factors, then the scales that are not None."""
        return self._kept() + [scale for scale in self.scales if scale is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "NtkStatistic":
        """The same statistic with other rows, factors and scales, and no cached Grams."""
        rest = iter(tensors)
        rows = {name: tuple(next(rest) for _ in chunks) for name, chunks in self.rows.items()}
        factors = {
            name: tuple((next(rest), next(rest)) for _ in chunks)
            for name, chunks in self.factors.items()
        }
        scales = tuple(None if scale is None else next(rest) for scale in self.scales)
        return NtkStatistic(rows, factors, scales, self.present)

    def _kept(self) -> list[Tensor]:
        rows = [chunk for chunks in self.rows.values() for chunk in chunks]
        return rows + [part for pairs in self.factors.values() for pair in pairs for part in pair]

    # ------------------------------------------------------------ products

    def gram(self, name: str, like: Tensor, precision: Tensor | None = None) -> Tensor:
        """Return A Aᵀ of one parameter's rows, or A P0^{-1} Aᵀ, (R, R), without a graph.

        Args:
            name: The parameter.
            like: A tensor of the device and dtype to compute in.
            precision: The diagonal of P0, one number or one for each element; None for 1.
        """
        if name in self.factors:
            gram = contraction_gram(*self._whole_factors(name, like)[:2])
            return gram if precision is None else gram / precision.to(gram)  # one for all
        gram = like.new_zeros(self.num_rows, self.num_rows)
        varies = precision is not None and precision.numel() > 1
        root = precision.reshape(-1).to(like).rsqrt() if precision is not None and varies else None
        for columns, slab in slabs(self.rows[name], like):
            _add_upper(gram, slab if root is None else slab * root[columns])
        _mirror(gram)
        return gram if precision is None or varies else gram / precision.to(gram)

    def kept_gram(self, names: Sequence[str], like: Tensor) -> Float[Tensor, "R R"]:
        """The sum of several parameters' Grams, computed once and cached."""
        # Another structure may read the same statistic with other groups or another dtype.
        key = (*names, like.dtype)
        if key not in self.grams:
            with torch.no_grad():
                first, *others = names
                gram = self.gram(first, like)
                for name in others:
                    gram += self.gram(name, like)
            self.grams[key] = gram
        return self.grams[key]

    def write_cotangent(
        self, name: str, cotangent: Float[Tensor, "R R"], precision: Tensor
    ) -> Tensor:
        """Overwrite a parameter's rows with a function's derivative in them; return that in P0.

        Args:
            name: The parameter.
            cotangent: The function's derivative in A P0^{-1} Aᵀ, symmetric.
            precision: The diagonal of P0, one number or one for each element.

        Returns:
            The derivative in the precision, of its shape.
        """
        inverse = precision.detach().reshape(-1).to(cotangent).reciprocal()
        of_precision = torch.zeros_like(inverse)
        if name in self.factors:
            inputs, gradients, data = self._whole_factors(name, cotangent)
            of_inputs, of_gradients = contraction_cotangents(inputs, gradients, cotangent * inverse)
            # The Gram is quadratic in the gradients: ⟨cotangent, it⟩ is half of this product.
            of_precision.copy_(-0.5 * (of_gradients * gradients).sum() * inverse)
            self._write_factors(name, of_inputs, of_gradients, data)
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
        """What belongs to consecutive data, without the scales, as a single micro-batch."""
        span = slice(self.rows_before(data.start), self.rows_before(data.stop))
        rows = {name: (_between(chunks, span),) for name, chunks in self.rows.items()}
        factors = {
            name: (
                (
                    _between([a for a, _ in chunks], data),
                    _between([g for _, g in chunks], data),
                ),
            )
            for name, chunks in self.factors.items()
        }
        return NtkStatistic(rows, factors, (None,), (_between(self.present, data),))

    def _whole_factors(self, name: str, like: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs and gradients of all data; with padding, of all rows, and the datum of each."""
        inputs = torch.cat([a.to(like) for a, _ in self.factors[name]])
        widths = {part.shape[1] for part in self.present}
        if len(widths) == 1 and all(bool(part.all()) for part in self.present):
            return inputs, torch.cat([g.to(like) for _, g in self.factors[name]]), None
        data, rows, start = [], [], 0
        for (_, gradients), present in zip(self.factors[name], self.present, strict=True):
            data.append(start + present.nonzero()[:, 0])
            rows.append(gradients.to(like)[present][:, None])
            start += len(present)
        of_rows = torch.cat(data)
        return inputs[of_rows], torch.cat(rows), of_rows

    def _write_factors(
        self, name: str, of_inputs: Tensor, of_gradients: Tensor, data: Tensor | None
    ) -> None:
        """Overwrite the factors, from tensors laid out as ``_whole_factors`` returns them."""
        first = row = 0
        if data is not None:
            total = sum(len(part) for part in self.present)
            of_inputs = of_inputs.new_zeros(total, *of_inputs.shape[1:]).index_add(
                0, data, of_inputs
            )
        for (inputs, gradients), present in zip(self.factors[name], self.present, strict=True):
            stop = first + len(inputs)
            inputs.copy_(of_inputs[first:stop])
            if data is None:
                gradients.copy_(of_gradients[first:stop])
            else:
                end = row + int(present.sum())
                gradients.zero_()
                gradients[present] = of_gradients[row:end, 0].to(gradients)
                row = end
            first = stop


def slabs(chunks: Sequence[Tensor], like: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of columns, and all micro-batches' rows in them like ``like``.

    Yields:
        The slice, and the matrix (R, columns).
    """
    num_rows, width = sum(len(chunk) for chunk in chunks), chunks[0].shape[1]
    step = max(1, SLAB_BYTES // max(1, num_rows * like.element_size()))
    for start in range(0, width, step):
        columns = slice(start, min(start + step, width))
        parts = [chunk[:, columns].to(like) for chunk in chunks]
        yield columns, parts[0] if len(parts) == 1 else torch.cat(parts)


def _strips(size: int) -> Iterator[slice]:
    step = max(STRIP, -(-size // STRIPS))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _add_upper(gram: Float[Tensor, "R R"], slab: Float[Tensor, "R n"]) -> None:
    """Add slab slabᵀ above the diagonal, and in the diagonal blocks of the strips."""
    for strip in _strips(len(gram)):
        rest = slice(strip.start, None)
        gram[strip, rest].addmm_(slab[strip], slab[rest].mT)


def _mirror(gram: Float[Tensor, "R R"]) -> None:
    """Copy what is above the diagonal blocks below them."""
    for strip in _strips(len(gram)):
        gram[strip.stop :, strip] = gram[strip, strip.stop :].mT


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
