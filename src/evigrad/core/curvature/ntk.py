"""The kernel form: ℓ = log|I + S| with the Gram matrix S of the rows (Theorem 3 of the paper).

S = D (Σ_g G_g / δ_g) D, where D is the diagonal matrix of the rows' scales. G_g is the Gram matrix
of the rows for the weights of prior group g, and δ_g is the prior precision of the group. If the
rows have no graph and memory is sufficient, all G_g are stored. Further steps on the precisions and
the scale (the noise) then need neither the network nor the rows. Each step takes R²L + R³/3
operations for R rows and L groups.

For a partition of the parameters (``blocks``), ℓ is the sum over the blocks. The Gram matrix of a
block contains only products over the parameters of this block.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evigrad.core.block import Conditioning
from evigrad.core.curvature.anchored import LogDet, log_det_conditional
from evigrad.core.curvature.base import (
    Cost,
    Curvature,
    Differential,
    Statistic,
    by_entry,
    bytes_of_row,
    working_dtype,
)
from evigrad.core.curvature.dense import BlockDiagonal
from evigrad.core.curvature.linalg import MatrixSpectrum, Spectra, log_det_identity_plus
from evigrad.core.curvature.rows import DenseRows, Rows, between, mixed_grams
from evigrad.core.protocols import LOG_DETS, Linearization, Purpose
from evigrad.core.roots import RootRows
from evigrad.errors import ConfigurationError

# The Grams of the prior groups are stored if they are at most as large as the rows, or as this. A
# gibibyte is affordable on machines that train networks, and avoids passes over the rows.
GRAM_CACHE_BYTES = 2**30
# R x R matrices next to the statistic while ℓ is differentiated: the unscaled sum, S, its factor,
# the inverse, and one product.
GRAM_WORKING_COPIES = 5
# R x R matrices that autograd keeps for each further block: the unscaled sum, the half-scaled sum,
# and the factor.
GRAM_BLOCK_COPIES = 3


@dataclass(frozen=True)
class NtkStatistic(Statistic):
    """The rows of every micro-batch, or their Gram matrices, without prior and scale.

    Attributes:
        rows: The rows of each parameter. Empty if Gram matrices have replaced them.
        scale: One number for each row, or None for 1.
        present: Which rows (m_i, k) of each micro-batch are not padding. ``rows`` and ``scale``
            contain only these.
        awaited: Number of examples after which each Gram matrix replaces its rows, or infinity.
        grams: A cache of Gram matrices, filled by ``cached_gram``.
        spectra: A cache of the eigenvalues of the Gram matrices.
    """

    rows: dict[str, Rows]
    scale: Float[Tensor, " R"] | None
    present: tuple[Bool[Tensor, "_ _"], ...]
    awaited: int | float = math.inf
    grams: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)
    spectra: Spectra = field(default_factory=Spectra, repr=False, compare=False)

    @cached_property
    def num_rows(self) -> int:
        """R, the number of rows."""
        if self.rows:
            return next(iter(self.rows.values())).num_rows
        return sum(int(part.sum()) for part in self.present)

    @property
    def carries_graph(self) -> bool:
        """Whether the rows (not only their scale) are differentiable."""
        return any(t.requires_grad for rows in self.rows.values() for t in rows.tensors())

    def __add__(self, other: "NtkStatistic") -> "NtkStatistic":
        """Return the rows of both, ``other`` last, without Grams, which lack mixed products."""
        scales = [part.scale for part in (self, other)]
        scale = next((s for s in scales if s is not None), None)
        if scale is not None:
            sizes = (self.num_rows, other.num_rows)
            pairs = zip(scales, sizes, strict=True)
            scale = torch.cat([scale.new_ones(n) if s is None else s for s, n in pairs])
        rows = {name: rows + other.rows[name] for name, rows in self.rows.items()}
        return NtkStatistic(rows, scale, self.present + other.present)

    def tensors(self) -> list[Tensor]:
        tensors = [t for rows in self.rows.values() for t in rows.tensors()]
        return tensors + ([] if self.scale is None else [self.scale])

    def with_tensors(self, tensors: Sequence[Tensor]) -> "NtkStatistic":
        remaining_tensors = iter(tensors)
        rows = {name: rows.with_tensors(remaining_tensors) for name, rows in self.rows.items()}
        return NtkStatistic(rows, next(remaining_tensors, None), self.present)

    def cached_gram(
        self,
        names: Sequence[str],
        like: Tensor,
        axes: Mapping[str, tuple[int, torch.Size]] = MappingProxyType({}),
    ) -> Float[Tensor, "*G R R"]:
        """Return the sum of the Gram matrices of these parameters, computed once and cached.

        The rows must have no graph. If no examples are awaited, the Gram matrix replaces them.
        ``axes`` contains an axis and the shape of parameters that have a Gram matrix for each
        position along the axis.
        """
        # Other structures may read this statistic with other groups or another dtype.
        key = (*((name, axes.get(name)) for name in names), like.dtype)
        if key not in self.grams:
            rows = {name: self.rows[name] for name in names}
            gram, *others = (
                part.dense().grams_along(*axes[name], like) if name in axes else part.gram(like)
                for name, part in rows.items()
            )
            for other in others:
                gram += other
            self.grams[key] = gram
            if not self.awaited:
                for name in names:
                    del self.rows[name]
        return self.grams[key]

    def taken_gram(self, names: Sequence[str], like: Tensor) -> Float[Tensor, "R R"]:
        """Return ``cached_gram`` and remove it from the cache, so that callers may overwrite it."""
        gram = self.cached_gram(names, like)
        del self.grams[(*((name, None) for name in names), like.dtype)]
        return gram

    def spectrum(
        self, names: Sequence[str], like: Tensor, rank: int, cache: bool
    ) -> MatrixSpectrum | None:
        """Return the eigenvalues of ``cached_gram``, or None on the first call.

        ``cache`` determines whether the Gram matrix is cached. For ``rank``, see
        ``Spectra.at_second_use``.
        """
        gram = partial(self.cached_gram if cache else self.taken_gram, names, like)
        return self.spectra.at_second_use((*names, like.dtype), gram, rank)

    def rows_before(self, datum: int) -> int:
        """Return the number of rows of the examples before this position."""
        return int(torch.cat([part.sum(1) for part in self.present])[:datum].sum())

    def part(self, data: slice) -> "NtkStatistic":
        """Return the rows of consecutive examples as a single micro-batch, without scales."""
        span = slice(self.rows_before(data.start), self.rows_before(data.stop))
        rows = {name: rows.part(span, data) for name, rows in self.rows.items()}
        return NtkStatistic(rows, None, (between(self.present, data),))


# With at most this many entries of a row for each precision, a product of scaled rows takes less
# time than a sum of Gram matrices, which reads more memory.
_FEW_ENTRIES = 16


class Ntk(Curvature[NtkStatistic]):
    """The exact ℓ of a block from the Gram matrix of its R rows.

    Args:
        weights: The parameters.
        precision_groups: For each parameter whose prior precision is one number, or varies along
            one axis, the label of its prior group. The parameters of a group share their precisions
            and Gram matrices. All entries of other parameters have precisions.
        gram_dtype: Dtype of S and its factor. None: the dtype of the rows.
        contracted: Parameters whose rows are stored as products (``fast.contraction``), with the
            number of values per row. Ignored for parameters whose precision varies.
        precision_axes: The axis along which the precision varies, for parameters of the groups.
        store: Function that stores a tensor (``fast.storage``).
        itemsize: Bytes per stored number, or 0 if rows are stored on another device.
        blocks: A partition of the parameters, with each precision group within one block. ℓ is the
            sum over the blocks. None: one block.
    """

    name = "ntk"
    log_det_is = "exact"
    keeps_rows = True
    settings = ("rows_dtype", "rows_device")
    cheaper = (
        "a smaller subset, one output per block ('ntk-...-1'), or 'kfac', whose memory does not"
        " grow with the subset"
    )

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        precision_groups: Mapping[str, Hashable],
        gram_dtype: torch.dtype | None = None,
        contracted: Mapping[str, int] | None = None,
        store: Callable[[Tensor], Tensor] | None = None,
        itemsize: int | None = None,
        blocks: Iterable[Collection[str]] | None = None,
        precision_axes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._axes = {name: (axis, self._shapes[name]) for name, axis in precision_axes.items()}
        self._numel = {name: weight.numel() for name, weight in weights.items()}
        first = next(iter(weights.values()))
        self._device = first.device
        self._dtype = reduce(torch.promote_types, (w.dtype for w in weights.values()))
        self._gram_dtype = gram_dtype
        self._store = store or (lambda tensor: tensor)
        self._stored_itemsize = self._dtype.itemsize if itemsize is None else itemsize
        self._groups: dict[Hashable, list[str]] = {}
        for name in weights:
            if name in precision_groups:
                self._groups.setdefault(precision_groups[name], []).append(name)
        self._num_precisions = {
            group: self._shapes[name][self._axes[name][0]] if name in self._axes else 1
            for group, (name, *_) in self._groups.items()
        }
        self._varying = [name for name in weights if name not in precision_groups]
        self.contracted = {
            name: numbers
            for name, numbers in (contracted or {}).items()
            if name in precision_groups
        }
        # Scaled products, or rows with few entries for each precision, take less time than a Gram
        # matrix for each precision.
        self._scaled = [
            name
            for name, (axis, shape) in self._axes.items()
            if name in self.contracted or self._numel[name] <= _FEW_ENTRIES * shape[axis]
        ]
        self._cached = {
            group: others
            for group, names in self._groups.items()
            if (others := [name for name in names if name not in self._scaled])
        }
        self._dense = [name for name in weights if name not in self.contracted]
        self._dense_bytes = bytes_of_row(weights[name] for name in self._dense)
        self._blocks = [list(weights)] if blocks is None else [list(names) for names in blocks]
        self._copies = GRAM_WORKING_COPIES + GRAM_BLOCK_COPIES * (len(self._blocks) - 1)

    def empty(self, purpose: Purpose, num_data: int) -> NtkStatistic:
        return NtkStatistic({}, None, (), num_data if purpose in LOG_DETS else math.inf)

    def collect(
        self, statistic: NtkStatistic | None, linearization: Linearization, root: RootRows
    ) -> NtkStatistic:
        """Return all rows so far, or Gram matrices if these suffice and this batch has all rows."""
        present = _present(root)
        rows = linearization.deferred_rows(root, list(self._numel), self.contracted)
        total = NtkStatistic(rows, _present_scale(root, present), (present,))
        before = None if statistic is None or not statistic.present else statistic
        awaited = (math.inf if statistic is None else statistic.awaited) - len(present)
        if not awaited:
            num_rows = total.num_rows + (0 if before is None else before.num_rows)
            sums_grams = not self._varying and not root.vectors.requires_grad
            awaited = 0 if sums_grams and self._caches_grams(num_rows) else math.inf
        is_whole = before is None and not awaited
        if not is_whole:
            stored = {name: deferred.stored(self._store) for name, deferred in rows.items()}
            total = replace(total, rows=stored)
        total = replace(total if before is None else before + total, awaited=awaited)
        if is_whole:
            # A micro-batch with all rows needs the rows of only one parameter at a time.
            with torch.no_grad():
                for names in self._cached.values():
                    total.cached_gram(names, self._like, self._axes)
            for name in self._scaled:
                total.rows[name] = total.rows[name].stored(self._store)
        return total

    def rescaled(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        scale: Float[Tensor, " R"],
        parameters: Sequence[Tensor],
    ) -> tuple[NtkStatistic, Mapping[str, Tensor]]:
        del parameters  # each row has its own factor
        return replace(statistic, scale=scale), precisions

    def log_det(
        self, statistic: NtkStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """Return ℓ, which equals the result of ``full`` (Theorem 3)."""
        return self._value(statistic, precisions, None).value

    def conditional(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        conditioning: Conditioning,
    ) -> LogDet:
        return self._value(statistic, precisions, conditioning)

    def _value(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        conditioning: Conditioning | None,
    ) -> LogDet:
        like = self._like
        scale = None if statistic.scale is None else statistic.scale.to(like)
        is_fixed = not statistic.carries_graph
        cache = is_fixed and (not statistic.rows or self._caches_grams(statistic.num_rows))
        terms: list[LogDet] = []
        for names in self._blocks:
            if is_fixed and scale is None and conditioning is None:
                spectrum = self._spectrum(statistic, precisions, names, like, cache)
                if spectrum is not None:
                    terms.append(LogDet(spectrum.log_det(precisions[names[0]])))
                    continue
            total = self._differentiable_gram(statistic, precisions, names, like, cache)
            if scale is not None:
                total = scale[:, None] * total * scale
            terms.append(_log_det(total, conditioning))
        return _sum_of_blocks(terms)

    def differentiate(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        arguments: Sequence[Tensor],
        conditioning: Conditioning | None = None,
    ) -> Differential[NtkStatistic]:
        """Return ℓ and its derivatives, and overwrite the rows A with ∂ℓ/∂A.

        See ``Curvature.differentiate`` for the arguments.
        """
        self._shared_groups(precisions, self._numel)
        precisions = {n: self._by_entry(n, precisions[n]) for n in self._shapes}
        block_derivatives = [
            self._differentiate_block(statistic, precisions, names, conditioning)
            for names in self._blocks
        ]
        values, scale_gradients, precision_gradients = zip(*block_derivatives, strict=True)
        scale = statistic.scale
        scale = None if scale is None else _sum([g for (g,) in scale_gradients]).to(scale)
        gradients = _chained(precisions, dict(ChainMap(*precision_gradients)), arguments)
        cotangent = replace(statistic, scale=scale, grams={})
        return Differential(_sum_of_blocks(values), cotangent, gradients)

    def inner(
        self, cotangent: NtkStatistic, data: slice, linearization: Linearization, root: RootRows
    ) -> Float[Tensor, ""]:
        part, present = cotangent.part(data), _present(root)
        dense, products = {}, {}
        for name, rows in part.rows.items():
            if isinstance(rows, DenseRows):
                dense[name] = self._with_padding(
                    rows.chunks[0].to(root.vectors.device, self._dtype), present, name
                )
            else:
                products[name] = rows.tensors()
        terms = [linearization.inner(root.vectors, dense)]
        uses = linearization.products(root.vectors, list(products)) if products else {}
        for name, pairs in uses.items():
            tensors = [t for pair in pairs for t in pair if t.is_floating_point()]
            for tensor_cotangent, tensor in zip(products[name], tensors, strict=True):
                terms.append((tensor_cotangent.to(tensor) * tensor).sum())
        if root.scale is not None:
            assert cotangent.scale is not None
            before = cotangent.rows_before(data.start)
            scale = root.scale.flatten()[present.flatten()]
            terms.append((cotangent.scale[before : before + len(scale)].to(scale) * scale).sum())
        return torch.stack([term.to(terms[0]) for term in terms]).sum()

    def _with_padding(self, rows: Float[Tensor, "R n"], present: Tensor, name: str) -> Tensor:
        """Return rows without padding as (m, k, *shape), with zeros for the padding."""
        (m, k), flat = present.shape, present.flatten()
        if not bool(flat.all()):
            rows = rows.new_zeros(m * k, rows.shape[1]).index_put((flat,), rows)
        return rows.reshape(m, k, *self._shapes[name])

    def _by_entry(self, name: str, precision: Tensor) -> Tensor:
        """Return a precision as its rows take it: products know the axis, other rows do not."""
        return precision if name in self.contracted else by_entry(precision, self._shapes[name])

    def _caches_grams(self, num_rows: int) -> bool:
        """Return whether the Grams of groups are cached."""
        return self._gram_bytes(num_rows) <= max(self._row_bytes(num_rows), GRAM_CACHE_BYTES)

    def _gram_bytes(self, num_rows: int) -> int:
        num_grams = sum(self._num_precisions[group] for group in self._cached)
        return self._like.element_size() * num_rows**2 * num_grams

    def _row_bytes(self, num_rows: int) -> int:
        """Return the bytes of the rows, or of their factors, on the weights' device."""
        numbers = sum(self._numel[name] for name in self._dense) + sum(self.contracted.values())
        return self._stored_itemsize * num_rows * numbers

    def cost(self, num_rows: int, purpose: Purpose, *, is_whole: bool = False) -> Cost:
        caches_grams = self._caches_grams(num_rows)
        # Between two passes, the rows remain, and one Gram at a time is added to the kernel.
        caches_grams = caches_grams and purpose in LOG_DETS
        drops_rows = caches_grams and not self._varying
        if drops_rows and is_whole:  # the rows of one weight at a time
            widest = max((self._numel[name] for name in self._dense), default=0)
            scaled = sum(self.contracted.get(n, self._numel[n]) for n in self._scaled)
            rows = num_rows * (self._dtype.itemsize * widest + self._stored_itemsize * scaled)
        else:
            rows = self._row_bytes(num_rows)
        grams = self._gram_bytes(num_rows) if caches_grams else 0
        total = rows + grams + self._copies * self._like.element_size() * num_rows**2
        return Cost(total, self._dense_bytes, drops_rows=drops_rows)

    def describe(self) -> dict[str, str]:
        words = dict.fromkeys(self._varying, "scaled rows")
        for group, names in self._groups.items():
            shared = f" of group {group!r}" if len(names) > 1 else ""
            count = self._num_precisions[group]
            count = f"{count} grams" if names[0] in self._axes else "gram"
            words.update(dict.fromkeys(names, f"{count}{shared}"))
        words.update(dict.fromkeys(self._scaled, "scaled rows"))
        for name in self.contracted:
            words[name] += ", contracted"
        return {name: words[name] for name in self._numel}

    def _spectrum(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        block: Sequence[str],
        like: Tensor,
        cache: bool,
    ) -> MatrixSpectrum | None:
        """Return the spectrum of a block with a single precision, from its second use on."""
        groups = self._shared_groups(precisions, block)
        has_one_group = (
            len(groups) == 1 and len(groups[0]) == len(block) and groups[0][0] not in self._axes
        )
        rank = sum(self._numel[name] for name in block)
        return statistic.spectrum(groups[0], like, rank, cache) if has_one_group else None

    def _differentiable_gram(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        block: Collection[str],
        like: Tensor,
        cache: bool,
    ) -> Float[Tensor, "R R"]:
        """Return A P0^{-1} Aᵀ of a block's rows, with a graph."""
        parts, separate = list[Tensor](), list[Tensor]()
        with_graph = [name for name in self._varying if name in block]
        groups = self._shared_groups(precisions, block)
        if cache:
            constant = [names for names in groups if names[0] not in self._axes]
            if constant:
                grams = [statistic.cached_gram(names, like) for names in constant]
                inverse = torch.stack([precisions[names[0]] for names in constant])
                parts.append(mixed_grams(inverse.to(like).reciprocal(), grams))
            for names in self._cached.values():
                if names[0] in self._axes and names[0] in block:
                    grams = statistic.cached_gram(names, like, self._axes)
                    inverse = precisions[names[0]].reshape(-1).to(like).reciprocal()
                    parts.append((inverse @ grams.flatten(1)).view_as(grams[0]))
            with_graph += [name for name in self._scaled if name in block]
        else:
            with_graph += [name for names in groups for name in names]
        for name in with_graph:
            precision = self._by_entry(name, precisions[name])
            separate.append(statistic.rows[name].differentiable_gram(like, precision))
        return _sum(parts + ([_sum(separate)] if separate else []))

    def _differentiate_block(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        block: Collection[str],
        conditioning: Conditioning | None,
    ) -> tuple[LogDet, Sequence[Tensor], dict[str, Tensor]]:
        """Return ℓ of a block and its derivatives. Overwrite the rows with their derivatives."""
        like, scale = self._like, statistic.scale
        total = like.new_zeros(statistic.num_rows, statistic.num_rows)
        for name in block:
            total += statistic.rows[name].gram(like, precisions[name].detach())
        leaf = total.requires_grad_()
        leaves = [leaf] if scale is None else [leaf, scale.detach().to(like).requires_grad_()]
        with torch.enable_grad():
            scaled = leaf if scale is None else leaves[1][:, None] * leaf * leaves[1]
            log_det = _log_det(scaled, conditioning)
            gram_cotangent, *scale_gradient = torch.autograd.grad(log_det.value, leaves)
        precision_gradients = {
            name: statistic.rows[name].write_cotangent(gram_cotangent, precisions[name].detach())
            for name in block
        }
        return replace(log_det, value=log_det.value.detach()), scale_gradient, precision_gradients

    @cached_property
    def _like(self) -> Tensor:
        """An empty tensor with the type and device of the Grams."""
        dtype = working_dtype(self._dtype, self._gram_dtype)
        return torch.empty(0, dtype=dtype, device=self._device)

    def _shared_groups(
        self, precisions: Mapping[str, Tensor], block: Collection[str]
    ) -> list[list[str]]:
        """Return a block's precision groups, or raise an error if one has several precisions."""
        groups = {group: names for group, names in self._groups.items() if names[0] in block}
        for group, names in groups.items():
            sizes = {precisions[name].numel() for name in names}
            shared = sizes == {self._num_precisions[group]}
            if shared and len(names) > 1:
                values = torch.stack([precisions[name].detach().flatten() for name in names])
                shared = bool((values == values[0]).all())
            if not shared:
                raise ConfigurationError(
                    f"The parameters {names} of precision group {group!r} have different"
                    " precisions. Pass the groups of the prior that computed the precisions."
                )
        return list(groups.values())


