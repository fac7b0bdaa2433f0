"""What the kernel side keeps of the data, and the products that read it.

Rows are kept per parameter and micro-batch, in the dtype and on the device asked for, and read in
slabs of columns: no second copy of them is ever made, and the derivative of ℓ in the rows can be
written over the rows themselves.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evigrad.curvature.base import Statistic
from evigrad.curvature.contraction import contraction_cotangents, contraction_gram

# Columns of the rows that are at work at once: enough for matrix products at full speed, and small
# beside the rows of any network for which the memory counts.
SLAB_BYTES = 2**25
# A Gram matrix is symmetric: in strips, five eighths of the products give all of it. Strips of
# fewer rows would multiply below full speed.
STRIPS, STRIP = 4, 64


@dataclass(frozen=True)
class Storage:
    """Where rows are kept, and as what.

    Attributes:
        dtype: Of the kept rows; None keeps them as they come. Products are in ``working``.
        device: Of the kept rows; None keeps them where they come. On the CPU of a machine with a
            GPU they are in pinned memory, which copies at full speed.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def keep_all(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of several parameters as they are kept, those of this device in one piece.

        Many tensors of a few megabytes that come and go between others would leave holes in the
        memory of the process.

        Args:
            rows: Name → matrix; all with a graph or all without.

        Returns:
            Name → the kept matrix.
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
    """A copy on another device with each column in one piece.

    Slabs of columns then are one piece of memory too, which a device copies as it is.

    Args:
        matrix: Any.
        like: Gives the device.
        pinned: Whether to take pinned memory of the host.

    Returns:
        The copy.
    """
    turned = torch.empty(
        matrix.shape[::-1], dtype=matrix.dtype, device=like.device, pin_memory=pinned
    )
    turned.copy_(matrix.detach().mT.contiguous())
    return turned.mT


@dataclass(frozen=True)
class NtkStatistic(Statistic):
    """The rows of every micro-batch, without prior and scale.

    Attributes:
        rows: Per parameter whose rows are formed, one (R_i, n) matrix per micro-batch.
        factors: Per other parameter, per micro-batch, its inputs (m_i, T, i) and gradients
            (m_i, k, T, o), of which the rows are the products.
        scales: One vector (R_i,) per micro-batch, or None for 1.
        present: Per micro-batch, which of the rows (m_i, k) are none of padding; the rows and
            scales hold these alone, the factors all.
        grams: The Gram matrices kept so far; a cache, filled by ``Ntk.log_det``.
    """

    rows: dict[str, tuple[Tensor, ...]]
    factors: dict[str, tuple[tuple[Tensor, Tensor], ...]]
    scales: tuple[Tensor | None, ...]
    present: tuple[Bool[Tensor, "_ _"], ...]
    grams: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        """R, the rows so far."""
        return sum(int(part.sum()) for part in self.present)

    @property
    def num_bytes(self) -> int:
        """Memory that the rows and the factors take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept())

    @property
    def carries_graph(self) -> bool:
        """Whether the rows themselves (not their scale) are differentiable."""
        return any(tensor.requires_grad for tensor in self._kept())

    def __add__(self, other: "NtkStatistic") -> "NtkStatistic":
        """The rows of both. Grams between them are missing from those kept, which are dropped."""
        return NtkStatistic(
            {name: chunks + other.rows[name] for name, chunks in self.rows.items()},
            {name: chunks + other.factors[name] for name, chunks in self.factors.items()},
            self.scales + other.scales,
            self.present + other.present,
        )

    def scale(self) -> Float[Tensor, " R"] | None:
        """The scales of all rows, or None where all are 1."""
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
        """The same rows under another scale (a step on the noise); the kept Grams stay valid.

        Args:
            scale: For all rows, in the order in which they were accumulated.

        Returns:
            Another statistic, which shares rows and kept Grams with this one.
        """
        sizes = [int(part.sum()) for part in self.present]
        return replace(self, scales=tuple(scale.split(sizes)))

    def tensors(self) -> list[Tensor]:
        """All rows, all factors, then the scales that are not None."""
        return self._kept() + [scale for scale in self.scales if scale is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "NtkStatistic":
        """The same statistic with other rows and scales; nothing is kept from the old ones."""
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
        """The Gram matrix of one parameter's rows, A Aᵀ or A P0^{-1} Aᵀ, without a graph.

        Args:
            name: Of the parameter.
            like: A tensor of the device and dtype to compute in.
            precision: The diagonal of P0, one number or one for each element; None for 1.

        Returns:
            Of shape (R, R), in the order of the rows.
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
        """The sum of several parameters' Grams, computed once and kept."""
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
        """Write over a parameter's rows the derivative in them of a function of A P0^{-1} Aᵀ.

        Args:
            name: Of the parameter.
            cotangent: Derivative of the function in the Gram matrix, symmetric.
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
                else:  # in the chunk's own order, as ``by_columns`` has left it
                    chunk.mT[columns] = part.mT.to(chunk.dtype).contiguous().to(chunk.device)
                start += len(chunk)
        return of_precision.reshape(precision.shape)

    def rows_before(self, datum: int) -> int:
        """The rows of the data before one, by its position."""
        return int(torch.cat([part.sum(1) for part in self.present])[:datum].sum())

    def part(self, data: slice) -> "NtkStatistic":
        """What belongs to some consecutive data, without the scales.

        Args:
            data: Their positions.

        Returns:
            A statistic of one micro-batch.
        """
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
        """Inputs and gradients of all data; of all rows, and their data, where some are padding."""
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
        """Write over the factors what ``_whole_factors`` has put together."""
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
    """Columns of the rows of one parameter, all micro-batches together.

    Args:
        chunks: One matrix (R_i, n) for each micro-batch.
        like: A tensor of the device and dtype to compute in.

    Yields:
        Which columns, and all rows' entries in them.
    """
    num_rows, width = sum(len(chunk) for chunk in chunks), chunks[0].shape[1]
    step = max(1, SLAB_BYTES // max(1, num_rows * like.element_size()))
    for start in range(0, width, step):
        columns = slice(start, min(start + step, width))
        parts = [chunk[:, columns].to(like) for chunk in chunks]
        yield columns, parts[0] if len(parts) == 1 else torch.cat(parts)


def _strips(size: int) -> Iterator[slice]:
    """Strips of the rows of a square matrix."""
    step = max(STRIP, -(-size // STRIPS))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _add_upper(gram: Float[Tensor, "R R"], slab: Float[Tensor, "R n"]) -> None:
    """Add slab slabᵀ above the diagonal, and in the strips' blocks on it."""
    for strip in _strips(len(gram)):
        rest = slice(strip.start, None)
        gram[strip, rest].addmm_(slab[strip], slab[rest].mT)


def _mirror(gram: Float[Tensor, "R R"]) -> None:
    """Copy what is above the diagonal blocks below."""
    for strip in _strips(len(gram)):
        gram[strip.stop :, strip] = gram[strip, strip.stop :].mT


def part_of(values: Float[Tensor, " n"], columns: slice) -> Tensor:
    """Entries for some columns, where there is one for each; the single one for all otherwise."""
    return values[columns] if values.numel() > 1 else values


def add_part(values: Float[Tensor, " n"], columns: slice, part: Tensor) -> None:
    """The adjoint of ``part_of``, added in place."""
    if values.numel() > 1:
        values[columns] += part
    else:
        values += part.sum()


def _between(chunks: Sequence[Tensor], span: slice) -> Tensor:
    """Entries along dim 0 of several tensors laid end to end; a view where one holds them all."""
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
