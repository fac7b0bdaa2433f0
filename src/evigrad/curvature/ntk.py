"""The kernel side: ℓ = log|I + S| with S the Gram matrix of the rows (Theorem 3 of the paper).

S = D (Σ_g G_g / δ_g) D with D the diagonal of the rows' scales and G_g the Gram matrix of the rows
of prior group g. Where the rows carry no graph the G_g are kept, so that further steps on the
precisions and on the scale (the noise) need neither the network nor the rows: R²L + R³/3
operations each, for R rows and L groups.

Over a partition of the parameters (``blocks``), ℓ is the sum over the blocks, each with the Gram
matrix of its own part of the rows.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.curvature.base import (
    Differential,
    Structure,
    flatten_rows,
    working_dtype,
)
from evigrad.curvature.conditional import Conditioning, LogDet, log_det_conditional
from evigrad.curvature.gram_functions import MixedGrams, RowsGram, chained
from evigrad.curvature.kernel_rows import SLAB_BYTES, NtkStatistic, Storage
from evigrad.curvature.linalg import log_det_identity_plus
from evigrad.errors import ConfigurationError
from evigrad.jacobians import Linearization, MatrixUse
from evigrad.jacobians.scratch import lent
from evigrad.likelihoods import RootRows

# The Grams of the prior groups are kept where they are no larger than the rows, or than this: a
# gibibyte is affordable on any machine that trains networks, and spares passes over the rows.
GRAM_CACHE_BYTES = 2**30
# R x R matrices beside the statistic while ℓ is differentiated: the unscaled sum, S, its factor,
# the inverse, and one product.
GRAM_WORKING_COPIES = 5
# R x R matrices that autograd keeps for each further block until the derivative is taken: the
# unscaled sum, the half scaled sum, and the factor.
GRAM_BLOCK_COPIES = 3
# Slabs of columns in memory at once: one as read, and its product.
SLAB_COPIES = 2


class Ntk(Structure[NtkStatistic]):
    """The exact ℓ of a block from the Gram matrix of its R rows.

    Args:
        weights: The parameters.
        precision_groups: For each parameter whose prior precision is one number, the label of its
            prior group; those of one label share one precision and one Gram. A missing parameter
            has a precision that varies inside it.
        gram_dtype: Dtype of S and its factor; None takes that of the rows.
        contracted: Parameters whose rows are not formed (see ``contraction``); ignored where the
            precision varies.
        storage: Device and dtype of the kept rows.
        blocks: A partition of the parameters, each precision group within one block; ℓ is the sum
            over the blocks. None: one block.
    """

    name = "ntk"
    keeps_rows = True
    cheaper = (
        "a smaller subset, one output per block ('ntk-...-1'), or 'kfac', whose memory does not"
        " grow with the subset"
    )

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        precision_groups: Mapping[str, Hashable],
        gram_dtype: torch.dtype | None = None,
        contracted: Mapping[str, MatrixUse] | None = None,
        storage: Storage | None = None,
        blocks: Iterable[Collection[str]] | None = None,
    ) -> None:
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._numel = {name: weight.numel() for name, weight in weights.items()}
        first = next(iter(weights.values()))
        self._device = first.device
        self._dtype = reduce(torch.promote_types, (w.dtype for w in weights.values()))
        self._gram_dtype = gram_dtype
        self._storage = storage or Storage()
        self._groups: dict[Hashable, list[str]] = {}
        for name in weights:
            if name in precision_groups:
                self._groups.setdefault(precision_groups[name], []).append(name)
        self._varying = [name for name in weights if name not in precision_groups]
        given = contracted or {}
        self._contracted = {n: u for n, u in given.items() if n in precision_groups}
        self._formed = [name for name in weights if name not in self._contracted]
        self._blocks = [list(weights)] if blocks is None else [list(names) for names in blocks]
        self._copies = GRAM_WORKING_COPIES + GRAM_BLOCK_COPIES * (len(self._blocks) - 1)

    def accumulate(
        self, statistic: NtkStatistic | None, linearization: Linearization, root: RootRows
    ) -> NtkStatistic:
        """See ``Structure.accumulate``; the rows themselves are kept."""
        found = linearization.rows(root.vectors, self._formed)
        present = _present(root)
        chosen = slice(None) if bool(present.all()) else present.flatten()
        keep = self._storage.keep
        flat = {n: flatten_rows(found[n], found[n].dtype)[chosen] for n in self._formed}
        rows = {name: (kept,) for name, kept in self._storage.keep_all(flat).items()}
        factors = self._factors(linearization, root)
        kept = {
            name: ((keep(_own(inputs)), keep(_own(gradients))),)
            for name, (inputs, gradients) in factors.items()
        }
        scales = (None if root.scale is None else root.scale.flatten()[chosen],)
        part = NtkStatistic(rows, kept, scales, (present,))
        return part if statistic is None else statistic + part

    def log_det(
        self, statistic: NtkStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """See ``Structure.log_det``; equal to that of ``full`` (Theorem 3)."""
        return self.evaluate(statistic, precisions).value

    def evaluate(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        conditioning: Conditioning | None = None,
    ) -> LogDet:
        """See ``Structure.evaluate``."""
        self.check_conditioning(conditioning)
        like, scale = self._like(), statistic.scale()
        scale = None if scale is None else scale.to(like)
        keep = self._keeps_grams(statistic, like.dtype)
        terms: list[LogDet] = []
        for names in self._blocks:
            total = self._differentiable_gram(statistic, precisions, names, like, keep)
            if scale is not None:
                total = scale[:, None] * total * scale
            terms.append(_log_det(total, conditioning))
        return _sum_of_blocks(terms)

    def check_conditioning(self, conditioning: Conditioning | None) -> None:
        """See ``Structure.check_conditioning``; several blocks cannot use anchors."""
        if len(self._blocks) > 1:
            super().check_conditioning(conditioning)

    def differentiate(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        arguments: Sequence[Tensor],
        conditioning: Conditioning | None = None,
    ) -> Differential[NtkStatistic]:
        """See ``Structure.differentiate``: W = 2 (I + S)^{-1} J̃ P0^{-1}, written over the rows."""
        self.check_conditioning(conditioning)
        self._shared_groups(precisions, self._numel)
        cotangent = replace(statistic, scales=(None,) * len(statistic.scales), grams={})
        of_precisions: dict[str, Tensor] = {}
        values, of_scales = zip(
            *(
                self._differentiate_block(statistic, precisions, names, of_precisions, conditioning)
                for names in self._blocks
            ),
            strict=True,
        )
        if (scale := statistic.scale()) is not None:
            sizes = [int(part.sum()) for part in statistic.present]
            of_scale = _sum([found for (found,) in of_scales]).to(scale)
            cotangent = replace(cotangent, scales=tuple(of_scale.split(sizes)))
        gradients = chained(precisions, of_precisions, arguments)
        return Differential(_sum_of_blocks(values), cotangent, gradients)

    def inner(
        self,
        cotangent: NtkStatistic,
        data: slice,
        linearization: Linearization,
        root: RootRows,
    ) -> Float[Tensor, ""]:
        """See ``Structure.inner``; contracted layers need no rows."""
        part = cotangent.part(data)
        present = _present(root)
        (m, k), flat = present.shape, present.flatten()
        whole = {}
        for name, (rows,) in part.rows.items():
            wanted = rows.to(root.vectors.device, self._dtype)
            if not bool(flat.all()):
                wanted = wanted.new_zeros(m * k, rows.shape[1]).index_put((flat,), wanted)
            whole[name] = wanted
        terms = [linearization.inner(root.vectors, self._shaped(whole, m, k))]
        for name, (inputs, gradients) in self._factors(linearization, root).items():
            ((of_inputs, of_gradients),) = part.factors[name]
            terms.append((of_inputs.to(inputs) * inputs).sum())
            terms.append((of_gradients.to(gradients) * gradients).sum())
        if root.scale is not None:
            scale = cotangent.scale()
            assert scale is not None
            before = cotangent.rows_before(data.start)
            own = scale[before : before + int(flat.sum())]
            terms.append((own.to(root.scale) * root.scale.flatten()[flat]).sum())
        return torch.stack([term.to(terms[0]) for term in terms]).sum()

    def keeps_products(self, num_rows: int) -> bool:
        """See ``Structure.keeps_products``: whether the Grams are kept for any size of the rows."""
        grams = len(self._groups) * num_rows**2 * self._like().element_size()
        return not self._varying and grams <= GRAM_CACHE_BYTES

    def predicted_bytes(self, num_rows: int) -> int:
        """See ``Structure.predicted_bytes``: the rows, the Grams that are kept, and S."""
        item = working_dtype(self._dtype, self._gram_dtype).itemsize
        kept = (self._storage.dtype or self._dtype).itemsize
        rows = kept * num_rows * sum(self._numel[name] for name in self._formed)
        for use in self._contracted.values():
            rows += kept * num_rows * use.positions * (use.inputs + use.outputs)
        if self._storage.device not in (None, self._device):
            rows = 0
        widest = max((self._numel[name] for name in self._formed), default=0)
        slab = min(SLAB_BYTES, item * num_rows * widest) * SLAB_COPIES
        grams = item * num_rows**2 * len(self._groups)
        if grams > max(rows, GRAM_CACHE_BYTES):
            grams = 0
        return rows + slab + grams + self._copies * item * num_rows**2

    def summarised_bytes(self, num_rows: int) -> int:
        """See ``Structure.summarised_bytes``: the Grams, and the rows of one parameter."""
        item = working_dtype(self._dtype, self._gram_dtype).itemsize
        grams = item * num_rows**2 * len(self._groups)
        if self._varying or grams > GRAM_CACHE_BYTES:
            return self.predicted_bytes(num_rows)
        widest = max((self._numel[name] for name in self._formed), default=0)
        rows = self._dtype.itemsize * num_rows * widest
        return rows + grams + self._copies * item * num_rows**2

    @property
    def contracted(self) -> Collection[str]:
        """See ``Structure.contracted``."""
        return list(self._contracted)

    def describe(self) -> dict[str, str]:
        """See ``Structure.describe``."""
        words = dict.fromkeys(self._varying, "scaled rows")
        for group, names in self._groups.items():
            shared = f" of group {group!r}" if len(names) > 1 else ""
            words.update(dict.fromkeys(names, f"gram{shared}"))
        for name in self._contracted:
            words[name] += ", contracted"
        return {name: words[name] for name in self._numel}

    def summarise(self, linearization: Linearization, root: RootRows) -> NtkStatistic:
        """See ``Structure.summarise``: one parameter's rows at a time, and never all of them."""
        present = _present(root)
        chosen = slice(None) if bool(present.all()) else present.flatten()
        scales = (None if root.scale is None else root.scale.flatten()[chosen],)
        (m, k), like = present.shape, self._like()
        empty = NtkStatistic({}, {}, scales, (present,))
        grams = len(self._groups) * empty.num_rows**2 * like.element_size()
        if self._varying or grams > GRAM_CACHE_BYTES:
            return self.condense(self.accumulate(None, linearization, root))
        closed = [name for name in self._formed if linearization.is_closed(name)]
        # On a GPU, PyTorch's own allocator reuses the memory.
        widest = max((self._numel[name] for name in closed), default=0)
        widest = widest if self._device.type == "cpu" else 0
        memory = torch.empty(m * k * widest, dtype=self._dtype, device=self._device)
        with torch.no_grad():
            factors = self._factors(linearization, root)
            # All that have no closed form in one call, as each call repeats the backward passes.
            others = [name for name in self._formed if name not in closed]
            found = linearization.rows(root.vectors, others) if others else {}
            for names in self._groups.values():
                gram = like.new_zeros(empty.num_rows, empty.num_rows)
                for name in names:
                    if name in factors:
                        part = replace(empty, factors={name: (factors[name],)})
                    else:
                        with lent(memory):
                            if (rows := found.get(name)) is None:
                                rows = linearization.rows(root.vectors, [name])[name]
                        part = replace(
                            empty, rows={name: (flatten_rows(rows, rows.dtype)[chosen],)}
                        )
                    gram += part.gram(name, like)
                empty.grams[(*names, like.dtype)] = gram
        return empty

    def condense(self, statistic: NtkStatistic) -> NtkStatistic:
        """Return a statistic with the groups' Grams instead of the rows, whose memory it frees.

        Return the same one where a precision varies inside a parameter, or where the Grams are too
        large to keep. The rows have no graph.
        """
        like = self._like()
        if self._varying or not self._keeps_grams(statistic, like.dtype):
            return statistic
        if not statistic.rows and not statistic.factors:
            return statistic
        for names in self._groups.values():
            statistic.kept_gram(names, like)
        return replace(statistic, rows={}, factors={})

    def _differentiable_gram(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        block: Collection[str],
        like: Tensor,
        keep: bool,
    ) -> Float[Tensor, "R R"]:
        """A P0^{-1} Aᵀ of a block's rows, with a graph."""
        parts: list[Tensor] = []
        alone = [name for name in self._varying if name in block]
        groups = self._shared_groups(precisions, block)
        if keep and groups:
            grams = [statistic.kept_gram(names, like) for names in groups]
            inverse = torch.stack([precisions[names[0]] for names in groups])
            parts.append(MixedGrams.apply(inverse.to(like).reciprocal(), *grams))
        else:
            alone += [name for names in groups for name in names]
        for name in alone:
            precision = precisions[name].reshape(-1)
            if name in self._contracted:
                gram = statistic.gram(name, like)
                parts.append(gram * precision.to(like).reciprocal())
            else:
                parts.append(RowsGram.apply(like, precision, *statistic.rows[name]))
        return _sum(parts)

    def _differentiate_block(
        self,
        statistic: NtkStatistic,
        precisions: Mapping[str, Tensor],
        block: Collection[str],
        of_precisions: dict[str, Tensor],
        conditioning: Conditioning | None,
    ) -> tuple[LogDet, Sequence[Tensor]]:
        """ℓ of a block and its derivative in the scale; writes those in precisions and rows."""
        like, scale = self._like(), statistic.scale()
        total = like.new_zeros(statistic.num_rows, statistic.num_rows)
        for name in block:
            total += statistic.gram(name, like, precisions[name].detach())
        leaf = total.requires_grad_()
        scale_leaf = None if scale is None else scale.detach().to(like).requires_grad_()
        with torch.enable_grad():
            scaled = leaf if scale_leaf is None else scale_leaf[:, None] * leaf * scale_leaf
            log_det = _log_det(scaled, conditioning)
            leaves = [leaf] if scale_leaf is None else [leaf, scale_leaf]
            of_total, *of_scale = torch.autograd.grad(log_det.value, leaves)
        for name in block:
            precision = precisions[name].detach()
            of_precisions[name] = statistic.write_cotangent(name, of_total, precision)
        return replace(log_det, value=log_det.value.detach()), of_scale

    def _like(self) -> Tensor:
        """An empty tensor of the Grams' device and dtype."""
        dtype = working_dtype(self._dtype, self._gram_dtype)
        return torch.empty(0, dtype=dtype, device=self._device)

    def _factors(
        self, linearization: Linearization, root: RootRows
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Inputs (m, T, i) and gradients (m, k, T, o) of the contracted parameters."""
        if not self._contracted:
            return {}
        uses = linearization.pairs(root.vectors, list(self._contracted))
        return {name: (use.inputs[:, 0], use.gradients[:, :, 0]) for name, (use,) in uses.items()}

    def _shaped(self, rows: Mapping[str, Tensor], m: int, k: int) -> dict[str, Tensor]:
        return {name: flat.reshape(m, k, *self._shapes[name]) for name, flat in rows.items()}

    def _keeps_grams(self, statistic: NtkStatistic, dtype: torch.dtype) -> bool:
        if statistic.carries_graph:
            return False
        if not statistic.rows and not statistic.factors:
            return True
        grams = len(self._groups) * statistic.num_rows**2 * dtype.itemsize
        return grams <= max(statistic.num_bytes, GRAM_CACHE_BYTES)

    def _shared_groups(
        self, precisions: Mapping[str, Tensor], block: Collection[str]
    ) -> list[list[str]]:
        """The precision groups of a block; refuses groups whose precisions are not one number."""
        found = {group: names for group, names in self._groups.items() if names[0] in block}
        for group, names in found.items():
            shared = all(precisions[name].ndim == 0 for name in names)
            if shared and len(names) > 1:
                values = torch.stack([precisions[name].detach() for name in names])
                shared = bool((values == values[0]).all())
            if not shared:
                raise ConfigurationError(
                    f"the parameters {names} of precision group {group!r} do not have one and the"
                    " same precision: give the groups of the prior that the precisions come from."
                )
        return list(found.values())


def _present(root: RootRows) -> Tensor:
    """Which rows (m, k) are no padding."""
    if root.present is not None:
        return root.present
    return torch.ones(root.vectors.shape[:2], dtype=torch.bool, device=root.vectors.device)


def _log_det(gram: Tensor, conditioning: Conditioning | None) -> LogDet:
    if conditioning is None:
        return LogDet(log_det_identity_plus(gram))
    return log_det_conditional(gram, conditioning)


def _sum_of_blocks(terms: Sequence[LogDet]) -> LogDet:
    return LogDet(_sum([term.value for term in terms]), terms[0].entropies)


def _own(tensor: Tensor) -> Tensor:
    """A copy that may be overwritten; the tensor itself where it carries a graph."""
    return tensor if tensor.requires_grad else tensor.detach().clone()


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, terms)