def _present(root: RootRows) -> Tensor:
    if root.present is not None:
        return root.present
    return torch.ones(root.vectors.shape[:2], dtype=torch.bool, device=root.vectors.device)


def _present_scale(root: RootRows, present: Tensor) -> Float[Tensor, " R"] | None:
    """Return the scale of each row that is not padding."""
    if root.scale is None or bool(present.all()):
        return None if root.scale is None else root.scale.flatten()
    return root.scale.flatten()[present.flatten()]


def _log_det(gram: Tensor, conditioning: Conditioning | None) -> LogDet:
    if conditioning is None:
        return LogDet(log_det_identity_plus(gram))
    return log_det_conditional(gram, conditioning)


def _sum_of_blocks(terms: Sequence[LogDet]) -> LogDet:
    return LogDet(_sum([term.value for term in terms]), terms[0].entropies)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, terms)


def _chained(
    precisions: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], arguments: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return derivatives with respect to ``arguments``, which determine the precisions."""
    pairs = [(precisions[name], cotangent) for name, cotangent in cotangents.items()]
    pairs = [(precision, c.to(precision)) for precision, c in pairs if precision.requires_grad]
    if not arguments or not pairs:
        return [None] * len(arguments)
    outputs, weights = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, list(arguments), list(weights), allow_unused=True)


class BlockKernel(Ntk):
    """A dense structure, computed from the Gram matrix of each block's rows.

    H_b is a block of H for n weights, and S_b is the R x R Gram matrix of the entries of R rows in
    this block. Their log-determinants are equal: log|I + P0^{-1/2} H_b P0^{-1/2}| = log|I + S_b|
    (Theorem 3 of the paper). For few rows and many weights, S_b is far cheaper. For ten examples
    with ten outputs and 12,800 weights, S_b is 100 x 100, but H_b is 12,800 x 12,800.

    ``dense`` is the structure that this object replaces and whose name it takes. Other arguments
    are as for ``Ntk``, but a precision group may span several blocks.
    """

    def __init__(
        self,
        dense: BlockDiagonal,
        weights: Mapping[str, Tensor],
        precision_groups: Mapping[str, Hashable],
        gram_dtype: torch.dtype | None = None,
        contracted: Mapping[str, int] | None = None,
        store: Callable[[Tensor], Tensor] | None = None,
        itemsize: int | None = None,
        precision_axes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        block_of = {name: block for block, names in dense.blocks.items() for name in names}
        groups = {name: (label, block_of[name]) for name, label in precision_groups.items()}
        blocks = dense.blocks.values()
        super().__init__(
            weights, groups, gram_dtype, contracted, store, itemsize, blocks, precision_axes
        )
        self.name = dense.name
        self._words = dense.describe()

    def conditional(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        conditioning: Conditioning,
    ) -> LogDet:
        return Curvature.conditional(self, statistic, precisions, conditioning)

    def describe(self) -> dict[str, str]:
        words = {name: f"{dense}, by the Gram of its rows" for name, dense in self._words.items()}
        return words | {name: f"{words[name]}, contracted" for name in self.contracted}


def is_cheaper(kernel: BlockKernel, dense: BlockDiagonal, num_rows: int) -> bool:
    """Return whether Gram matrices take fewer multiplications than H, and no more memory.

    For R rows and n weights in a block, H takes 2 R n² operations, and its factor takes n³/3. The
    Gram matrix takes 2 R² n operations, and its factor takes R³/3. At R = n, Gram matrices were 1.5
    times faster if only precisions were learned, and 1.9 times faster in two passes, but took more
    memory. The choice depends only on sizes, so it is the same on every machine.
    """
    rows = num_rows
    by_grams = sum(6 * rows**2 * size + rows**3 for size in dense.sizes)
    by_blocks = sum(6 * rows * size**2 + size**3 for size in dense.sizes)
    fewer = by_grams < by_blocks
    costs = [form.cost(rows, Purpose.VALUE).total for form in (kernel, dense)]
    return fewer and costs[0] <= costs[1]
